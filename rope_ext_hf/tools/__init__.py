"""The tool box: serving, checks of servers, suites of tasks, training, parts for models of one's own.

It is built on the library's names; nothing outside of it names it, see `rope_ext_hf.plug_ins`.
"""

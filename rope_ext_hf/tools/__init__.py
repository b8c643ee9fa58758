"""The tool box: serving, checks of servers, suites of tasks, training, parts for models of one's own.

It imports the library, which is all other folders of this package, and the library never imports it. Instead the
library loads its commands, methods and other parts as plug-ins, see `rope_ext_hf.plug_ins`.
"""

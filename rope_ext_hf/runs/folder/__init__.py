"""The folder of a run: its settings, journal, identity, run file and report.

folder: lock and read it.
journal: one line for each value, written before progress is reported.
identity, model_digest: what the numbers depend on, as digests.
earlier_runs: say why a command begins anew instead of continuing.
run_file: run.yaml, with which `rope-ext run` repeats the run.
report: results.json, CSV files, picture and page.
"""

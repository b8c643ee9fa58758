"""Runs: what they measure, their folders, their results, and the conclusions from them.

measurement, kinds: what a run measures; perplexity and retrieval are in `rope_ext_hf.eval`.
chosen_methods: the methods that a user named, for one model.
preflight: the memory that a run needs, checked before weights are read.
loop: the loop over methods, documents and spans, which every measurement runs.
measured_methods: the methods that the loop goes over.
listeners: what shows the progress of a run.
runner: carry out a plan, in memory or in a run's folder; recorded_run: in a folder.
run, tables: the results, and how they are shown.
comparison: several runs of one model.
workers: processes that share a run.

Folders that these modules use:
    folder: journal, identity, run file and report of a run.
    conclusions: statistics, verdicts, sentences and charts.
"""

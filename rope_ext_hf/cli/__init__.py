"""The command line, `rope-ext`.

app: the program: its commands, its own options, errors as one line, and exit codes.
models, evaluation, run_files, lm_eval, demo: the commands of the library; those of the tool box come as plug-ins.
options: options that several commands share, by which they load a model.
parameters: options for the parameters of methods, such as `--beta-fast 16`.
dataclass_options: make options of the fields of dataclasses (`rope_ext_hf.options`).
planned_runs, run_progress: what a run needs, and how far it is.
folders: folders that commands write.
console: output for any terminal.
"""

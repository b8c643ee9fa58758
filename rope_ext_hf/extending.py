"""The parts of the library that packages built on it may use, beside the names of `rope_ext_hf` and `rope_ext_hf.eval`.

An entry of `OPEN` is a whole module, of which the names in its `__all__` are open, or one object, written
`module:object`; the text says what an author of tools uses it for, and the docstrings say how. The tool box takes no
other names of the library, and a package of your own should do the same: a change of an open name stands in the
changelog, and all other names may change in any release.
"""

from __future__ import annotations

OPEN: dict[str, str] = {
    # commands
    "rope_ext_hf.cli.options": "make a function a command of `rope-ext`; options that several commands share",
    "rope_ext_hf.options.arguments": "describe arguments once, for Python and the command line; spell a command",
    "rope_ext_hf.options.method_choice": "options that choose methods: --method, --factor, --target-length",
    "rope_ext_hf.bounds": "read lengths (4096, 4k, 1M) and sizes, and check whole numbers",
    "rope_ext_hf.cli.console": "print results, notes and progress",
    "rope_ext_hf.cli.evaluation": "the steps of a command that measures: plan, forecast, measure, print",
    "rope_ext_hf.cli.run_progress:shown_progress": "show the progress of runs in the terminal",
    "rope_ext_hf.cli.folders": "write a patched copy of a model, and upload a folder to the Hub",
    "rope_ext_hf.terminal": "reports that show themselves as text and as tables, and wrapped lines",
    "rope_ext_hf.errors": "the exceptions, and small functions that put values into messages",
    "rope_ext_hf.installing:install_command": "the pip command to name where a package is missing",
    "rope_ext_hf.lazy:lazy_names": "names of a package that are imported when first used",
    # files and models
    "rope_ext_hf.files.whole": "read JSON, list folders; write whole or not at all; turn foreign errors into ours",
    "rope_ext_hf.files.plain_yaml:PlainLoader": "read YAML without aliases",
    "rope_ext_hf.files.model_folders": "find the folder of a model by its name, without loading anything",
    "rope_ext_hf.hub": "find, read and load configs, models and tokenizers by name",
    "rope_ext_hf.files.model_files": "read models from one file of another format, as the tool box does for GGUF",
    "rope_ext_hf.checkpoints.files.weight_files": "read and write safetensors files, a part of a tensor at a time",
    "rope_ext_hf.checkpoints.files.numbers": "where tensors lie in a file, and their bytes",
    "rope_ext_hf.checkpoints.files.torch_files": "the dtypes of torch by their names in safetensors",
    "rope_ext_hf.checkpoints.report:Conversion": "base class of conversions, which write a folder whole or not at all",
    "rope_ext_hf.checkpoints.pairing.detection:detect_in_weights": "the pairing that the weights of a model show",
    "rope_ext_hf.checkpoints.pairing.model_weights:weights_from_model": "the rows of a loaded model that rotate",
    "rope_ext_hf.patches.rows.row_probe:pairing_of": "the pairing that the class of a model runs",
    "rope_ext_hf.rotary.pairing_names:other_pairing": "half for interleaved, and the other way round",
    "rope_ext_hf.checkpoints.folder_copies:unlike_copies": "compare a patched copy of a folder with its source",
    "rope_ext_hf.checkpoints.rows.loaded_rows:reordered": "run a model with its rotated rows in the other pairing",
    # methods and parts of models
    "rope_ext_hf.methods.registry": "make a method of its name and parameters",
    "rope_ext_hf.methods.base:TrainingDefaults": "the settings with which a model is trained under a method",
    "rope_ext_hf.methods.static:Default": "the method that leaves the frequencies as they are",
    "rope_ext_hf.methods.remapping": "base classes of methods that change relative positions or add to scores",
    "rope_ext_hf.rotary.embedding": "a rotary module, and the layouts in which cos and sin are arranged",
    "rope_ext_hf.attention.blockwise": "attention over remapped positions, one block after the other",
    "rope_ext_hf.attention.rules": "the positions, windows and score modifiers that blockwise attention takes",
    # patches
    "rope_ext_hf.models.config_keys": "the rope settings of a config.json as plain values",
    "rope_ext_hf.patches.describing": "a model's method, its scalings, and what they do to short inputs",
    "rope_ext_hf.models.config:rope_dict": "the rope settings of a config, as a dict",
    "rope_ext_hf.models.config:rope_by_sizes": "the rotary embedding of a layer type, by a config alone",
    "rope_ext_hf.models.families:family": "what is known of a model family",
    "rope_ext_hf.models.family_settings:check_stated": "check the numbers of a config.json",
    "rope_ext_hf.models.layer_types": "the attention type of each layer, and which layers rotate",
    "rope_ext_hf.models.patched_config": "write a patch into a config",
    "rope_ext_hf.models.recipes": "what publishers state about longer contexts",
    "rope_ext_hf.patches.saved.fingerprint:table_differences": "compare an engine's cos and sin with a saved model",
    "rope_ext_hf.models.model_classes": "a model without weights, and the number of its token ids",
    "rope_ext_hf.models.patch_records": "a patch, and its record in a config",
    "rope_ext_hf.patches.model_rope": "what a model, its config or a checkpoint says of its rope",
    "rope_ext_hf.patches.small_replica": "try a patch on a small random model of the same class",
    "rope_ext_hf.patches.slots.class_angles": "the frequencies that a rotary module of transformers computes",
    "rope_ext_hf.patches.slots.slot_finding": "the rotary modules of a model",
    "rope_ext_hf.patches.slots.patched_slot": "the patches that a model in memory carries",
    "rope_ext_hf.models.temporary": "put a model into eval mode, or set attributes, for a `with` block",
    "rope_ext_hf.patches.trials.refusals": "checks of a model in training, and of its trainer",
    # reading text
    "rope_ext_hf.reading.text.load": "load texts by name: files, folders, patterns, hf:OWNER/NAME, stdlib",
    "rope_ext_hf.reading.text.documents": "texts, as text and as tokens",
    "rope_ext_hf.reading.text.tokenizing": "tokenise as evaluations do",
    "rope_ext_hf.reading.spans": "plan which tokens are read and scored",
    "rope_ext_hf.reading.protocols": "add a protocol, by which a document is cut into spans that are read and scored",
    "rope_ext_hf.reading.scorer": "losses, likelihoods and greedy answers of a model, in fixed memory",
    "rope_ext_hf.reading.through.head_losses": "the head of a model, a part of the vocabulary at a time",
    "rope_ext_hf.reading.cost.memory": "estimate and check the memory that reading takes",
    "rope_ext_hf.reading.cost.forecast": "the forecast of a dry run",
    "rope_ext_hf.reading.cost.operations": "estimate the time of reading from the measured speed of a device",
    # runs
    "rope_ext_hf.runs.kinds": "add a kind of run: plan it, make results, show them",
    "rope_ext_hf.runs.measurement": "what a run reads, how each item is scored, and what follows a run",
    "rope_ext_hf.runs.conclusions.conclusions:Conclusion": "the conclusion of a run",
    "rope_ext_hf.runs.conclusions.labels": "base class of results; keys and labels of methods",
    "rope_ext_hf.runs.conclusions.measures": "results as one number per method and length",
    "rope_ext_hf.runs.conclusions.statistics": "means and shares with 95% confidence intervals",
    "rope_ext_hf.runs.conclusions.verdicts": "judge a change by its interval, and put it into words",
    "rope_ext_hf.runs.tables": "tables of results by context length",
    "rope_ext_hf.runs.folder.folder": "lock and read the folder of a run, and compare its settings",
    "rope_ext_hf.runs.folder.journal": "read the values that a run has recorded",
    "rope_ext_hf.runs.folder.run_file": "write run.yaml, by which a run can be repeated",
    "rope_ext_hf.runs.folder.identity": "digests of what a run depends on; its results about one model",
    "rope_ext_hf.runs.folder.model_digest:model_digest": "a digest of a model's weights",
    # evaluations
    "rope_ext_hf.eval.measurement_options": "base class of the options of measurements, and those of the library",
    "rope_ext_hf.eval.evaluations:results_of": "make a function such as `perplexity` for options of one's own",
    "rope_ext_hf.eval.spans.span_measurement": "measure documents in spans of each context length, to build on",
    "rope_ext_hf.eval.spans.perplexity_measurement": "the losses of documents at each context length, to build on",
    "rope_ext_hf.eval.spans.perplexity_runs": "runs that measure perplexity, to build on",
}
"""The open modules and objects, each with the purpose that it serves for an author of tools."""

"""The command `lm-eval`: tasks of lm-evaluation-harness on a patched model."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import print_note, print_text
from rope_ext_hf.cli.options import Json, LoadOptions, Model, command
from rope_ext_hf.errors import FileError, MethodError, short
from rope_ext_hf.files.whole import disk_errors, json_text
from rope_ext_hf.installing import install_command
from rope_ext_hf.options.arguments import argument
from rope_ext_hf.options.method_choice import LayerChoice

_CHAT_TEMPLATE = {"auto": None, "always": True, "never": False}  # as `evaluate` takes it


@command("Measure")
def lm_eval(
    model: Model,
    methods: LayerChoice,
    load: LoadOptions,
    tasks: str = argument(MISSING, "Names, groups or YAML files, with commas, e.g. rope_ruler.", metavar="NAMES"),
    include_path: Path | None = argument(None, "A folder with task definitions of your own.", metavar="FOLDER"),
    limit: float | None = argument(None, "Documents per task; below 1, a fraction of them.", least=0),
    num_fewshot: int | None = argument(None, "Worked examples in each prompt.", least=0),
    batch_size: str = argument("1", "A number, or auto."),
    max_length: int | None = argument(
        None, "Longest input, e.g. 16k. Default: the extended length.", parse=parse_length, metavar="TOKENS"
    ),
    chat_template: str = argument(
        "auto", "auto: use the tokenizer's for suites of long inputs; or always, or never.", among=tuple(_CHAT_TEMPLATE)
    ),
    output_path: Path | None = argument(
        None, "A folder or JSON file for the results, as in lm-eval.", names=("--output-path", "-o"), metavar="PATH"
    ),
    log_samples: bool = argument(
        False, "With --output-path: also keep every prompt with its answers and scores.", names=("--log-samples", "-s")
    ),
    as_json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness, with or without a method.

    Inputs may be as long as the extended length. The suites of this package (rope_ruler, rope_json_kv, rope_graphwalks,
    rope_babilong) download nothing; suites of lm-eval (ruler, longbench2, babilong and others) download data, which a
    note says first. Options may be written with underscores, as in lm-eval: --output_path.

    Example: `rope-ext lm-eval reference --method yarn --factor 8 --tasks niah_single_1 --limit 4`
    """
    from rope_ext_hf.runs.chosen_methods import apply_choice

    methods.check_single()
    if batch_size != "auto" and not (batch_size.isdecimal() and int(batch_size)):
        raise MethodError(f"--batch-size must be a number of at least 1 or 'auto', got {short(batch_size)!r}")
    if log_samples and output_path is None:
        raise MethodError("--log-samples needs a folder for the samples; give --output-path FOLDER")
    try:
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.utils import make_table

        from rope_ext_hf.eval.lm_eval.lm_eval_tasks import evaluate, long_suite
    except ImportError as error:
        raise MethodError(
            f"lm-eval is not installed ({error}); to install it, type: {install_command('eval')}"
        ) from error
    names = tasks.split(",")
    for download in dict.fromkeys(filter(None, map(long_suite, names))):
        print_note("fetches", download)
    loaded = load.model(model)
    tokenizer = load.tokenizer(model)
    apply_choice(methods, loaded)
    tracker = EvaluationTracker(None if output_path is None else str(output_path))
    tracker.general_config_tracker.log_experiment_args("rope-ext", {"pretrained": model}, None, None, False)
    results = evaluate(
        loaded,
        tokenizer,
        tasks=names,
        include_path=include_path,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size if batch_size == "auto" else int(batch_size),
        max_length=max_length,
        apply_chat_template=_CHAT_TEMPLATE[chat_template],
        log_samples=log_samples,
    )
    samples = results.pop("samples", {})
    files = [] if output_path is None else _write_results(tracker, output_path, results, samples)
    if as_json:
        print_text(json_text(results))
        return
    print_text(make_table(results))
    if results.get("groups"):
        print_text(make_table(results, "groups"))
    lines = [f"read up to {results['max_length']:,} tokens", *(f"written to {file}" for file in files)]
    print_text("\n".join(lines))


def _write_results(tracker: Any, output_path: Path, results: dict[str, Any], samples: dict[str, Any]) -> list[Path]:
    """Write the results and the samples of each task with lm-eval's tracker, and return the new files.

    Raises:
        FileError: some files were not written; lm-eval itself only logs such errors.
    """
    folder = output_path.parent if output_path.suffix == ".json" else output_path
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.rglob("*.json*"))
        tracker.save_results_aggregated(results=dict(results), samples=samples)
        for task, of_task in samples.items():
            tracker.save_results_samples(task_name=task, samples=of_task)
    files = sorted({*folder.rglob("*.json*")} - before)
    if len(files) < 1 + len(samples):
        raise FileError(f"lm-eval could not write all of its results into {str(folder)!r}; is the disk full?")
    return files

"""Commands that make a longer model of one: `search` by its numbers, `finetune` by training it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_ext_hf.cli.console import print_note, print_text
from rope_ext_hf.cli.evaluation import print_forecast, shown_progress
from rope_ext_hf.cli.options import DryRun, Json, LoadOptions, Model, PublishOptions
from rope_ext_hf.errors import MethodError
from rope_ext_hf.files import json_text
from rope_ext_hf.training.questions import Finetuning, OfModel, Searching

_RunFolder = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The folder of the run; the model is in FOLDER/model.")
]


def finetune(
    model: Model,
    question: Finetuning,
    source: LoadOptions,
    publish: PublishOptions,
    out: _RunFolder,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Patch a model, train it at the extended length, and measure it before and after on text it did not see.

    Short inputs are held to what the model predicts without the patch. The same command continues where it was stopped.
    The trained model, in FOLDER/model, loads plainly wherever the method does.

    Example: `rope-ext finetune reference --method yarn --factor 4 --data 'books/*.txt' --minutes 10 --out longer`
    """
    _carry_out(question, source, publish, out, dry_run, as_json)


def search(
    model: Model,
    question: Searching,
    source: LoadOptions,
    publish: PublishOptions,
    out: _RunFolder,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Search the method and the divisors with which a model reads your text best at a longer length.

    The loss at the context length is bounded, and the numbers at the end are of text that the search did not read. The
    same command continues where it was stopped. Where what was found does not surely read better than the best fixed
    method, that is written.

    Example: `rope-ext search reference --target-length 2k --data 'books/*.txt' --budget 10m --out found`
    """
    _carry_out(question, source, publish, out, dry_run, as_json)


def _carry_out(
    question: OfModel, source: LoadOptions, publish: PublishOptions, out: Path, dry_run: bool, as_json: bool
) -> None:
    """Do what is asked, in the folder of a run, and print the report; of a dry run what it would take."""
    name = question.command
    if source.device_map is not None:
        raise MethodError(f"{name} takes no model that is spread over devices; leave out --device-map")
    publish.check()
    from rope_ext_hf import training

    if dry_run:
        from rope_ext_hf.training.forecasts import forecast

        print_forecast(forecast(question, out), as_json)
        return
    report: Any
    try:
        arguments = question.arguments
        arguments |= arguments.pop("parameters", {})
        arguments |= {"report": lambda line: print_note(name, line), "progress": shown_progress()}
        report = getattr(training, name)(out=out, **arguments)
    except ImportError as error:
        raise MethodError(str(error)) from error
    print_text(json_text(report.to_dict()) if as_json else str(report))
    publish.upload(out / "model", trust_remote_code=source.trust_remote_code)

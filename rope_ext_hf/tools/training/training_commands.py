"""The command `finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.cli.console import print_note, print_result
from rope_ext_hf.cli.folders import PublishOptions
from rope_ext_hf.cli.options import CONTINUES, DryRun, Json, LoadOptions, Model, command
from rope_ext_hf.cli.run_progress import shown_progress
from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.training.finetuning_options import Finetuning

_RunFolder = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The folder of the run; the model is in FOLDER/model.")
]


@command("Tool box: train", interrupted=CONTINUES)
def finetune(
    model: Model,
    options: Finetuning,
    source: LoadOptions,
    publish: PublishOptions,
    out: _RunFolder,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Patch a model, and train it at the extended length.

    The model is measured before and after, on text that it was not trained on. On short inputs it is trained to keep
    the unpatched model's predictions. Under nope it is trained at its context length, and keeps nothing. The same
    command continues an interrupted run. The trained model is in FOLDER/model.

    Example: `rope-ext finetune reference --method yarn --factor 4 --data 'books/*.txt' --minutes 10 --out longer`
    """
    if source.device_map is not None:
        raise MethodError("finetune cannot train a model that is spread over devices; leave out --device-map")
    publish.check()
    if dry_run:
        from rope_ext_hf.tools.training.forecasts import forecast

        print_result(forecast(options, out), as_json)
        return
    try:
        from rope_ext_hf.tools.training.finetuning import finetune as train

        arguments = options.arguments
        arguments |= arguments.pop("parameters", {})
        arguments |= {"report": lambda line: print_note("finetune", line), "progress": shown_progress()}
        report = train(out=out, **arguments)
    except ImportError as error:
        raise MethodError(str(error)) from error
    print_result(report, as_json)
    publish.upload(out / "model", trust_remote_code=source.trust_remote_code)

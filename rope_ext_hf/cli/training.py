"""The command that trains: `finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.cli.console import print_note, print_text, quiet_transformers
from rope_ext_hf.cli.options import Json, LoadOptions, Model, PatchOptions
from rope_ext_hf.errors import MethodError
from rope_ext_hf.files import json_text

__all__ = ["finetune"]


def finetune(
    model: Model,
    methods: PatchOptions,
    source: LoadOptions,
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="The text to train on, as in `rope-ext ppl`; 'stdlib' is for a trial.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of the run; the model is in FOLDER/model.")],
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="How long is trained, measurements left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps instead of minutes.")] = None,
    eval_data: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What is measured. Default: a tenth of --data that is not trained on."),
    ] = None,
    train_all: Annotated[
        bool, typer.Option("--train-all", help="Train all weights. Default: adapters, norms and embeddings.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, metavar="N", help="Rank of the adapters.")] = 16,
    learning_rate: Annotated[float, typer.Option(metavar="RATE", help="Its peak.")] = 2e-4,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Long rows in a pass.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, metavar="N", help="Passes in a step.")] = 4,
    guard: Annotated[
        float,
        typer.Option(min=0, metavar="WEIGHT", help="How strongly short inputs are held to the model before; 0: not."),
    ] = 1.0,
    control: Annotated[
        bool, typer.Option("--control", help="Also train the model without the patch for as long, and compare.")
    ] = False,
    retrieval: Annotated[
        str | None, typer.Option(metavar="TASK", help="Measure retrieval at the extended length, e.g. needle.")
    ] = None,
    max_spans: Annotated[int, typer.Option(min=1, metavar="N", help="Spans of text measured at each length.")] = 48,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """Patch a model, train it at the extended length, and measure it before and after on text it did not see.

    Short inputs are held to what the model predicts without the patch. The same command continues where it was stopped.
    The trained model, in FOLDER/model, loads plainly wherever the method does.

    Example: `rope-ext finetune reference --method yarn --factor 4 --data books/*.txt --minutes 10 --out longer`
    """
    from rope_ext_hf.training.finetuning import finetune as train

    methods.check_single(required=True)
    if source.device_map is not None:
        raise MethodError("a model that is spread over devices is not trained here; leave out --device-map")
    quiet_transformers()
    report = train(
        model,
        out,
        data=data,
        method=methods.names[0],
        factor=methods.factors[0] if methods.factors else None,
        target_length=methods.extended_length,
        **methods.underneath,
        minutes=minutes,
        steps=steps,
        eval_data=eval_data,
        train_all=train_all,
        rank=rank,
        learning_rate=learning_rate,
        batch=batch,
        accumulate=accumulate,
        guard=guard,
        control=control,
        retrieval=retrieval,
        max_spans=max_spans,
        seed=seed,
        dtype="float32" if source.dtype == "auto" else source.dtype,
        device=source.device,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        report=lambda line: print_note("finetune", line),
        **methods.parameters,
    )
    print_text(json_text(report.to_dict()) if as_json else str(report))

"""Commands that make a longer model of one: `search` by its numbers, `finetune` by training it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import print_note, print_text, quiet_transformers
from rope_ext_hf.cli.options import Json, LoadOptions, Model, PatchOptions, split_list
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.files import json_text

_UNITS = {"s": 1 / 60, "m": 1.0, "h": 60.0}


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

    Example: `rope-ext finetune reference --method yarn --factor 4 --data 'books/*.txt' --minutes 10 --out longer`
    """
    from rope_ext_hf.training.finetuning import finetune as train

    methods.check_single(required=True)
    if source.device_map is not None:
        raise MethodError("a model that is spread over devices is not trained here; leave out --device-map")
    quiet_transformers()
    try:
        report = train(
            model,
            out,
            data=data,
            **methods.arguments,
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
            **source.version,
            report=lambda line: print_note("finetune", line),
        )
    except ImportError as error:
        raise MethodError(str(error)) from error
    print_text(json_text(report.to_dict()) if as_json else str(report))


def search(
    model: Model,
    source: LoadOptions,
    target_length: Annotated[str, typer.Option(metavar="TOKENS", help="The longer length, e.g. 32k.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="The text, as in `rope-ext ppl`; half of it is not searched on but measured at the end.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of the run; the model is in FOLDER/model.")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long is searched and measured: 90s, 10m or 2h."),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, metavar="N", help="Candidates instead of a time.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Methods to begin with. Default: linear, ntk, by-parts, yarn and llama3."),
    ] = None,
    static: Annotated[
        bool,
        typer.Option(
            "--static",
            help="The same frequencies for inputs of every length. Default: what is found is for inputs beyond the "
            "context length alone.",
        ),
    ] = False,
    most_lost_at_1x: Annotated[
        float,
        typer.Option(metavar="NATS", help="The most that the loss per token may rise at the context length."),
    ] = 0.02,
    fitness: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="Whose loss counts. loss: of all tokens; key-tokens: of those that need the long context; or of the "
            "answers of a task of `rope-ext passkey`, e.g. needle.",
        ),
    ] = "loss",
    eval_data: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What is measured at the end, instead of half of --data.")
    ] = None,
    passages: Annotated[int, typer.Option(min=1, metavar="N", help="Passages that each candidate reads.")] = 24,
    max_spans: Annotated[int, typer.Option(min=1, metavar="N", help="Passages measured at the end.")] = 32,
    over: Annotated[str, typer.Option(metavar="WHAT", help="As in `rope-ext patch`.")] = "own",
    context_length: Annotated[str | None, typer.Option(metavar="TOKENS", help="As in `rope-ext patch`.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """Search the method and the divisors with which a model reads your text best at a longer length.

    The loss at the context length is bounded, and the numbers at the end are of text that the search did not read. The
    same command continues where it was stopped. Where what was found does not surely read better than the best fixed
    method, that is written.

    Example: `rope-ext search reference --target-length 2k --data 'books/*.txt' --budget 10m --out found`
    """
    from rope_ext_hf.training.searching import search as find

    if source.device_map is not None:
        raise MethodError("a model that is spread over devices is not searched here; leave out --device-map")
    quiet_transformers()
    report = find(
        model,
        out,
        data=data,
        target_length=parse_length(target_length),
        minutes=None if budget is None else _minutes(budget),
        trials=trials,
        methods=None if methods is None else _names(methods),
        static=static,
        most_lost=most_lost_at_1x,
        fitness=fitness,
        eval_data=eval_data,
        passages=passages,
        max_spans=max_spans,
        over=over,
        context_length=parse_length(context_length),
        seed=seed,
        dtype=source.dtype,
        device=source.device,
        **source.version,
        report=lambda line: print_note("search", line),
    )
    print_text(json_text(report.to_dict()) if as_json else str(report))


def _names(text: str) -> list[str]:
    if not (names := split_list([text])):
        raise MethodError("--methods names no method; leave it out to begin with the default ones")
    return names


def _minutes(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", text.strip())
    if match is None or not float(match[1]):
        raise MethodError(f"--budget takes a time, e.g. 90s, 10m or 2h; got {short(text)!r}")
    return float(match[1]) * _UNITS[match[2]]

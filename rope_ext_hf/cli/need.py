"""`need`: whether a model needs a longer context at all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import make_folder, print_note, print_text, quiet_transformers
from rope_ext_hf.cli.options import EvalOptions, Json, Model
from rope_ext_hf.files import json_text

__all__ = ["need"]


def need(
    model: Model,
    load: EvalOptions,
    target_length: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="The length that you need, e.g. 128k. Default: up to 4 context lengths."),
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="The text that is read, as in `rope-ext ppl`, with long documents.")
    ] = "stdlib",
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the result is kept; the same command continues there.")
    ] = Path("rope-ext-results/need"),
    as_json: Json = False,
) -> None:
    """Find out whether a model needs extending, how far it reads as it is, and what in its architecture says so.

    A short fixed plan: the loss of the same tokens at growing lengths, and answers hidden in text. `rope-ext advise`
    takes what it leaves in --out FOLDER by its option --need FOLDER.

    Example: `rope-ext need reference --target-length 512`
    """
    from rope_ext_hf.eval.needs import need as find_need
    from rope_ext_hf.hub import foreign_errors

    wanted = parse_length(target_length)
    make_folder(out)
    quiet_transformers()
    with foreign_errors(f"the model {model!r} could not be measured"):
        found = find_need(
            load.model(model),
            data,
            target_length=wanted,
            tokenizer=load.tokenizer(model),
            name=model,
            out=out,
            chunk=load.tokens_per_pass,
            report=lambda line: print_note("need", line),
        )
    print_text(json_text(found.to_dict()) if as_json else str(found))

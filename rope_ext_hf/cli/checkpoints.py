"""Commands about weights on disk: `convert`, `detect`."""

from __future__ import annotations

import warnings
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated

import typer

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import print_text, progress_bar, quiet_transformers
from rope_ext_hf.cli.options import Json, Model, SourceOptions
from rope_ext_hf.errors import CheckpointError, one_line, short
from rope_ext_hf.files import json_text
from rope_ext_hf.questions import asked


def convert(
    source_folder: Annotated[str, typer.Argument(metavar="SRC", help="Hub id or folder; Meta's own format too.")],
    new_folder: Annotated[Path, typer.Argument(metavar="DST", help="The converted folder; must not exist yet.")],
    source: SourceOptions,
    to: str = asked(MISSING, "half, interleaved, or meta (Meta's own format)."),
    source_pairing: str | None = asked(
        None, "Pairing of the weights now. Default: by the config, else by the family.", names=("--from",)
    ),
    force: bool = asked(False, "Convert weights that the config says are in that pairing already."),
    resume: bool = asked(False, "Continue after an interruption."),
    verify: bool = asked(False, "Compare the new folder with the source."),
    model_parallel: int = asked(1, "Parts, with --to meta: consolidated.00.pth, ...", least=1),
    context_length: str | None = asked(
        None, "The length that weights in Meta's format are for. Default: by their sizes.", metavar="TOKENS"
    ),
    as_json: Json = False,
) -> None:
    """Write a copy of a checkpoint in the other RoPE pairing: streamed, complete or absent, lossless both ways.

    Example: `rope-ext convert reference reference-interleaved --to interleaved`
    """
    from rope_ext_hf.checkpoints.conversion import convert_checkpoint

    quiet_transformers()
    with progress_bar(new_folder.name, unit="bytes") as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert_checkpoint(
            source_folder,
            new_folder,
            to,
            source_pairing=source_pairing,
            force=force,
            resume=resume,
            verify=verify,
            model_parallel=model_parallel,
            context_length=parse_length(context_length),
            **source.version,
            progress=bar.set,
        )
    for warning in caught:  # the report has those of the conversion among its notes
        if str(warning.message) not in report.notes:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    print_text(json_text(report.to_dict()) if as_json else str(report))


def detect(
    model: Model,
    source: SourceOptions,
    text: Path | None = asked(
        None, "A text to compare the loss of under both pairings; loads the model.", metavar="FILE"
    ),
    as_json: Json = False,
) -> None:
    """Determine from its weights which pairing a checkpoint is in, layer by layer; "undecided" where it is unclear.

    Example: `rope-ext detect reference`
    """
    from rope_ext_hf.checkpoints.detection import TEXT_CHARACTERS, detect_pairing
    from rope_ext_hf.hub import model_source

    sample = None
    if text is not None:
        try:
            if not text.is_file():  # a device may have no end, a pipe may never begin
                raise CheckpointError(f"no such text file: {short(str(text))!r}")
            with text.open(encoding="utf-8") as file:
                sample = file.read(TEXT_CHARACTERS)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the text {short(str(text))!r} cannot be read: {one_line(error)}") from error
    quiet_transformers()
    report = detect_pairing(model_source(model), text=sample, **source.version)
    print_text(json_text(report.to_dict()) if as_json else str(report))

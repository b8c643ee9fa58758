"""What is asked of an extension, as a value. Nothing here imports torch, so that --help answers at once."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.engines.base import list_engines, usual_server
from rope_ext_hf.questions import anything, asked
from rope_ext_hf.serving.questions import GPUServer


@dataclass(frozen=True, kw_only=True)
class Extending(GPUServer):
    """From a model to a folder that an engine serves."""

    command = "extend"

    target_length: int | Any = asked(
        MISSING, "The length that you need, e.g. 128k.", parse=parse_length, metavar="TOKENS"
    )
    engine: str = asked(usual_server(), f"What will serve it: one of {', '.join(list_engines())}.", metavar="NAME")
    out: Path | Any | None = asked(
        None,
        "The folder to write. Default: MODEL-TOKENS.",
        parse=lambda given: None if given is None else Path(given),
        metavar="FOLDER",
    )
    data: Any = asked(
        None,
        "The text that is read, as in `rope-ext ppl`; it takes three documents of the target length. Default: "
        "'stdlib', joined to documents that are long enough, which it has for up to 32k tokens.",
        parse=anything,
        metavar="TEXT",
    )
    max_spans: int = asked(16, "Spans of text that are read per length.", least=1, metavar="N")
    measure: bool = asked(True, "Measure the loss at short inputs and at the target length.")
    over: str = asked("own", "What is extended: own or original, see `rope-ext describe --help`.", metavar="WHAT")
    context_length: int | Any | None = asked(
        None,
        "The length that the model is for. Default: as published, else as its config states.",
        parse=parse_length,
        metavar="TOKENS",
    )
    anyway: bool = asked(False, "Write the folder also where the measurement speaks against it.")

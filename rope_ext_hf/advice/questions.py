"""What is asked of an extension, as a value. Nothing here imports torch, so that --help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.engines.base import list_engines
from rope_ext_hf.engines.comparison import usual_server
from rope_ext_hf.questions import Question, asked


@dataclass(frozen=True, kw_only=True)
class Extending(Question):
    """From a model to a folder that an engine serves.

    Attributes:
        target_length: in tokens.
        engine: a name that `rope-ext serve-config --help` lists.
        out: the folder to write; None: the name of the model with the length.
        data: the text that is read; None: the modules of "stdlib", joined to documents that are long enough.
        max_spans: how many spans of each length are read.
        measure: whether the loss is measured.
        over, context_length: as in `rope_ext_hf.patch`; None: the published one where a recipe is for such a length,
            else as the config states it.
        anyway: write the folder also where the measurement speaks against it.
    """

    target_length: int | Any = asked(parse=parse_length, metavar="TOKENS", help="The length that you need, e.g. 128k.")
    engine: str = asked(usual_server(), metavar="NAME", help=f"What will serve it: one of {', '.join(list_engines())}.")
    out: Path | Any | None = asked(
        None,
        parse=lambda given: None if given is None else Path(given),
        metavar="FOLDER",
        help="The folder to write. Default: MODEL-TOKENS.",
    )
    data: Any = asked(
        None,
        parse=lambda given: given,
        metavar="TEXT",
        help="The text that is read, as in `rope-ext ppl`; it takes three documents of the target length. Default: "
        "'stdlib', joined to documents that are long enough, which it has for up to 32k tokens.",
    )
    max_spans: int = asked(16, least=1, metavar="N", help="Spans of text that are read per length.")
    measure: bool = asked(True, help="Measure the loss at short inputs and at the target length.")
    over: str = asked("own", metavar="WHAT", help="What is extended: own or original, see `rope-ext describe --help`.")
    context_length: int | Any | None = asked(
        None,
        parse=parse_length,
        metavar="TOKENS",
        help="The length that the model is for. Default: as published, else as its config states.",
    )
    anyway: bool = asked(False, help="Write the folder also where the measurement speaks against it.")

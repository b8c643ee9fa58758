"""Command-line options for the GPUs of a server and for the command `extend`, as dataclasses.

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS, parse_bytes, parse_length
from rope_ext_hf.options.arguments import Options, anything, argument
from rope_ext_hf.reading.text.load import check_name
from rope_ext_hf.tools.engines.base import find_engine, list_engines, usual_server


@dataclass(frozen=True, kw_only=True)
class GPUServer(Options):
    """The GPUs of one server."""

    PANEL = "GPUs of the server"

    gpus: int | None = argument(
        None, "Number of GPUs; the options of the server are computed to fit.", least=1, most=4096, metavar="N"
    )
    gpu_memory: int | Any = argument(
        80 * 10**9,
        "Memory of each GPU, e.g. 80GB or 80GiB.",
        parse=parse_bytes,
        show=lambda size: f"{size / 1e9:.10g}GB",
        least=1,
        most=MOST_TOKENS,
        metavar="SIZE",
    )
    weight_bits: int | None = argument(
        None,
        "Bits of a weight on the server. Default: 16 if the weights are not quantised.",
        least=2,
        most=32,
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class Extending(GPUServer):
    """An extension: the way from a model to a folder that an engine serves."""

    command = "extend"

    target_length: int | Any = argument(
        MISSING, "The length that you need, e.g. 128k.", parse=parse_length, metavar="TOKENS"
    )
    engine: str = argument(
        usual_server(), f"The engine that will serve it: one of {', '.join(list_engines())}.", metavar="NAME"
    )
    out: Path | Any | None = argument(
        None,
        "The folder to write. Default: MODEL-TOKENS.",
        parse=lambda path: None if path is None else Path(path),
        metavar="FOLDER",
    )
    data: Any = argument(
        None,
        "The text to measure on, as in `rope-ext ppl`; at least three documents of the target length. Default: "
        "'stdlib', joined to documents that are long enough, which is possible for up to 32k tokens.",
        parse=anything,
        metavar="TEXT",
    )
    max_spans: int = argument(16, "Number of spans of text per length.", least=1, metavar="N")
    measure: bool = argument(True, "Measure perplexity on short inputs and at the target length first.")
    over: str = argument("own", "What is extended: own or original, see `rope-ext describe --help`.", metavar="WHAT")
    context_length: int | Any | None = argument(
        None,
        "The length that the model is for. Default: as its publisher or its config states.",
        parse=parse_length,
        metavar="TOKENS",
    )
    anyway: bool = argument(False, "Write the folder even if the measurement speaks against it.")

    @property
    def server(self) -> GPUServer:
        """The options for the server's GPUs, without those for the extension."""
        return GPUServer(gpus=self.gpus, gpu_memory=self.gpu_memory, weight_bits=self.weight_bits)

    @property
    def base_arguments(self) -> dict[str, Any]:
        """The arguments of `rope_ext_hf.patch` that say which rotary embedding of the model is extended."""
        return {"over": self.over, "context_length": self.context_length}

    def check_early(self) -> None:
        check_name(self.data)
        find_engine(self.engine)

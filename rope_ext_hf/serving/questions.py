"""The GPUs of a server as a value. Nothing here imports torch, so that --help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS, parse_bytes
from rope_ext_hf.questions import Question, asked


@dataclass(frozen=True, kw_only=True)
class GPUServer(Question):
    """The GPUs that one server has, for which its options are computed."""

    PANEL = "GPUs of the server"

    gpus: int | None = asked(
        None, "GPUs of the server; its options are computed to fit.", least=1, most=4096, metavar="N"
    )
    gpu_memory: int | Any = asked(
        80 * 10**9, "Memory of each, e.g. 80GB or 80GiB.", parse=parse_bytes, show=lambda size: f"{size / 1e9:.10g}GB",
        least=1, most=MOST_TOKENS, metavar="SIZE",
    )  # fmt: skip
    weight_bits: int | None = asked(
        None, "Bits of a weight there. Default: 16, of weights that are not quantised.", least=2, most=32, metavar="N"
    )

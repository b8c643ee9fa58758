"""What a measurement says, with everything needed to repeat or doubt it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rope_ext_hf.patches.patching import Description

if TYPE_CHECKING:
    from rope_ext_hf.eval.perplexity import Reading

__all__ = ["DocumentLoss", "Result", "bootstrap", "label", "provenance", "write_json"]


class DocumentLoss(NamedTuple):
    """One document's share of a result: nats summed over the scored tokens."""

    name: str
    nats: float
    tokens: int
    bytes: int
    windows: int

    def plus(self, nats: float, tokens: int, size: int) -> DocumentLoss:
        return DocumentLoss(self.name, self.nats + nats, self.tokens + tokens, self.bytes + size, self.windows + 1)


def bootstrap(documents: Sequence[DocumentLoss], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the loss per token when documents are drawn anew, with replacement."""
    sums = torch.tensor([[document.nats, document.tokens] for document in documents], dtype=torch.float64)
    chosen = torch.randint(len(documents), (draws, len(documents)), generator=torch.Generator().manual_seed(seed))
    nats, tokens = sums[chosen].sum(dim=1).unbind(dim=1)
    low, high = torch.quantile(nats / tokens, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@dataclass(frozen=True)
class Result:
    """A model's loss at one context length; every token weighs the same.

    Attributes:
        method, params: the RoPE method and its parameters; `patched` is False for the model as loaded.
        protocol, targets, stride, bos: how the text was read, see `rope_ext_hf.eval.windows`.
        length: context length in tokens.
        left_out: documents too short to be read.
        loss: nats per token. NaN or infinite if any window's loss was; `nonfinite` names the documents.
        low, high: its 95% interval, by resampling documents (equal to the loss where there is one document).
        perplexity, bits_per_token, bits_per_byte: the same loss in other units.
        documents: the sums it was made of.
    """

    method: str
    params: dict[str, Any]
    patched: bool
    protocol: str
    length: int
    targets: int
    stride: int
    bos: bool
    left_out: int
    loss: float
    low: float
    high: float
    perplexity: float
    bits_per_token: float
    bits_per_byte: float
    tokens: int
    windows: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentLoss, ...]

    @classmethod
    def of(cls, description: Description, reading: Reading, length: int, documents: Sequence[DocumentLoss]) -> Result:
        """The result of one length, from every document's loss."""
        nats = math.fsum(document.nats for document in documents)
        tokens = sum(document.tokens for document in documents)
        loss = nats / tokens
        low, high = bootstrap(documents)
        return cls(
            method=description.method,
            params=description.params,
            patched=description.patched,
            protocol=reading.protocol,
            length=length,
            targets=reading.plan.targets,
            stride=reading.plan.stride,
            bos=reading.prefix is not None,
            left_out=reading.left_out,
            loss=loss,
            low=low,
            high=high,
            perplexity=math.inf if loss >= 700 else math.exp(loss),
            bits_per_token=loss / math.log(2),
            bits_per_byte=nats / math.log(2) / max(1, sum(document.bytes for document in documents)),
            tokens=tokens,
            windows=sum(document.windows for document in documents),
            nonfinite=tuple(document.name for document in documents if not math.isfinite(document.nats)),
            documents=tuple(documents),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; documents as objects."""
        return asdict(self) | {"documents": [document._asdict() for document in self.documents]}


def label(result: Result) -> str:
    """The method as a person would say it: "yarn x8", "dynamic-ntk paper", "as loaded"."""
    if not result.patched:
        return "as loaded"
    parts = [result.method]
    if "growth" in result.params:
        parts.append(str(result.params["growth"]))
    if result.params.get("factor") is not None:
        parts.append(f"x{result.params['factor']:g}")
    return " ".join(parts)


def provenance(model: Any, data: str) -> dict[str, Any]:
    """Where a result comes from."""
    parameter = next(model.parameters())
    return {
        "model": model.name_or_path,
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "data": data,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("rope-ext-hf", "torch", "transformers")},
    }


def write_json(path: Path, source: dict[str, Any], results: Sequence[Result]) -> None:
    """Provenance and results in one file; a non-finite number is written as null, which every JSON reader takes."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    content = {"provenance": source, "results": [plain(result.to_dict()) for result in results]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

"""Evaluation results with their provenance."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "Cost",
    "DocumentLoss",
    "Result",
    "Setting",
    "bootstrap",
    "difference",
    "label",
    "provenance",
    "write_json",
]


class Cost(NamedTuple):
    """What a measurement cost: tokens that went through the model, seconds, and peak GPU memory in bytes."""

    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, max(self.peak, other.peak))


class DocumentLoss(NamedTuple):
    """One document's share of a result: nats summed over the scored tokens."""

    name: str
    nats: float
    tokens: int
    bytes: int
    spans: int

    def plus(self, nats: float, tokens: int, size: int) -> DocumentLoss:
        return DocumentLoss(self.name, self.nats + nats, self.tokens + tokens, self.bytes + size, self.spans + 1)


def bootstrap(documents: Sequence[DocumentLoss], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the loss per token when documents are drawn anew, with replacement."""
    return _interval(
        [document.nats for document in documents], [document.tokens for document in documents], draws, seed
    )


def _interval(nats: Sequence[float], tokens: Sequence[int], draws: int, seed: int) -> tuple[float, float]:
    sums = torch.tensor([nats, tokens], dtype=torch.float64)
    chosen = torch.randint(len(nats), (draws, len(nats)), generator=torch.Generator().manual_seed(seed))
    drawn = sums[:, chosen].sum(dim=-1)
    low, high = torch.quantile(drawn[0] / drawn[1], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def difference(one: Result, other: Result, draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """How much higher the loss of `one` is, in nats per token, with its 95% interval, paired by document.

    Raises:
        ValueError: the two did not score the same tokens.
    """
    mine, theirs = ({document.name: document for document in result.documents} for result in (one, other))
    if {n: d.tokens for n, d in mine.items()} != {n: d.tokens for n, d in theirs.items()}:
        raise ValueError("only results over the same scored tokens can be compared by document")
    gaps = [document.nats - theirs[name].nats for name, document in mine.items()]
    tokens = [document.tokens for document in mine.values()]
    return (math.fsum(gaps) / sum(tokens), *_interval(gaps, tokens, draws, seed))


@dataclass(frozen=True)
class Setting:
    """How the text of a result was read, see `rope_ext_hf.eval.protocols`; `left_out` documents were too short."""

    protocol: str
    targets: int
    stride: int
    bos: bool
    left_out: int


@dataclass(frozen=True)
class Result:
    """A model's loss at one context length; every token weighs the same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        setting: how the text was read.
        length: context length in tokens.
        loss: nats per token. NaN or infinite if the loss of any span was; `nonfinite` names the documents.
        low, high: its 95% interval, by resampling documents (equal to the loss where there is one document).
        perplexity, bits_per_token, bits_per_byte: the same loss in other units.
        documents: the sums it was made of.
        tokens_per_second: how fast spans of this length went through the model; None where nothing was timed.
        gpu_bytes: the most memory held on a GPU meanwhile; None without one. Neither counts when results are compared.
    """

    method: dict[str, Any] | None
    setting: Setting
    length: int
    loss: float
    low: float
    high: float
    perplexity: float
    bits_per_token: float
    bits_per_byte: float
    tokens: int
    spans: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentLoss, ...]
    tokens_per_second: float | None = field(default=None, compare=False)
    gpu_bytes: int | None = field(default=None, compare=False)

    @classmethod
    def from_documents(
        cls,
        method: dict[str, Any] | None,
        setting: Setting,
        length: int,
        documents: Sequence[DocumentLoss],
        cost: Cost | None = None,
    ) -> Result:
        """The result of one length, from every document's loss; the same whatever order the documents come in."""
        documents = sorted(documents)
        nats = math.fsum(document.nats for document in documents)
        tokens = sum(document.tokens for document in documents)
        loss = nats / tokens
        low, high = bootstrap(documents)
        return cls(
            method=method,
            setting=setting,
            length=length,
            loss=loss,
            low=low,
            high=high,
            perplexity=math.inf if loss >= 700 else math.exp(loss),
            bits_per_token=loss / math.log(2),
            bits_per_byte=nats / math.log(2) / max(1, sum(document.bytes for document in documents)),
            tokens=tokens,
            spans=sum(document.spans for document in documents),
            nonfinite=tuple(document.name for document in documents if not math.isfinite(document.nats)),
            documents=tuple(documents),
            tokens_per_second=cost.tokens / cost.seconds if cost and cost.seconds else None,
            gpu_bytes=(cost and cost.peak) or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; documents as objects."""
        return asdict(self) | {"documents": [document._asdict() for document in self.documents]}


def label(method: dict[str, Any] | None) -> str:
    """The method as a person would say it: "yarn x8", "dynamic-ntk paper", "as loaded"."""
    if method is None:
        return "as loaded"
    parts = [str(method["method"])]
    if "growth" in method:
        parts.append(str(method["growth"]))
    if "theta" in method:
        parts.append(f"{method['theta']:g}")
    if "factor" in method:
        parts.append(f"x{method['factor']:g}")
    parts += [f"{key}={method[key]:g}" for key in ("chunk", "window", "group", "k") if key in method]
    if "frequency" in method:
        parts.append(f"on {label(method['frequency'])}")
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
    """Provenance and results in one file; a non-finite number is written as null, which every JSON scorer takes."""

    content = {"provenance": source, "results": [_finite(result.to_dict()) for result in results]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value

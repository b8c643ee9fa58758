"""Losses of documents, and the perplexity at one length that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from rope_ext_hf.errors import short
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.runs.labels import Method
from rope_ext_hf.runs.statistics import Estimate, estimate

_LARGEST_LOSS = 709.0  # nats per token; a float holds exp of this and of little more


class DocumentLoss(NamedTuple):
    """One document's share of a result: nats summed over the scored tokens, and over the key tokens among them."""

    name: str
    nats: float
    tokens: int
    bytes: int
    spans: int
    key_nats: float = 0.0
    key_tokens: int = 0

    def to_record(self) -> list[float]:
        """Everything but the name; without key tokens the last two numbers are left out."""
        return list(self[1:] if self.key_tokens else self[1:5])

    @classmethod
    def from_record(cls, name: str, value: Any) -> DocumentLoss:
        """Read what a journal holds of the document of this name; ValueError for anything else."""
        match value:
            case [int() | float() as nats, int(tokens), int(size), int(spans), *rest] if (
                1 <= tokens < 2**63 and 0 <= size < 2**63 and 1 <= spans <= tokens and not isinstance(nats, bool)
            ):
                match rest:
                    case []:
                        return cls(name, float(nats), tokens, size, spans)
                    case [int() | float() as key_nats, int(keys)] if 1 <= keys <= tokens:
                        return cls(name, float(nats), tokens, size, spans, float(key_nats), keys)
        raise ValueError(f"expected a loss [nats, tokens, bytes, spans] and of key tokens, got {short(repr(value))}")

    def plus(self, nats: float, tokens: int, size: int, key_nats: float = 0.0, key_tokens: int = 0) -> DocumentLoss:
        return DocumentLoss(self.name, *map(add, self[1:], (nats, tokens, size, 1, key_nats, key_tokens)))


@dataclass(frozen=True)
class Result:
    """A model's loss at one context length; every token weighs the same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        setting: how the text was read.
        length: context length in tokens.
        loss: nats per token. NaN or infinite if the loss of any span was; `nonfinite` names the documents.
        low, high: its 95% interval over documents (`rope_ext_hf.runs.statistics`); None with fewer than three.
        perplexity, bits_per_token, bits_per_byte: the same loss in other units.
        documents: the sums it was made of.
        longppl: the perplexity of the key tokens alone; None where there are none.
        longppl_low, longppl_high: its 95% interval over the documents that have key tokens; None as above.
        key_tokens: how many there are; None where none were looked for.
        tokens_per_second: how fast spans of this length went through the model; None where nothing was timed.
        gpu_bytes: the most memory held on a GPU meanwhile; None without one.
        seconds: that reading each document took; empty where nothing was timed. These three do not count when results
            are compared.
    """

    method: Method
    setting: Setting
    length: int
    loss: float
    low: float | None
    high: float | None
    perplexity: float
    bits_per_token: float
    bits_per_byte: float
    tokens: int
    spans: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentLoss, ...]
    longppl: float | None = None
    longppl_low: float | None = None
    longppl_high: float | None = None
    key_tokens: int | None = None
    tokens_per_second: float | None = field(default=None, compare=False)
    gpu_bytes: int | None = field(default=None, compare=False)
    seconds: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def from_documents(
        cls,
        method: Method,
        setting: Setting,
        length: int,
        documents: Sequence[DocumentLoss],
        costs: Sequence[Cost] = (),
    ) -> Result:
        """The result of one length, whatever order the documents come in; without costs, nothing was timed."""
        order = sorted(range(len(documents)), key=documents.__getitem__)
        documents, costs = [documents[at] for at in order], [costs[at] for at in order] if costs else []
        cost = reduce(Cost.plus, costs, Cost())
        nats = math.fsum([document.nats for document in documents])
        tokens = sum([document.tokens for document in documents])
        loss, low, high, _ = estimate([d.nats for d in documents], [d.tokens for d in documents])
        keys: list[float | None] = [None] * 3
        if keyed := [document for document in documents if document.key_tokens]:
            ends = estimate([d.key_nats for d in keyed], [d.key_tokens for d in keyed])[:3]
            keys = [None if end is None else perplexity_from_loss(end) for end in ends]
        return cls(
            method=method,
            setting=setting,
            length=length,
            loss=loss,
            low=low,
            high=high,
            perplexity=perplexity_from_loss(loss),
            bits_per_token=loss / math.log(2),
            bits_per_byte=nats / math.log(2) / max(1, sum(document.bytes for document in documents)),
            tokens=tokens,
            spans=sum(document.spans for document in documents),
            nonfinite=tuple(document.name for document in documents if not math.isfinite(document.nats)),
            documents=tuple(documents),
            longppl=keys[0],
            longppl_low=keys[1],
            longppl_high=keys[2],
            key_tokens=sum(document.key_tokens for document in documents) if setting.keys else None,
            tokens_per_second=cost.tokens / cost.seconds if cost.seconds else None,
            gpu_bytes=cost.peak or None,
            seconds=tuple(each.seconds for each in costs) if cost.seconds else (),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; documents as objects."""
        return asdict(self) | {"documents": [document._asdict() for document in self.documents]}


def difference(one: Result, other: Result, *, keys: bool = False) -> Estimate:
    """How much higher the loss of `one` is, nats per token, by document; with `keys` over the key tokens alone."""

    def shares(result: Result) -> dict[str, tuple[float, int]]:
        of_keys = {d.name: (d.key_nats, d.key_tokens) for d in result.documents if d.key_tokens}
        return of_keys if keys else {d.name: (d.nats, d.tokens) for d in result.documents}

    mine, theirs = shares(one), shares(other)
    counts = {name: count for name, (_, count) in mine.items()}
    if not counts or counts != {name: count for name, (_, count) in theirs.items()}:
        raise ValueError("only results over the same scored tokens can be compared by document")
    return estimate([nats - theirs[name][0] for name, (nats, _) in mine.items()], list(counts.values()))


def perplexity_from_loss(nats: float) -> float:
    """exp(nats); infinite where a float cannot hold it."""
    return math.inf if nats > _LARGEST_LOSS else math.exp(nats)

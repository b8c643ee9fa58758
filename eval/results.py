"""Evaluation results with their provenance."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.metadata import version
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch

from rope_ext_hf.errors import MethodError, printable, short
from rope_ext_hf.eval.statistics import Estimate, estimate
from rope_ext_hf.methods.registry import method_from_dict

__all__ = [
    "Cost",
    "DocumentLoss",
    "MethodResult",
    "Result",
    "Retrieval",
    "RetrievalSetting",
    "Setting",
    "TrialScore",
    "difference",
    "label",
    "labels",
    "method_key",
    "perplexity_from_loss",
    "provenance",
    "short_labels",
]


LARGEST_LOSS = 709.0
"""Nats per token; a float holds exp of this and of little more."""


class MethodResult(Protocol):
    """What every result has: its method, `RopeMethod.to_dict` or None for the model as loaded."""

    @property
    def method(self) -> dict[str, Any] | None: ...
    def to_dict(self) -> dict[str, Any]: ...


class Cost(NamedTuple):
    """What a measurement cost: tokens that went through the model, seconds, and peak GPU memory in bytes."""

    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0

    @classmethod
    def from_record(cls, value: Any) -> Cost:
        """Read what a journal holds.

        Raises:
            ValueError: anything but [tokens, seconds, bytes], none of them negative.
        """
        match value:
            case [int(tokens), int() | float() as seconds, int(peak)] if (
                0 <= tokens < 2**63 and 0 <= seconds < math.inf and 0 <= peak < 2**63
            ):
                return cls(tokens, float(seconds), peak)
        raise ValueError(f"expected a cost [tokens, seconds, bytes], got {short(repr(value))}")

    def plus(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, max(self.peak, other.peak))


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
        """As a journal holds it: everything but the name; without key tokens the last two numbers are left out."""
        return list(self[1:] if self.key_tokens else self[1:5])

    @classmethod
    def from_record(cls, name: str, value: Any) -> DocumentLoss:
        """Read what a journal holds of the document of this name.

        Raises:
            ValueError: anything but [nats, tokens, bytes, spans] with at least one token, then maybe the nats and the
                number of key tokens.
        """
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
        """With another span."""
        return DocumentLoss(
            self.name,
            self.nats + nats,
            self.tokens + tokens,
            self.bytes + size,
            self.spans + 1,
            self.key_nats + key_nats,
            self.key_tokens + key_tokens,
        )


def perplexity_from_loss(nats: float) -> float:
    """exp(nats); infinite where a float cannot hold it."""
    return math.inf if nats > LARGEST_LOSS else math.exp(nats)


def difference(one: Result, other: Result, *, keys: bool = False) -> Estimate:
    """How much higher the loss of `one` is, in nats per token, with its 95% interval, paired by document.

    Args:
        keys: over the key tokens alone.

    Raises:
        ValueError: the two did not score the same tokens, or there is no key token.
    """

    def shares(result: Result) -> dict[str, tuple[float, int]]:
        of_keys = {d.name: (d.key_nats, d.key_tokens) for d in result.documents if d.key_tokens}
        return of_keys if keys else {d.name: (d.nats, d.tokens) for d in result.documents}

    mine, theirs = shares(one), shares(other)
    counts = {name: count for name, (_, count) in mine.items()}
    if not counts or counts != {name: count for name, (_, count) in theirs.items()}:
        raise ValueError("only results over the same scored tokens can be compared by document")
    return estimate([nats - theirs[name][0] for name, (nats, _) in mine.items()], list(counts.values()))


@dataclass(frozen=True)
class Setting:
    """How the text of a result was read, see `rope_ext_hf.eval.protocols`; `left_out` documents were too short.

    `keys` says which model found the key tokens, and how; empty: there are none.
    """

    protocol: str
    targets: int
    stride: int
    bos: bool
    left_out: int
    keys: str = ""


@dataclass(frozen=True)
class Result:
    """A model's loss at one context length; every token weighs the same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        setting: how the text was read.
        length: context length in tokens.
        loss: nats per token. NaN or infinite if the loss of any span was; `nonfinite` names the documents.
        low, high: its 95% interval over documents (`rope_ext_hf.eval.statistics`); None with fewer than three.
        perplexity, bits_per_token, bits_per_byte: the same loss in other units.
        documents: the sums it was made of.
        longppl: the perplexity of the key tokens alone; None where there are none.
        longppl_low, longppl_high: its 95% interval over the documents that have key tokens; None as above.
        key_tokens: how many there are; None where none were looked for.
        tokens_per_second: how fast spans of this length went through the model; None where nothing was timed.
        gpu_bytes: the most memory held on a GPU meanwhile; None without one.
        seconds: what reading each document took; empty where nothing was timed. These three do not count when results
            are compared.
    """

    method: dict[str, Any] | None
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
        method: dict[str, Any] | None,
        setting: Setting,
        length: int,
        documents: Sequence[DocumentLoss],
        costs: Sequence[Cost] = (),
    ) -> Result:
        """The result of one length, from every document's loss; the same whatever order the documents come in.

        Args:
            costs: of each document; empty: nothing was timed.
        """
        order = sorted(range(len(documents)), key=documents.__getitem__)
        documents, costs = [documents[at] for at in order], [costs[at] for at in order] if costs else []
        cost = reduce(Cost.plus, costs, Cost())
        nats = math.fsum(document.nats for document in documents)
        tokens = sum(document.tokens for document in documents)
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


@dataclass(frozen=True)
class RetrievalSetting:
    """How prompts were made: the task's name, keys and distractors per prompt, and the seed of names and values."""

    task: str
    keys: int
    distractors: int
    seed: int


class TrialScore(NamedTuple):
    """One prompt's share of a result: whether greedy decoding answers right, and the rank of the right answer."""

    exact: bool
    rank: float

    def to_record(self) -> list[float]:
        """As a journal holds it."""
        return list(self)


@dataclass(frozen=True)
class Retrieval:
    """Retrieval from one depth of one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        task: a key of `retrieval_prompts.TASKS`.
        keys: statements in every prompt, of which one is asked for.
        length: of prompt and answer together, in tokens.
        depth: share of the haystack that stands before the statement asked for.
        trials: prompts, each with names and values of its own.
        distractors: wrong answers that the right one is ranked among.
        exact_match: share of trials in which greedy decoding gives the right answer.
        rank: mean rank of the right answer by likelihood, 1 is best; among equals, the middle.
        top1: share of trials in which it ranks first.
        chance: the value of `top1` by luck.
        scores: of each trial.
    """

    method: dict[str, Any] | None
    task: str
    keys: int
    length: int
    depth: float
    trials: int
    distractors: int
    exact_match: float
    rank: float
    top1: float
    chance: float
    scores: tuple[TrialScore, ...]

    @classmethod
    def from_trials(
        cls,
        method: dict[str, Any] | None,
        setting: RetrievalSetting,
        length: int,
        depth: float,
        scores: Sequence[TrialScore],
    ) -> Retrieval:
        """The result of one length and depth."""
        return cls(
            method=method,
            task=setting.task,
            keys=setting.keys,
            length=length,
            depth=depth,
            trials=len(scores),
            distractors=setting.distractors,
            exact_match=fmean(score.exact for score in scores),
            rank=fmean(score.rank for score in scores),
            top1=fmean(score.rank == 1 for score in scores),
            chance=1 / (setting.distractors + 1),
            scores=tuple(scores),
        )

    @property
    def chance_rank(self) -> float:
        """The value of `rank` by luck."""
        return 1 + self.distractors / 2

    @property
    def above_chance(self) -> bool:
        """Whether the rank is better than chance by 3 standard errors of a mean of uniform ranks."""
        error = math.sqrt(((self.distractors + 1) ** 2 - 1) / 12 / self.trials)
        return self.rank < self.chance_rank - 3 * error

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"chance_rank": self.chance_rank, "above_chance": self.above_chance}


def method_key(method: Mapping[str, Any] | None) -> str:
    """A method as a key of dicts and of a journal: its JSON."""
    return json.dumps(method)


def label(method: dict[str, Any] | None) -> str:
    """The method in tables and plots: "yarn x8", "dynamic-ntk paper", "as loaded".

    A method that this installation does not have, such as a plug-in of the run's author, is shown by its name.
    """
    if method is None:
        return "as loaded"
    try:
        return printable(method_from_dict(method).label())
    except (MethodError, TypeError, ValueError):
        return short(printable(str(method["method"])))


def labels(methods: Iterable[dict[str, Any] | None]) -> dict[str, str]:
    """A label for each method, by its key, in the order given; equal labels get the parameters that tell them apart."""
    given = {method_key(method): method for method in methods}
    names = {key: label(method) for key, method in given.items()}
    for name in {name for name in names.values() if list(names.values()).count(name) > 1}:
        same = [key for key, other in names.items() if other == name]
        parameters = {key: dict(given[key] or {}) for key in same}
        for key in same:
            told = [f"{k}={v}" for k, v in parameters[key].items() if any(p.get(k) != v for p in parameters.values())]
            names[key] = f"{name} ({short(printable(', '.join(told)))})"
    return names


def short_labels(names: Iterable[str]) -> list[str]:
    """Labels without further parameters than the factor, where that tells all of them apart."""
    full = list(names)
    first = [name if name == label(None) else "".join(re.findall(r"^\S+| x[\d.]+$", name)) for name in full]
    return first if len(set(first)) == len(full) else full


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

"""Candidates of a search: each is read on the same passages, and no further once it is surely worse.

Passages of different documents come in turn; their ends are scored, as in the measurement of the result. A candidate
stops when its losses are above the best one's on the same passages by the whole 95% interval of their difference; as
long as no candidate holds the bound at the context length, one that does is not stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.runs.statistics import Estimate, estimate
from rope_ext_hf.runs.verdicts import Outcome, verdict
from rope_ext_hf.training.passages import LARGEST_LOSS, LEAST_READ, Passage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PENALTY = 10.0
"""Nats that one lost at the context length beyond the bound adds to the loss by which candidates are compared."""


@dataclass(frozen=True)
class Candidate:
    """A method that a search tried, and what it read under that method."""

    stage: str  # "methods", "bands" or "pairs"
    method: dict[str, Any]  # `RopeMethod.to_dict` of the method that was patched in
    label: str  # its name in tables
    loss: float  # nats per token over all passages; stopped: the best one's then plus the difference so far
    losses: tuple[float, ...]  # of each passage that was read
    lost: float | None  # how much higher the loss is at the context length, in nats per token; None: stopped before
    most_lost: float | None  # the upper end of its 95% interval
    stopped: bool  # it was surely worse than the best before
    parameters: dict[str, Any]  # the values that made it, for the search to go on from
    seconds: float  # of its reading
    cpu_seconds: float

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Candidate:
        return cls(**saved | {"losses": tuple(saved["losses"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def holds(self, bound: float) -> bool:
        """Whether it surely loses no more than this at the context length; not if it was stopped."""
        return self.most_lost is not None and self.most_lost <= bound

    def cost(self, bound: float) -> float:
        """The value that the search makes small."""
        return self.loss + _PENALTY * max(0.0, (self.most_lost or 0.0) - bound)


def best_candidate(candidates: Sequence[Candidate], bound: float) -> Candidate | None:
    """The candidate with the lowest loss among those that hold the bound; None: none does."""
    return min((each for each in candidates if each.holds(bound)), key=lambda each: each.loss, default=None)


class Reader:
    """Reads candidates on one model, all in the same order of passages, which have the target length.

    On the `short` ones, of the context length, at most `bound` nats per token may be lost to the model as loaded.
    `underneath` has `over` and `context_length`, as `rope_ext_hf.patch` takes them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        passages: Sequence[Passage],
        short: Sequence[Passage],
        bound: float,
        **underneath: Any,
    ) -> None:
        self.model, self.passages, self.short, self.bound, self.underneath = model, passages, short, bound, underneath
        self.scorer = TokenScorer(model, longest=len(passages[0].ids))
        self.as_loaded = self.losses(None, short)

    def losses(self, method: RopeMethod | None, passages: Sequence[Passage]) -> list[float]:
        """The loss of each passage under a method, in nats per token; None: of the model as loaded."""
        with nullcontext() if method is None else patched(self.model, method, **self.underneath):
            return [passage.loss(self.scorer) for passage in passages]

    def _lost(self) -> Estimate:
        """How much higher the loss of the present method is at the context length, in nats per token, over passages."""
        pairs = zip(self.short, self.as_loaded, strict=True)
        return estimate([passage.loss(self.scorer) - own for passage, own in pairs])

    def read(
        self, stage: str, method: RopeMethod, before: Sequence[Candidate], parameters: dict[str, Any], label: str = ""
    ) -> Candidate:
        """Read the passages under a method, and stop once it is surely worse than the best candidate before."""
        started, cpu = time.monotonic(), time.process_time()
        best = best_candidate(before, self.bound)
        losses: list[float] = []
        lost: Estimate | None = None
        stopped = False
        with patched(self.model, method, **self.underneath):
            if best is None:  # the first one that holds the bound is read to the end, however high its loss is
                lost = self._lost()
                whole = [each for each in before if not each.stopped and _most(lost) > self.bound]
                best = min(whole, key=lambda each: each.cost(self.bound), default=None)
            for passage in self.passages:
                losses.append(passage.loss(self.scorer))
                if best is not None and LEAST_READ <= len(losses) < len(self.passages):
                    gap = estimate([a - b for a, b in zip(losses, best.losses, strict=False)])
                    if stopped := verdict(gap).outcome is Outcome.WORSE:
                        break
            lost = None if stopped else lost or self._lost()
        return Candidate(
            stage=stage,
            method=method.to_dict(),
            label=label or method.label(),
            loss=best.loss + gap.value if stopped and best is not None else fmean(losses),
            losses=tuple(losses),
            lost=None if lost is None else lost.value,
            most_lost=None if lost is None else _most(lost),
            stopped=stopped,
            parameters=parameters,
            seconds=time.monotonic() - started,
            cpu_seconds=time.process_time() - cpu,
        )


def _most(lost: Estimate) -> float:
    """The upper end of the interval; without one, nothing is known of the loss at the context length."""
    return LARGEST_LOSS if lost.high is None else lost.high

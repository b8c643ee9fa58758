"""Made-up measures, whose numbers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rope_ext_hf.runs.conclusions.measures import Evidence, Measure

SPREAD = (-0.05, -0.02, 0.0, 0.01, 0.06)
"""Differences between the documents of a made-up loss."""
Row = Mapping[int, float | Sequence[float]]


def perplexities(rows: Mapping[str, Row], name: str = "perplexity", **more: Any) -> Measure:
    """A perplexity by method and length from nats of five documents; a list has the nats of each document."""
    items = {
        key: {
            n: [(10.0 * v, 10.0) for v in (loss if isinstance(loss, Sequence) else [loss + s for s in SPREAD])]
            for n, loss in row.items()
        }
        for key, row in rows.items()
    }
    return Measure(name, "", Evidence.LOSS, False, items, exponential=True, tolerance=0.05, **more)


def answers(rows: Mapping[str, Mapping[int, int]], prompts: int = 40, **more: Any) -> Measure:
    """Exact answers, from the number of prompts that are answered."""
    items = {
        key: {n: [(float(i < right), 1.0) for i in range(prompts)] for n, right in row.items()}
        for key, row in rows.items()
    }
    return Measure("exact match", "%", Evidence.RETRIEVAL, True, items, "prompt", **more)


def answer_losses(rows: Mapping[str, Mapping[int, float]], share: Measure, prompts: int = 40) -> Measure:
    """The loss of the right answer, which replaces `share` where it is at the floor; prompts differ by up to 0.02."""
    items = {
        key: {n: [(loss + 0.01 * (i % 3), 1.0) for i in range(prompts)] for n, loss in row.items()}
        for key, row in rows.items()
    }
    evidence = Evidence.ANSWER_LOSS
    return Measure("loss of the answer", "nats per token", evidence, False, items, "prompt", instead_of=share)

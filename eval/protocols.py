"""Which tokens are read and which of them are scored: protocols as pure generators, tested against literal values.

    >>> list(matched(8, [4, 8], Plan(targets=2)))
    [Window(length=4, start=4, stop=8, score_from=6, score_to=8, context=4),
     Window(length=8, start=0, stop=8, score_from=6, score_to=8, context=8)]

A protocol gets the number of tokens of a document, the context lengths (ascending) and a `Plan`; it knows nothing of
models or text. Position -1 stands for the prefix token (BOS) before a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["PROTOCOLS", "Plan", "Window", "check_lengths"]


class Window(NamedTuple):
    """Tokens start..stop of a document are read in one pass; of them, score_from..score_to are scored.

    `length` is the context length the score counts for, `context` the one length-dependent methods are held at.
    """

    length: int
    start: int
    stop: int
    score_from: int
    score_to: int
    context: int


@dataclass(frozen=True)
class Plan:
    """What protocols take beside the lengths: `targets` (matched) and `stride` (sliding, stream), in tokens."""

    targets: int
    stride: int = 256


Protocol = Callable[[int, Sequence[int], Plan], Iterator[Window]]


def check_lengths(lengths: Sequence[int], targets: int | None) -> tuple[list[int], int]:
    """Ascending lengths and the number of target tokens, by default half the shortest length.

    Raises:
        ValueError: no lengths, one below 2, or more targets than the shortest length can hold with a token before them.
    """
    ordered = sorted(set(lengths))
    if not ordered or ordered[0] < 2:
        raise ValueError(f"lengths must be one or more numbers of at least 2 tokens, got {list(lengths)}")
    scored = ordered[0] // 2 if targets is None else targets
    if not 1 <= scored < ordered[0]:
        raise ValueError(f"targets must be between 1 and {ordered[0] - 1} (below the shortest length), got {scored}")
    return ordered, scored


def matched(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """The same targets at every length: the last `targets` tokens of each longest-length stretch of a document.

    At length N they are read after N - targets tokens of context, so that lengths differ by the context alone.
    Stretches do not overlap; what is left at the end of the document is not used, and a document shorter than the
    longest length yields nothing.
    """
    longest = lengths[-1]
    for stop in range(longest, tokens + 1, longest):
        for length in lengths:
            yield Window(length, stop - length, stop, stop - plan.targets, stop, length)


def sliding(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """Windows of N tokens, `stride` apart, the last `stride` tokens of each scored (PI paper, arXiv 2306.15595, 3.2).

    The first N - stride tokens of a document are never scored. Documents shorter than the longest length are left out.
    """
    for length in lengths if tokens >= lengths[-1] else ():
        for stop in range(length, tokens + 1, plan.stride):
            yield Window(length, stop - length, stop, max(stop - length + 1, stop - plan.stride), stop, length)


def truncate(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """The first N tokens of each document in one pass, all scored (the code of the YaRN paper).

    Documents shorter than the longest length are left out at every length, as that code's --dataset-min-tokens does.
    """
    for length in lengths if tokens >= lengths[-1] else ():
        yield Window(length, 0, length, 1, length, length)


def stream(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """Windows of N tokens, `stride` apart, all tokens scored (LongLoRA, ChunkLlama); meant for joined documents."""
    for length in lengths:
        for start in range(0, tokens - length + 1, plan.stride):
            yield Window(length, start, start + length, start + 1, start + length, length)


def blocks(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """Every token once: disjoint runs of N targets, each read after one token of context (lm-evaluation-harness).

    The first run begins after the prefix token; the last, if shorter, is given earlier tokens up to N of input.
    """
    for length in lengths:
        for first in range(0, tokens, length):
            stop = min(first + length, tokens)
            yield Window(length, max(-1, stop - length - 1), stop, first, stop, length)


def position(tokens: int, lengths: Sequence[int], plan: Plan) -> Iterator[Window]:
    """One pass over the first longest-length tokens; the loss of positions between two lengths counts for the upper.

    The whole length curve of a static method from a single forward: the entry at N is the mean loss at positions from
    the next shorter length up to N. Documents shorter than the longest length are left out.
    """
    longest = lengths[-1]
    if tokens >= longest:
        for before, length in zip((1, *lengths), lengths, strict=False):
            yield Window(length, 0, longest, before, length, longest)


PROTOCOLS: dict[str, Protocol] = {
    function.__name__: function for function in (matched, sliding, truncate, stream, blocks, position)
}
"""Every protocol by name."""

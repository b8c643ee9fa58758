"""Give one kernel call all tiles of a kind, as a batch, and merge what it returns; docs/internals.md draws the tiles.

Tiles of one size and mask, evenly spaced on a diagonal, are one `KernelCall`: `strided_spans` views their queries as
(rows, times, heads, size, dim), `batch_rows` makes rows x times of it, and the kernel is run once. Every call has the
softmax of its own keys only; `MergedSoftmax` adds it to what the queries have seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.attention.kernels import join_rows
from rope_ext_hf.attention.triton_merging import merge_fused
from rope_ext_hf.methods.tiles import Mask, Tile
from rope_ext_hf.rotary.triton_rotation import can_fuse


class Spans(NamedTuple):
    """`times` ranges of `size` tokens, `step` apart, the first from `begin` on."""

    begin: int
    size: int
    step: int = 1
    times: int = 1

    def after(self, first: int) -> Spans:
        """The same, counted from token `first`."""
        return Spans(self.begin - first, *self[1:])


class KernelCall(NamedTuple):
    """Rectangles that one kernel call takes, as rows of a batch; positions of their queries and keys."""

    zones: tuple[int, ...]  # of all rows, or of each
    mask: Mask
    queries: Spans  # of each row; a single span is of all rows
    keys: Spans
    first_row: int = 0  # of its zones, among queries that are rotated to several
    joint: bool = False  # whether all rows are of the same queries


def kernel_calls(
    tiles: Iterable[Tile], low: int, max_copied: int, max_joined: int = 0, windows: bool = False
) -> list[KernelCall]:
    """Cover the tiles of a zone, in the order of their queries: evenly spaced ones of one size and mask share a call.

    Three or more of the same queries do, in any zones but the nearest; others in one zone and along one diagonal.

    Args:
        low: keys below this position are left out.
        max_copied: anticausal tiles are copied to be read backwards; a call of them has at most this many queries.
        max_joined: the most queries, those of all rows, of a call over rows of the same queries.
        windows: whether masks may be numbers.
    """
    calls: list[KernelCall] = []
    together: dict[tuple[bool, Mask, int, int, int], dict[int, int]] = {}
    for tile in tiles:
        for (q0, q1), (k0, k1), mask in tile.rectangles(low, windows):
            together.setdefault((tile.zone == 0, mask, q0, q1 - q0, k1 - k0), {})[k0] = tile.zone
    kinds: dict[tuple[int, Mask, int, int, int], list[int]] = {}
    for (nearest, mask, q0, size, width), zones in together.items():
        for keys in _even_spans(sorted(zones), width, 1, 1 if nearest else max_joined // size):
            of_rows = tuple(zones[keys.begin + i * keys.step] for i in range(keys.times))
            if keys.times > 2:
                same = of_rows[:1] if len(set(of_rows)) == 1 else of_rows
                calls.append(KernelCall(same, mask, Spans(q0, size), keys, joint=True))
                continue
            for i, zone in enumerate(of_rows):
                kinds.setdefault((zone, mask, size, width, keys.begin + i * keys.step - q0), []).append(q0)
    for (zone, mask, size, width, diagonal), starts in kinds.items():
        most = max_copied // size if mask == "anticausal" else len(starts)
        for queries in _even_spans(starts, size, size, most):
            keys = queries._replace(begin=queries.begin + diagonal, size=width)
            calls.append(KernelCall((zone,), mask, queries, keys))
    return sorted(calls, key=lambda call: call.zones)


def _even_spans(starts: list[int], size: int, apart: int, most: int) -> Iterator[Spans]:
    """Ranges that begin at `starts`, those at even distances of at least `apart` together, at most `most` of them."""
    run = Spans(starts[0], size)
    for start in starts[1:]:
        step = start - run.begin - run.step * (run.times - 1)
        if step >= apart and run.times < most and (run.times == 1 or step == run.step):
            run = Spans(run.begin, size, step, run.times + 1)
        else:
            yield run
            run = Spans(start, size)
    yield run


def strided_spans(x: Tensor, spans: Spans) -> Tensor:
    """View spans of tokens of `x`, (rows, heads, tokens, dim); writing to the view writes to `x`.

    It is (rows, times, heads, size, dim), or (rows, heads, size, dim) of a single span.
    """
    begin, size, step, times = spans
    view = x[:, :, begin : begin + step * (times - 1) + size]
    return view if times == 1 else view.unfold(2, size, step).movedim((2, -1), (1, 3))


def batch_rows(x: Tensor, spans: Spans) -> Tensor:
    """(rows x times, heads, size, dim), spans as rows of a batch; a copy where there are several rows and spans."""
    if spans.times == 1:
        return x[:, :, spans.begin : spans.begin + spans.size]
    return strided_spans(x, spans).flatten(0, 1)


def add_to_spans(x: Tensor, spans: Spans, part: Tensor) -> None:
    """Add to spans of `x`, which may overlap, what a kernel returned for them as rows of a batch."""
    for i, each in enumerate(part.reshape(-1, spans.times, *part.shape[1:]).unbind(1)):
        begin = spans.begin + i * spans.step
        x[:, :, begin : begin + spans.size] += each


class Zones(NamedTuple):
    """Zones of a block: queries, a row for each of several, and keys, rotated, values, and kernel calls, counted from
    the first query and key."""

    zones: tuple[int, ...]
    query: Tensor
    keys: Tensor
    values: Tensor
    calls: list[KernelCall]

    def of_call(self, query: Tensor, call: KernelCall) -> Tensor:
        """The rows of queries, or of their gradients, in the zones of a call."""
        return query[call.first_row : call.first_row + len(call.zones)] if self.zones[1:] else query

    def rows(self, call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a call, as `run_kernel` takes them."""
        query, (begin, size, _, times) = self.query, call.keys
        if self.zones[1:]:
            query = self.of_call(query, call)
        if times > 1:
            return batch_rows(query, call.queries), batch_rows(self.keys, call.keys), batch_rows(self.values, call.keys)
        first, keys = call.queries.begin, slice(begin, begin + size)  # of a single span, as are the queries then: views
        return query[:, :, first : first + call.queries.size], self.keys[:, :, keys], self.values[:, :, keys]


class MergedSoftmax:
    """The attention of a block of queries, (rows, heads, tokens, head_dim), to more and more keys.

    A first part that covers all queries is taken as it is, so that a decoding step fills nothing and copies nothing.
    `out`: where the result goes, (rows, heads, tokens, head_dim of value); None: wherever it is.
    """

    def __init__(self, query: Tensor, out: Tensor | None) -> None:
        self.query = query
        self.out: Any = out  # the result; None before a first part
        self._lse: Tensor | None = None
        self._last: tuple[Spans, Tensor] | None = None  # not yet in `_lse`

    def add(self, spans: Spans, part: Tensor, part_lse: Tensor) -> None:
        """Merge in the attention of the queries `spans`, which are folded into the batch, to further keys.

        More rows than there are spans are parts of the same queries.
        """
        joint = len(part) > len(self.query) * spans.times
        if self._lse is None:
            if spans.size == self.query.shape[-2] and not joint:
                self.out = part if self.out is None else self.out.copy_(part)
                self._lse = part_lse[..., None]
                return
            shape, device = self.query.shape[:-1], self.query.device
            self.out = part.new_zeros(*shape, part.shape[-1]) if self.out is None else self.out.zero_()
            self._lse = torch.full((*shape, 1), -math.inf, dtype=part_lse.dtype, device=device)
        out = strided_spans(self.out, spans)
        lse = strided_spans(self.log_sum_exp(), spans)
        if can_fuse(part) and out.stride(-1) == part.stride(-1) == 1:
            single = spans.times == 1
            merge_fused(out[:, None] if single else out, (lse[:, None] if single else lse)[..., 0], part, part_lse)
            return
        part, part_lse = join_rows(part, part_lse) if joint else (part, part_lse)
        part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
        # exp(part) / (exp(lse) + exp(part)), as a sigmoid: neither exponential is formed, so neither can overflow.
        weight = torch.sigmoid(part_lse - lse, out=torch.empty_like(lse, dtype=out.dtype))
        out.lerp_(part, weight)
        self._last = spans, part_lse

    def log_sum_exp(self) -> Tensor:
        """(rows, heads, tokens, 1), of the scores of all keys so far."""
        assert self._lse is not None
        if self._last is not None:  # a step without sinks never asks for the log-sum-exp of its last part
            spans, part_lse = self._last
            lse = strided_spans(self._lse, spans)
            torch.logaddexp(lse, part_lse, out=lse)
            self._last = None
        return self._lse

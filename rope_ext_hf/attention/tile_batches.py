"""Batching of tiles (blocks of queries and keys) into kernel calls, and the merging of their softmaxes.

docs/internals.md draws the tiles. Tiles of one size and mask, evenly spaced along a diagonal of the attention matrix,
are one `KernelCall`: `strided_spans` views their queries as (rows, times, heads, size, dim), `batch_rows` makes rows x
times rows from them, and the kernel is run once. A call returns the softmax over its own keys; `MergedSoftmax` merges
it with those of earlier calls.
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
    """Evenly spaced ranges of tokens: `times` ranges of `size` tokens, beginning at `begin`, `begin` + `step`, ..."""

    begin: int
    size: int
    step: int = 1
    times: int = 1

    def after(self, first: int) -> Spans:
        """Return the same ranges, with tokens counted from token `first`."""
        return Spans(self.begin - first, *self[1:])


class KernelCall(NamedTuple):
    """Rectangles (ranges of queries and keys) with the same mask that one kernel call computes as rows of a batch."""

    zones: tuple[int, ...]  # the zone of each row, or one zone for all
    mask: Mask
    queries: Spans  # the positions of the queries of each row, or of all rows
    keys: Spans  # the positions of the keys of each row
    first_row: int = 0  # the row of its first zone, among queries that are rotated to several zones
    joint: bool = False  # whether all rows have the same queries


def kernel_calls(
    tiles: Iterable[Tile], low: int, max_copied: int, max_joined: int = 0, windows: bool = False
) -> list[KernelCall]:
    """Group tiles into kernel calls, in the order of their queries.

    Each tile is cut into rectangles. Rectangles that have the same size and mask, and are evenly spaced, can share a
    call in two ways. First, three or more rectangles with the same queries can; these may be in different zones, but
    not in the nearest one. Second, rectangles of one zone can if their first key minus their first query is the same
    (they lie on one diagonal).

    Args:
        tiles: tiles in the order of their queries.
        low: keys below this position are left out.
        max_copied: the most queries in a call with anticausal masks, whose queries and keys are copied to be read
            backwards.
        max_joined: the most queries in a call of the first kind; they are counted again in each row of the call.
        windows: whether a mask may also be a number, the size of a window in tokens.
    """
    calls: list[KernelCall] = []
    same_queries: dict[tuple[bool, Mask, int, int, int], dict[int, int]] = {}  # -> zone by first key
    for tile in tiles:
        for (q0, q1), (k0, k1), mask in tile.rectangles(low, windows):
            same_queries.setdefault((tile.zone == 0, mask, q0, q1 - q0, k1 - k0), {})[k0] = tile.zone
    same_diagonal: dict[tuple[int, Mask, int, int, int], list[int]] = {}  # -> first queries
    for (nearest, mask, q0, size, width), zone_of_key in same_queries.items():
        for keys in _even_spans(sorted(zone_of_key), width, 1, 1 if nearest else max_joined // size):
            zones = tuple(zone_of_key[keys.begin + i * keys.step] for i in range(keys.times))
            if keys.times > 2:
                if len(set(zones)) == 1:
                    zones = zones[:1]
                calls.append(KernelCall(zones, mask, Spans(q0, size), keys, joint=True))
                continue
            for i, zone in enumerate(zones):
                diagonal = keys.begin + i * keys.step - q0
                same_diagonal.setdefault((zone, mask, size, width, diagonal), []).append(q0)
    for (zone, mask, size, width, diagonal), starts in same_diagonal.items():
        most = max_copied // size if mask == "anticausal" else len(starts)
        for queries in _even_spans(starts, size, size, most):
            keys = queries._replace(begin=queries.begin + diagonal, size=width)
            calls.append(KernelCall((zone,), mask, queries, keys))
    return sorted(calls, key=lambda call: call.zones)


def _even_spans(starts: list[int], size: int, apart: int, most: int) -> Iterator[Spans]:
    """Yield ranges of `size` tokens that begin at `starts`, with evenly spaced ranges grouped into one `Spans`.

    The ranges in a group begin at least `apart` tokens after each other, and a group has at most `most` ranges.
    """
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
    """Return a view of some ranges of tokens in `x`; writing to the view writes to `x`.

    `x`: (rows, heads, tokens, dim). The view is (rows, times, heads, size, dim), or (rows, heads, size, dim) if there
    is a single range.
    """
    begin, size, step, times = spans
    view = x[:, :, begin : begin + step * (times - 1) + size]
    return view if times == 1 else view.unfold(2, size, step).movedim((2, -1), (1, 3))


def batch_rows(x: Tensor, spans: Spans) -> Tensor:
    """Return ranges of tokens in `x` as rows of a batch, (rows x times, heads, size, dim).

    `x`: (rows, heads, tokens, dim). The result is a view of `x`, or a copy if there are several rows and ranges.
    """
    if spans.times == 1:
        return x[:, :, spans.begin : spans.begin + spans.size]
    return strided_spans(x, spans).flatten(0, 1)


def add_to_spans(x: Tensor, spans: Spans, part: Tensor) -> None:
    """Add each row of a batch to the range of tokens in `x` that it belongs to; ranges may overlap.

    Args:
        x: (rows, heads, tokens, dim).
        spans: the ranges.
        part: (rows x times, heads, size, dim), as `batch_rows` returns it.
    """
    for i, of_span in enumerate(part.reshape(-1, spans.times, *part.shape[1:]).unbind(1)):
        begin = spans.begin + i * spans.step
        x[:, :, begin : begin + spans.size] += of_span


class Zones(NamedTuple):
    """The queries, keys and values of several zones that read the same key tensor, for one block of queries.

    A zone is a range of keys to which one rule of relative positions applies.
    """

    zones: tuple[int, ...]
    query: Tensor  # (rows, heads, queries, head_dim), rotated; where there are several zones, a row for each
    keys: Tensor  # (rows, kv_heads, keys, head_dim), rotated
    values: Tensor
    calls: list[KernelCall]  # they count from the first of these queries and keys

    def of_call(self, query: Tensor, call: KernelCall) -> Tensor:
        """Return the rows of `query` (queries, or their gradients) that belong to the zones of this kernel call."""
        return query[call.first_row : call.first_row + len(call.zones)] if len(self.zones) > 1 else query

    def rows(self, call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values for a kernel call, as rows of a batch that `run_kernel` takes."""
        query = self.of_call(self.query, call)
        return batch_rows(query, call.queries), batch_rows(self.keys, call.keys), batch_rows(self.values, call.keys)


class MergedSoftmax:
    """The attention of a block of queries to all keys that were added so far, part by part.

    A first part that covers all queries is taken as it is, so that a decoding step fills nothing and copies nothing.

    Args:
        query: (rows, heads, tokens, head_dim).
        out: the tensor to write the result to, (rows, heads, tokens, head_dim of value); None: any tensor.
    """

    def __init__(self, query: Tensor, out: Tensor | None) -> None:
        self.query = query
        self.out: Any = out  # the result; None before a first part
        self._lse: Tensor | None = None
        self._last: tuple[Spans, Tensor] | None = None  # not yet in `_lse`

    def add(self, spans: Spans, part: Tensor, part_lse: Tensor) -> None:
        """Add the attention of some of the queries to further keys.

        Args:
            spans: the ranges of these queries.
            part: their attention to these keys, (rows x spans, heads, size, head_dim of value). If it has more rows,
                several rows hold the attention of the same queries to different keys.
            part_lse: the log-sum-exp of the scores, (rows x spans, heads, size).
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
        if joint:
            part, part_lse = join_rows(part, part_lse)
        part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
        # exp(part) / (exp(lse) + exp(part)), as a sigmoid: neither exponential is formed, so neither can overflow.
        weight = torch.sigmoid(part_lse - lse, out=torch.empty_like(lse, dtype=out.dtype))
        out.lerp_(part, weight)
        self._last = spans, part_lse

    def log_sum_exp(self) -> Tensor:
        """Return the log-sum-exp of the scores of all keys added so far, (rows, heads, tokens, 1)."""
        assert self._lse is not None
        if self._last is not None:  # a step without sinks never asks for the log-sum-exp of its last part
            spans, part_lse = self._last
            lse = strided_spans(self._lse, spans)
            torch.logaddexp(lse, part_lse, out=lse)
            self._last = None
        return self._lse

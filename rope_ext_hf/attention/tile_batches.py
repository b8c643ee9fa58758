r"""Give one kernel call all tiles of a kind, as a batch, and merge what it returns.

Dual chunk attention with chunks of 4 tokens, 12 queries and their keys; a number is the zone of a tile:

                  keys 0-3      4-7       8-11
    queries 0-3    0 causal
            4-7    1 full     0 causal
            8-11   2 full     1 full    0 causal

The three causal squares of zone 0 have one size and lie on one diagonal, 4 queries and 4 keys apart: `batch_tiles`
makes them one run, `strided_spans` views their queries as (rows, 3, heads, 4, dim), `fold_into_batch` makes rows x 3 of
it, and one causal kernel call serves all three. Zone 1 is a run of two full tiles, zone 2 a run of one: three calls
instead of six. Every call has the softmax of its own keys only; `MergedSoftmax` adds it to what the queries have seen.

A method with an exact local window of 4 tokens covers the same square by triangles, `\` causal and `/` anticausal:

                  keys 0-3      4-7       8-11
    queries 0-3    0 \
            4-7    0 / 1 \    0 \
            8-11   1          0 / 1 \   0 \

In the square of queries 4-7 and keys 0-3, query m sees the keys above the diagonal, n > m - 4, in zone 0, and the other
keys in zone 1. Zone 1 as a whole is one causal square, queries 4-11 and keys 0-7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rope_ext_hf.methods.tiles import TileRectangle


def batch_tiles(rectangles: Iterable[TileRectangle], max_copied: int) -> Iterator[list[TileRectangle]]:
    """Group rectangles that one kernel call can take: of one size and mask, evenly spaced along one diagonal.

    Args:
        rectangles: in the order of their queries.
        max_copied: anticausal tiles are copied to be read backwards; a run of them has at most this many queries.
    """
    kinds: dict[tuple[str, int, int, int], list[TileRectangle]] = {}
    for one in rectangles:
        (q0, q1), (k0, k1), mask = one
        kinds.setdefault((mask, q1 - q0, k1 - k0, k0 - q0), []).append(one)
    for (mask, size, *_), alike in kinds.items():
        run = alike[:1]
        for one in alike[1:]:
            step = one.queries[0] - run[-1].queries[0]
            even = step >= size and step == (run[1].queries[0] - run[0].queries[0] if run[1:] else step)
            if not even or (mask == "anticausal" and (len(run) + 1) * size > max_copied):
                yield run
                run = []
            run.append(one)
        yield run


def strided_spans(x: Tensor, begin: int, size: int, step: int, count: int) -> Tensor:
    """View `count` spans of `size` tokens, `step` tokens apart.

    Args:
        x: (rows, heads, tokens, dim).

    Returns:
        (rows, count, heads, size, dim), or (rows, heads, size, dim) of a single span; writing to it writes to `x`.
    """
    spans = x[:, :, begin : begin + step * (count - 1) + size]
    return spans if count == 1 else spans.unfold(2, size, step).movedim((2, -1), (1, 3))


def fold_into_batch(spans: Tensor) -> Tensor:
    """(rows x count, heads, size, dim) from `strided_spans`; a copy where there are several rows and several spans."""
    return spans if spans.ndim == 4 else spans.flatten(0, 1)


class MergedSoftmax:
    """The attention of a block of queries to more and more keys.

    A first part that covers all queries is taken as it is, so that a decoding step fills nothing and copies nothing.

    Args:
        query: the queries, (rows, heads, tokens, head_dim).
        out: where the result goes, (rows, heads, tokens, head_dim of value); None: wherever it is.

    Attributes:
        out: the result; None before the first part.
    """

    def __init__(self, query: Tensor, out: Tensor | None) -> None:
        self.query, self.out = query, out
        self._lse: Tensor | None = None
        self._last: tuple[tuple[int, int, int, int], Tensor] | None = None  # not yet in `_lse`

    def add(self, spans: tuple[int, int, int, int], part: Tensor, part_lse: Tensor) -> None:
        """Merge in the attention to further keys.

        Args:
            spans: the queries that attend to them, as `strided_spans` takes them: begin, size, step, count.
            part, part_lse: as a kernel returns them, spans folded into the batch.
        """
        if self._lse is None:
            if spans[1] == self.query.shape[-2]:
                self.out = part if self.out is None else self.out.copy_(part)
                self._lse = part_lse[..., None]
                return
            shape, device = self.query.shape[:-1], self.query.device
            self.out = part.new_zeros(*shape, part.shape[-1]) if self.out is None else self.out.zero_()
            self._lse = torch.full((*shape, 1), -math.inf, dtype=torch.float32, device=device)
        assert self.out is not None
        out = strided_spans(self.out, *spans)
        lse = strided_spans(self.log_sum_exp(), *spans)
        part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
        # exp(part) / (exp(lse) + exp(part)), as a sigmoid: neither exponential is formed, so neither can overflow.
        weight = torch.sigmoid(part_lse - lse, out=torch.empty_like(lse, dtype=out.dtype))
        out.lerp_(part, weight)
        self._last = spans, part_lse

    def log_sum_exp(self) -> Tensor:
        """(rows, heads, tokens, 1) float32, of the scores of all keys so far."""
        assert self._lse is not None
        if self._last is not None:  # a step without sinks never asks for the log-sum-exp of its last part
            spans, part_lse = self._last
            lse = strided_spans(self._lse, *spans)
            torch.logaddexp(lse, part_lse, out=lse)
            self._last = None
        return self._lse

"""Attention over zones of keys, each at relative positions of its own, without a (length, length) tensor.

    out = attend(rule, rotation, call, query, key, value, scale)

Two ways to the same numbers. Where a fused kernel can be used, the visible pairs of a zone are covered by rectangles
and causal squares, each goes through the kernel, and the partial softmaxes are merged by their log-sum-exp. The rest
(soft caps, odd masks, gradients, decoding steps of padded batches) comes from the scores of a few queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rope_ext_hf.attention.kernels import has_kernel, run_kernel
from rope_ext_hf.attention.rules import AttentionRule, ForwardContext, Rotation, ScoreModifiers
from rope_ext_hf.methods.remapping import RemappedPosition
from rope_ext_hf.methods.tiles import TileRectangle
from rope_ext_hf.rotary.kv_cache import KeyRotation

__all__ = ["MAX_BLOCKS", "MAX_QUERY_BLOCK", "MIN_FUSED_QUERIES", "SCORE_BYTES", "attend"]

MAX_QUERY_BLOCK = 2048  # turned at a time
MAX_BLOCKS = 4  # of queries, of long inputs: more take more launches, fewer more memory
MIN_FUSED_QUERIES = 16  # queries for which the kernels are worth their calls in a padded batch
SCORE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # bytes of scores at a time: on a CPU, what its caches hold


_NONE = ScoreModifiers()


def attend(
    rule: AttentionRule,
    rotation: Rotation | None,
    context: ForwardContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    modifiers: ScoreModifiers = _NONE,
) -> Tensor:
    """Attention of the newest queries to keys that end with their own.

    Args:
        rotation: None: nothing is turned here.
        query: (rows, heads, tokens, head_dim), turned as the keys are.
        key, value: (rows, kv_heads, past + tokens, head_dim), keys turned to where they are stored.

    Returns:
        (rows, heads, tokens, head_dim of value) in value's dtype.
    """
    if not query.numel():
        return value.new_empty(*query.shape[:-1], value.shape[-1])
    if query.dtype != value.dtype:  # under autocast a rotation leaves queries and keys wider than values
        query, key = query.to(value.dtype), key.to(value.dtype)
    return _Attention(rule, rotation, context, scale, modifiers).run(query, key, value)


@dataclass(frozen=True)
class _Attention:
    """One layer's attention in one call. Tensors as in `attend`."""

    rule: AttentionRule
    rotation: Rotation | None
    context: ForwardContext
    scale: float
    modifiers: ScoreModifiers

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        left_padding, modifiers = self.context.left_padding, self.modifiers
        plain = modifiers.mask is None and modifiers.softcap is None and not modifiers.dropout
        if left_padding is None or not plain or _needs_grad(query, key, value) or not has_kernel(query, value):
            return self._eager(query, key, value)
        if len(set(left_padding)) == 1:
            return self._fused(query, key, value, left_padding[0])
        if query.shape[-2] < MIN_FUSED_QUERIES:
            return self._eager(query, key, value)
        rows = [slice(r, r + 1) for r in range(len(left_padding))]
        return torch.cat([self._fused(query[r], key[r], value[r], o) for r, o in zip(rows, left_padding, strict=True)])

    def _local_rotation(self, positions: Tensor, where: Hashable) -> KeyRotation | None:
        """What brings queries or keys, (rows or 1, tokens), to where the nearest zone has them; None: they are there.

        Args:
            where: says which positions these are, among those of the call.
        """
        return (
            self._cached_rotation(positions, lambda: RemappedPosition(positions), where)
            if self.rule.local_zone_exact
            else None
        )

    def _zone_rotation(self, m: Tensor, zone: int, where: Hashable) -> KeyRotation | None:
        """What brings queries to where a further zone has them."""
        return self._cached_rotation(m, lambda: self.rule.query_positions(m)[zone - 1], (zone, where))

    def _cached_rotation(
        self, positions: Tensor, place: Callable[[], RemappedPosition], what: Hashable
    ) -> KeyRotation | None:
        if self.rotation is None:
            return None
        table, rotations = self.rotation.table, self.context.rotations
        name = (self.rule, table, positions.device, what)
        if name not in rotations:
            rotations[name] = table.between(self.rule.key_position(positions), place(), positions.device)
        return rotations[name]

    def _rotate(self, rotation: KeyRotation | None, x: Tensor) -> Tensor:
        return x if rotation is None or self.rotation is None else rotation.apply(x, self.rotation.layout)

    def _scale_query(self, query: Tensor, m: Tensor) -> Tensor:
        weight = self.rule.query_scale(m)
        return query if weight is None else query * weight[:, None, :, None].to(query.dtype)

    # --- by kernel

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        """Rows whose real keys begin after `offset` padded ones."""
        evicted = (
            self.context.key_positions.shape[-1] - key.shape[-2]
        )  # a sliding cache let them go: they are in nobody's window
        begin = max(0, offset - evicted)
        key, value = key[:, :, begin:], value[:, :, begin:]
        low = max(0, evicted - offset)  # position of the first key
        last = low + key.shape[-2]
        padded = max(0, query.shape[-2] - last)  # queries that are padding themselves
        first = last - query.shape[-2] + padded
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        many = max(MAX_QUERY_BLOCK, -(-(last - first) // MAX_BLOCKS))
        for start in range(first, last, many):
            stop = min(start + many, last)
            block = slice(padded + start - first, padded + stop - first)
            self._fused_block(out[:, :, block], query[:, :, block], key, value, start, low)
        return out

    def _fused_block(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, start: int, low: int) -> None:
        """Queries from position `start` on, over keys from position `low` on; `out` comes as zeros."""
        rule, device = self.rule, query.device
        stop = start + query.shape[-2]
        m = torch.arange(start, stop, device=device)[None]
        oldest = max(low, start - rule.last_zone_start + 1)
        n = torch.arange(oldest, stop, device=device)[None]
        near = self._local_rotation(n, ("positions", oldest, stop))
        near_keys = self._rotate(near, key[:, :, oldest - low : stop - low])
        query = self._scale_query(query, m)
        lse = torch.full((*query.shape[:-1], 1), -math.inf, dtype=torch.float32, device=device)
        for zone, pieces in groupby(sorted(rule.tiles(start, stop), key=lambda piece: piece.zone), lambda p: p.zone):
            if zone == 0:
                turn, keys, keys_from = near and near.last(query.shape[-2]), near_keys, oldest
            else:
                turn, keys, keys_from = self._zone_rotation(m, zone, ("positions", start, stop)), key, low
            turned = self._rotate(turn, query)
            for run in _batch_tiles(chain.from_iterable(piece.rectangles(keys_from) for piece in pieces)):
                (q0, q1), (k0, k1), mask = run[0]
                step, times = run[1].queries[0] - q0 if run[1:] else 1, len(run)
                of_queries, of_keys = (q0 - start, q1 - q0, step, times), (k1 - k0, step, times)
                part, part_lse = run_kernel(
                    _fold_into_batch(_strided_spans(turned, *of_queries)),
                    _fold_into_batch(_strided_spans(keys, k0 - keys_from, *of_keys)),
                    _fold_into_batch(_strided_spans(value, k0 - low, *of_keys)),
                    self.scale,
                    mask,
                )
                _merge_softmax_(_strided_spans(out, *of_queries), _strided_spans(lse, *of_queries), part, part_lse)
        if self.modifiers.sinks is not None:
            out *= torch.sigmoid(lse - self.modifiers.sinks.float()[None, :, None, None]).to(out.dtype)

    # --- by scores

    def _eager(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A few queries at a time, whatever the masks and positions are."""
        rows, heads, tokens, _ = query.shape
        few = max(1, SCORE_BYTES.get(query.device.type, SCORE_BYTES["cuda"]) // (4 * rows * heads * key.shape[-2]))
        learns = _needs_grad(query, key, value)
        out = []
        for start in range(0, tokens, few):
            block = slice(start, min(start + few, tokens))
            if learns and few < tokens:  # else the scores of all of them would wait for the gradient
                out.append(checkpoint(self._eager_block, query, key, value, block, use_reentrant=False))
            else:
                out.append(self._eager_block(query, key, value, block))
        return torch.cat(out, dim=-2)

    def _eager_block(self, query: Tensor, key: Tensor, value: Tensor, block: slice) -> Tensor:
        """Some of the newest queries."""
        rule, context, modifiers = self.rule, self.context, self.modifiers
        tokens, count, device, last_zone = query.shape[-2], key.shape[-2], query.device, rule.zones - 1
        evicted = context.key_positions.shape[-1] - count
        # Of the keys here, those before `begin` are seen by no query of the block, those before `middle` in the last
        # zone, those from `end` on by later queries only.
        begin, middle, end = 0, 0, count
        if context.left_padding is not None and modifiers.mask is None:  # positions follow each other
            middle = max(0, count - tokens + block.start - rule.last_zone_start + 1)
            begin = 0 if last_zone else middle
            end = count - tokens + block.stop
        # layers may be spread over devices
        m, n = (
            context.query_positions[:, block].to(device),
            context.key_positions[:, evicted + begin : evicted + end].to(device),
        )
        query, key, value = self._scale_query(query[:, :, block], m), key[:, :, begin:end], value[:, :, begin:end]
        skip = middle - begin
        near_keys = self._rotate(
            self._local_rotation(n[:, skip:], ("keys", evicted + middle, evicted + end)), key[:, :, skip:]
        )

        def scored(zone: int, keys: Tensor) -> Tensor:
            where = ("queries", block.start, block.stop)
            turn = self._zone_rotation(m, zone, where) if zone else self._local_rotation(m, where)
            return _scores(self._rotate(turn, query), keys, self.scale)

        scores = scored(last_zone, key if last_zone else near_keys)
        if last_zone:
            zones = rule.zone(m[:, :, None], n[:, None, skip:])[:, None]
            some = scores[..., skip:]
            for zone in range(last_zone):
                some = torch.where(zones == zone, scored(zone, key[:, :, skip:] if zone else near_keys), some)
            scores = torch.cat([scores[..., :skip], some], dim=-1)
        if modifiers.softcap is not None:
            scores = torch.tanh(scores / modifiers.softcap) * modifiers.softcap
        lowest = torch.finfo(scores.dtype).min
        if modifiers.mask is not None:
            mask = modifiers.mask[:, :, block, begin:end]
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        else:
            key_index = torch.arange(begin, end, device=device)
            query_index = (count - tokens + torch.arange(block.start, block.stop, device=device))[:, None]
            visible = key_index <= query_index
            if rule.window_size is not None:
                visible = visible & (key_index > query_index - rule.window_size)
            visible = visible[None, None]
            if context.key_mask is not None:
                visible = visible & context.key_mask[:, None, None, evicted + begin : evicted + end].to(device)
            scores = scores.masked_fill(~visible, lowest)
        if modifiers.sinks is not None:
            sinks = modifiers.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if modifiers.dropout:
            weights = nn.functional.dropout(weights, modifiers.dropout)
        rows, heads, queries, _ = weights.shape
        folded = weights.to(value.dtype).reshape(rows, value.shape[1], -1, value.shape[-2])
        return (folded @ value).reshape(rows, heads, queries, -1)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(rows, heads, queries, keys) float32; heads share keys in groups."""
    rows, heads, queries, dim = query.shape
    folded = (query * scale).reshape(rows, key.shape[1], -1, dim)  # before the product: float16 could overflow
    return (folded @ key.transpose(-1, -2)).float().reshape(rows, heads, queries, -1)


def _batch_tiles(rectangles: Iterable[TileRectangle]) -> Iterator[list[TileRectangle]]:
    """Those that one call of a kernel can take: as large, mask alike, evenly spaced along a diagonal."""
    kinds: dict[tuple[str, int, int, int], list[TileRectangle]] = {}
    for one in rectangles:
        (q0, q1), (k0, k1), mask = one
        kinds.setdefault((mask, q1 - q0, k1 - k0, k0 - q0), []).append(one)
    for (mask, size, *_), many in kinds.items():
        run = many[:1]
        for one in many[1:]:
            gap = one.queries[0] - run[-1].queries[0]
            even = gap >= size and gap == (run[1].queries[0] - run[0].queries[0] if run[1:] else gap)
            if not even or (mask == "anticausal" and (len(run) + 1) * size > MAX_QUERY_BLOCK):  # these are copied
                yield run
                run = []
            run.append(one)
        yield run


def _strided_spans(x: Tensor, begin: int, size: int, step: int, times: int) -> Tensor:
    """A view of `times` stretches of `size` tokens, `step` apart: (rows, times, heads, size, dim), or of one: (rows,
    heads, size, dim)."""
    some = x[:, :, begin : begin + step * (times - 1) + size]
    return some if times == 1 else some.unfold(2, size, step).movedim((2, -1), (1, 3))


def _fold_into_batch(stretches: Tensor) -> Tensor:
    """(rows * times, heads, size, dim): a copy only if there are several of both."""
    return stretches if stretches.ndim == 4 else stretches.flatten(0, 1)


def _merge_softmax_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial softmax, stretches as rows, to those stretches of what is there: zeros where `lse` is -inf."""
    part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
    out.lerp_(part, torch.sigmoid(part_lse - lse).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)

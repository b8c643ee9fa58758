"""Attention over zones of keys, each at relative positions of its own, without a (length, length) tensor.

Two ways to the same numbers. Where a fused kernel can be used, the visible pairs of a zone are covered by tiles, each
tile goes through the kernel, forward and backward, and the partial softmaxes are merged (see tile_batches.py). The rest
(soft caps, dropout, unusual masks, decoding steps of padded batches) computes the scores of a few queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rope_ext_hf.attention.kernels import run_backward, run_kernel, usable_kernel
from rope_ext_hf.attention.rules import PairScales, Rotation, ScoreModifiers, TokenPositions
from rope_ext_hf.attention.tile_batches import KernelCall, MergedSoftmax, Zones, add_to_spans, batch_rows, kernel_calls
from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.key_rotation import KeyRotation
from rope_ext_hf.rotary.triton_rotation import can_fuse

_MAX_QUERY_BLOCK = 2048  # queries rotated at a time, in tokens, unless that makes more than `_MAX_BLOCKS` blocks
_MAX_WINDOW_BLOCK = 4096  # the same with windows, whose tiles are not copied: a usual chunk of a prompt is one block
_MAX_BLOCKS = 4  # upper bound on query blocks: more blocks mean more kernel launches, fewer mean more memory
_MIN_FUSED_QUERIES = 16
"""Queries from which a padded batch uses the kernels, row by row; below, the scores of all rows at once are faster."""
SCORE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Bytes of scores at a time; on a CPU about the size of its caches."""
_MAX_SCALED_ZONES = 3
_NO_MODIFIERS = ScoreModifiers()
_Zones = tuple[int, ...]


def attend(
    rule: AttentionRule,
    rotation: Rotation | None,
    positions: TokenPositions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    modifiers: ScoreModifiers = _NO_MODIFIERS,
) -> Tensor:
    """Attention of the newest queries to the keys of all tokens.

    Args:
        rotation: None: queries and keys stay as they are.
        query: (rows, heads, tokens, head_dim), rotated to `rule.stored_position`, as the keys are.
        key, value: (rows, kv_heads, past + tokens, head_dim); fewer keys where a sliding-window cache evicted the
            first ones.
        scale: the factor of scores.

    Returns:
        (rows, heads, tokens, head_dim of value) in value's dtype.
    """
    if not query.numel():
        return value.new_empty(*query.shape[:-1], value.shape[-1])
    if query.dtype != value.dtype:  # under autocast a rotation leaves queries and keys wider than values
        query, key = query.to(value.dtype), key.to(value.dtype)
    return _Attention(rule, rotation, positions, scale, modifiers, query.device).run(query, key, value)


@dataclass(frozen=True)
class _Attention:
    """One layer's attention in one forward. Arguments as in `attend`; m and n are positions of queries and keys."""

    rule: AttentionRule
    rotation: Rotation | None
    positions: TokenPositions
    scale: float
    modifiers: ScoreModifiers
    device: torch.device
    windows: bool = False  # whether the kernel takes masks that are numbers

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        left_padding, modifiers = self.positions.left_padding, self.modifiers
        plain = modifiers.mask is None and modifiers.softcap is None and not modifiers.dropout
        plain = plain and modifiers.bias is None and modifiers.pair_scales is None
        given = (query, key, value, modifiers.sinks)
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        # Kernels hide keys by causality alone.
        usable, windows = usable_kernel(query, value) if plain and left_padding is not None else (False, False)
        if left_padding is None or not usable:
            return self._eager(needs_grad, query, key, value)
        alike = len(set(left_padding)) == 1
        if not alike and query.shape[-2] < _MIN_FUSED_QUERIES:
            return self._eager(needs_grad, query, key, value)
        if needs_grad:
            if torch.compiler.is_exporting():  # an exported program holds the computation itself
                return self._eager(needs_grad, query, key, value)
            fused = graph_break(self._fused)  # tiles are other ones for each length
        else:
            fused = (replace(self, windows=True) if windows and query.shape[-2] > 1 else self)._fused
        # Rows padded alike have the same tiles: one launch serves the batch. Otherwise each row is launched by itself.
        if alike:
            return fused(needs_grad, query, key, value, left_padding[0])
        rows = zip(*(torch.split(x, 1) for x in (query, key, value)), left_padding, strict=True)
        return torch.cat([fused(needs_grad, *row) for row in rows])

    def _rotation_to(self, zones: _Zones, positions: Callable[[], Tensor], name: Hashable) -> KeyRotation | None:
        """The rotation of queries from `stored_position` to their position in zones, as rows; None: none.

        Args:
            zones: 0 is the nearest, in which keys are rotated like queries; (): the position of keys in all others.
            positions: (rows or 1, tokens), which `name` identifies among those of the forward.
        """
        moves = zones != (0,) or self.rule.local_zone_exact if zones else self.rule.by_length
        if self.rotation is None or not moves:
            return None
        table, rotations = self.rotation.table, self.positions.rotations
        entry = (self.rule, table, self.device, zones, name)
        if entry not in rotations:
            # Angles depend on positions, not on the layer: the first layer of a forward pays for all of them.
            at = positions()
            before = self.rule.stored_position(at)
            after = [self.rule.query_position(at, zone) if zone else RemappedPosition(at) for zone in zones]
            after = after or [self.rule.key_position(at)]  # far keys
            stays = all(before.positions is each.positions and before[1:] == each[1:] for each in after)
            rotations[entry] = None if stays else table.between(before, after[0], self.device, *after[1:])
        return rotations[entry]

    def _place_query(
        self, rotation: KeyRotation | None, query: Tensor, m: Callable[[], Tensor], zones: _Zones, name: Hashable
    ) -> Tensor:
        """Queries at positions `m`, which `name` identifies in the forward, rotated to zones, as rows, and scaled.

        The temperature goes into cos and sin, which saves a pass over the queries. Where some dims of a head do not
        rotate, it cannot: those have to be scaled as well.
        """
        whole = rotation if self.rotation is not None and self.rotation.layout.dim >= query.shape[-1] else None
        rotations, scales = self.positions.rotations, self.positions.query_scales
        entry = (self.rule, self.rotation and self.rotation.table, self.device, "scaled", zones, name)
        if whole is not None and (scaled := rotations.get(entry)) is not None:
            return self._rotate(scaled, query)
        dtype = query.dtype if whole is None else whole.cos.dtype
        of_dtype = (self.rule, self.device, dtype, name)
        if of_dtype not in scales:  # (rows or 1, 1, tokens, 1), computed by the first layer
            scale = self.rule.query_scale(m())
            scales[of_dtype] = None if scale is None else scale[:, None, :, None].to(dtype)
        scale = scales[of_dtype]
        if whole is None:
            turned = query if rotation is None else self._rotate(rotation, query)
            return turned if scale is None else turned * scale
        scaled = whole if scale is None else KeyRotation(whole.cos * scale, whole.sin * scale)
        if query.shape[-2] < _MIN_FUSED_QUERIES:  # long ones are cheap beside the rest, and would be kept in memory
            rotations[entry] = scaled
        return self._rotate(scaled, query)

    def _rotate(self, rotation: KeyRotation | None, x: Tensor) -> Tensor:
        return x if rotation is None or self.rotation is None else rotation.apply(x, self.rotation.layout)

    def _far_keys(self, key: Tensor, positions: Callable[[], Tensor], name: Hashable) -> Tensor:
        """Keys where every zone but the nearest sees them; arguments as in `_rotation_to`."""
        return self._rotate(self._rotation_to((), positions, ("far keys", name)), key)

    # --- fused kernels

    def _fused(self, needs_grad: bool, query: Tensor, key: Tensor, value: Tensor, padding: int) -> Tensor:
        """Rows that begin with `padding` padded tokens, all others in order."""
        # int(): tiles follow from the length, so that torch.export refuses lengths that are to vary.
        tokens, evicted = int(query.shape[-2]), self.positions.total - int(key.shape[-2])
        # Keys evicted by a sliding-window cache are outside every query's window.
        begin = max(0, padding - evicted)
        key, value = key[:, :, begin:], value[:, :, begin:]
        first_key = max(0, evicted - padding)  # positions from here on
        last = first_key + int(key.shape[-2])
        padded_queries = max(0, tokens - last)
        first = last - tokens + padded_queries
        count = (last - first) * query.shape[1] // key.shape[1] if self.positions.max_joined else 0
        rule, grid, step = self.rule.for_queries(first, count)
        # With windows a zone is one call, and fewer rotations save little where they and the merging are cheap.
        if self.windows and (can_fuse(query) or self.positions.max_joined >= 2 * (last - first)):
            rule, grid, step = self.rule, 0, 1
        layer, far_key = self if rule is self.rule else replace(self, rule=rule), key
        if rule.by_length:
            end = max(first_key + 1, last - rule.zone_distances(last)[1][0])  # of the keys that a far zone sees
            at, place = (lambda: torch.arange(first_key, end, device=key.device)[None]), (first_key, end)
            far_key = layer._far_keys(key[:, :, : end - first_key], at, place)
        # Every zone has a rotated copy of the queries: blocks bound its size, and their number bounds the launches.
        block_size = max(_MAX_WINDOW_BLOCK if self.windows else _MAX_QUERY_BLOCK, -(-(last - first) // _MAX_BLOCKS))
        starts = range(first - (first - grid) % step, last, -(-block_size // step) * step)
        whole, sinks = not padded_queries and len(starts) == 1, self.modifiers.sinks
        # Gradients do not go through what is written into a common tensor.
        out = None if whole or needs_grad else query.new_empty(*query.shape[:-1], value.shape[-1])
        # Queries at padding have no key; their softmax would be NaN, which spreads through residual streams.
        parts = [] if whole else [value.new_zeros(*query.shape[:2], padded_queries, value.shape[-1])]
        for block_start in starts:
            start, stop = max(first, block_start), min(last, block_start + starts.step)
            block = slice(padded_queries + start - first, padded_queries + stop - first)
            given = query if whole else query[:, :, block], key, far_key, value
            if needs_grad:
                parts.append(_FusedBlock.apply(layer, start, first_key, sinks, *given))  # type: ignore[no-untyped-call]
            else:
                part = None if out is None else out[:, :, block]
                parts.append(layer._fused_block(start, first_key, *given, out=part).out)
        if out is None:
            return parts[0] if whole else torch.cat(parts, dim=-2)
        out[:, :, :padded_queries] = 0
        return out

    def _fused_block(self, start: int, first_key: int, *given: Tensor, out: Tensor | None = None) -> MergedSoftmax:
        """Queries from position `start` on, over keys from position `first_key` on.

        `given`: the queries, keys as stored, for the nearest zone, and where the others see them, and values; `out`:
        where the result goes; None: it is returned in memory of its own.
        """
        # Zones split the keys of a query into disjoint sets. The softmax over their union is the sum of the parts, each
        # weighted by exp(its log-sum-exp - the joint one): exact, and no score ever leaves a kernel.
        merged = MergedSoftmax(given[0], out)
        for zones in self._zones(start, first_key, *given):
            for call in zones.calls:
                merged.add(call.queries, *run_kernel(*zones.rows(call), self.scale, call.mask, call.joint))
        if self.modifiers.sinks is not None:
            # A sink is a score without a value: it adds exp(sink) to the denominator alone, so that the output shrinks
            # by exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
            weight = torch.sigmoid(merged.log_sum_exp() - self.modifiers.sinks.float()[None, :, None, None])
            merged.out.mul_(weight.to(merged.out.dtype))
        return merged

    def _zones(self, start: int, first_key: int, *given: Tensor) -> Iterator[Zones]:
        """The zones that a block sees, nearest first, those together whose queries are rotated by one launch."""
        rule, device, (query, key, far_key, value) = self.rule, self.device, given
        stop = start + query.shape[-2]
        first_local, by_zones = _calls_by_zones(rule, start, stop, first_key, self.positions.max_joined, self.windows)
        queries, local_name = ("positions", start, stop), ("positions", first_local, stop)

        def m() -> Tensor:
            return torch.arange(start, stop, device=device)[None]

        local = self.rotation and self._rotation_to(
            (0,), lambda: torch.arange(first_local, stop, device=device)[None], local_name
        )
        # The temperature of few zones goes into cos and sin; of many, those would be larger than the queries.
        scale_first = self.windows and sum(len(zones) for zones, _ in by_zones) > _MAX_SCALED_ZONES
        if scale_first:
            query = self._place_query(None, query, m, (), queries)
        for zones, calls in by_zones:
            if zones == (0,):
                rotation = local and local.last(query.shape[-2])
                among = slice(first_local - first_key, stop - first_key)
                keys, values = key[:, :, among], value[:, :, among]
                keys = keys if local is None else self._rotate(local, keys)
            else:
                rotation, keys, values = self._rotation_to(zones, m, queries), far_key, value
            turned = query.expand(len(zones), -1, -1, -1) if zones[1:] else query
            if scale_first:
                turned = self._rotate(rotation, turned)
            else:
                turned = self._place_query(rotation, turned, m, zones, queries)
            yield Zones(zones, turned, keys, values, calls)

    # --- whole scores

    def _eager(self, needs_grad: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scores of a few queries at a time, for any mask and any positions."""
        rows, heads, tokens = int(query.shape[0]), query.shape[1], int(query.shape[2])
        score_bytes = SCORE_BYTES.get(query.device.type, SCORE_BYTES["cuda"])
        # (rows, heads, block, keys) in float32, 4 bytes each.
        block_size = max(1, score_bytes // (4 * rows * heads * int(key.shape[-2])))
        out = []
        for start in range(0, tokens, block_size):
            block = slice(start, min(start + block_size, tokens))
            if needs_grad and block_size < tokens:  # else the scores of all blocks are kept for the backward
                out.append(checkpoint(self._eager_block, query, key, value, block, use_reentrant=False))
            else:
                out.append(self._eager_block(query, key, value, block))
        return torch.cat(out, dim=-2)

    def _eager_block(self, query: Tensor, key: Tensor, value: Tensor, block: slice) -> Tensor:
        rule, tokens, count, device = self.rule, int(query.shape[-2]), int(key.shape[-2]), query.device
        evicted = self.positions.total - count
        first_visible, end, first_query = 0, count, None
        if self.positions.left_padding is not None and self.modifiers.mask is None:  # positions are in order
            first_query = count - tokens + block.start  # where the first query is among the keys
            # The block sees no key beyond its farthest zone, and none after its last query.
            farthest = max(bound for _, bound in rule.zone_distances(self.positions.total))
            first_visible, end = max(0, first_query - farthest + 1), count - tokens + block.stop
            first_query -= first_visible
        visible_keys = slice(first_visible, end)
        # Layers may be spread over devices.
        m = self.positions.query_positions[:, block].to(device)
        n = self.positions.key_positions[:, evicted + first_visible : evicted + end].to(device)
        key, value = key[:, :, visible_keys], value[:, :, visible_keys]
        name = ("queries", block.start, block.stop)
        scaled = self._place_query(None, query[:, :, block], lambda: m, (), name)
        scores = self._zone_scores(scaled, key, m, n, first_query, name, evicted + first_visible)
        scores = self._mask_scores(scores, m, n, block, visible_keys, tokens, count)
        if self.modifiers.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = self.modifiers.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        if self.modifiers.dropout:
            weights = nn.functional.dropout(weights, self.modifiers.dropout)
        rows, heads, queries, _ = weights.shape
        # (rows, kv_heads, group * queries, keys): query heads that share a key head become further queries of it, so
        # that values are read once and never repeated.
        folded = weights.to(value.dtype).reshape(rows, value.shape[1], -1, value.shape[-2])
        return (folded @ value).reshape(rows, heads, queries, -1)

    def _zone_scores(
        self, query: Tensor, key: Tensor, m: Tensor, n: Tensor, first_query: int | None, m_name: Hashable, offset: int
    ) -> Tensor:
        """Scores (rows, heads, queries, keys), each pair of query and key in its zone.

        Args:
            first_query: the key that the first query stands at; None: positions are not in order.
            m_name: identifies `m` among the positions of the forward.
            offset: the first of these keys among all keys of the forward.
        """
        rule, queries, keys = self.rule, query.shape[-2], int(key.shape[-2])
        # Keys that may be in each zone: between the farthest one of the first query and the nearest one of the last.
        distances = rule.zone_distances(self.positions.total)
        if first_query is not None:
            ranges = [
                (max(0, first_query - bound + 1), min(keys, first_query + queries - smallest))
                for smallest, bound in distances
            ]
        else:
            # Positions out of order may be farther apart than there are keys. Where that makes further zones, the
            # largest position is needed; other methods end with a zone without an end, and nothing waits.
            grows = distances[-1][1] < UNBOUNDED and rule.window_size is None
            ranges = [(0, keys)] * len(rule.zone_distances(self.positions.reach) if grows else distances)
        begin, end = ranges[0]
        local = self._rotation_to((0,), lambda: n[:, begin:end], ("keys", offset + begin, offset + end))
        local_keys = self._rotate(local, key[:, :, begin:end])
        if len(ranges) == 1 and self.modifiers.pair_scales is not None:
            rotated = self._rotate(self._rotation_to((0,), lambda: m, m_name), query)
            return _scaled_scores(self.modifiers.pair_scales, rotated, local_keys, m, n[:, begin:], self.scale)

        far_key = self._far_keys(key, lambda: n, (offset, offset + keys))

        def scores_in(zone: int, start: int, stop: int) -> Tensor:
            part = far_key[:, :, start:stop] if zone else local_keys[:, :, start - begin : stop - begin]
            return _scores(self._rotate(self._rotation_to((zone,), lambda: m, m_name), query), part, self.scale)

        pieces = []
        # Between two of these edges the same zones may occur; with one query there is a single one.
        edges = {0, keys, *(edge for low, high in ranges if low < high for edge in (low, high))}
        for start, stop in pairwise(sorted(edges)):
            present = [zone for zone, (low, high) in enumerate(ranges) if low <= start and stop <= high]
            # Zones meet along diagonals. The few keys there are scored in every zone present and chosen from by pair,
            # which is cheaper than gathering pairs.
            scores = scores_in(present[0], start, stop)
            if present[1:]:
                zones = rule.zone(m[:, :, None], n[:, None, start:stop])[:, None]
                for zone in present[1:]:
                    scores = torch.where(zones == zone, scores_in(zone, start, stop), scores)
            pieces.append(scores)
        return torch.cat(pieces, dim=-1) if pieces[1:] else pieces[0]

    def _mask_scores(
        self, scores: Tensor, m: Tensor, n: Tensor, block: slice, keys: slice, tokens: int, count: int
    ) -> Tensor:
        """Cap the scores, add the bias, and hide the pairs that are not visible.

        `m`, `n`: positions of the queries and keys: `block` of all `tokens` queries, and `keys` of all `count` keys.
        """
        modifiers, device = self.modifiers, scores.device
        if modifiers.softcap is not None:
            scores = torch.tanh(scores / modifiers.softcap) * modifiers.softcap
        if modifiers.bias is not None:
            scores = scores + modifiers.bias(m, n)
        # Not -inf: a query at padding has every key hidden, and its softmax must stay finite.
        lowest = torch.finfo(scores.dtype).min
        if modifiers.mask is not None:
            mask = modifiers.mask[:, :, block, keys]
            return scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        key_index = torch.arange(keys.start, keys.stop, device=device)
        query_index = (count - tokens + torch.arange(block.start, block.stop, device=device))[:, None]
        visible = key_index <= query_index
        if self.rule.window_size is not None:
            visible = visible & (key_index > query_index - self.rule.window_size)
        visible = visible[None, None]
        if self.positions.key_mask is not None:
            evicted = self.positions.total - count
            real = self.positions.key_mask[:, None, None, evicted + keys.start : evicted + keys.stop]
            visible = visible & real.to(device)
        return scores.masked_fill(~visible, lowest)


@lru_cache(maxsize=16)  # the layers of a model share them
def _calls_by_zones(
    rule: AttentionRule, start: int, stop: int, low: int, joined: int, windows: bool
) -> tuple[int, list[tuple[_Zones, list[KernelCall]]]]:
    """The first key that the nearest zone has, and the calls of a block, counted from its first query and key."""
    # Far zones may reach back to the first token. Keys that the nearest zone can reach are few, and they alone are
    # rotated for it: (rows, kv_heads, window + queries, head_dim).
    first_local = max(low, start - rule.zone_distances(stop)[0][1] + 1)
    calls = kernel_calls(rule.tiles(start, stop), low, _MAX_QUERY_BLOCK, joined, windows)
    together: list[tuple[_Zones, list[KernelCall]]] = []
    for zones, alike in groupby(calls, lambda call: call.zones):
        room = joined // (stop - start) - len(zones)  # the nearest zone has other keys, and stays alone
        roomy = (i for i, (before, _) in enumerate(together) if before != (0,) and len(before) <= room)
        at = next(roomy, len(together))
        if at == len(together):
            together.append(((), []))
        before, placed = together[at]
        begin = first_local if zones == (0,) else low
        for call in alike:
            queries, keys = call.queries.after(start), call.keys.after(begin)
            placed.append(call._replace(queries=queries, keys=keys, first_row=len(before)))
        together[at] = before + zones, placed
    return first_local, together


class _FusedBlock(torch.autograd.Function):
    """`_Attention._fused_block` and its gradients. It keeps its arguments, its result and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, attention: _Attention, start: int, first_key: int, sinks: Any, *given: Tensor) -> Tensor:
        merged = attention._fused_block(start, first_key, *(x.detach() for x in given))
        lse = merged.log_sum_exp()
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
        ctx.asked = attention, start, first_key
        out: Tensor = merged.out
        ctx.save_for_backward(sinks, out, lse, *given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attention, start, first_key = ctx.asked
        sinks, out, lse, *given = ctx.saved_tensors
        out = out.detach()
        with torch.enable_grad():  # autograd takes gradients back through the rotations
            leaves = [x.detach().requires_grad_() for x in given]
            for zones in attention._zones(start, first_key, *leaves):
                still = zones._replace(
                    query=zones.query.detach(), keys=zones.keys.detach(), values=zones.values.detach()
                )
                sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (still.query, still.keys, still.values)]
                for call in zones.calls:
                    grads, outs, logs = (batch_rows(x, call.queries) for x in (grad, out, lse))
                    parts = run_backward((grads, outs, logs), still.rows(call), attention.scale, call.mask)
                    totals, spans = (zones.of_call(sums[0], call), *sums[1:]), (call.queries, call.keys, call.keys)
                    for total, tokens, part in zip(totals, spans, parts, strict=True):
                        add_to_spans(total, tokens, part)
                for x, total in zip((zones.query, zones.keys, zones.values), sums, strict=True):
                    x.backward(total.to(out.dtype))
        if sinks is not None:  # its weight is exp(sink - lse), and it has no value
            weight = torch.exp(sinks.to(lse.dtype)[:, None, None] - lse)
            sinks = -(weight * (grad * out).sum(-1, keepdim=True)).sum((0, 2, 3)).to(sinks.dtype)
        return None, None, None, sinks, *(x.grad for x in leaves)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(rows, heads, queries, keys) float32; heads share keys in groups."""
    rows, heads, queries, dim = query.shape
    folded = (query * scale).reshape(rows, key.shape[1], -1, dim)  # before the product: float16 could overflow
    return (folded @ key.transpose(-1, -2)).float().reshape(rows, heads, queries, -1)


def _scaled_scores(scales: PairScales, query: Tensor, key: Tensor, m: Tensor, n: Tensor, scale: float) -> Tensor:
    """`_scores` under scales that grow with the position: they are counted from an origin near each block of keys.

    Counted from 0 they would overflow, and a cache of scaled keys would hold numbers of any size.
    """
    parts = []
    for start in range(0, key.shape[-2], scales.block_size):
        block = slice(start, start + scales.block_size)
        origin = n[:, block].amin(-1, keepdim=True)
        # A query before the whole block sees none of it: its scale, which could overflow, is not needed.
        scaled_query = scales.scale_pairs(query, (m - origin).clamp(min=0))
        parts.append(_scores(scaled_query, scales.scale_pairs(key[:, :, block], origin - n[:, block]), scale))
    return torch.cat(parts, dim=-1)

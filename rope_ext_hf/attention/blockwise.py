"""Attention for remapping methods, computed block by block, without a (length, length) tensor.

The keys before a query fall into zones: ranges of keys, each with its own rule of relative positions. There are three
ways to the same numbers. Where a fused kernel can be used, the visible pairs of a zone are covered by tiles, each tile
goes through the kernel, forward and backward, and the partial softmaxes are merged (see tile_batches.py). On a GPU,
where the launches of tiles take longer than their products, one kernel of this package goes through all zones (see
triton_attention.py). In all other cases (dropout, unusual masks, soft caps and decoding steps of padded batches on a
CPU) the scores of a few queries at a time are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rope_ext_hf.attention.kernels import run_backward, run_kernel, usable_kernel
from rope_ext_hf.attention.rules import Rotation, ScoreModifiers, TokenPositions
from rope_ext_hf.attention.tile_batches import KernelCall, MergedSoftmax, Zones, add_to_spans, batch_rows, kernel_calls
from rope_ext_hf.attention.triton_attention import ZonedAttention, attend_fused, can_attend, parts_of_keys
from rope_ext_hf.methods.base import UNBOUNDED, constant
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition
from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.key_rotation import KeyRotation
from rope_ext_hf.rotary.tiled_rotation import TILE_TOKENS, TiledRotation
from rope_ext_hf.rotary.triton_rotation import can_fuse

__all__ = ["attend", "query_key_product"]

_MAX_QUERY_BLOCK = 2048  # queries rotated at a time, in tokens, unless that makes more than `_MAX_BLOCKS` blocks
_MAX_WINDOW_BLOCK = 4096  # the same with windows, whose tiles are not copied: a usual chunk of a prompt is one block
_MAX_BLOCKS = 4  # upper bound on query blocks: more blocks mean more kernel launches, fewer mean more memory
_MIN_FUSED_QUERIES = 16
"""Queries from which a padded batch uses the kernels, row by row; below, the scores of all rows at once are faster."""
SCORE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Bytes of scores at a time, by type of device; on a CPU about the size of its caches."""
_LAUNCH_BOUND = 2e11
"""Floating-point operations of a tile below which one launch for all zones is taken to be faster than tiles.

By the record of an H200 in docs/gpu.md, a tile of SmolLM2 costs 190 microseconds of the host under self-extend (1.6 s
for 65,536 tokens in place of 0.9 s, 30 layers, 16 chunks of 8 tiles). In that time cuDNN's kernel, taken to compute 600
TFLOP/s, gets this far ahead of a Triton kernel of 395. The two rates are published ones; no GPU has timed our kernel.
"""
_MAX_SCALED_ZONES = 3  # zones up to which the temperature goes into cos and sin, see `_Attention._zones`
_NO_MODIFIERS = ScoreModifiers()
_Zones = tuple[int, ...]
_NEAREST: _Zones = (0,)
"""The nearest zone. It is always alone: its keys may be rotated otherwise than those of the far zones, 1 and up."""


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
    """Return the attention of the newest queries to the keys of all tokens.

    Args:
        rule: says which keys a query sees, and at which relative positions.
        rotation: the rotation of the layer; None: queries and keys stay as they are.
        positions: positions and padding of all tokens.
        query: (rows, heads, tokens, head_dim), rotated to `rule.stored_position`, as the keys are.
        key, value: (rows, kv_heads, past + tokens, head_dim); fewer keys where a sliding-window cache evicted the first
            ones.
        scale: the factor of scores.
        modifiers: changes to the scores.

    Returns:
        (rows, heads, tokens, head_dim of value) in value's dtype.
    """
    if not query.numel():
        return value.new_empty(*query.shape[:-1], value.shape[-1])
    if query.dtype != value.dtype:  # under autocast a rotation leaves queries and keys wider than values
        query, key = query.to(value.dtype), key.to(value.dtype)
    return _Attention(rule, rotation, positions, scale, modifiers, query.device).run(query, key, value)


class _Span(NamedTuple):
    """Positions of the queries and keys of a row whose tokens are in order, after the padding it begins with."""

    first_key: int  # the position of the first key
    first: int  # the position of the first query
    last: int  # one more than the last position, that of the last query and key
    padded_queries: int  # queries at padding, before the first

    @property
    def queries(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class _Attention:
    """One layer's attention in one forward.

    The fields are as in `attend`. In its methods, m and n are positions of queries and keys. Positions, and what is
    computed from them, are the same in every layer; `positions.rotations` and `positions.query_scales` keep what the
    first layer has computed for the next ones. An argument `name` says which positions of the forward are meant, as a
    key into these caches.
    """

    rule: AttentionRule
    rotation: Rotation | None
    positions: TokenPositions
    scale: float
    modifiers: ScoreModifiers
    device: torch.device
    windows: bool = False  # whether the kernel takes masks that are numbers

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the queries to the keys, by fused kernels where they can be used.

        The tensors and the result are as in `attend`.
        """
        left_padding = self.positions.left_padding
        tensors = (query, key, value, self.modifiers.sinks)
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not needs_grad and can_attend(query, key, value):
            out = self._in_one_launch(query, key, value)
            if out is not None:
                return out
        # Kernels hide keys by causality alone.
        if left_padding is None or not self.modifiers.plain:
            return self._eager(needs_grad, query, key, value)
        padded_alike = len(set(left_padding)) == 1
        if self._rotates_in_tiles(query, key):
            return self._eager(needs_grad, query, key, value)
        usable, windows = usable_kernel(query, value)
        if not usable or (not padded_alike and query.shape[-2] < _MIN_FUSED_QUERIES):
            return self._eager(needs_grad, query, key, value)
        if needs_grad and torch.compiler.is_exporting():  # an exported program holds the computation itself
            return self._eager(needs_grad, query, key, value)
        if needs_grad:
            fused = graph_break(self._fused)  # every length has other tiles
        elif windows and query.shape[-2] > 1:
            fused = replace(self, windows=True)._fused
        else:
            fused = self._fused
        # Rows padded alike have the same tiles: one launch serves the batch. Otherwise each row is launched by itself.
        if padded_alike:
            return fused(needs_grad, query, key, value, left_padding[0])
        rows = zip(*(torch.split(x, 1) for x in (query, key, value)), left_padding, strict=True)
        return torch.cat([fused(needs_grad, *row) for row in rows])

    # --- rotations

    def _rotation_to_own(self, positions: Callable[[], Tensor], name: Hashable) -> KeyRotation | None:
        """Return the rotation of queries or keys to their own position, where the nearest zone sees them.

        None: they are read as they are stored.

        Args:
            positions: returns the positions of the queries or keys, (rows or 1, tokens).
            name: identifies the positions among those of the forward.
        """
        if not self.rule.local_zone_exact:
            return None
        return self._rotation_from_stored(_NEAREST, lambda at: [RemappedPosition(at)], positions, name)

    def _rotation_to_zones(self, zones: _Zones, m: Callable[[], Tensor], name: Hashable) -> KeyRotation | None:
        """Return the rotation of queries from where they are stored to their positions in each of these zones.

        The result has the zones as rows, in their order. None: the queries stay where they are.

        Args:
            zones: the numbers of the zones.
            m: returns the positions of the queries, (rows or 1, tokens).
            name: says which positions of the forward these are.
        """
        if zones == _NEAREST:
            return self._rotation_to_own(m, name)
        return self._rotation_from_stored(
            zones, lambda at: [self.rule.query_position(at, zone) for zone in zones], m, name
        )

    def _far_keys(self, key: Tensor, n: Callable[[], Tensor], name: Hashable) -> Tensor:
        """Return keys at positions `n`, rotated to the positions at which every zone but the nearest sees them."""
        return self._rotate(self._rotation_to_far(n, name), key)

    def _rotation_to_far(self, n: Callable[[], Tensor], name: Hashable) -> KeyRotation | None:
        """Return the rotation of keys at positions `n` to where far zones see them; None: they are stored there."""
        if not self.rule.depends_on_total_length:
            return None
        return self._rotation_from_stored("far keys", lambda at: [self.rule.key_position(at)], n, name)

    def _rotates_in_tiles(self, query: Tensor, key: Tensor) -> bool:
        """Return whether the far keys are rotated as they are read: for one token on a CPU, see `TiledRotation`."""
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
            return False
        moves = self.rule.depends_on_total_length and self.rule.key_period is not None and self.rotation is not None
        # Rows padded alike have the same positions, so that one rotation serves them.
        if not moves or len(set(self.positions.left_padding or ())) != 1 or is_exporting():
            return False
        return query.shape[-2] == 1 and query.device.type == "cpu"

    def _far_keys_in_tiles(self, first: int, count: int) -> TiledRotation:
        """Return the rotation of `count` keys from position `first` on to where all zones but the nearest see them."""
        assert self.rotation is not None
        assert self.rule.key_period is not None
        table, rule, period = self.rotation.table, self.rule, self.rule.key_period
        start, tile = first - first % period, -(-TILE_TOKENS // period) * period

        def rotation(at: Tensor) -> KeyRotation:
            return table.between(rule.stored_position(at), rule.key_position(at), self.device)

        of_tiles = rotation(torch.arange(start, first + count, tile, device=self.device)[None])
        return TiledRotation(of_tiles, rotation(torch.arange(tile, device=self.device)[None]), first - start)

    def _rotation_from_stored(
        self,
        target: Hashable,
        places: Callable[[Tensor], list[RemappedPosition]],
        positions: Callable[[], Tensor],
        name: Hashable,
    ) -> KeyRotation | None:
        """Return the rotation of queries or keys from where they are stored to other positions; None: nothing moves.

        If there are several new positions for each token, the result has a row for each.

        Args:
            target: a name for the new positions, by which the rotation is cached.
            places: returns the new positions for given positions (rows or 1, tokens).
            positions, name: as in `_rotation_to_own`.
        """
        if self.rotation is None:
            return None
        table, rotations = self.rotation.table, self.positions.rotations
        entry = (self.rule, table, self.device, target, name)
        if entry not in rotations:
            at = positions()
            before = self.rule.stored_position(at)
            after = places(at)
            stays = all(before.positions is place.positions and before[1:] == place[1:] for place in after)
            rotations[entry] = None if stays else table.between(before, after[0], self.device, *after[1:])
        return rotations[entry]

    def _rotate(self, rotation: KeyRotation | None, x: Tensor) -> Tensor:
        return x if rotation is None or self.rotation is None else rotation.apply(x, self.rotation.layout)

    def _temperature(self, dtype: torch.dtype, m: Callable[[], Tensor], name: Hashable) -> Tensor | None:
        """Return the factor for queries at positions `m`, (rows or 1, 1, tokens, 1). None: they stay as they are."""
        return self.positions.query_scale(self.rule, m, self.device, dtype, name)

    def _scaled(self, query: Tensor, m: Callable[[], Tensor], name: Hashable) -> Tensor:
        """Return queries at positions `m` multiplied by their temperature, the factor by position."""
        scale = self._temperature(query.dtype, m, name)
        return query if scale is None else query * scale

    def _rotated_and_scaled(
        self, rotation: KeyRotation | None, query: Tensor, m: Callable[[], Tensor], zones: _Zones, name: Hashable
    ) -> Tensor:
        """Return queries rotated to the positions that they have in these zones, and multiplied by their temperature.

        The result has the zones as rows. The temperature goes into cos and sin, which saves a pass over the queries.
        Where some dims of a head do not rotate, it cannot, because those have to be scaled as well.
        """
        if rotation is None or self.rotation is None or self.rotation.layout.dim < query.shape[-1]:
            return self._scaled(self._rotate(rotation, query), m, name)
        rotations = self.positions.rotations
        entry = (self.rule, self.rotation.table, self.device, "scaled", zones, name)
        scaled = rotations.get(entry)
        if scaled is None:
            scale = self._temperature(rotation.cos.dtype, m, name)
            scaled = rotation if scale is None else KeyRotation(rotation.cos * scale, rotation.sin * scale)
            if query.shape[-2] < _MIN_FUSED_QUERIES:  # those of many queries are cheap beside the rest, but large
                rotations[entry] = scaled
        return self._rotate(scaled, query)

    # --- one launch for all zones

    def _in_one_launch(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return the attention by the kernel that goes through all zones; None: another way is faster, or needed."""
        edges, (tokens, count) = self.rule.zone_edges(self.positions.total), (query.shape[-2], key.shape[-2])
        padding, modifiers = self.positions.left_padding, self.modifiers
        usable, windows = usable_kernel(query, value)  # not usable where the user allows no fused kernel
        if edges is None or padding is None or not usable or not modifiers.zoned or self.scale <= 0:
            return None
        if modifiers.softcap is not None and modifiers.softcap <= 0:
            return None
        one_tile = edges.zones == 1 and self.rule.window_size is None  # or two tiles, for which torch has kernels
        if modifiers.plain and (one_tile or not self._is_launch_bound(windows, query, key)):
            return None
        evicted = self.positions.total - count
        pads = tuple(padding) if len(set(padding)) > 1 else padding[:1]  # rows padded alike have the same positions

        def positions(first_index: int) -> Tensor:
            # Counted here: at padding behind the tokens of a row, the positions of the call are those of this row.
            at = torch.arange(first_index, self.positions.total, device=self.device)[None]
            return at if pads == (0,) else (at - constant(pads, self.device, torch.int64)[:, None]).clamp(min=0)

        # The first keys that a query may see, and may see in the nearest zone: an anchor lies up to a step before it.
        first, first_near = (max(0, count - tokens - edges.step + 1 + edge) for edge in (edges.last, edges.first))
        queries, far_zones = ("one launch", tokens), tuple(range(1, edges.zones))
        near, far = key[:, :, first_near:], key[:, :, first:]
        near_keys = self._rotation_to_own(lambda: positions(evicted + first_near), ("one launch", first_near, count))
        far_keys = None
        if far_zones:
            far_keys = self._rotation_to_far(lambda: positions(evicted + first), ("one launch", first, count))
        if tokens >= _MIN_FUSED_QUERIES:  # many queries read the keys again and again: they are rotated before
            near, far = self._rotate(near_keys, near), self._rotate(far_keys, far)
            near_keys = far_keys = None
        m = partial(positions, self.positions.total - tokens)
        zoned = ZonedAttention(
            edges=edges,
            padding=constant(pads, self.device, torch.int32),
            total=self.positions.total,
            to_near=self._rotation_to_own(m, queries),
            to_far=self._rotation_to_zones(far_zones, m, queries) if far_zones else None,
            near_keys=near_keys,
            far_keys=far_keys,
            layout=None if self.rotation is None else self.rotation.layout,
            temperature=self._temperature(torch.float32, m, queries),
        )
        value = value[:, :, first:]
        parts = parts_of_keys(query, value)
        return attend_fused(
            zoned, query, near, far, value, self.scale, sinks=modifiers.sinks, softcap=modifiers.softcap, parts=parts
        )

    def _is_launch_bound(self, windows: bool, query: Tensor, key: Tensor) -> bool:
        """Return whether tiles would compute so little that their launches take longer.

        `windows`: whether masks of tiles may be numbers.
        """
        rows, heads, tokens, dim = query.shape
        if tokens < _MIN_FUSED_QUERIES:
            return True
        padding = self.positions.left_padding or ()
        span, _ = self._span(query, key, min(padding))
        layer, starts = replace(self, windows=windows)._blocks(span, query, key)
        launches = 0
        for start in starts:
            block = max(span.first, start), min(span.last, start + starts.step)
            _, by_zones = _calls_by_zones(layer.rule, *block, span.first_key, self.positions.max_joined, windows)
            launches += sum(len(calls) for _, calls in by_zones)
        if len(set(padding)) > 1:  # rows padded alike share launches
            launches *= rows
        operations = 4 * rows * heads * dim * span.queries * (span.last - span.first_key - span.queries / 2)
        return operations < _LAUNCH_BOUND * launches

    # --- fused kernels

    def _fused(self, needs_grad: bool, query: Tensor, key: Tensor, value: Tensor, padding: int) -> Tensor:
        """Return the attention by fused kernels, for rows that begin with `padding` padded tokens.

        All other tokens of a row must be in order.
        """
        span, padded_keys = self._span(query, key, padding)
        key, value = key[:, :, padded_keys:], value[:, :, padded_keys:]
        layer, starts = self._blocks(span, query, key)
        far_key = layer._far_keys_of_span(key, span)
        if not span.padded_queries and len(starts) == 1:
            return layer._attend_block(needs_grad, span.first, span.first_key, (query, key, far_key, value))
        blocks = [(max(span.first, start), min(span.last, start + starts.step)) for start in starts]
        before = span.padded_queries - span.first  # from a position to its index among the queries
        # Queries at padding have no key; their softmax would be NaN, which spreads through residual streams.
        if needs_grad:  # gradients do not go through writes into a common tensor
            parts = [value.new_zeros(*query.shape[:2], span.padded_queries, value.shape[-1])]
            for start, stop in blocks:
                tensors = (query[:, :, before + start : before + stop], key, far_key, value)
                parts.append(layer._attend_block(needs_grad, start, span.first_key, tensors))
            return torch.cat(parts, dim=-2)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        out[:, :, : span.padded_queries] = 0
        for start, stop in blocks:
            block = slice(before + start, before + stop)
            tensors = (query[:, :, block], key, far_key, value)
            layer._attend_block(needs_grad, start, span.first_key, tensors, out[:, :, block])
        return out

    def _span(self, query: Tensor, key: Tensor, padding: int) -> tuple[_Span, int]:
        """Return where the queries and keys of a padded row stand, and how many of the leading keys are padding.

        Positions count from the first real token of the row. A sliding-window cache may have dropped some or all of the
        `padding` tokens at the beginning of the row; those that it still holds are the leading keys to skip.
        """
        # int(): tiles follow from the length, so that torch.export refuses lengths that are to vary.
        tokens, count = int(query.shape[-2]), int(key.shape[-2])
        # Keys that a sliding-window cache has evicted are outside every query's window.
        evicted = self.positions.total - count
        padded_keys = max(0, padding - evicted)
        first_key = max(0, evicted - padding)
        last = first_key + count - padded_keys
        padded_queries = max(0, tokens - last)
        return _Span(first_key, last - tokens + padded_queries, last, padded_queries), padded_keys

    def _blocks(self, span: _Span, query: Tensor, key: Tensor) -> tuple[_Attention, range]:
        """Return this attention with the cheapest equivalent rule, and the positions where blocks of queries begin.

        Every zone has a rotated copy of the queries of a block: the size of a block limits that copy, and the number of
        blocks limits how many kernels are launched.
        """
        # With windows a zone is one call, and fewer rotations save little where they and the merging are cheap.
        cheap = self.windows and (can_fuse(query) or self.positions.max_joined >= 2 * span.queries)
        if cheap:
            rule, grid, step = self.rule, 0, 1
        else:
            sharing_a_key = span.queries * query.shape[1] // key.shape[1] if self.positions.max_joined else 0
            rule, grid, step = self.rule.for_queries(span.first, sharing_a_key)
        size = max(_MAX_WINDOW_BLOCK if self.windows else _MAX_QUERY_BLOCK, -(-span.queries // _MAX_BLOCKS))
        starts = range(span.first - (span.first - grid) % step, span.last, -(-size // step) * step)
        return self if rule is self.rule else replace(self, rule=rule), starts

    def _far_keys_of_span(self, key: Tensor, span: _Span) -> Tensor:
        """Return keys rotated to where the far zones see them.

        The last keys, which only the nearest zone sees, are left out.
        """
        if not self.rule.depends_on_total_length:
            return key
        nearest_of_far = self.rule.zone_distances(span.last)[1][0]
        end = max(span.first_key + 1, span.last - nearest_of_far)

        def n() -> Tensor:
            return torch.arange(span.first_key, end, device=key.device)[None]

        return self._far_keys(key[:, :, : end - span.first_key], n, (span.first_key, end))

    def _attend_block(
        self,
        needs_grad: bool,
        start: int,
        first_key: int,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of one block of queries; the arguments are as in `_fused_block`."""
        if needs_grad:
            result: Tensor = _FusedBlock.apply(self, start, first_key, self.modifiers.sinks, *tensors)  # type: ignore[no-untyped-call]
            return result
        merged: Tensor = self._fused_block(start, first_key, *tensors, out=out).out
        return merged

    def _fused_block(self, start: int, first_key: int, *tensors: Tensor, out: Tensor | None = None) -> MergedSoftmax:
        """Return the attention of the queries from position `start` on to the keys from position `first_key` on.

        Args:
            start, first_key: positions.
            *tensors: the queries; the keys as they are stored, for the nearest zone; the keys where far zones see them;
                and the values.
            out: the tensor to write the result to; None: a new one.
        """
        # Zones split the keys of a query into disjoint sets. The softmax over their union is the sum of the parts, each
        # weighted by exp(its log-sum-exp - the joint one): exact, and no score ever leaves a kernel.
        merged = MergedSoftmax(tensors[0], out)
        for zones in self._zones(start, first_key, *tensors):
            for call in zones.calls:
                merged.add(call.queries, *run_kernel(*zones.rows(call), self.scale, call.mask, call.joint))
        if self.modifiers.sinks is not None:
            # A sink is a score without a value: it adds exp(sink) to the denominator alone, so that the output shrinks
            # by exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
            weight = torch.sigmoid(merged.log_sum_exp() - self.modifiers.sinks.float()[None, :, None, None])
            merged.out.mul_(weight.to(merged.out.dtype))
        return merged

    def _zones(self, start: int, first_key: int, *tensors: Tensor) -> Iterator[Zones]:
        """Yield the zones that a block of queries sees, nearest first, grouped by the launch that rotates the queries.

        The arguments are as in `_fused_block`.
        """
        rule, device, (query, key, far_key, value) = self.rule, self.device, tensors
        stop = start + query.shape[-2]
        first_local, by_zones = _calls_by_zones(rule, start, stop, first_key, self.positions.max_joined, self.windows)

        def m() -> Tensor:
            return torch.arange(start, stop, device=device)[None]

        def local_positions() -> Tensor:
            return torch.arange(first_local, stop, device=device)[None]

        queries = ("positions", start, stop)
        local = self._rotation_to_own(local_positions, ("positions", first_local, stop))
        # The temperature of few zones goes into cos and sin; with many zones, those would be larger than the queries.
        scale_first = self.windows and sum(len(zones) for zones, _ in by_zones) > _MAX_SCALED_ZONES
        if scale_first:
            query = self._scaled(query, m, queries)
        for zones, calls in by_zones:
            if zones == _NEAREST:
                near = slice(first_local - first_key, stop - first_key)
                keys, values = self._rotate(local, key[:, :, near]), value[:, :, near]
                rotation = None if local is None else local.last(query.shape[-2])
            else:
                keys, values = far_key, value
                rotation = self._rotation_to_zones(zones, m, queries)
            in_zones = query.expand(len(zones), -1, -1, -1) if len(zones) > 1 else query
            if scale_first:
                in_zones = self._rotate(rotation, in_zones)
            else:
                in_zones = self._rotated_and_scaled(rotation, in_zones, m, zones, queries)
            yield Zones(zones, in_zones, keys, values, calls)

    # --- whole scores

    def _eager(self, needs_grad: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention by computing the scores of a few queries at a time, without fused kernels.

        It works for any mask and any positions.
        """
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
        """Return the attention of some of the queries, by computing their scores.

        `block`: the indices of these queries.
        """
        tokens, count, device = int(query.shape[-2]), int(key.shape[-2]), query.device
        evicted = self.positions.total - count
        first_visible, end, first_query = 0, count, None
        if self.positions.left_padding is not None and self.modifiers.mask is None:  # positions are in order
            index_of_first = count - tokens + block.start  # of the first query, among the keys
            # The block sees no key beyond its farthest zone, and none after its last query.
            farthest = max(bound for _, bound in self.rule.zone_distances(self.positions.total))
            first_visible, end = max(0, index_of_first - farthest + 1), count - tokens + block.stop
            first_query = index_of_first - first_visible
        visible_keys = slice(first_visible, end)
        # Layers may be spread over devices.
        m = self.positions.query_positions[:, block].to(device)
        n = self.positions.key_positions[:, evicted + first_visible : evicted + end].to(device)
        key, value = key[:, :, visible_keys], value[:, :, visible_keys]
        name = ("queries", block.start, block.stop)
        scaled = self._scaled(query[:, :, block], lambda: m, name)
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
        """Return attention scores, computed for each pair of query and key by the rule of its zone.

        Args:
            query, key: the block of queries, and the keys that it may see.
            m, n: their positions.
            first_query: the index of the first query among these keys; None: positions are not in order.
            m_name: says which positions of the forward `m` are.
            offset: the index of the first of these keys among all keys of the forward.

        Returns:
            (rows, heads, queries, keys) float32.
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
            # largest position is needed, for which the host waits. Most methods have a last zone without an end.
            if distances[-1][1] < UNBOUNDED and rule.window_size is None:
                distances = rule.zone_distances(self.positions.reach)
            ranges = [(0, keys)] * len(distances)
        begin, end = ranges[0]
        local = self._rotation_to_own(lambda: n[:, begin:end], ("keys", offset + begin, offset + end))
        local_keys = self._rotate(local, key[:, :, begin:end])
        if len(ranges) == 1 and self.modifiers.product is not None:
            rotated = self._rotate(self._rotation_to_own(lambda: m, m_name), query)
            return self.modifiers.product(rotated, local_keys, m, n[:, begin:end], self.scale)

        in_tiles = first_query is not None and self._rotates_in_tiles(query, key)
        far_key = key if in_tiles else self._far_keys(key, lambda: n, (offset, offset + keys))

        def scores_in(zone: int, start: int, stop: int) -> Tensor:
            rotated = self._rotate(self._rotation_to_zones((zone,), lambda: m, m_name), query)
            if in_tiles:
                return self._scores_in_tiles(zone, rotated, key[:, :, start:stop], offset + start)
            keys_of_zone = far_key[:, :, start:stop] if zone else local_keys[:, :, start - begin : stop - begin]
            return query_key_product(rotated, keys_of_zone, self.scale)

        pieces = []
        # Between two of these edges the same zones may occur; with one query there is a single one.
        edges = {0, keys, *(edge for low, high in ranges if low < high for edge in (low, high))}
        for start, stop in pairwise(sorted(edges)):
            present = [zone for zone, (low, high) in enumerate(ranges) if low <= start and stop <= high]
            # Zones meet along diagonals. The few keys there are scored in every zone present, and each pair takes the
            # score of its zone, which is cheaper than gathering pairs.
            scores = scores_in(present[0], start, stop)
            if len(present) > 1:
                zones = rule.zone(m[:, :, None], n[:, None, start:stop])[:, None]
                for zone in present[1:]:
                    scores = torch.where(zones == zone, scores_in(zone, start, stop), scores)
            pieces.append(scores)
        return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]

    def _scores_in_tiles(self, zone: int, query: Tensor, key: Tensor, first: int) -> Tensor:
        """Return the scores of one query per row in a zone, (rows, heads, 1, keys) float32.

        Args:
            zone: the number of the zone.
            query: (rows, heads, 1, head_dim), rotated to its position in the zone.
            key: (rows, kv_heads, keys, head_dim), as the keys are stored.
            first: the index of the first of these keys among all keys of the forward.
        """
        rows, heads, _, dim = query.shape
        if not zone:
            return query_key_product(query.float(), key.float(), self.scale)
        assert self.rotation is not None
        positions, count = self.positions, int(key.shape[-2])
        entry = (self.rule, self.rotation.table, first, count)
        if entry not in positions.tiled:
            assert positions.left_padding is not None
            positions.tiled[entry] = self._far_keys_in_tiles(first - positions.left_padding[0], count)
        folded = query.reshape(rows, key.shape[1], -1, dim)
        return positions.tiled[entry].scores(folded, key, self.rotation.layout, self.scale).reshape(rows, heads, 1, -1)

    def _mask_scores(
        self, scores: Tensor, m: Tensor, n: Tensor, block: slice, keys: slice, tokens: int, count: int
    ) -> Tensor:
        """Cap the scores, add the bias, and hide the pairs that are not visible.

        Args:
            scores: (rows, heads, queries, keys).
            m, n: positions of these queries and keys.
            block, keys: their indices among all `tokens` queries and all `count` keys.
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
    """Return the kernel calls for a block of queries, grouped by zones whose queries one launch can rotate.

    Args:
        rule: the rule of the layer.
        start, stop: positions of the queries.
        low: the position of the first key.
        joined: the most queries that are rotated at once, counted anew in each zone; 0: zones are not grouped.
        windows: whether masks may be numbers.

    Returns:
        The position of the first key in the nearest zone, and the calls for each group of zones. Calls count queries
        from the first of the block, and keys from `low`; in the nearest zone, from its own first key.
    """
    # Far zones may reach back to the first token. Keys that the nearest zone can reach are few, and they alone are
    # rotated for it: (rows, kv_heads, window + queries, head_dim).
    first_local = max(low, start - rule.zone_distances(stop)[0][1] + 1)
    calls = kernel_calls(rule.tiles(start, stop), low, _MAX_QUERY_BLOCK, joined, windows)
    together: list[tuple[_Zones, list[KernelCall]]] = []
    for zones, calls_of_zones in groupby(calls, lambda call: call.zones):
        # Add them to the first group with room for them; the nearest zone has other keys, and stays alone.
        room = joined // (stop - start) - len(zones)
        fitting = (i for i, (group, _) in enumerate(together) if group != _NEAREST and len(group) <= room)
        index = next(fitting, None)
        if index is None:
            index = len(together)
            together.append(((), []))
        group, placed = together[index]
        begin = first_local if zones == _NEAREST else low
        for call in calls_of_zones:
            queries, keys = call.queries.after(start), call.keys.after(begin)
            placed.append(call._replace(queries=queries, keys=keys, first_row=len(group)))
        together[index] = group + zones, placed
    return first_local, together


class _FusedBlock(torch.autograd.Function):
    """The attention of a block of queries (`_Attention._fused_block`) as an autograd function, with its gradients.

    Its arguments, its result and the log-sum-exp of the scores are kept for the backward.
    """

    @staticmethod
    def forward(ctx: Any, attention: _Attention, start: int, first_key: int, sinks: Any, *tensors: Tensor) -> Tensor:
        merged = attention._fused_block(start, first_key, *(x.detach() for x in tensors))
        lse = merged.log_sum_exp()
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
        ctx.block = attention, start, first_key
        out: Tensor = merged.out
        ctx.save_for_backward(sinks, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attention, start, first_key = ctx.block
        sinks, out, lse, *tensors = ctx.saved_tensors
        out = out.detach()
        with torch.enable_grad():  # autograd takes the gradients of rotated queries and keys back through the rotations
            leaves = [x.detach().requires_grad_() for x in tensors]
            for zones in attention._zones(start, first_key, *leaves):
                detached = zones._replace(
                    query=zones.query.detach(), keys=zones.keys.detach(), values=zones.values.detach()
                )
                dq, dk, dv = (
                    torch.zeros_like(x, dtype=lse.dtype) for x in (detached.query, detached.keys, detached.values)
                )
                for call in zones.calls:
                    grads, outs, logs = (batch_rows(x, call.queries) for x in (grad, out, lse))
                    parts = run_backward((grads, outs, logs), detached.rows(call), attention.scale, call.mask)
                    add_to_spans(zones.of_call(dq, call), call.queries, parts[0])
                    add_to_spans(dk, call.keys, parts[1])
                    add_to_spans(dv, call.keys, parts[2])
                zones.query.backward(dq.to(out.dtype))
                zones.keys.backward(dk.to(out.dtype))
                zones.values.backward(dv.to(out.dtype))
        sinks_grad = None
        if sinks is not None:  # its weight is exp(sink - lse), and it has no value
            weight = torch.exp(sinks.to(lse.dtype)[:, None, None] - lse)
            sinks_grad = -(weight * (grad * out).sum(-1, keepdim=True)).sum((0, 2, 3)).to(sinks.dtype)
        return None, None, None, sinks_grad, *(x.grad for x in leaves)


def query_key_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the scores of all pairs of query and key, (rows, heads, queries, keys) float32.

    Several query heads may share a key head.
    """
    rows, heads, queries, dim = query.shape
    folded = (query * scale).reshape(rows, key.shape[1], -1, dim)  # before the product: float16 could overflow
    return (folded @ key.transpose(-1, -2)).float().reshape(rows, heads, queries, -1)

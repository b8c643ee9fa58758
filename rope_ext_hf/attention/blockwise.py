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
from rope_ext_hf.attention.rules import Call, Rotation, Rule, ScoreModifiers
from rope_ext_hf.methods.remapping import Place
from rope_ext_hf.methods.tiles import Rectangle
from rope_ext_hf.rotary.kv_cache import Turn

__all__ = ["BLOCKS", "FEWEST", "QUERIES", "SCORES", "attend"]

QUERIES = 2048  # turned at a time
BLOCKS = 4  # of queries, of long inputs: more take more launches, fewer more memory
FEWEST = 16  # queries for which the kernels are worth their calls in a padded batch
SCORES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # bytes of scores at a time: on a CPU, what its caches hold


_NONE = ScoreModifiers()


def attend(
    rule: Rule,
    rotation: Rotation | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    extras: ScoreModifiers = _NONE,
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
    return _Attention(rule, rotation, call, scale, extras).of(query, key, value)


@dataclass(frozen=True)
class _Attention:
    """One layer's attention in one call. Tensors as in `attend`."""

    rule: Rule
    rotation: Rotation | None
    call: Call
    scale: float
    extras: ScoreModifiers

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets, extras = self.call.offsets, self.extras
        plain = extras.mask is None and extras.cap is None and not extras.dropout
        if offsets is None or not plain or _needs_grad(query, key, value) or not has_kernel(query, value):
            return self._eager(query, key, value)
        if len(set(offsets)) == 1:
            return self._fused(query, key, value, offsets[0])
        if query.shape[-2] < FEWEST:
            return self._eager(query, key, value)
        rows = [slice(r, r + 1) for r in range(len(offsets))]
        return torch.cat([self._fused(query[r], key[r], value[r], o) for r, o in zip(rows, offsets, strict=True)])

    def _near(self, positions: Tensor, where: Hashable) -> Turn | None:
        """What brings queries or keys, (rows or 1, tokens), to where the nearest zone has them; None: they are there.

        Args:
            where: says which positions these are, among those of the call.
        """
        return self._turn(positions, lambda: Place(positions), where) if self.rule.band else None

    def _far(self, m: Tensor, zone: int, where: Hashable) -> Turn | None:
        """What brings queries to where a further zone has them."""
        return self._turn(m, lambda: self.rule.far(m)[zone - 1], (zone, where))

    def _turn(self, positions: Tensor, place: Callable[[], Place], what: Hashable) -> Turn | None:
        if self.rotation is None:
            return None
        phases, turns = self.rotation.phases, self.call.turns
        name = (self.rule, phases, positions.device, what)
        if name not in turns:
            turns[name] = phases.turn(self.rule.stored(positions), place(), positions.device)
        return turns[name]

    def _rotate(self, turn: Turn | None, x: Tensor) -> Tensor:
        return x if turn is None or self.rotation is None else turn.applied(x, self.rotation.layout)

    def _scale_query(self, query: Tensor, m: Tensor) -> Tensor:
        weight = self.rule.weight(m)
        return query if weight is None else query * weight[:, None, :, None].to(query.dtype)

    # --- by kernel

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        """Rows whose real keys begin after `offset` padded ones."""
        gone = self.call.keys.shape[-1] - key.shape[-2]  # a sliding cache let them go: they are in nobody's window
        begin = max(0, offset - gone)
        key, value = key[:, :, begin:], value[:, :, begin:]
        low = max(0, gone - offset)  # position of the first key
        last = low + key.shape[-2]
        padded = max(0, query.shape[-2] - last)  # queries that are padding themselves
        first = last - query.shape[-2] + padded
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        many = max(QUERIES, -(-(last - first) // BLOCKS))
        for start in range(first, last, many):
            stop = min(start + many, last)
            block = slice(padded + start - first, padded + stop - first)
            self._merge(out[:, :, block], query[:, :, block], key, value, start, low)
        return out

    def _merge(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, start: int, low: int) -> None:
        """Queries from position `start` on, over keys from position `low` on; `out` comes as zeros."""
        rule, device = self.rule, query.device
        stop = start + query.shape[-2]
        m = torch.arange(start, stop, device=device)[None]
        oldest = max(low, start - rule.span + 1)
        n = torch.arange(oldest, stop, device=device)[None]
        near = self._near(n, ("positions", oldest, stop))
        near_keys = self._rotate(near, key[:, :, oldest - low : stop - low])
        query = self._scale_query(query, m)
        lse = torch.full((*query.shape[:-1], 1), -math.inf, dtype=torch.float32, device=device)
        for zone, pieces in groupby(sorted(rule.pieces(start, stop), key=lambda piece: piece.zone), lambda p: p.zone):
            if zone == 0:
                turn, keys, keys_from = near and near.of_last(query.shape[-2]), near_keys, oldest
            else:
                turn, keys, keys_from = self._far(m, zone, ("positions", start, stop)), key, low
            turned = self._rotate(turn, query)
            for run in _batch_tiles(chain.from_iterable(piece.rectangles(keys_from) for piece in pieces)):
                (q0, q1), (k0, k1), seen = run[0]
                step, times = run[1].queries[0] - q0 if run[1:] else 1, len(run)
                of_queries, of_keys = (q0 - start, q1 - q0, step, times), (k1 - k0, step, times)
                part, part_lse = run_kernel(
                    _fold_into_batch(_strided_spans(turned, *of_queries)),
                    _fold_into_batch(_strided_spans(keys, k0 - keys_from, *of_keys)),
                    _fold_into_batch(_strided_spans(value, k0 - low, *of_keys)),
                    self.scale,
                    seen,
                )
                _add(_strided_spans(out, *of_queries), _strided_spans(lse, *of_queries), part, part_lse)
        if self.extras.sinks is not None:
            out *= torch.sigmoid(lse - self.extras.sinks.float()[None, :, None, None]).to(out.dtype)

    # --- by scores

    def _eager(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A few queries at a time, whatever the masks and positions are."""
        rows, heads, tokens, _ = query.shape
        few = max(1, SCORES.get(query.device.type, SCORES["cuda"]) // (4 * rows * heads * key.shape[-2]))
        learns = _needs_grad(query, key, value)
        out = []
        for start in range(0, tokens, few):
            block = slice(start, min(start + few, tokens))
            if learns and few < tokens:  # else the scores of all of them would wait for the gradient
                out.append(checkpoint(self._block, query, key, value, block, use_reentrant=False))
            else:
                out.append(self._block(query, key, value, block))
        return torch.cat(out, dim=-2)

    def _block(self, query: Tensor, key: Tensor, value: Tensor, block: slice) -> Tensor:
        """Some of the newest queries."""
        rule, call, extras = self.rule, self.call, self.extras
        tokens, count, device, last_zone = query.shape[-2], key.shape[-2], query.device, rule.zones - 1
        gone = call.keys.shape[-1] - count
        # Of the keys here, those before `begin` are seen by no query of the block, those before `middle` in the last
        # zone, those from `end` on by later queries only.
        begin, middle, end = 0, 0, count
        if call.offsets is not None and extras.mask is None:  # positions follow each other
            middle = max(0, count - tokens + block.start - rule.span + 1)
            begin = 0 if last_zone else middle
            end = count - tokens + block.stop
        # layers may be spread over devices
        m, n = call.queries[:, block].to(device), call.keys[:, gone + begin : gone + end].to(device)
        query, key, value = self._scale_query(query[:, :, block], m), key[:, :, begin:end], value[:, :, begin:end]
        skip = middle - begin
        near_keys = self._rotate(self._near(n[:, skip:], ("keys", gone + middle, gone + end)), key[:, :, skip:])

        def scored(zone: int, keys: Tensor) -> Tensor:
            where = ("queries", block.start, block.stop)
            turn = self._far(m, zone, where) if zone else self._near(m, where)
            return _scores(self._rotate(turn, query), keys, self.scale)

        scores = scored(last_zone, key if last_zone else near_keys)
        if last_zone:
            zones = rule.zone(m[:, :, None], n[:, None, skip:])[:, None]
            some = scores[..., skip:]
            for zone in range(last_zone):
                some = torch.where(zones == zone, scored(zone, key[:, :, skip:] if zone else near_keys), some)
            scores = torch.cat([scores[..., :skip], some], dim=-1)
        if extras.cap is not None:
            scores = torch.tanh(scores / extras.cap) * extras.cap
        lowest = torch.finfo(scores.dtype).min
        if extras.mask is not None:
            mask = extras.mask[:, :, block, begin:end]
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        else:
            key_index = torch.arange(begin, end, device=device)
            query_index = (count - tokens + torch.arange(block.start, block.stop, device=device))[:, None]
            visible = key_index <= query_index
            if rule.sees is not None:
                visible = visible & (key_index > query_index - rule.sees)
            visible = visible[None, None]
            if call.real is not None:
                visible = visible & call.real[:, None, None, gone + begin : gone + end].to(device)
            scores = scores.masked_fill(~visible, lowest)
        if extras.sinks is not None:
            sinks = extras.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if extras.dropout:
            weights = nn.functional.dropout(weights, extras.dropout)
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


def _batch_tiles(rectangles: Iterable[Rectangle]) -> Iterator[list[Rectangle]]:
    """Those that one call of a kernel can take: as large, seen alike, evenly spaced along a diagonal."""
    kinds: dict[tuple[str, int, int, int], list[Rectangle]] = {}
    for one in rectangles:
        (q0, q1), (k0, k1), seen = one
        kinds.setdefault((seen, q1 - q0, k1 - k0, k0 - q0), []).append(one)
    for (seen, size, *_), many in kinds.items():
        run = many[:1]
        for one in many[1:]:
            gap = one.queries[0] - run[-1].queries[0]
            even = gap >= size and gap == (run[1].queries[0] - run[0].queries[0] if run[1:] else gap)
            if not even or (seen == "reversed" and (len(run) + 1) * size > QUERIES):  # these are copied
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


def _add(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial softmax, stretches as rows, to those stretches of what is there: zeros where `lse` is -inf."""
    part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
    out.lerp_(part, torch.sigmoid(part_lse - lse).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)

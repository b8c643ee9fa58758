"""Attention over zones of keys, each at relative positions of its own, without a (length, length) tensor.

    out = attend(rule, rotation, call, query, key, value, scale)

Two ways to the same numbers. Where a fused kernel can be used, the visible pairs of a zone are covered by rectangles
and causal squares, each goes through the kernel, and the partial softmaxes are merged by their log-sum-exp. The rest
(soft caps, odd masks, gradients, decoding steps of padded batches) comes from the scores of a few queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rope_ext_hf.cache import KeyLayout, Turn
from rope_ext_hf.relative import AttentionLevel, Piece, Place, Rectangle, newest
from rope_ext_hf.rotary import fixed_point

__all__ = ["Call", "Extras", "Phases", "Rotation", "Rule", "Window", "attend"]

QUERIES = 2048  # turned at a time
BLOCKS = 4  # of queries, of long inputs: more take more launches, fewer more memory
FEWEST = 16  # queries for which the kernels are worth their calls in a padded batch
SCORES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # bytes of scores at a time: on a CPU, what its caches hold


class Rule(Protocol):
    """What `AttentionLevel` says about places and zones; the docstrings are there."""

    @property
    def band(self) -> bool: ...
    @property
    def sees(self) -> int | None: ...
    @property
    def span(self) -> int: ...
    @property
    def zones(self) -> int: ...
    def stored(self, n: Tensor) -> Place: ...
    def far(self, m: Tensor) -> tuple[Place, ...]: ...
    def weight(self, m: Tensor) -> Tensor | None: ...
    def zone(self, m: Tensor, n: Tensor) -> Tensor: ...
    def pieces(self, first: int, last: int) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Window:
    """The rule of a layer without a method: all keys, or those of a sliding window, where they are.

    `method`: whose rotation the keys come with; None: their own, or none.
    """

    sees: int | None = None
    method: AttentionLevel | None = None

    @property
    def band(self) -> bool:
        return True

    @property
    def span(self) -> int:
        return self.sees or 2**40

    @property
    def zones(self) -> int:
        return 1

    def stored(self, n: Tensor) -> Place:
        return Place(n) if self.method is None else self.method.stored(n)

    def far(self, m: Tensor) -> tuple[Place, ...]:
        return ()

    def weight(self, m: Tensor) -> Tensor | None:
        return None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return torch.zeros_like(m - n)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        if self.sees is not None:
            yield from newest(self.sees, first, last)
        else:
            yield Piece(0, (first, last), (0, last))


class Phases:
    """Angles of places, in fixed point: int64 units of 2^-64 turns (see `rotary.py`).

    Args:
        inv_freq: (pairs,) float64, radians per token.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq
        self._known: dict[tuple[float, torch.device], Tensor] = {}

    def at(self, place: Place, device: torch.device) -> Tensor:
        """(..., pairs) int64 for positions (...)."""
        phase = torch.zeros((), dtype=torch.int64, device=device)
        if place.positions is not None:
            phase = place.positions.to(device)[..., None] * self._of(1 / place.divisor, device)
        return phase + self._of(place.plus, device) if place.plus else phase

    def turn(self, before: Place, after: Place, device: torch.device) -> Turn:
        """What brings queries or keys from one place to another; positions (rows or 1, tokens)."""
        return Turn.by(self.at(after, device) - self.at(before, device))

    def _of(self, tokens: float, device: torch.device) -> Tensor:
        """The phase of so many tokens, (pairs,); copied to a device once."""
        key = tokens, device
        if key not in self._known:
            self._known[key] = fixed_point(self.inv_freq * tokens).to(device)
        return self._known[key]


@dataclass(frozen=True)
class Call:
    """One forward of the decoder, as far as attention must know.

    Attributes:
        queries: (rows or 1, tokens) int64, positions of the new tokens.
        keys: (rows or 1, past + tokens) int64, positions of all of them.
        offsets: per row, how many padded tokens come before position 0, all others following in order; None: the
            positions are not like that.
        real: (rows, past + tokens) bool, False where a key is padding; None: nowhere.
        turns: what has been worked out for one layer and serves the next.
    """

    queries: Tensor
    keys: Tensor
    offsets: tuple[int, ...] | None
    real: Tensor | None
    turns: dict[Hashable, Turn] = field(default_factory=dict)


class Rotation(NamedTuple):
    """How a layer turns its queries and keys."""

    phases: Phases
    layout: KeyLayout


class Extras(NamedTuple):
    """What some families do to scores.

    Attributes:
        cap: scores become cap tanh(score / cap).
        sinks: (heads,) scores of a key without a value.
        mask: (rows or 1, 1, tokens, keys), bool or to be added; it then says all about what is visible.
        dropout: of attention weights.
    """

    cap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0


_NONE = Extras()


def attend(
    rule: Rule,
    rotation: Rotation | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    extras: Extras = _NONE,
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
    extras: Extras

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets, extras = self.call.offsets, self.extras
        plain = extras.mask is None and extras.cap is None and not extras.dropout
        if offsets is None or not plain or _learns(query, key, value) or not _has_kernel(query, value):
            return self._by_scores(query, key, value)
        if len(set(offsets)) == 1:
            return self._by_kernel(query, key, value, offsets[0])
        if query.shape[-2] < FEWEST:
            return self._by_scores(query, key, value)
        rows = [slice(r, r + 1) for r in range(len(offsets))]
        return torch.cat([self._by_kernel(query[r], key[r], value[r], o) for r, o in zip(rows, offsets, strict=True)])

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

    def _turned(self, turn: Turn | None, x: Tensor) -> Tensor:
        return x if turn is None or self.rotation is None else turn.applied(x, self.rotation.layout)

    def _weighed(self, query: Tensor, m: Tensor) -> Tensor:
        weight = self.rule.weight(m)
        return query if weight is None else query * weight[:, None, :, None].to(query.dtype)

    # --- by kernel

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
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
        near_keys = self._turned(near, key[:, :, oldest - low : stop - low])
        query = self._weighed(query, m)
        lse = torch.full((*query.shape[:-1], 1), -math.inf, dtype=torch.float32, device=device)
        for zone, pieces in groupby(sorted(rule.pieces(start, stop), key=lambda piece: piece.zone), lambda p: p.zone):
            if zone == 0:
                turn, keys, keys_from = near and near.of_last(query.shape[-2]), near_keys, oldest
            else:
                turn, keys, keys_from = self._far(m, zone, ("positions", start, stop)), key, low
            turned = self._turned(turn, query)
            for run in _together(chain.from_iterable(piece.rectangles(keys_from) for piece in pieces)):
                (q0, q1), (k0, k1), seen = run[0]
                step, times = run[1].queries[0] - q0 if run[1:] else 1, len(run)
                of_queries, of_keys = (q0 - start, q1 - q0, step, times), (k1 - k0, step, times)
                part, part_lse = _kernel(
                    _as_rows(_stretches(turned, *of_queries)),
                    _as_rows(_stretches(keys, k0 - keys_from, *of_keys)),
                    _as_rows(_stretches(value, k0 - low, *of_keys)),
                    self.scale,
                    seen,
                )
                _add(_stretches(out, *of_queries), _stretches(lse, *of_queries), part, part_lse)
        if self.extras.sinks is not None:
            out *= torch.sigmoid(lse - self.extras.sinks.float()[None, :, None, None]).to(out.dtype)

    # --- by scores

    def _by_scores(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A few queries at a time, whatever the masks and positions are."""
        rows, heads, tokens, _ = query.shape
        few = max(1, SCORES.get(query.device.type, SCORES["cuda"]) // (4 * rows * heads * key.shape[-2]))
        learns = _learns(query, key, value)
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
        query, key, value = self._weighed(query[:, :, block], m), key[:, :, begin:end], value[:, :, begin:end]
        skip = middle - begin
        near_keys = self._turned(self._near(n[:, skip:], ("keys", gone + middle, gone + end)), key[:, :, skip:])

        def scored(zone: int, keys: Tensor) -> Tensor:
            where = ("queries", block.start, block.stop)
            turn = self._far(m, zone, where) if zone else self._near(m, where)
            return _scores(self._turned(turn, query), keys, self.scale)

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


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(rows, heads, queries, keys) float32; heads share keys in groups."""
    rows, heads, queries, dim = query.shape
    folded = (query * scale).reshape(rows, key.shape[1], -1, dim)  # before the product: float16 could overflow
    return (folded @ key.transpose(-1, -2)).float().reshape(rows, heads, queries, -1)


def _together(rectangles: Iterable[Rectangle]) -> Iterator[list[Rectangle]]:
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


def _stretches(x: Tensor, begin: int, size: int, step: int, times: int) -> Tensor:
    """A view of `times` stretches of `size` tokens, `step` apart: (rows, times, heads, size, dim), or of one: (rows,
    heads, size, dim)."""
    some = x[:, :, begin : begin + step * (times - 1) + size]
    return some if times == 1 else some.unfold(2, size, step).movedim((2, -1), (1, 3))


def _as_rows(stretches: Tensor) -> Tensor:
    """(rows * times, heads, size, dim): a copy only if there are several of both."""
    return stretches if stretches.ndim == 4 else stretches.flatten(0, 1)


def _add(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial softmax, stretches as rows, to those stretches of what is there: zeros where `lse` is -inf."""
    part, part_lse = part.view(out.shape), part_lse.view(lse.shape)
    out.lerp_(part, torch.sigmoid(part_lse - lse).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


# --- fused kernels --------------------------------------------------------------------------------------------------


class _Fused(NamedTuple):
    """What runs on one kind of device: `takes` says whether, `step` what the dims of a head must be a multiple of."""

    run: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    takes: Callable[[Tensor, int], bool]
    step: int


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    # Where heads share keys it is right from torch 2.9 on only, which is why that is asked for.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention where it runs; it takes groups of heads as they are. Else the memory-efficient kernel."""
    if _has_flash(query):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    rows, heads, tokens, dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1 and causal:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    elif groups > 1:  # the queries of a group are to its keys what more queries are
        query = query.reshape(rows, key.shape[1], groups * tokens, dim)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
    lse = lse[..., : query.shape[-2]]  # it comes with room for a multiple of 32
    return out.reshape(rows, heads, tokens, -1), lse.reshape(rows, heads, tokens)


def _has_flash(query: Tensor) -> bool:
    built = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return query.dtype in (torch.float16, torch.bfloat16) and _generation(query) >= 8 and built()


def _generation(query: Tensor) -> int:
    return torch.cuda.get_device_capability(query.device)[0]


def _cuda_takes(query: Tensor, width: int) -> bool:
    known = query.dtype in (torch.float16, torch.float32) or (query.dtype == torch.bfloat16 and _generation(query) >= 8)
    return known and width <= 256


KERNELS = {"cpu": _Fused(_on_cpu, lambda query, width: True, 1), "cuda": _Fused(_on_cuda, _cuda_takes, 8)}


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    fused = KERNELS.get(query.device.type)
    return fused is not None and fused.takes(query, max(query.shape[-1], value.shape[-1]))


def _kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: str) -> tuple[Tensor, Tensor]:
    """A fused kernel and its log-sum-exp, (rows, heads, queries) float32; `seen` as in `Rectangle`."""
    if seen == "reversed":
        out, lse = _kernel(query.flip(-2), key.flip(-2), value.flip(-2), scale, "causal")
        return out.flip(-2), lse.flip(-1)
    fused, width = KERNELS[query.device.type], value.shape[-1]
    wide = -(-max(width, query.shape[-1]) // fused.step) * fused.step
    query, key, value = (_widened(x, wide) for x in (query, key, value))
    out, lse = fused.run(query, key, value, scale, seen == "causal")
    return out[..., :width], lse.float()


def _widened(x: Tensor, wide: int) -> Tensor:
    """With so many dims, which lie next to each other in memory, as kernels want."""
    if x.shape[-1] < wide:
        return nn.functional.pad(x, (0, wide - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()

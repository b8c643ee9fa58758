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
from rope_ext_hf.rotary import RotaryEmbedding, fixed_point
from rope_ext_hf.scaling import Frequencies

__all__ = ["Call", "Extras", "Phases", "Rotation", "Rule", "StoredRotary", "Window", "attend"]

QUERIES = 2048  # turned at a time
BLOCKS = 4  # of queries, of long inputs: more take more launches, fewer more memory
FEWEST = 16  # queries for which the kernels are worth their calls in a padded batch
SCORES = 4 * 2**20  # bytes of scores at a time, which a CPU's caches hold; 16 times that elsewhere


class Rule(Protocol):
    """What `AttentionLevel` says about places and zones; the docstrings are there."""

    @property
    def band(self) -> bool: ...
    @property
    def sees(self) -> int | None: ...
    @property
    def span(self) -> int: ...
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


class StoredRotary(RotaryEmbedding):
    """The rotary module of an attention-level method: it turns queries and keys to where keys are stored."""

    def _at(self, length: int | None) -> Frequencies:
        assert isinstance(self.method, AttentionLevel)
        inv_freq, attention_factor = super()._at(length)
        return Frequencies(inv_freq / self.method.stored(torch.zeros((), dtype=torch.int64)).divisor, attention_factor)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        assert isinstance(self.method, AttentionLevel)
        positions = self.method.stored(position_ids).positions
        assert positions is not None
        return super().forward(x, positions)


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
    zoned = _Zoned(rule, rotation, call.turns)
    tokens, count = query.shape[-2], key.shape[-2]
    offsets = call.offsets
    simple = extras.mask is None and extras.cap is None and not extras.dropout
    if offsets is None or not simple or _learns(query, key, value) or not _has_kernel(query, value):
        return _by_scores(zoned, call, query, key, value, scale, extras)
    # A sliding cache has let the oldest keys go; they are in nobody's window.
    gone = call.keys.shape[-1] - count
    if len(set(offsets)) == 1:
        return _by_kernel(zoned, query, key, value, scale, extras.sinks, offsets[0], gone)
    if tokens < FEWEST:
        return _by_scores(zoned, call, query, key, value, scale, extras)
    rows = (
        _by_kernel(zoned, query[r : r + 1], key[r : r + 1], value[r : r + 1], scale, extras.sinks, offset, gone)
        for r, offset in enumerate(offsets)
    )
    return torch.cat(list(rows))


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@dataclass(frozen=True)
class _Zoned:
    """A rule with the means to turn by it."""

    rule: Rule
    rotation: Rotation | None
    turns: dict[Hashable, Turn]

    def near(self, positions: Tensor, where: Hashable) -> Turn | None:
        """What brings queries or keys, (rows or 1, tokens), to where the nearest zone has them; None: they are there.

        Args:
            where: says which positions these are, among those of the call.
        """
        return self._turn(positions, lambda: Place(positions), where) if self.rule.band else None

    def far(self, m: Tensor, zone: int, where: Hashable) -> Turn | None:
        """What brings queries to where a further zone has them."""
        return self._turn(m, lambda: self.rule.far(m)[zone - 1], (zone, where))

    def _turn(self, positions: Tensor, place: Callable[[], Place], what: Hashable) -> Turn | None:
        if self.rotation is None:
            return None
        phases = self.rotation.phases
        name = (self.rule, phases, positions.device, what)
        if name not in self.turns:
            self.turns[name] = phases.turn(self.rule.stored(positions), place(), positions.device)
        return self.turns[name]

    def applied(self, turn: Turn | None, x: Tensor) -> Tensor:
        return x if turn is None or self.rotation is None else turn.applied(x, self.rotation.layout)

    def weighed(self, query: Tensor, m: Tensor) -> Tensor:
        weight = self.rule.weight(m)
        return query if weight is None else query * weight[:, None, :, None].to(query.dtype)


# --- by kernel ------------------------------------------------------------------------------------------------------


def _by_kernel(
    zoned: _Zoned, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None, offset: int, gone: int
) -> Tensor:
    """Rows whose real keys begin after `offset` padded ones; of all of them the first `gone` are not here any more."""
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
        _merged(out[:, :, block], zoned, query[:, :, block], key, value, scale, sinks, start, low)
    return out


def _merged(
    out: Tensor,
    zoned: _Zoned,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sinks: Tensor | None,
    start: int,
    low: int,
) -> None:
    """Queries from position `start` on, over keys from position `low` on; `out` comes as zeros."""
    rule, device = zoned.rule, query.device
    stop = start + query.shape[-2]
    m = torch.arange(start, stop, device=device)[None]
    oldest = max(low, start - rule.span + 1)
    n = torch.arange(oldest, stop, device=device)[None]
    near = zoned.near(n, (oldest, stop))
    near_keys = zoned.applied(near, key[:, :, oldest - low : stop - low])
    query = zoned.weighed(query, m)
    lse = torch.full((*query.shape[:-1], 1), -math.inf, dtype=torch.float32, device=device)
    for zone, pieces in groupby(sorted(rule.pieces(start, stop), key=lambda piece: piece.zone), lambda p: p.zone):
        if zone == 0:
            turn, keys, keys_from = near and near.of_last(query.shape[-2]), near_keys, oldest
        else:
            turn, keys, keys_from = zoned.far(m, zone, (start, stop)), key, low
        turned = zoned.applied(turn, query)
        for run in _together(chain.from_iterable(piece.rectangles(keys_from) for piece in pieces)):
            (q0, q1), (k0, k1), seen = run[0]
            step, times = run[1].queries[0] - q0 if run[1:] else 1, len(run)
            of_queries, of_keys = (q0 - start, q1 - q0, step, times), (k1 - k0, step, times)
            part, part_lse = _kernel(
                _stretches(turned, *of_queries).flatten(0, 1),
                _stretches(keys, k0 - keys_from, *of_keys).flatten(0, 1),
                _stretches(value, k0 - low, *of_keys).flatten(0, 1),
                scale,
                seen,
            )
            _merge(
                _stretches(out, *of_queries),
                _stretches(lse, *of_queries),
                part.view(-1, times, *part.shape[1:]),
                part_lse.view(-1, times, *part_lse.shape[1:], 1),
            )
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks.float()[None, :, None, None]).to(out.dtype)


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
    """A view of `times` stretches of `size` tokens, `step` apart: (rows, times, heads, size, dim)."""
    some = x[:, :, begin : begin + step * (times - 1) + size]
    return some[:, None] if times == 1 else some.unfold(2, size, step).movedim((2, -1), (1, 3))


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial softmax to what is there: zeros where `lse` is -inf."""
    out.lerp_(part, torch.sigmoid(part_lse - lse).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


class _Fused(NamedTuple):
    """The kernel of one kind of device: heads are padded to a multiple of `step` dims, and have at most `widest`."""

    run: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    step: int
    widest: int


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention where it runs; it takes groups of heads as they are. Else the memory-efficient kernel."""
    if query.dtype != torch.float32 and torch.cuda.get_device_capability(query.device)[0] >= 8:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
    return out, lse


KERNELS = {"cpu": _Fused(_on_cpu, 1, 2**16), "cuda": _Fused(_on_cuda, 8, 256)}


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    kernel = KERNELS.get(query.device.type)
    return kernel is not None and max(query.shape[-1], value.shape[-1]) <= kernel.widest


def _kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: str) -> tuple[Tensor, Tensor]:
    """A fused kernel and its log-sum-exp, (rows, heads, queries) float32; `seen` as in `Rectangle`."""
    if seen == "reversed":
        out, lse = _kernel(query.flip(-2), key.flip(-2), value.flip(-2), scale, "causal")
        return out.flip(-2), lse.flip(-1)
    fused, width = KERNELS[query.device.type], value.shape[-1]
    wide = -(-max(width, query.shape[-1]) // fused.step) * fused.step
    query, key, value = (
        nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (query, key, value)
    )
    out, lse = fused.run(query, key, value, scale, seen == "causal")
    return out[..., :width], lse[..., : query.shape[-2]].float()


# --- by scores ------------------------------------------------------------------------------------------------------


def _by_scores(
    zoned: _Zoned, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float, extras: Extras
) -> Tensor:
    """A few queries at a time, whatever the masks and positions are."""
    rows, heads, tokens, _ = query.shape
    most = SCORES if query.device.type == "cpu" else 16 * SCORES
    few = max(1, most // (4 * rows * heads * key.shape[-2]))
    learns = _learns(query, key, value)
    out = []
    for start in range(0, tokens, few):
        block = slice(start, min(start + few, tokens))
        if learns and few < tokens:  # else the scores of all of them would wait for the gradient
            out.append(checkpoint(_block, zoned, call, query, key, value, scale, extras, block, use_reentrant=False))
        else:
            out.append(_block(zoned, call, query, key, value, scale, extras, block))
    return torch.cat(out, dim=-2)


def _block(
    zoned: _Zoned,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    extras: Extras,
    block: slice,
) -> Tensor:
    """Some of the newest queries."""
    rule, tokens, count = zoned.rule, query.shape[-2], key.shape[-2]
    last_zone = len(rule.far(call.queries))
    begin, newest, end = 0, 0, count
    if call.offsets is not None and extras.mask is None:  # positions follow each other
        end = count - tokens + block.stop  # later keys are seen by later queries
        newest = max(0, count - tokens + block.start - rule.span + 1)  # keys before these are in the last zone
        begin = 0 if last_zone else newest
    total = call.keys.shape[-1]
    here = slice(total - count + begin, total - count + end)
    query, key, value = query[:, :, block], key[:, :, begin:end], value[:, :, begin:end]
    device, newest = query.device, newest - begin  # layers may be spread over devices
    m, n = call.queries[:, block].to(device), call.keys[:, here].to(device)
    near_keys = zoned.applied(zoned.near(n[:, newest:], ("keys", begin + newest, end)), key[:, :, newest:])
    query, where = zoned.weighed(query, m), (block.start, block.stop)

    def scored(zone: int, keys: Tensor) -> Tensor:
        turn = zoned.far(m, zone, where) if zone else zoned.near(m, ("queries", *where))
        return _scores(zoned.applied(turn, query), keys, scale)

    scores = scored(last_zone, key if last_zone else near_keys)
    if last_zone:
        zones = rule.zone(m[:, :, None], n[:, None, newest:])[:, None]
        some = scores[..., newest:]
        for zone in range(last_zone):
            some = torch.where(zones == zone, scored(zone, key[:, :, newest:] if zone else near_keys), some)
        scores = torch.cat([scores[..., :newest], some], dim=-1)
    if extras.cap is not None:
        scores = torch.tanh(scores / extras.cap) * extras.cap
    lowest = torch.finfo(scores.dtype).min
    if extras.mask is not None:
        mask = extras.mask[:, :, block, begin:end]
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    else:
        key_index = torch.arange(begin, end, device=device)
        query_index = torch.arange(count - tokens + block.start, count - tokens + block.stop, device=device)[:, None]
        visible = key_index <= query_index
        if rule.sees is not None:
            visible = visible & (key_index > query_index - rule.sees)
        visible = visible[None, None]
        if call.real is not None:
            visible = visible & call.real[:, None, None, here].to(device)
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


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(rows, heads, queries, keys) float32; heads share keys in groups."""
    rows, heads, queries, dim = query.shape
    folded = query.reshape(rows, key.shape[1], -1, dim)
    return ((folded @ key.transpose(-1, -2)).float() * scale).reshape(rows, heads, queries, -1)

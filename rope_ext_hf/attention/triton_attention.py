"""Attention over all zones of a layer as one Triton kernel, where tiles take a launch for each of several parts.

A small model on a GPU is bound by launches: cutting zones into tiles, rotating the queries for each zone and merging
the partial softmaxes cost more time on the host than the device needs to compute. Here one program takes a block of
queries through all its zones: it rotates the queries to a zone, reads the keys of the zone, and goes on with the next,
all in one softmax. A few queries on many keys, as in a decoding step, are cut into parts of the keys, which a second
kernel merges.

The kernel knows no method. A zone is a range of keys that follows from the position of the query (`ZoneEdges`), and a
rotation of the queries; the keys come as the nearest zone and as the far zones see them.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.methods.tiles import ZoneEdges
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.triton_rotation import can_fuse, launching_on, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LOG2_E = math.log2(math.e)  # scores are powers of 2 inside the kernels
_DTYPES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_FEWEST_PART_KEYS = 256  # keys in a part, at least: fewer would not pay for merging it
_MOST_PARTS = 64
_MOST_OWNERS = 65_535  # rows times key heads: a grid of CUDA has no more programs in its second dimension
_UNUSABLE: set[tuple[torch.device, int, int]] = set()
"""Devices, with the dims of queries and of values per head, for which Triton could not build the kernel."""


class ZonedAttention(NamedTuple):
    """The keys that the queries of one forward see, and the rotations, the same in all layers that share a rule.

    Attributes:
        edges: where zones begin and end.
        padding: (rows or 1,) int32, the number of padded tokens that each row begins with.
        total: the number of tokens in a row, padding and evicted ones included.
        to_near, to_far: the rotations of the queries from where they are stored to where the nearest zone sees them,
            and to the far zones; None: they stay. cos and sin are (rows or 1, 1, tokens or 1, pairs), for far zones
            with the rows of zone 1 first, then those of zone 2, and so on.
        near_keys, far_keys: the rotations of the keys that the kernel makes as it reads them, (rows or 1, 1, keys,
            pairs); None: the keys are where the nearest zone, or far zones, see them.
        layout: the dims of a head that rotate; None: none do.
        temperature: (rows or 1, 1, tokens, 1) float32, the factor of each query; None: 1.
    """

    edges: ZoneEdges
    padding: Tensor
    total: int
    to_near: KeyRotation | None
    to_far: KeyRotation | None
    near_keys: KeyRotation | None
    far_keys: KeyRotation | None
    layout: KeyLayout | None
    temperature: Tensor | None


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can take these tensors: half precision, on an NVIDIA GPU from Ampere on.

    Gradients, graphs that torch compiles, and heads of more than 256 dims are not for it.
    """
    if not can_fuse(query) or key.requires_grad or value.requires_grad or _heads(query, value) in _UNUSABLE:
        return False
    if not query.dtype == key.dtype == value.dtype or len(key) * key.shape[1] > _MOST_OWNERS:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(query.device)[0] < 8:
        return False
    widest = max(query.shape[-1], value.shape[-1])
    return query.dtype in _DTYPES and widest <= _WIDEST_HEAD


def _heads(query: Tensor, value: Tensor) -> tuple[torch.device, int, int]:
    return query.device, query.shape[-1], value.shape[-1]


def attend_fused(
    zoned: ZonedAttention,
    query: Tensor,
    near: Tensor,
    far: Tensor,
    value: Tensor,
    scale: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    parts: int = 1,
) -> Tensor | None:
    """Return the attention of the queries to the keys of all zones, or None if Triton cannot build the kernel.

    Args:
        zoned: what the queries see.
        query: (rows, heads, tokens, head_dim), as stored.
        near: (rows, kv_heads, near_keys, head_dim), the last keys, for the nearest zone.
        far: (rows, kv_heads, keys, head_dim), all keys, for far zones.
        value: (rows, kv_heads, keys, width).
        scale: the factor of scores, above 0.
        sinks: (heads,) scores of a key without a value.
        softcap: scores become softcap * tanh(score / softcap).
        parts: the number of parts that the keys are cut into, see `parts_of_keys`.

    Returns:
        (rows, heads, tokens, width) in the dtype of `value`. Queries at padding get 0.
    """
    try:
        return _launch(zoned, query, near, far, value, scale, sinks, softcap, parts)
    except Exception as error:  # whatever a compiler or a driver may raise before the kernel runs
        if query.device.type != "cuda" or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        if torch.cuda.is_current_stream_capturing():  # nothing can be built meanwhile
            raise
        _UNUSABLE.add(_heads(query, value))
        warnings.warn(
            f"Triton could not build the kernel of attention, so several launches do the same: {error}", stacklevel=2
        )
        return None


def parts_of_keys(query: Tensor, value: Tensor) -> int:
    """Return the number of parts to cut the keys into, so that every multiprocessor of the device has a program."""
    rows, heads, tokens, dim = query.shape
    _, kv_heads, keys, width = value.shape
    block = _sizes(tokens * heads // kv_heads, max(dim, width))[0]
    programs = rows * kv_heads * -(-tokens * heads // kv_heads // block)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return max(1, min(2 * processors // programs, keys // _FEWEST_PART_KEYS, _MOST_PARTS))


def _sizes(folded: int, dim: int) -> tuple[int, int, int]:
    """Return the queries and the keys of a block, and the warps of a program.

    Args:
        folded: queries of all heads that share a key head.
        dim: the larger number of dims per head.
    """
    queries = max(16, min(128 if dim <= 128 else 64, power_of_two(folded)))
    keys = 64 if dim <= 128 and queries > 32 else 32  # few queries may come with keys that are rotated in registers
    return queries, keys, 8 if queries == 128 or dim > 128 else 4


def _launch(
    zoned: ZonedAttention, query: Tensor, near: Tensor, far: Tensor, value: Tensor, scale: float,
    sinks: Tensor | None, softcap: float | None, parts: int,
) -> Tensor:  # fmt: skip
    (rows, heads, tokens, dim), (_, kv_heads, keys, width) = query.shape, value.shape
    query, near, far, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, near, far, value))
    group, edges, layout, device = heads // kv_heads, zoned.edges, zoned.layout, query.device
    block_queries, block_keys, warps = _sizes(tokens * group, max(dim, width))
    out = value.new_empty(rows, tokens, heads, width).transpose(1, 2)
    several = parts > 1
    partial = torch.empty(parts, rows, kv_heads, tokens * group, width, device=device) if several else out
    lse = torch.empty(parts, rows, kv_heads, tokens * group, device=device) if several else zoned.padding
    # Triton selects between near and far: where one is missing, the other stands in its place, and is not read.
    near_cos, near_sin, *near_steps = _table(zoned.to_near or zoned.to_far, 1, zoned.padding)
    far_cos, far_sin, *far_steps = _table(zoned.to_far or zoned.to_near, max(1, edges.zones - 1), zoned.padding)
    near_key_cos, near_key_sin, *near_key_steps = _table(zoned.near_keys or zoned.far_keys, 1, zoned.padding)
    far_key_cos, far_key_sin, *far_key_steps = _table(zoned.far_keys or zoned.near_keys, 1, zoned.padding)
    temperature = None if zoned.temperature is None else zoned.temperature.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    factors, sink_scores = (zoned.padding if x is None else x for x in (temperature, sinks))  # not read where missing
    scores, cap = (scale * _LOG2_E, 1.0) if softcap is None else (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
    with launching_on(device):
        _attend_zones[(-(-tokens * group // block_queries), rows * kv_heads, parts)](
            query, near, far, value, partial, lse, near_cos, near_sin, far_cos, far_sin,
            near_key_cos, near_key_sin, far_key_cos, far_key_sin, factors, zoned.padding, sink_scores,
            *query.stride()[:3], *near.stride()[:3], *far.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *near_steps[1:], *far_steps, near_key_steps[1], far_key_steps[1],
            0 if temperature is None or len(temperature) == 1 else tokens, int(len(zoned.padding) > 1),
            kv_heads, tokens, zoned.total, zoned.total - keys, keys - near.shape[2],
            -(-keys // parts // block_keys) * block_keys,
            edges.zones, edges.step, edges.first, edges.band, edges.last, scores, cap,
            GROUP=group, DIM=dim, WIDTH=width, START=layout.start if layout else 0, ROTATED=layout.dim if layout else 0,
            HALF=layout is None or layout.pairing == "half", NEGATIVE=layout is not None and layout.negative_angle,
            TURNS_NEAR=zoned.to_near is not None, TURNS_FAR=zoned.to_far is not None,
            TURNS_NEAR_KEYS=zoned.near_keys is not None, TURNS_FAR_KEYS=zoned.far_keys is not None,
            SCALED=temperature is not None, SINKS=sinks is not None, CAPPED=softcap is not None, SEVERAL=several,
            PRECISION="ieee" if query.dtype == torch.float32 else None, QUERIES=block_queries, KEYS=block_keys,
            DIMS=max(16, power_of_two(dim)), WIDTHS=max(16, power_of_two(width)),
            num_warps=warps, num_stages=2,
        )  # fmt: skip
        if several:
            _merge_parts[(tokens * group, rows * kv_heads)](
                partial, lse, out, sink_scores, *out.stride()[:3], kv_heads, tokens, parts,
                GROUP=group, WIDTH=width, WIDTHS=power_of_two(width), PARTS=power_of_two(parts),
                SINKS=sinks is not None,
            )  # fmt: skip
    return out


def _table(rotation: KeyRotation | None, zones: int, unused: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """Return cos and sin, and their strides over zones, rows and tokens; 0 where one row or token stands for all."""
    if rotation is None:
        return unused, unused, 0, 0, 0
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    rows, tokens = cos.shape[0] // zones, cos.shape[2]
    row, token = cos.stride(0), cos.stride(2)
    return cos, sin, rows * row, row if rows > 1 else 0, token if tokens > 1 else 0


if triton is not None:
    _LOG2_E_OF_KERNEL = tl.constexpr(_LOG2_E)
    _VARYING = ["tokens", "total", "evicted", "before_near", "part_keys"]
    _VARYING += ["zones", "step", "first_edge", "band", "last_edge", "near_row_step", "far_row_step", "row_tokens"]
    _VARYING += ["padding_row", "near_key_step", "far_key_step"]

    @triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator, unused-ignore]
    def _attend_zones(  # type: ignore[no-untyped-def]
        query, near, far, value, out, lse, near_cos, near_sin, far_cos, far_sin,
        near_key_cos, near_key_sin, far_key_cos, far_key_sin, temperature, padding, sinks,
        query_row, query_head, query_token, near_row, near_head, near_token, far_row, far_head, far_token,
        value_row, value_head, value_token, out_row, out_head, out_token,
        near_row_step, near_token_step, far_zone_step, far_row_step, far_token_step,
        near_key_step, far_key_step, row_tokens, padding_row,
        kv_heads, tokens, total, evicted, before_near, part_keys,
        zones, step, first_edge, band, last_edge, scale, cap,
        GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, ROTATED: tl.constexpr,
        HALF: tl.constexpr, NEGATIVE: tl.constexpr, TURNS_NEAR: tl.constexpr, TURNS_FAR: tl.constexpr,
        TURNS_NEAR_KEYS: tl.constexpr, TURNS_FAR_KEYS: tl.constexpr, SCALED: tl.constexpr, SINKS: tl.constexpr,
        CAPPED: tl.constexpr, SEVERAL: tl.constexpr, PRECISION: tl.constexpr,
        QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, WIDTHS: tl.constexpr,
    ):  # fmt: skip
        """Attend with a block of queries, those of all heads that share a key head, to the keys of a part.

        Positions count from the first token of a row that is not padding. A query at m sees in zone z the keys n with
        low <= n < high, where both rise with m. So a block of queries sees keys from its first query's low to its last
        query's high; the keys from its last query's low to its first query's high need no mask.
        """
        FILLED: tl.constexpr = DIMS == DIM and WIDTHS == WIDTH  # heads fill the block of dims that they are read as
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most keys: they begin first
        row, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
        part = tl.program_id(2)
        folded = block * QUERIES + tl.arange(0, QUERIES)
        token, head = folded // GROUP, kv_head * GROUP + folded % GROUP
        padded = tl.load(padding + row * padding_row)
        first = total - tokens - padded  # the position of token 0
        m = first + token
        real = (token < tokens) & (m >= 0)
        m_first = tl.maximum(first + (block * QUERIES) // GROUP, 0)
        m_last = first + tl.minimum((block * QUERIES + QUERIES - 1) // GROUP, tokens - 1)
        index_of_zero = (padded - evicted).to(tl.int64)  # the index of the key at position 0
        floor = tl.maximum(-index_of_zero, 0).to(tl.int32)  # the position of the first key that there is
        from_key = tl.maximum(floor, part * part_keys - index_of_zero.to(tl.int32))
        to_key = (part + 1) * part_keys - index_of_zero.to(tl.int32)
        near += row * near_row + kv_head * near_head + (index_of_zero - before_near) * near_token
        far += row * far_row + kv_head * far_head + index_of_zero * far_token
        value += row * value_row + kv_head * value_head + index_of_zero * value_token
        near_turn = row * near_key_step + (index_of_zero - before_near) * (ROTATED // 2)
        far_turn = row * far_key_step + index_of_zero * (ROTATED // 2)

        dim, width = tl.arange(0, DIMS), tl.arange(0, WIDTHS)
        inner = dim - START
        rotates = (inner >= 0) & (inner < ROTATED)
        if HALF:  # `partner` is the other member of a pair
            is_first = inner < ROTATED // 2
            partner = tl.where(is_first, dim + ROTATED // 2, dim - ROTATED // 2)
            pair = tl.where(is_first, inner, inner - ROTATED // 2)
        else:
            is_first = inner % 2 == 0
            partner = tl.where(is_first, dim + 1, dim - 1)
            pair = inner // 2
        partner, pair = tl.where(rotates, partner, dim), tl.where(rotates, pair, 0)
        sign = tl.where(is_first, 1.0 if NEGATIVE else -1.0, -1.0 if NEGATIVE else 1.0)
        at = query + row * query_row + head * query_head + token.to(tl.int64) * query_token
        inside = real[:, None] & (dim < DIM)[None, :]
        factor = tl.full((QUERIES,), 1.0, tl.float32)
        if SCALED:
            factor = tl.load(temperature + row * row_tokens + token, mask=real, other=0.0)

        merged = tl.zeros((QUERIES, WIDTHS), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        highest = tl.full((QUERIES,), float("-inf"), tl.float32)
        for zone in range(0, zones):
            nearest, last = zone == 0, zone == zones - 1
            upper = first_edge - (zone - 1) * band
            lower = tl.where(last, last_edge, first_edge - zone * band)
            anchor, anchor_first, anchor_last = m // step * step, m_first // step * step, m_last // step * step
            high = tl.minimum(tl.where(nearest, m + 1, anchor + upper), to_key)
            low = tl.maximum(anchor + lower, from_key)
            begin = tl.maximum(anchor_first + lower, from_key)
            end = tl.minimum(tl.where(nearest, m_last + 1, anchor_last + upper), to_key)
            if begin < end:
                x = tl.load(at[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
                if TURNS_NEAR or TURNS_FAR:
                    y = tl.load(at[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
                    turns = real[:, None] & rotates[None, :]
                    if not TURNS_NEAR:
                        turns = turns & (zone > 0)
                    if not TURNS_FAR:
                        turns = turns & nearest
                    if nearest:
                        place = row * near_row_step + token[:, None].to(tl.int64) * near_token_step + pair[None, :]
                        cos_at, sin_at = near_cos + place, near_sin + place
                    else:
                        place = row * far_row_step + token[:, None].to(tl.int64) * far_token_step + pair[None, :]
                        cos_at, sin_at = far_cos + place, far_sin + place
                    cos, sin = tl.load(cos_at, mask=turns, other=1.0), tl.load(sin_at, mask=turns, other=0.0)
                    x = x * cos + y * sin * sign[None, :]
                if SCALED:
                    x = x * factor[:, None]
                q = x.to(query.dtype.element_ty)
                # Whole blocks of keys that all queries see, then those before and after, which need a mask.
                seen_from = tl.minimum(tl.maximum(anchor_last + lower, from_key), end)
                seen_to = tl.minimum(tl.where(nearest, m_first + 1, anchor_first + upper), to_key)
                whole = tl.maximum(seen_to - seen_from, 0) // KEYS
                before = tl.where(whole > 0, tl.cdiv(tl.maximum(seen_from - begin, 0), KEYS), 0)
                rest = tl.where(whole > 0, seen_from + whole * KEYS, begin)
                after = tl.cdiv(tl.maximum(end - rest, 0), KEYS)
                turned = 0
                if TURNS_NEAR_KEYS or TURNS_FAR_KEYS:
                    turns_keys = (nearest & TURNS_NEAR_KEYS) | ((zone > 0) & TURNS_FAR_KEYS)
                    turned = tl.where(turns_keys, tl.cdiv(end - begin, KEYS), 0)
                    whole, before, after = (
                        tl.where(turns_keys, 0, whole), tl.where(turns_keys, 0, before), tl.where(turns_keys, 0, after)
                    )  # fmt: skip
                    turn = tl.where(nearest, near_turn, far_turn)
                    key_cos = tl.where(nearest, near_key_cos, far_key_cos) + turn
                    key_sin = tl.where(nearest, near_key_sin, far_key_sin) + turn
                keys, key_token = tl.where(nearest, near, far), tl.where(nearest, near_token, far_token)
                if TURNS_NEAR_KEYS or TURNS_FAR_KEYS:
                    for i in tl.range(0, turned, num_stages=1):
                        merged, weight, highest = _add_keys(
                            merged, weight, highest, q, keys, value, begin + i * KEYS, low, high, end, key_token,
                            value_token, scale, cap, dim, width, key_cos, key_sin, partner, pair, sign, rotates,
                            DIM, WIDTH, ROTATED, KEYS, True, True, CAPPED, PRECISION, FILLED,
                        )  # fmt: skip
                for i in tl.range(0, whole):
                    merged, weight, highest = _add_keys(
                        merged, weight, highest, q, keys, value, seen_from + i * KEYS, low, high, end, key_token,
                        value_token, scale, cap, dim, width, near_cos, near_sin, partner, pair, sign, rotates,
                        DIM, WIDTH, ROTATED, KEYS, False, False, CAPPED, PRECISION, FILLED,
                    )  # fmt: skip
                for i in tl.range(0, before + after):
                    start = tl.where(i < before, begin + i * KEYS, rest + (i - before) * KEYS)
                    stop = tl.where(i < before, seen_from, end)  # keys from here on are in another block
                    merged, weight, highest = _add_keys(
                        merged, weight, highest, q, keys, value, start, low, tl.minimum(high, stop), stop, key_token,
                        value_token, scale, cap, dim, width, near_cos, near_sin, partner, pair, sign, rotates,
                        DIM, WIDTH, ROTATED, KEYS, True, False, CAPPED, PRECISION, FILLED,
                    )  # fmt: skip
            zone_step = tl.where(nearest, 0, far_zone_step)
            far_cos, far_sin = far_cos + zone_step, far_sin + zone_step
        exists = token < tokens
        if SEVERAL:
            place = (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * GROUP * tokens + folded
            tl.store(lse + place, tl.where(weight > 0, highest + tl.log2(weight), float("-inf")), mask=exists)
            write = out + place * WIDTH
        else:
            write = out + row * out_row + head * out_head + token.to(tl.int64) * out_token
            if SINKS:
                sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E_OF_KERNEL
                higher = tl.maximum(highest, sink)
                higher = tl.where(higher == float("-inf"), 0.0, higher)
                kept = tl.exp2(highest - higher)
                merged, weight = merged * kept[:, None], weight * kept + tl.exp2(sink - higher)
        merged = merged / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(
            write[:, None] + width[None, :], merged.to(out.dtype.element_ty),
            mask=exists[:, None] & (width < WIDTH)[None, :],
        )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_keys(  # type: ignore[no-untyped-def]
        merged, weight, highest, q, keys, value, start, low, high, stop, key_token, value_token, scale, cap, dim, width,
        key_cos, key_sin, partner, pair, sign, rotates,
        DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
        TURNED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, FILLED: tl.constexpr,
    ):  # fmt: skip
        """Add a block of keys from position `start` on to the softmax of the queries; scores are powers of 2.

        If MASKED, there are keys up to `stop`, of which a query sees those from `low` to `high`. If TURNED, keys are
        rotated as they are read.
        """
        n = start + tl.arange(0, KEYS)
        key_at, value_at = keys + n.to(tl.int64)[:, None] * key_token, value + n.to(tl.int64)[:, None] * value_token
        if MASKED or not FILLED:
            there = (n < stop)[:, None]
            k = tl.load(key_at + dim[None, :], mask=there & (dim < DIM)[None, :], other=0.0)
            v = tl.load(value_at + width[None, :], mask=there & (width < WIDTH)[None, :], other=0.0)
        else:
            k, v = tl.load(key_at + dim[None, :]), tl.load(value_at + width[None, :])
        if TURNED:
            others = tl.load(key_at + partner[None, :], mask=there & (dim < DIM)[None, :], other=0.0).to(tl.float32)
            place, turns = n.to(tl.int64)[:, None] * (ROTATED // 2) + pair[None, :], there & rotates[None, :]
            cos, sin = tl.load(key_cos + place, mask=turns, other=1.0), tl.load(key_sin + place, mask=turns, other=0.0)
            k = (k.to(tl.float32) * cos + others * sin * sign[None, :]).to(k.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = scale
        if CAPPED:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
            scores = (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)) * cap
            factor = 1.0
        if MASKED:
            scores = tl.where((n[None, :] >= low[:, None]) & (n[None, :] < high[:, None]), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores * factor - base[:, None])
        kept = tl.exp2(highest - base)
        weight = weight * kept + tl.sum(weights, 1)
        merged = tl.dot(weights.to(v.dtype), v, merged * kept[:, None], input_precision=PRECISION)
        return merged, weight, higher

    @triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator, unused-ignore]
    def _merge_parts(  # type: ignore[no-untyped-def]
        partial, lse, out, sinks, out_row, out_head, out_token, kv_heads, tokens, parts,
        GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTHS: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
    ):  # fmt: skip
        """Merge the parts of one query of one head; `partial` is (parts, rows, kv_heads, tokens x group, width)."""
        folded, owner = tl.program_id(0), tl.program_id(1)
        row, head = (owner // kv_heads).to(tl.int64), (owner % kv_heads * GROUP + folded % GROUP).to(tl.int64)
        part, width = tl.arange(0, PARTS), tl.arange(0, WIDTHS)
        place = (part.to(tl.int64) * tl.num_programs(1) + owner) * GROUP * tokens + folded
        scores = tl.load(lse + place, mask=part < parts, other=float("-inf"))
        highest = tl.max(scores, 0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E_OF_KERNEL
            highest = tl.maximum(highest, sink)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - highest)
        total = tl.sum(weights, 0)
        if SINKS:
            total += tl.exp2(sink - highest)
        inside = (part < parts)[:, None] & (width < WIDTH)[None, :]
        values = tl.load(partial + place[:, None] * WIDTH + width[None, :], mask=inside, other=0.0)
        merged = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
        write = out + row * out_row + head * out_head + (folded // GROUP).to(tl.int64) * out_token
        tl.store(write + width, merged.to(out.dtype.element_ty), mask=width < WIDTH)

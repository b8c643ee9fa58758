"""Attention of one new token per row to a static cache, in operations that are the same at every step.

Tiles follow from the length of the input, so that a compiler would build them anew for each length. Here every far zone
scores all places of the cache, and a mask keeps the keys that are in the zone; the nearest zone, whose keys may have to
be rotated, takes the last places alone. `torch.compile` makes one graph of it, which a CUDA graph can repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_ext_hf.attention.blockwise import query_key_product
from rope_ext_hf.attention.rules import Rotation, ScoreModifiers
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition, RemappingMethod

_MOST_ZONES = 4
"""The most zones of a rule whose far zones all score every key; with more, tiles take less time."""


@dataclass(frozen=True)
class StaticStep:
    """The positions in a forward of one new token per row onto a static cache.

    Attributes:
        place: the place of the new tokens in the cache, a whole number as a tensor of no dims.
        query_positions: (rows or 1, 1) int64, of the new tokens.
        key_positions: (rows or 1, places) int64, of the key at each place; below 0 at padding, and larger than the
            query's at places that are still empty.
    """

    place: Tensor
    query_positions: Tensor
    key_positions: Tensor


def can_step(rule: AttentionRule, places: int) -> bool:
    """Return whether `attend_step` computes a rule: one with few zones, the same for rows of every length.

    `places`: the number of keys that the cache has room for.
    """
    if rule.depends_on_total_length or rule.scales_queries_only or rule.window_size is not None:
        return False
    if isinstance(rule, RemappingMethod) and not rule.moves_keys:  # it adds a bias to scores
        return False
    return len(rule.zone_distances(places)) <= _MOST_ZONES


def attend_step(
    rule: AttentionRule,
    rotation: Rotation | None,
    step: StaticStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    modifiers: ScoreModifiers,
) -> Tensor:
    """Return the attention of the new tokens to the keys of a static cache.

    Args:
        rule: says at which relative positions a query sees the keys; it has no window and no bias.
        rotation: the rotation of the layer; None: queries and keys stay as they are.
        step: the positions of queries and keys.
        query: (rows, heads, 1, head_dim), rotated to `rule.stored_position`, as the keys are.
        key, value: (rows, kv_heads, places, head_dim).
        scale: the factor of scores.
        modifiers: the softcap, the sinks and the mask; a step has no dropout and no bias.

    Returns:
        (rows, heads, 1, head_dim of value) in value's dtype.
    """
    if query.dtype != value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    m, n = (at.to(query.device) for at in (step.query_positions, step.key_positions))
    temperature = rule.query_scale(m)
    if temperature is not None:
        query = query * temperature.reshape(-1, 1, 1, 1).to(query.dtype)
    places, mask = key.shape[-2], modifiers.mask
    (_, near), *far = rule.zone_distances(places)
    zones, seen = rule.zone(m, n), (n >= 0) & (n <= m)
    if mask is not None and mask.dtype == torch.bool:
        seen, mask = seen & mask[:, 0, 0, :places], None

    def scores_of(queries: Tensor, keys: Tensor, visible: Tensor, added: Tensor | None) -> Tensor:
        scores = query_key_product(queries, keys, scale)
        if modifiers.softcap is not None:
            scores = torch.tanh(scores / modifiers.softcap) * modifiers.softcap
        if added is not None:
            scores = scores + added
        return scores.masked_fill(~visible.unsqueeze(1).unsqueeze(1), torch.finfo(scores.dtype).min)

    parts, values = [], []
    if rule.local_zone_exact and far:  # its keys are the last ones, rotated to where they are
        last = step.place.to(query.device) - torch.arange(min(near, places), device=query.device)
        index = last.clamp(min=0)
        n_near = n.index_select(1, index)
        visible = (last >= 0) & seen.index_select(1, index) & (zones.index_select(1, index) == 0)
        keys = _rotated(rotation, rule.stored_position(n_near), RemappedPosition(n_near), key.index_select(2, index))
        own = _rotated(rotation, rule.stored_position(m), RemappedPosition(m), query)
        parts.append(scores_of(own, keys, visible, None if mask is None else mask.index_select(-1, index)))
        values.append(value.index_select(2, index))
    scores = None
    for zone in range(bool(values), 1 + len(far)):
        at_zone = query
        if zone:
            at_zone = _rotated(rotation, rule.stored_position(m), rule.query_position(m, zone), query)
        elif rule.local_zone_exact:  # a rule of one zone
            at_zone = _rotated(rotation, rule.stored_position(m), RemappedPosition(m), query)
            key = _rotated(rotation, rule.stored_position(n), RemappedPosition(n), key)
        of_zone = scores_of(at_zone, key, seen & (zones == zone), None if mask is None else mask[..., :places])
        scores = of_zone if scores is None else torch.maximum(scores, of_zone)  # each pair is seen in one zone
    if scores is not None:
        parts.append(scores)
        values.append(value)
    sizes = [part.shape[-1] for part in parts]
    if modifiers.sinks is not None:
        sinks = modifiers.sinks.to(parts[0].dtype)[None, :, None, None].expand(*parts[0].shape[:-1], 1)
        parts.append(sinks)
        sizes.append(1)
    weights: tuple[Tensor, ...] = torch.split(torch.cat(parts, dim=-1).softmax(-1).to(value.dtype), sizes, dim=-1)
    rows, heads = query.shape[:2]
    out = sum(
        weight.reshape(rows, value.shape[1], -1, weight.shape[-1]) @ of_part
        for weight, of_part in zip(weights, values, strict=False)  # sinks have no value
    )
    assert isinstance(out, Tensor)
    return out.reshape(rows, heads, 1, -1)


def _rotated(rotation: Rotation | None, before: RemappedPosition, after: RemappedPosition, x: Tensor) -> Tensor:
    """Return queries or keys rotated from one position to another."""
    if rotation is None or (before.positions is after.positions and before[1:] == after[1:]):
        return x
    return rotation.table.between(before, after, x.device).apply(x, rotation.layout)

"""Attention over zones by its definition: scores of all pairs, zone by zone, in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.triton_attention import ZonedAttention
from rope_ext_hf.rotary.key_rotation import KeyRotation


def attend_zoned(
    zoned: ZonedAttention, query: Tensor, near: Tensor, far: Tensor, value: Tensor, scale: float,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return what `attend_fused` returns, for the same arguments."""
    edges, rows, (tokens, count) = zoned.edges, len(query), (query.shape[2], far.shape[2])
    n = torch.arange(zoned.total - count, zoned.total) - zoned.padding.long()[:, None]  # (rows or 1, count)
    m = n[:, count - tokens :, None]
    anchor = m // edges.step * edges.step
    if zoned.layout is not None:
        near = near if zoned.near_keys is None else zoned.near_keys.apply(near, zoned.layout)
        far = far if zoned.far_keys is None else zoned.far_keys.apply(far, zoned.layout)
    near = nn.functional.pad(near, (0, 0, count - near.shape[2], 0))  # it begins with the first key of the nearest zone
    scores = torch.full((rows, query.shape[1], tokens, count), -torch.inf)
    for zone in range(edges.zones):
        upper = m + 1 if zone == 0 else anchor + edges.first - (zone - 1) * edges.band
        lower = anchor + (edges.last if zone == edges.zones - 1 else edges.first - zone * edges.band)
        rotation = zoned.to_far if zone else zoned.to_near
        turned = query.float()
        if rotation is not None:
            size = len(rotation.cos) // max(1, edges.zones - 1) if zone else len(rotation.cos)
            part = slice((zone - 1) * size, zone * size) if zone else slice(None)
            assert zoned.layout is not None
            turned = KeyRotation(rotation.cos[part], rotation.sin[part]).apply(turned, zoned.layout)
        if zoned.temperature is not None:
            turned = turned * zoned.temperature
        keys = (far if zone else near).float().repeat_interleave(query.shape[1] // far.shape[1], 1)
        here = turned.to(query.dtype).float() @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            here = torch.tanh(here / softcap) * softcap
        visible = (n[:, None] >= lower) & (n[:, None] < upper) & (n[:, None] >= 0) & (m >= 0)
        scores = torch.where(visible[:, None], here, scores)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :count]
    return (weights @ value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)).to(value.dtype)

"""Queries and keys of a trained model as RoPE meets them, and the mean score of two of them at a distance.

A query at m and a key at n score Re sum_i q_i conj(k_i) exp(1j (m - n) theta_i), with pairs of dims as complex numbers.
The mean of that over many queries and keys, at one distance, follows from the mean of q_i conj(k_i) alone, its
spectrum, whatever the frequencies: one forward pass serves all methods and all distances.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.attention.rules import RotationTable
from rope_ext_hf.errors import LengthError, UnsupportedModelError, one_line
from rope_ext_hf.methods.remapping import RemappedPosition
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.attention_interface import attending, evaluating
from rope_ext_hf.patches.forward_hooks import decoder_of
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import patched_slots
from rope_ext_hf.rotary.kv_cache import KeyLayout, candidate_key_layouts, nearly_equal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "rope_ext_hf.record"
_SHIFT, _PROBED = 5, 16  # how far, and how many tokens, the second pass is moved to find out how a layer rotates

_RECORDS: ContextVar[list[_Record]] = ContextVar("rope_ext_hf_attention_vectors")


class _Record(NamedTuple):
    """The arguments of one attention call: (1, heads or key heads, tokens, head_dim), rotated."""

    query: Tensor
    key: Tensor


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attend as "sdpa" does, and keep queries and keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    _RECORDS.get().append(_Record(query.detach(), key.detach()))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


@torch.no_grad()
def spectra(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The mean of q_i conj(k_i) over every query and key of a text, each of length 1, where they stand left out.

    The model is not patched. ids: (tokens,) integers, at least 16 and at most the context length -> (heads, pairs)
    complex128, the heads of every layer that rotates by the frequencies a method would change.
    """
    if patched_slots(model):
        raise UnsupportedModelError(
            "the model is patched, and these are queries and keys of the model itself; unpatch it"
        )
    slot, rotary = find_slots(model)[0], patch_geometry(model)
    tokens = ids.shape[-1]
    if ids.ndim != 1 or not _PROBED <= tokens <= rotary.context_length:
        raise LengthError(f"the text must be {_PROBED} to {rotary.context_length} tokens, got {tuple(ids.shape)}")
    if not getattr(model, "_supports_sdpa", False):
        raise UnsupportedModelError(f"{type(model).__name__} does not run on transformers' 'sdpa' attention")
    decoder = decoder_of(model, slot.parent)
    inv_freq, _ = Default().frequencies(rotary, tokens)
    here = _record(model, decoder, ids, 0)
    moved = _record(model, decoder, ids[:_PROBED], _SHIFT)
    table, at_zero = RotationTable(inv_freq), RemappedPosition(torch.zeros(1, 1, dtype=torch.int64))
    means = []
    for record, shifted in zip(here, moved, strict=True):
        layout = _layout(record, shifted, table, rotary.dim)
        if layout is None:
            continue
        positions = RemappedPosition(torch.arange(tokens)[None])
        back = table.between(positions, at_zero, torch.device("cpu"))
        q, k = (_unit_pairs(back.apply(x.float().cpu(), layout)[0], layout) for x in record)
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        means.append(q.mean(1) * k.mean(1).conj())
    if not means:
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} keeps queries and keys as its rotary embedding leaves them"
        )
    return torch.cat(means)


def mean_scores(vectors: Tensor, inv_freq: Tensor, distances: Tensor) -> Tensor:
    """The mean cosine of a query and a key at each distance, for each head.

    vectors: (heads, pairs) complex; inv_freq: (pairs,) of any method; distances: (count,) -> (heads, count) float64.
    """
    angles = inv_freq.double()[:, None] * distances.double()  # (pairs, count)
    return (vectors @ torch.polar(torch.ones_like(angles), angles)).real


def _record(model: Any, decoder: Any, ids: Tensor, start: int) -> list[_Record]:
    """What every attention call gets when the text begins at this position."""
    from transformers.masking_utils import sdpa_mask

    records: list[_Record] = []
    device = next(decoder.parameters()).device
    positions = torch.arange(start, start + len(ids), device=device)[None]
    try:
        with evaluating(model), attending(model, _NAME, _attention, sdpa_mask, _RECORDS, records):
            decoder(input_ids=ids[None].to(device), position_ids=positions, use_cache=False)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} does not run on plain text: {one_line(error)}"
        ) from error
    return records


def _layout(record: _Record, moved: _Record, table: RotationTable, dim: int) -> KeyLayout | None:
    """Where a layer's rotated dims are: the first tokens moved by some positions must be rotated by as many."""
    before, after = (RemappedPosition(torch.arange(start, start + _PROBED)[None]) for start in (0, _SHIFT))
    rotation = table.between(before, after, record.key.device)
    for layout in candidate_key_layouts(record.key.shape[-1], dim):
        if all(
            nearly_equal(rotation.apply(x[:, :, :_PROBED].contiguous(), layout), y)
            for x, y in zip(record, moved, strict=True)
        ):
            return layout
    return None


def _unit_pairs(x: Tensor, layout: KeyLayout) -> Tensor:
    """Vectors (heads, tokens, head_dim) as complex pairs (heads, tokens, dim // 2), their rotated part of length 1."""
    part = x[..., layout.start : layout.start + layout.dim].double()
    half = layout.dim // 2
    members = (slice(half), slice(half, None)) if layout.pairing == "half" else (slice(0, None, 2), slice(1, None, 2))
    first, second = (part[..., member] for member in members)
    pairs = torch.complex(first, -second if layout.negative_angle else second)
    unit: Tensor = pairs / part.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return unit

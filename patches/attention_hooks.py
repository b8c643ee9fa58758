"""Attention-level methods in a live model: its attention runs our function, which knows each layer and each forward.

transformers' attention interface is used as it is: a name of ours in its two tables, and the model's own configs say
that name. What a layer does with its rotary embedding (which dims of a head turn, how they are paired, whether at all)
is found by running a few tokens through the model, and checked there, not looked up by class names.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import AttentionRule, ForwardContext, Rotation, ScoreModifiers
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME, LAYER_ATTRIBUTE, register_attention
from rope_ext_hf.patches.forward_context import Layer

__all__ = ["attach", "attend_from_kwargs", "detach", "register", "remapped_attention", "remapped_mask"]


def remapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a patched model, as transformers calls it.

    Args:
        query: (rows, heads, tokens, head_dim).
        key, value: (rows, kv_heads, past + tokens, head_dim).

    Returns:
        (rows, tokens, heads, head_dim), None for the weights.
    """
    layer: Layer | None = module.__dict__.get(LAYER_ATTRIBUTE)
    context = None if layer is None else layer.tracker.context_for(given.get("position_ids"))
    if layer is None or context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was not there, or had no weights yet, when its model was patched; patch it again"
        )
    total = context.key_positions.shape[-1]
    key, value = key[:, :, :total], value[:, :, :total]  # a static cache has room after them
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    return attend_from_kwargs(layer.rule, layer.rotation, context, query, key, value, mask, **given)


def attend_from_kwargs(
    rule: AttentionRule,
    rotation: Rotation | None,
    context: ForwardContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    /,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend`, with the keywords that transformers gives an attention function; returns what it wants of one."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(rule, rotation, context, query, key, value, scale, ScoreModifiers(softcap, s_aux, mask, dropout))
    return out.transpose(1, 2).contiguous(), None


def remapped_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A mask as long as a row, where causality and a window are all there is beside it; else transformers' own."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    function, size = kwargs.get("mask_function"), kwargs.get("local_size")
    if function is causal_mask_function or (
        size is not None and _same_closure(function, sliding_window_causal_mask_function(size))
    ):
        mask: Tensor | None = kwargs.get("attention_mask")
        return mask
    whole: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return whole


def _same_closure(one: Any, other: Any) -> bool:
    """Whether two functions are the same code around the same values."""
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return all(map(_same_closure, one, other))
        return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
    cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
    return one.__code__ is other.__code__ and _same_closure(*cells)


def register() -> None:
    """Add the functions of remapping methods to transformers' tables."""
    register_attention(ATTENTION_NAME, remapped_attention, remapped_mask)


def attach(layers: list[tuple[nn.Module, Layer]]) -> None:
    """Tell each attention module what `probe_layers` found."""
    for module, layer in layers:
        module.__dict__[LAYER_ATTRIBUTE] = layer


def detach(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(LAYER_ATTRIBUTE, None)

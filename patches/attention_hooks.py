"""Remapping methods in a live model: its attention modules run our function, which is given each forward's context.

transformers' attention interface is used as it is: its two tables get a name of ours, and the model's own configs name
that name. What a layer does with its rotary embedding (which dims of a head rotate, how they are paired, whether at
all) is probed by running a few tokens through the model (attention_probe.py), not by class names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import AttentionRule, Rotation, ScoreModifiers, TokenPositions
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.patches.attention_interface import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    PROBE_RECORDS,
    Layer,
    is_sliding,
    register_attention,
)
from rope_ext_hf.patches.forward_context import CONTEXT_KWARG, ForwardContext, current_context, place_tokens
from rope_ext_hf.patches.forward_hooks import DecoderHooks
from rope_ext_hf.patches.slots import PatchedSlot
from rope_ext_hf.rotary.cache_state import CacheState, check_origin
from rope_ext_hf.rotary.graphs import graph_break


class RemappingHooks(DecoderHooks):
    """Hooks around the forward of a decoder under a remapping method."""

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        super().__init__(slots)
        self.layers: dict[int, Layer] | None = None  # of the decoder; looked up at first need

    @graph_break  # it looks at values
    def pre_forward(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Work out positions and padding, and pass them on to the attention functions.

        Raises:
            UnsupportedModelError: attention weights are asked for, or the attention was set to another function.
            LengthError: a cache that was filled elsewhere, or positions that do not fit it.
        """
        if PROBE_RECORDS.get() is not None:
            return None
        config: Any = decoder.config
        if config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(
                f"this model is patched with a remapping method, and its attention was set to "
                f"{config._attn_implementation!r} since: unpatch it first, or set {ATTENTION_NAME!r} again"
            )
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(config, "output_attentions", False)):
            raise UnsupportedModelError(
                "a remapping method computes attention in blocks and has no attention weights to return; call the "
                "model without output_attentions=True, or unpatch it first and use attn_implementation='eager'"
            )
        context = self.begin(decoder, args, kwargs)
        if context is None:
            return None
        if context.past_length:
            context.cache_state = check_origin(context.cache, self.origin())
        context.token_positions = place_tokens(context)
        if self.layers is None:
            attached = (module.__dict__.get(LAYER_ATTRIBUTE) for module in decoder.modules())
            self.layers = {layer.index: layer for layer in attached if layer is not None}
        context.layers = self.layers
        if context.cache_state is None:
            context.cache_state = CacheState(self.origin(), packed=context.packed)
        passed_on: dict[str, Any] = {}
        # As a keyword the context survives until a checkpointed layer runs again in the backward.
        if _takes_any_keyword(decoder):
            passed_on[CONTEXT_KWARG] = context
        if context.position_ids is None or "position_ids" in kwargs:
            passed_on["position_ids"] = context.token_positions.query_positions
        return args, kwargs | passed_on

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        context = self.end(decoder)
        if context is None or context.token_positions is None:
            return
        # Rotations are as large as (tokens, head_dim) each; kept between forwards they would add up with every length.
        context.token_positions.rotations.clear()
        context.token_positions.query_scales.clear()
        if output is not None and context.cache_state is not None:
            self.record(context.cache, output, context.cache_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention function, which a pickled model needs in the process that loads it."""
        self.__dict__.update(state)
        register()


def _takes_any_keyword(decoder: nn.Module) -> bool:
    parameters = inspect.signature(type(decoder).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def remapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one layer of a patched model, as transformers calls it.

    Args:
        query: (rows, heads, tokens, head_dim).
        key, value: (rows, kv_heads, past + tokens, head_dim).

    Returns:
        (rows, tokens, heads, head_dim), and None for the attention weights.
    """
    layer: Layer | None = module.__dict__.get(LAYER_ATTRIBUTE)
    if layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was not there, or had no weights yet, when its model was patched; patch it again"
        )
    # In a backward with gradient checkpoints, attention runs again when its forward has long ended.
    context: ForwardContext | None = kwargs.pop(CONTEXT_KWARG, None) or current_context()
    if context is None or context.token_positions is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} ran outside a forward of its decoder, so the positions of its tokens are not "
            "known. Call the whole model; with gradient checkpointing, use a model family whose layers pass keyword "
            "arguments on to their attention"
        )
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    # One operator, whose inside a compiler leaves alone: its tiles are other ones at every step, so that compiled code
    # would be compiled again for each length. It has no backward, and an exported program must contain the computation
    # itself: there it is traced.
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and not torch.is_grad_enabled():
        given = kwargs.get("s_aux"), layer.index, kwargs.get("scaling"), kwargs.get("softcap")
        out: Tensor = torch.ops.rope_ext_hf.remapped_attention(
            query, key, value, mask, *given, kwargs.get("dropout", 0.0)
        )
        return out, None
    return _attend_to_tokens(layer, context.token_positions, query, key, value, mask, **kwargs)


def _attend_to_tokens(
    layer: Layer,
    positions: TokenPositions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend_from_kwargs` of a layer; a static cache has empty places after the tokens."""
    total = positions.key_positions.shape[-1]
    key, value = key[:, :, :total], value[:, :, :total]
    return attend_from_kwargs(layer.rule, layer.rotation, positions, query, key, value, mask, **kwargs)


def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    s_aux: Tensor | None,
    layer: int,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """(rows, tokens, heads, head_dim of the values); positions come from the forward under way in this thread."""
    context = current_context()
    if context is None or context.token_positions is None:
        raise UnsupportedModelError("compiled attention of a remapping method ran outside a forward of its decoder")
    given: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}
    out, _ = _attend_to_tokens(context.layers[layer], context.token_positions, query, key, value, mask, **given)
    return out


def _operator_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    rows, heads, tokens = query.shape[:3]
    return query.new_empty((rows, tokens, heads, value.shape[-1]))


@cache
def _register_operator() -> None:
    """Add the operator to torch's table, once in a process; CUDA graphs leave it out, because it changes each step."""
    operator = torch.library.custom_op(
        "rope_ext_hf::remapped_attention",
        _operator,
        mutates_args=(),
        schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? s_aux, int layer, float? scaling, "
        "float? softcap, float dropout) -> Tensor",
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    operator.register_fake(_operator_shape)


def attend_from_kwargs(
    rule: AttentionRule,
    rotation: Rotation | None,
    positions: TokenPositions,
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
    """`attend` with the keywords and the result of an attention function of transformers."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    in_order = positions.left_padding is not None  # else distances may be larger than there are keys
    bias = rule.score_bias(query.shape[1], int(positions.key_positions.shape[-1]) if in_order else UNBOUNDED)
    modifiers = ScoreModifiers(softcap, s_aux, mask, dropout, bias)
    # (rows, heads, tokens, head_dim); transformers reshapes what is returned to (rows, tokens, heads * head_dim).
    out = attend(rule, rotation, positions, query, key, value, scale, modifiers)
    return out.transpose(1, 2).contiguous(), None


def _remapped_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The padding mask as it was given, where a mask has only causality and a window beside it; else transformers' own.

    Causality, window and padding come from the rule and the positions, which needs no (length, length) tensor.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if kwargs.get("mask_function") is causal_mask_function or is_sliding(kwargs):
        mask: Tensor | None = kwargs.get("attention_mask")
        return mask
    whole: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return whole


def register() -> None:
    """Add the functions of remapping methods to transformers' tables, and their operator to torch's."""
    _register_operator()
    register_attention(ATTENTION_NAME, remapped_attention, _remapped_mask)


def attach(layers: Sequence[tuple[nn.Module, Layer]]) -> None:
    """Give each attention module what `probe_layers` measured of it."""
    for index, (module, layer) in enumerate(layers):
        module.__dict__[LAYER_ATTRIBUTE] = replace(layer, index=index)


def remapped_windows(model: nn.Module) -> list[tuple[int, int | None]]:
    """The layer index and the window of every attention module under a remapping method; None: it attends to all."""
    layers: list[tuple[nn.Module, Layer | None]] = [(each, vars(each).get(LAYER_ATTRIBUTE)) for each in model.modules()]
    return [(getattr(module, "layer_idx", -1), layer.rule.window_size) for module, layer in layers if layer]


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in model.modules():
        module.__dict__.pop(LAYER_ATTRIBUTE, None)

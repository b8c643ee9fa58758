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
from rope_ext_hf.attention.rules import Rotation, RowGroup, ScoreModifiers, TokenPositions, pick_rows
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.remapping import AttentionRule, RemappingMethod
from rope_ext_hf.patches.attention_interface import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    PROBE_RECORDS,
    Layer,
    Places,
    is_sliding,
    places_of_attention,
    places_of_queries,
    register_attention,
    run_as_loaded,
)
from rope_ext_hf.patches.decoder_arguments import arguments
from rope_ext_hf.patches.forward_context import CONTEXT_KWARG, ForwardContext, current_context, place_tokens
from rope_ext_hf.patches.forward_hooks import Arguments, DecoderHooks
from rope_ext_hf.patches.slots import PatchedSlot, tables_of
from rope_ext_hf.rotary.cache_state import CacheState, check_origin
from rope_ext_hf.rotary.forward_state import graph_break


class RemappingHooks(DecoderHooks):
    """Hooks around the forward of a decoder under a remapping method."""

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        super().__init__(slots)
        self.layers: dict[int, nn.Module] = {}  # attention modules of the decoder; looked up at first need
        self.places: Places = []  # where they stood then

    @graph_break  # it looks at values
    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
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
        context = self.begin(decoder, arguments(decoder, args, kwargs))
        if context is None:
            return None
        if context.past_length:
            context.cache_state = check_origin(context.cache, self.origin())
        context.token_positions = place_tokens(context)
        if not self.layers or any(getattr(parent, name, None) is not module for parent, name, module in self.places):
            attached = ((module, module.__dict__.get(LAYER_ATTRIBUTE)) for module in decoder.modules())
            self.layers = {layer.index: module for module, layer in attached if layer is not None}
            self.places = places_of_attention(decoder, self.layers.values(), self.slots[0].state.spec.method.name)
        context.layers = self.layers
        context.row_groups = self._group_rows(context)
        if context.cache_state is None:
            context.cache_state = CacheState(self.origin(), packed=context.packed)
        placed = context.token_positions
        context.cache_state.in_order = placed.key_mask is None and not any(placed.left_padding or (1,))
        passed_on: dict[str, Any] = {}
        # As a keyword the context survives until a checkpointed layer runs again in the backward.
        if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(type(decoder).forward).parameters.values()):
            passed_on[CONTEXT_KWARG] = context
        if context.position_ids is None or "position_ids" in kwargs:
            passed_on["position_ids"] = context.token_positions.query_positions
        return args, kwargs | passed_on

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        context = self.end(decoder)
        if context is None or context.token_positions is None:
            return
        # Rotations are as large as (tokens, head_dim) each; kept between forwards they would add up with every length.
        for positions in (context.token_positions, *(group.positions for group in context.row_groups)):
            positions.rotations.clear()
            positions.query_scales.clear()
        context.masks.clear()
        if output is not None and context.cache_state is not None:
            self.record(context.cache, output, context.cache_state)

    def _group_rows(self, context: ForwardContext) -> tuple[RowGroup, ...]:
        """The rows of a forward by the rule of their length; nothing where one rule is for rows of every length."""
        table = next(each for each in tables_of(self.slots) if isinstance(each.method, RemappingMethod))
        method, positions = table.method, context.token_positions
        assert isinstance(method, RemappingMethod)
        assert positions is not None
        if not method.by_length:
            return ()
        rules = [method.at_length(n) for n in ((table.fixed_length,) if table.fixed_length else positions.lengths)]
        if context.packed and not table.fixed_length and any(rules):
            raise LengthError(
                "a row holds several inputs one after the other (its position_ids start anew), and the rule of "
                f"{method.name} follows the length of each: give one input per row, or hold one length with "
                "rope_ext_hf.fixed_length(model, length)"
            )
        rows_of: dict[RemappingMethod | None, list[int]] = {}
        for row, rule in enumerate(rules):
            rows_of.setdefault(rule, []).append(row)
        if len(rows_of) == 1:
            return (RowGroup(None, rules[0], positions),)
        return tuple(RowGroup(tuple(rows), rule, positions.of_rows(tuple(rows))) for rule, rows in rows_of.items())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention function, which a pickled model needs in the process that loads it."""
        self.__dict__.update(state)
        register()


def remapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a layer as transformers calls it.

    From (rows, heads, tokens, head_dim), and fewer heads of past + tokens keys, to (rows, tokens, heads, head_dim).
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
        modifiers = kwargs.get("s_aux"), layer.index, kwargs.get("scaling"), kwargs.get("softcap")
        operator = torch.ops.rope_ext_hf.remapped_attention
        return operator(query, key, value, mask, *modifiers, kwargs.get("dropout", 0.0)), None
    return _attend_in_context(module, context, mask, query, key, value, **kwargs), None


def _attend_in_context(
    module: nn.Module, context: ForwardContext, mask: Tensor | None, *given: Tensor, **kwargs: Any
) -> Tensor:
    """Attention of one layer in a forward, each row by the rule of its length; (rows, tokens, heads, head_dim).

    `given`: the queries, keys and values.
    """
    layer: Layer = module.__dict__[LAYER_ATTRIBUTE]
    assert context.token_positions is not None
    by_row: dict[int, Tensor] = {}
    for group in context.row_groups or (RowGroup(None, None, context.token_positions),):
        (query, key, value), seen = given, mask
        if group.rows is not None:
            query, key, value = (pick_rows(x, group.rows) for x in given)
            seen = mask if mask is None else pick_rows(mask, group.rows)
        if context.row_groups and group.method is None:
            out = _attend_as_loaded(module, context, group, seen, query, key, value, **kwargs)
        else:
            rule = group.method if group.method and isinstance(layer.rule, RemappingMethod) else layer.rule
            total = group.positions.total  # a static cache has empty places after the tokens
            key, value = key[:, :, :total], value[:, :, :total]
            out, _ = attend_from_kwargs(rule, layer.rotation, group.positions, query, key, value, seen, **kwargs)
        if group.rows is None:
            return out
        by_row |= {row: out[index : index + 1] for index, row in enumerate(group.rows)}
    return torch.cat([by_row[row] for row in range(len(by_row))])


def _attend_as_loaded(
    module: nn.Module, context: ForwardContext, group: RowGroup, mask: Tensor | None, *given: Tensor, **kwargs: Any
) -> Tensor:
    layer: Layer = module.__dict__[LAYER_ATTRIBUTE]
    query, key, _ = given
    config, window, keys = layer.as_loaded, layer.rule.window_size, int(key.shape[2])
    if mask is not None and mask.dtype == torch.bool and config._attn_implementation == "eager":
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=mask.device).where(mask, lowest)
    if mask is None:
        entry = (group.rows, window, keys, query.device)
        if entry not in context.masks:
            context.masks[entry] = _mask_as_loaded(config, window, query, keys, context, group.positions)
        mask = context.masks[entry]
    if window is not None:
        kwargs = {"sliding_window": window} | kwargs
    return run_as_loaded(module, config, *given, mask, **kwargs)


def _mask_as_loaded(
    config: Any, window: int | None, query: Tensor, keys: int, context: ForwardContext, positions: TokenPositions
) -> Any:
    """The mask of causal attention that transformers makes for the function in a config; `keys` with empty places."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        causal_mask_function,
        sliding_window_causal_mask_function,
    )

    compileable = getattr(context.cache, "is_compileable", False)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]
    return make_mask(
        batch_size=query.shape[0],
        kv_length=keys,
        **places_of_queries(make_mask, context.past_length, query.shape[2], query.device),
        kv_offset=max(0, positions.key_positions.shape[-1] - keys),
        mask_function=causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        attention_mask=None if positions.key_mask is None else positions.key_mask.to(query.device),
        allow_is_causal_skip=not (compileable and query.shape[2] == 1),  # a compiled step gets a mask of one shape
        dtype=query.dtype,
        config=config,
        device=query.device,
        **({} if window is None else {"local_size": window}),
    )


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
    return _attend_in_context(context.layers[layer], context, mask, query, key, value, **given)


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
    operator.register_fake(lambda q, k, v, *_: q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])))


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
    bias = rule.score_bias(query.shape[1], positions.total if in_order else UNBOUNDED)
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


def attach(layers: Sequence[tuple[nn.Module, Layer]], as_loaded: Any) -> None:
    """Give each attention module what `probe_layers` measured of it, and the config that it was loaded with."""
    for index, (module, layer) in enumerate(layers):
        module.__dict__[LAYER_ATTRIBUTE] = replace(layer, index=index, as_loaded=as_loaded)


def remapped_windows(model: nn.Module) -> list[tuple[int, int | None]]:
    """The layer index and the window of every attention module under a remapping method; None: it attends to all."""
    layers: list[tuple[nn.Module, Layer | None]] = [(each, vars(each).get(LAYER_ATTRIBUTE)) for each in model.modules()]
    return [(getattr(module, "layer_idx", -1), layer.rule.window_size) for module, layer in layers if layer]


def detach(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(LAYER_ATTRIBUTE, None)

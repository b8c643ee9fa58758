"""The attention function of remapping methods, which transformers calls in the attention modules of a patched model.

transformers looks attention functions up by name. `register` adds `remapped_attention` under our name, with a mask
function beside it, and a patch makes the model's own configs name that name. The function gets queries and keys rotated
to where keys are stored, and the positions of the forward from its `ForwardCall`; `attention/blockwise.py` computes.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import Rotation, RowGroup, ScoreModifiers, TokenPositions, pick_rows
from rope_ext_hf.attention.static_step import StaticStep, attend_step
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.remapping import AttentionRule, RemappingMethod
from rope_ext_hf.patches.forward.attention_interface import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    Layer,
    is_sliding,
    places_of_queries,
    register_attention,
    run_as_loaded,
)
from rope_ext_hf.patches.forward.forward_call import CALL_KWARG, ForwardCall, current_call


def remapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return the output of one attention module under a remapping method, and None in place of attention weights.

    Args:
        module: the attention module, which holds its `Layer`.
        query: (rows, heads, tokens, head_dim), rotated to where keys are stored.
        key, value: (rows, key heads, past + tokens, head_dim); a static cache has empty places after the tokens.
        attention_mask: of four dims where the model adds something to causality, a window and padding; else ignored,
            because these follow from the rule and the positions.
        kwargs: scaling, softcap, s_aux, dropout and others, as transformers passes them.

    Returns:
        (rows, tokens, heads, head_dim of the values).

    Raises:
        UnsupportedModelError: the module was added after the patch, or runs outside of a forward of its decoder.
    """
    layer: Layer | None = module.__dict__.get(LAYER_ATTRIBUTE)
    if layer is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was not there, or had no weights yet, when its model was patched; patch the "
            "model again"
        )
    # In a backward with gradient checkpoints, attention runs again when its forward has long ended.
    call: ForwardCall | None = kwargs.pop(CALL_KWARG, None) or current_call()
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    if call is not None and call.static_step is not None:
        return attend_from_kwargs(layer.rule, layer.rotation, call.static_step, query, key, value, mask, **kwargs)
    if call is None or call.token_positions is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} ran outside a forward of its decoder, so the positions of its tokens are not "
            "known. Call the whole model; if its forward was replaced after the patch, replace it before, or call the "
            "one that you replace; with gradient checkpointing, use a model family whose layers pass keyword "
            "arguments on to their attention"
        )
    # Compiled code calls this computation as one operator, into which the compiler does not look: the sizes of its
    # tiles change at every step, so it would be compiled again for each length. With gradients it is traced instead,
    # because the operator has no backward; and when exporting, because an exported program must contain the computation
    # itself.
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and not torch.is_grad_enabled():
        modifiers = kwargs.get("s_aux"), layer.index, kwargs.get("scaling"), kwargs.get("softcap")
        operator = torch.ops.rope_ext_hf.remapped_attention
        return operator(query, key, value, mask, *modifiers, kwargs.get("dropout", 0.0)), None
    return _attend_in_call(module, call, mask, query, key, value, **kwargs), None


def _attend_in_call(module: nn.Module, call: ForwardCall, mask: Tensor | None, *qkv: Tensor, **kwargs: Any) -> Tensor:
    """Return the output of one attention module in the forward that `call` describes.

    Where the rule of a method depends on the length, rows of different lengths are computed apart and put together.
    `qkv`: the queries, keys and values. The output: (rows, tokens, heads, head_dim of the values).
    """
    assert call.token_positions is not None
    if not call.row_groups:
        return _attend_by_rule(module, RowGroup(None, None, call.token_positions), mask, *qkv, **kwargs)
    by_row: dict[int, Tensor] = {}
    for group in call.row_groups:
        group_qkv, group_mask = qkv, mask
        if group.rows is not None:
            group_qkv = tuple(pick_rows(x, group.rows) for x in qkv)
            group_mask = None if mask is None else pick_rows(mask, group.rows)
        if group.method is None:  # rows in which the method changes nothing, or no more than the size of queries
            out = _attend_as_loaded(module, call, group, group_mask, *group_qkv, **kwargs)
        else:
            out = _attend_by_rule(module, group, group_mask, *group_qkv, **kwargs)
        if group.rows is None:
            return out
        by_row |= {row: out[index : index + 1] for index, row in enumerate(group.rows)}
    return torch.cat([by_row[row] for row in range(len(by_row))])


def _attend_by_rule(
    module: nn.Module,
    group: RowGroup,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Return the output of an attention module for a group of rows, by the group's rule or else the module's own."""
    layer: Layer = module.__dict__[LAYER_ATTRIBUTE]
    rule = layer.rule
    if group.method is not None and isinstance(rule, RemappingMethod):
        rule = group.method
    total = group.positions.total  # a static cache has empty places after the tokens
    key, value = key[:, :, :total], value[:, :, :total]
    out, _ = attend_from_kwargs(rule, layer.rotation, group.positions, query, key, value, mask, **kwargs)
    return out


def _attend_as_loaded(
    module: nn.Module, call: ForwardCall, group: RowGroup, mask: Tensor | None, *qkv: Tensor, **kwargs: Any
) -> Tensor:
    """Return the output of the attention function that the model was loaded with.

    Where no query has a factor above 1, the output is that of the unpatched model, bit for bit.
    """
    layer: Layer = module.__dict__[LAYER_ATTRIBUTE]
    query, key, value = qkv
    if layer.rule.scales_queries_only:
        at = partial(group.positions.query_positions.to, query.device)
        scale = group.positions.query_scale(layer.rule, at, query.device, query.dtype, "all")
        query = query if scale is None else query * scale
    config, window, keys = layer.as_loaded, layer.rule.window_size, int(key.shape[2])
    # A bool mask says which keys are seen; eager attention adds its mask to the scores.
    if mask is not None and mask.dtype == torch.bool and config._attn_implementation == "eager":
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=mask.device).where(mask, lowest)
    if mask is None:
        mask_key = (group.rows, window, keys, query.device)
        if mask_key not in call.masks:
            call.masks[mask_key] = _mask_as_loaded(config, window, query, keys, call, group.positions)
        mask = call.masks[mask_key]
    if window is not None:
        kwargs = {"sliding_window": window} | kwargs
    return run_as_loaded(module, config, query, key, value, mask, **kwargs)


def _mask_as_loaded(
    config: Any, window: int | None, query: Tensor, keys: int, call: ForwardCall, positions: TokenPositions
) -> Any:
    """Return the mask that transformers makes for the attention function of a config.

    Args:
        config: the config that the model was loaded with.
        window: how many keys a query sees, itself included; None: all before it.
        query: (rows, heads, tokens, head_dim).
        keys: the number of keys, with the empty places of a static cache.
        positions: the positions and the padding of the tokens in the rows of `query`.
    """
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        causal_mask_function,
        sliding_window_causal_mask_function,
    )

    compileable = getattr(call.cache, "is_compileable", False)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]
    return make_mask(
        batch_size=query.shape[0],
        kv_length=keys,
        **places_of_queries(make_mask, call.past_length, query.shape[2], query.device),
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
    """Compute `remapped_attention` for the attention module with index `layer`; torch calls this as an operator.

    An operator takes tensors and numbers alone, so the module and the positions come from the call of the forward
    under way in this thread.
    """
    call = current_call()
    if call is None or call.token_positions is None:
        raise UnsupportedModelError(
            "compiled attention of a remapping method ran outside a forward of its decoder, so the positions of its "
            "tokens are not known. Call the whole model"
        )
    kwargs: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}
    return _attend_in_call(call.layers[layer], call, mask, query, key, value, **kwargs)


@cache
def _register_operator() -> None:
    """Add the operator to torch's table, once in a process.

    Its tag keeps it out of CUDA graphs, which would repeat the kernels of one step at the next step, although that
    needs other kernels.
    """
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
    positions: TokenPositions | StaticStep,
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
    """Run `attend` with the keywords and the result of an attention function of transformers.

    Args:
        rule: the keys that a query sees, and at which relative positions.
        rotation: how the module rotates; None: it does not.
        positions: the positions of all tokens of the rows; or those of a step onto a static cache.
        query: (rows, heads, tokens, head_dim).
        key, value: (rows, key heads, past + tokens, head_dim).
        mask: True, or 0 to add, where a key is seen; None: the rule and the positions say all.
        scaling: the factor of the scores; None: 1 / sqrt(head_dim).
        softcap: scores are tanh(score / softcap) * softcap; None: no cap.
        s_aux: attention sinks, (heads,): scores of keys without a value; None: there are none.
        dropout: the share of the weights that is dropped.

    Returns:
        (rows, tokens, heads, head_dim of the values), and None in the place of attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(positions, StaticStep):
        modifiers = ScoreModifiers(softcap, s_aux, mask, dropout)
        step_out = attend_step(rule, rotation, positions, query, key, value, scale, modifiers)
        return step_out.transpose(1, 2).contiguous(), None
    in_order = positions.left_padding is not None  # else a distance may exceed the number of keys
    bias = rule.score_bias(query.shape[1], positions.total if in_order else UNBOUNDED)
    modifiers = ScoreModifiers(softcap, s_aux, mask, dropout, bias)
    # (rows, heads, tokens, head_dim); transformers reshapes what is returned to (rows, tokens, heads * head_dim).
    out = attend(rule, rotation, positions, query, key, value, scale, modifiers)
    return out.transpose(1, 2).contiguous(), None


def _remapped_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask that transformers passes to `remapped_attention`.

    Causality, a window and padding follow from the rule and the positions, so that the padding mask of the call is
    enough, and no (length, length) tensor is made. A model that asks for more gets the whole mask of transformers.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if kwargs.get("mask_function") is causal_mask_function or is_sliding(kwargs):
        mask: Tensor | None = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and mask.shape[1] < kwargs["kv_length"]:
            # A static cache has empty places after the tokens. A mask of one shape at every step is compiled once.
            mask = nn.functional.pad(mask, (0, kwargs["kv_length"] - mask.shape[1]), value=True)
        return mask
    whole: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return whole


def register() -> None:
    """Add the functions of remapping methods to transformers' tables, and their operator to torch's."""
    _register_operator()
    register_attention(ATTENTION_NAME, remapped_attention, _remapped_mask)

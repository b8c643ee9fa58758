"""Find out what each attention layer of a model does with its rotary embedding, by running a few tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable, TokenPositions
from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.methods.base import UNBOUNDED, Rotary
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition, RemappingMethod, ReRoPE
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.attention_function import attend_from_kwargs
from rope_ext_hf.patches.attention_interface import (
    PROBE_NAME,
    PROBE_RECORDS,
    UNSUPPORTED_KWARGS,
    Layer,
    attending,
    evaluating,
    is_sliding,
    places_of_attention,
)
from rope_ext_hf.patches.decoder_arguments import check_names
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.forward_hooks import decoder_of
from rope_ext_hf.patches.slots import PatchedSlot, Slot
from rope_ext_hf.rotary.kv_cache import candidate_key_layouts, nearly_equal


@dataclass(frozen=True)
class _ProbeRecord:
    """The arguments of one call of an attention function."""

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    refused: str | None  # why a remapping method cannot run this attention; None: it can


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Record the arguments and return zeros, so that later layers get the same whatever the rotation is."""
    records = PROBE_RECORDS.get()
    assert records is not None
    refused = next((name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None), None)
    if not getattr(module, "is_causal", True):
        refused = "attention that is not causal"
    if isinstance(getattr(module, "indexer", None), nn.Module):
        refused = "an index with rotated keys of its own, by which it chooses the keys that a query sees"
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        added = attention_mask[(attention_mask != 0) & (attention_mask > torch.finfo(attention_mask.dtype).min / 2)]
        refused = "a mask of its own, which adds to the scores of some keys" if added.numel() else refused
    if refused is None and not _computes_the_same(module, query, key, value, kwargs):
        from transformers import __version__

        given = ", ".join(sorted(name for name, value in kwargs.items() if value is not None))
        refused = f"attention that this package does not compute in transformers {__version__} (called with {given})"
    window = kwargs.get("sliding_window") or getattr(attention_mask, _WINDOW, None)
    records.append(_ProbeRecord(module, query, key, window, refused))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


def _computes_the_same(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether our attention and that of the module's class agree on random numbers of these shapes.

    Keywords of attention functions are read by their names, so that a scale, soft cap or sink under a new one would be
    missed. What keywords mean is what the class does with them in its `eager_attention_forward`. True: they agree, or
    there is nothing to compare with.
    """
    names = (each.__module__ for each in type(module).__mro__)
    own = next((f for each in names if (f := getattr(sys.modules.get(each), "eager_attention_forward", None))), None)
    if own is None or key.shape[-2] != query.shape[-2] or query.device.type == "meta":
        return True
    draws, at = torch.Generator().manual_seed(0), torch.arange(_COMPARED, device=query.device)[None]
    # In float64 no product is rounded as TensorFloat-32, which other devices lack together with it.
    kind: dict[str, Any] = {
        "device": query.device,
        "dtype": torch.float64 if query.device.type in ("cpu", "cuda") else torch.float32,
    }
    q, k, v = (
        torch.randn(*each.shape[:2], _COMPARED, each.shape[-1], generator=draws).to(**kind)
        for each in (query, key, value)
    )
    # Scores of 16 standard deviations, because a soft cap leaves small ones as they are.
    width = query.shape[-1] ** 0.5
    q *= 16 / (width * (kwargs.get("scaling") or 1 / width))
    mask = torch.full((1, 1, _COMPARED, _COMPARED), torch.finfo(q.dtype).min, **kind).triu(1)
    try:
        expected = own(module, q, k, v, mask, **kwargs)[0]
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError):
        return True
    placed = TokenPositions(at, at, (0,) * len(q), None)
    actual, _ = attend_from_kwargs(LocalAttention(None), None, placed, q, k, v, None, **kwargs)
    # Not "at most": weights that are not numbers have an error of their own.
    return not bool((actual - expected).abs().max() > _ROUNDING)


_COMPARED = 32
"""Tokens by which attention is compared with that of the model's class."""
_ROUNDING = 1e-3
"""The largest difference that counts as rounding. Where no keyword is missed, differences are about 1e-6."""


def _probe_mask(*args: Any, **kwargs: Any) -> Any:
    """A whole mask, because some decoders read it themselves before their attention is called.

    It carries its window, which some attention modules do not pass on to their function (PhiMoE, Qwen2-MoE).
    """
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    if isinstance(mask, Tensor) and is_sliding(kwargs):
        setattr(mask, _WINDOW, kwargs["local_size"])
    return mask


_WINDOW = "rope_ext_hf_window"


def probe_layers(
    model: nn.Module, slots: Sequence[Slot], method: RemappingMethod, rotary: Rotary
) -> list[tuple[nn.Module, Layer]]:
    """Every attention module of a model with how it is to attend under a remapping method."""
    slots = [slot for slot in slots if not slot.idle]
    decoders = {id(each): each for each in (decoder_of(model, slot.parent) for slot in slots)}
    if len(decoders) != 1 or len({slot.layout for slot in slots}) != 1 or not all(slot.scaled_layers for slot in slots):
        raise UnsupportedModelError(
            f"a remapping method needs one rotary embedding for all layers of one decoder, and {type(model).__name__} "
            f"has {len(slots)} of {len(decoders)}; use a frequency method"
        )
    slot, decoder = slots[0], next(iter(decoders.values()))
    check_names(decoder)  # under another name the positions of the probe would be passed over
    assert method.max_distance is not None
    _check_sharding(model, decoder, method)
    plain = method.frequency or Default()
    # Keys at position 0 differ from those at any other, which not every method's own places for cached keys do.
    at_zero = ReRoPE(window=1, max_distance=method.max_distance, temperature="none", frequency=method.frequency)
    near = torch.arange(4)[None]
    far = method.max_distance + torch.tensor([[1, 2, 5, 9]])
    device = _device_of_input(decoder, model)
    records: list[_ProbeRecord] = []
    recording = attending(model, PROBE_NAME, _probe_attention, _probe_mask, PROBE_RECORDS, records)
    runs = []
    with evaluating(model), torch.no_grad(), recording:
        for installed, at in ((plain, near), (plain, far), (at_zero, far)):
            modules = [(each, PatchedSlot(each, installed, rotary, None)) for each in slots]
            runs.append(_run(decoder, modules, at.to(device), records))
    places_of_attention(decoder, [record.module for record in runs[0]], method.name)
    own_temperature = family(slot.config.model_type).own_temperature
    table = RotationTable(plain.frequencies(rotary).inv_freq)
    layers = [
        (of_layer[0].module, _layer(of_layer, method, rotary, table, near, far, own_temperature))
        for of_layer in zip(*runs, strict=True)
    ]
    if not any(layer.rule is method for _, layer in layers):
        raise UnsupportedModelError(
            f"no layer of this {slot.config.model_type!r} model both rotates and attends to everything before it; a "
            "remapping method would change nothing"
        )
    return layers


def is_partitioned(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 has partitioned the weights of a model, so that parameters here are empty."""
    return any(not parameter.numel() and hasattr(parameter, "ds_shape") for parameter in model.parameters())


def _check_sharding(model: nn.Module, decoder: nn.Module, method: RemappingMethod) -> None:
    """Check that the weights are whole, or split by heads over processes that all apply the patch (tensor parallel)."""
    if is_partitioned(decoder):
        raise UnsupportedModelError(
            f"the weights of {type(decoder).__name__} are partitioned over processes (DeepSpeed ZeRO-3), and a "
            "remapping method runs a few tokens through the model when it is patched; patch it inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters()))"
        )
    sharding = sys.modules.get("torch.distributed.tensor")  # without it there are no sharded weights
    if sharding is None or not any(isinstance(parameter, sharding.DTensor) for parameter in decoder.parameters()):
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        raise UnsupportedModelError(
            f"the weights of {type(decoder).__name__} are sharded over devices (FSDP2), and a remapping method runs "
            "a few tokens through the model when it is patched; patch it first, then shard it (fully_shard)"
        )
    if type(method).score_bias is not RemappingMethod.score_bias:
        raise UnsupportedModelError(
            f"the heads of {type(decoder).__name__} are split over devices, and {method.name} has a bias for each "
            "head; use another method, or one device"
        )


def _layer(
    records: tuple[_ProbeRecord, ...],
    method: RemappingMethod,
    rotary: Rotary,
    table: RotationTable,
    near: Tensor,
    far: Tensor,
    own_temperature: bool,
) -> Layer:
    """How a layer is to attend, from its queries and keys at near positions, at far ones, and at 0."""
    at_near, at_far, at_stored = records
    name = type(at_near.module).__name__
    if at_near.refused:
        raise UnsupportedModelError(
            f"{name} has {at_near.refused}, which remapping methods do not support; use a frequency method (yarn, ntk)"
        )
    for record in records:
        if not (record.key.isfinite().all() and record.query.isfinite().all()):
            raise UnsupportedModelError(
                f"queries or keys of {name} are not finite numbers (NaN or infinity) for ordinary tokens: weights of "
                "this model are damaged, or too large for its dtype; load it again, or in float32"
            )
    if at_near.key.shape[-2] != at_near.query.shape[-2]:
        raise UnsupportedModelError(
            f"{name} has {at_near.key.shape[-2]} keys for {at_near.query.shape[-2]} tokens (it compresses them), so "
            "that a key has no position of its own that a remapping method could move"
        )
    if not method.moves_keys:  # so that it does not matter how the layer rotates
        if at_near.window is not None:
            return Layer(LocalAttention(at_near.window, method), None)
        if (bias := method.score_bias(at_near.query.shape[1], UNBOUNDED)) is not None:
            bias(near, near)  # it raises where it is for another number of heads
        return Layer(method, None)
    if nearly_equal(at_stored.key, at_far.key) and nearly_equal(at_stored.query, at_far.query):
        # No rotation, or one by a rotary module of its own. Queries that are alike at all positions have no temperature
        # of their own either: where such a layer attends to everything, that of the method is all it can be given.
        still = nearly_equal(at_near.key, at_far.key) and nearly_equal(at_near.query, at_far.query)
        temperature = method if still and at_near.window is None else None
        return Layer(LocalAttention(at_near.window, temperature=temperature), None)
    device = at_near.key.device
    moved = table.between(RemappedPosition(near), RemappedPosition(far), device)
    stored = table.between(RemappedPosition(near), RemappedPosition(), device)
    for layout in candidate_key_layouts(at_near.key.shape[-1], rotary.dim):
        if all(
            nearly_equal(rotation.apply(at_near.key, layout), later.key)
            and _same_queries(rotation.apply(at_near.query, layout), later.query, own_temperature)
            for rotation, later in ((moved, at_far), (stored, at_stored))
        ):
            rule: AttentionRule = method if at_near.window is None else LocalAttention(at_near.window, method)
            return Layer(rule, Rotation(table, layout))
    raise UnsupportedModelError(
        f"{name} does more with its queries and keys after rotating them than a remapping method can undo (a norm "
        "after the rotation, or another arrangement of its dims)"
    )


def _same_queries(query: Tensor, other: Tensor, own_temperature: bool) -> bool:
    """Whether queries (1, heads, tokens, head_dim) are equal but for rounding, and for a temperature of their own.

    Such attention multiplies the queries of all heads by a number that depends on their position.
    """
    if own_temperature:
        norms = [x.float().square().sum((1, 3), keepdim=True).sqrt() for x in (other, query)]
        query = query * (norms[0] / norms[1]).to(query.dtype)
    return nearly_equal(query, other)


def _device_of_input(*modules: Any) -> torch.device:
    """The device of the input embeddings of the first of these modules that names them."""
    for module in modules:
        try:
            device: torch.device = next(module.get_input_embeddings().parameters()).device
        except (AttributeError, NotImplementedError):  # as a model of several language models has it
            continue
        return torch.device("cpu") if device.type == "meta" else device  # offloaded: its hooks move what comes
    raise UnsupportedModelError(f"{type(modules[-1]).__name__} does not name its input embeddings")


def _run(
    decoder: nn.Module, slots: list[tuple[Slot, PatchedSlot]], positions: Tensor, records: list[_ProbeRecord]
) -> list[_ProbeRecord]:
    """Run a few tokens at these positions, with these modules in the slots; what the attention modules recorded."""
    records.clear()
    ids = torch.arange(3, 3 + positions.shape[1], device=positions.device)[None]
    with ExitStack() as stack:
        for slot, module in slots:
            stack.callback(setattr, slot.parent, slot.attribute, getattr(slot.parent, slot.attribute))
            setattr(slot.parent, slot.attribute, module)
        try:
            decoder(input_ids=ids, position_ids=positions, use_cache=False)
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise UnsupportedModelError(
                f"{type(decoder).__name__} does not run on four tokens without a cache, which a remapping method needs "
                f"to find out how it attends: {one_line(error)}"
            ) from error
    if not records:
        raise UnsupportedModelError(
            f"the attention of {type(decoder).__name__} does not go through transformers' attention interface, so a "
            "remapping method cannot replace it; use a frequency method"
        )
    return list(records)

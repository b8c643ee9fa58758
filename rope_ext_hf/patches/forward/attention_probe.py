"""Find out what each attention layer of a model does with its rotary embedding, by running a few tokens.

A remapping method must rotate queries and keys on from where the layer has rotated them, so it must know how the layer
rotates. The same four tokens are run three times: at near positions, at positions beyond the limit of the method, and
with the rotary module of a method that stores all keys at position 0. Attention is replaced by a function that records
queries and keys and returns zeros, so that nothing but the rotation differs between the runs. If rotating the first
keys by the difference of the positions gives those of the other runs, the layer is understood.
"""

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
from rope_ext_hf.models.decoder_arguments import check_names, is_of_transformers, package_of_forward
from rope_ext_hf.models.families import family
from rope_ext_hf.models.temporary import trying
from rope_ext_hf.models.weights_at_hand import is_partitioned
from rope_ext_hf.patches.forward.attention_function import attend_from_kwargs
from rope_ext_hf.patches.forward.attention_interface import (
    PROBE_NAME,
    PROBE_RECORDS,
    UNSUPPORTED_KWARGS,
    Layer,
    attending,
    is_sliding,
    places_of_attention,
)
from rope_ext_hf.patches.forward.decoders import decoder_of
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, Slot
from rope_ext_hf.rotary.key_rotation import KeyLayout, candidate_key_layouts, nearly_equal


@dataclass(frozen=True)
class _ProbeRecord:
    """The arguments of one call of an attention function, recorded while tokens are run to probe a model."""

    module: nn.Module
    query: Tensor  # (1, heads, tokens, head_dim)
    key: Tensor  # (1, key heads, tokens, head_dim)
    window: int | None  # keys that a query sees, itself included; None: all before it
    refused: str | None  # what a remapping method cannot run here; None: nothing


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Record the arguments of an attention call; return zeros, so that the rotation does not affect later layers."""
    records = PROBE_RECORDS.get()
    assert records is not None
    refused = _unsupported(module, query, key, value, attention_mask, kwargs)
    window = kwargs.get("sliding_window") or getattr(attention_mask, _WINDOW, None)
    records.append(_ProbeRecord(module, query, key, window, refused))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


def _unsupported(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, kwargs: Mapping[str, Any]
) -> str | None:
    """Return a name for the part of an attention call that a remapping method cannot run; None if it can run all."""
    refused = next((name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None), None)
    if not getattr(module, "is_causal", True):
        refused = "attention that is not causal"
    if isinstance(getattr(module, "indexer", None), nn.Module):
        refused = "an index with rotated keys of its own, by which it chooses the keys that a query sees"
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        # A mask of causality and padding holds 0 and the lowest number only.
        added = attention_mask[(attention_mask != 0) & (attention_mask > torch.finfo(attention_mask.dtype).min / 2)]
        if added.numel():
            refused = "a mask of its own, which adds to the scores of some keys"
    if refused is None and not _computes_the_same(module, query, key, value, kwargs):
        from transformers import __version__

        release = f" in transformers {__version__}" if is_of_transformers(module) else ""
        keywords = ", ".join(sorted(name for name, value in kwargs.items() if value is not None))
        refused = f"attention that this package does not compute{release} (called with {keywords})"
    return refused


def _computes_the_same(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether our attention and that of the module's class agree on random numbers of these shapes.

    Our function reads the keywords of an attention function by their names, so that it would miss a scale, a soft cap
    or a sink under a new name. The meaning of a keyword is its effect in the `eager_attention_forward` of the class.
    True also where there is nothing to compare with.
    """
    eager = _eager_attention(module)
    if eager is None or key.shape[-2] != query.shape[-2] or query.device.type == "meta":
        return True
    draws, at = torch.Generator().manual_seed(0), torch.arange(_TOKENS_COMPARED, device=query.device)[None]
    # In float64 no product is rounded to TensorFloat-32. Devices other than CPU and CUDA have neither type.
    dtype = torch.float64 if query.device.type in ("cpu", "cuda") else torch.float32
    q, k, v = (
        torch.randn(*x.shape[:2], _TOKENS_COMPARED, x.shape[-1], generator=draws).to(query.device, dtype)
        for x in (query, key, value)
    )
    # Scores of 16 standard deviations, because a soft cap leaves small ones as they are.
    width = query.shape[-1] ** 0.5
    q *= 16 / (width * (kwargs.get("scaling") or 1 / width))
    lowest = torch.finfo(dtype).min
    mask = torch.full((1, 1, _TOKENS_COMPARED, _TOKENS_COMPARED), lowest, device=query.device, dtype=dtype).triu(1)
    try:
        expected = eager(module, q, k, v, mask, **kwargs)[0]
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError):
        return True
    positions = TokenPositions(at, at, (0,) * len(q), None)
    actual, _ = attend_from_kwargs(LocalAttention(None), None, positions, q, k, v, None, **kwargs)
    # NaN counts as agreement: weights that are not numbers have an error of their own.
    return not bool((actual - expected).abs().max() > _ROUNDING)


def _eager_attention(module: nn.Module) -> Any:
    """Return the `eager_attention_forward` of the file of a module's class, or of a class it derives from, or None."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    return None


_TOKENS_COMPARED = 32
"""The number of tokens on which our attention is compared with that of the model's class."""
_ROUNDING = 1e-3
"""The largest difference that counts as rounding. Where no keyword is missed, differences are about 1e-6."""


def _probe_mask(*args: Any, **kwargs: Any) -> Any:
    """Return a whole attention mask, because some decoders read it themselves before their attention is called.

    The mask carries its window as an attribute: some attention modules do not pass it on to their function (PhiMoE,
    Qwen2-MoE).
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
    """Return every attention module of a model with the `Layer` that states how it attends under a remapping method.

    Args:
        model: the model; it is unchanged afterwards.
        slots: its rotary modules.
        method: the method, with all parameters filled in for the trained length.
        rotary: the rotary embedding that the method extends.

    Raises:
        UnsupportedModelError: the model has attention that the method cannot run, or no layer that it would change.
    """
    slots = [slot for slot in slots if not slot.idle]
    decoder = _only_decoder(model, slots)
    check_names(decoder)  # under another name the positions of the probe would be passed over
    _check_sharding(model, decoder, method)
    assert method.max_distance is not None
    plain = method.frequency or Default()
    # The keys of this method are stored at position 0. Those of `method` may be stored where plain ones are, too.
    at_zero = ReRoPE(window=1, max_distance=method.max_distance, temperature="none", frequency=method.frequency)
    near = torch.arange(4)[None]
    far = method.max_distance + torch.tensor([[1, 2, 5, 9]])
    device = _device_of_input(decoder, model)
    records: list[_ProbeRecord] = []
    recording = attending(model, PROBE_NAME, _probe_attention, _probe_mask, PROBE_RECORDS, records)
    runs = []
    with trying(model), torch.no_grad(), recording:
        for installed, positions in ((plain, near), (plain, far), (at_zero, far)):
            modules = [(slot, PatchedRotaryEmbedding(slot, installed, rotary, None)) for slot in slots]
            runs.append(_run(decoder, modules, positions.to(device), records))
    places_of_attention(decoder, [record.module for record in runs[0]], method.name)
    reader = _LayerReader(
        method=method,
        rotary=rotary,
        table=RotationTable(plain.frequencies(rotary).inv_freq),
        near=near,
        far=far,
        own_temperature=family(slots[0].config.model_type).own_temperature,
    )
    layers = [(calls[0].module, reader.layer(*calls)) for calls in zip(*runs, strict=True)]
    if not any(layer.rule is method for _, layer in layers):
        raise UnsupportedModelError(
            f"no layer of this {slots[0].config.model_type!r} model both rotates and attends to everything before it; "
            "a remapping method would change nothing"
        )
    return layers


def _only_decoder(model: nn.Module, slots: Sequence[Slot]) -> nn.Module:
    """Return the decoder of a model, which must have exactly one, with one rotary embedding for all its layers."""
    decoders: dict[int, nn.Module] = {}
    for slot in slots:
        decoder = decoder_of(model, slot.parent)
        decoders[id(decoder)] = decoder
    layouts = {slot.layout for slot in slots}
    if len(decoders) != 1 or len(layouts) != 1 or not all(slot.scaled_layers for slot in slots):
        raise UnsupportedModelError(
            f"a remapping method needs one rotary embedding for all layers of one decoder, but {type(model).__name__} "
            f"has {len(slots)} (decoders: {len(decoders)}); use a frequency method"
        )
    return next(iter(decoders.values()))


def _check_sharding(model: nn.Module, decoder: nn.Module, method: RemappingMethod) -> None:
    """Check that the weights are here, so that tokens can be run through them.

    Weights that are split by heads over processes pass (tensor parallelism): all of these processes apply the patch.

    Raises:
        UnsupportedModelError: they are partitioned or sharded in another way, or the method treats each head apart.
    """
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


@dataclass(frozen=True)
class _LayerReader:
    """A reader of three probe runs, which derives from a layer's attention calls how the layer is to attend.

    Attributes:
        method: the remapping method of the patch.
        rotary: the rotary embedding that it extends.
        table: the angles of the frequencies that the runs rotated by.
        near: the positions of the first run, (1, tokens).
        far: the positions of the other runs, (1, tokens).
        own_temperature: the attention of this family multiplies queries by a number that depends on their position.
    """

    method: RemappingMethod
    rotary: Rotary
    table: RotationTable
    near: Tensor
    far: Tensor
    own_temperature: bool

    def layer(self, at_near: _ProbeRecord, at_far: _ProbeRecord, at_stored: _ProbeRecord) -> Layer:
        """Return how a layer is to attend, from its calls at near positions, at far ones, and with keys stored at 0.

        Raises:
            UnsupportedModelError: the method cannot run this attention.
        """
        _check_calls(at_near, at_far, at_stored)
        method, window = self.method, at_near.window
        if not method.moves_keys:  # so that it does not matter how the layer rotates
            if window is not None:
                return Layer(LocalAttention(window, method), None)
            bias = method.score_bias(at_near.query.shape[1], UNBOUNDED)
            if bias is not None:
                bias(self.near, self.near)  # raises where the bias is for another number of heads
            return Layer(method, None)
        if nearly_equal(at_stored.key, at_far.key) and nearly_equal(at_stored.query, at_far.query):
            # The rotary module of the slot has no effect: the layer does not rotate, or has a rotary module of its own.
            # One that does not rotate, and has no temperature of its own, has the same queries at all positions. If it
            # attends to everything, the temperature of the method is all that the method can give it.
            unrotated = nearly_equal(at_near.key, at_far.key) and nearly_equal(at_near.query, at_far.query)
            temperature = method if unrotated and window is None else None
            return Layer(LocalAttention(window, temperature=temperature), None)
        layout = self._key_layout(at_near, at_far, at_stored)
        if layout is None:
            raise UnsupportedModelError(
                f"{type(at_near.module).__name__} does more with its queries and keys after rotating them than a "
                "remapping method can undo (a norm after the rotation, or another arrangement of its dims)"
            )
        rule: AttentionRule = method if window is None else LocalAttention(window, method)
        return Layer(rule, Rotation(self.table, layout))

    def _key_layout(self, at_near: _ProbeRecord, at_far: _ProbeRecord, at_stored: _ProbeRecord) -> KeyLayout | None:
        """Return which dims of a head rotate and how they are paired, found by trying the possible layouts.

        Under the right layout, a rotation of the near queries and keys gives those of both other runs. None: no layout
        does so.
        """
        device = at_near.key.device
        near = RemappedPosition(self.near)
        to_far = self.table.between(near, RemappedPosition(self.far), device)
        to_stored = self.table.between(near, RemappedPosition(), device)
        for layout in candidate_key_layouts(at_near.key.shape[-1], self.rotary.dim):
            if all(
                nearly_equal(rotation.apply(at_near.key, layout), later.key)
                and _same_queries(rotation.apply(at_near.query, layout), later.query, self.own_temperature)
                for rotation, later in ((to_far, at_far), (to_stored, at_stored))
            ):
                return layout
        return None


def _check_calls(*calls: _ProbeRecord) -> None:
    """Check that a remapping method can run the attention in these recorded calls, and that all values are finite."""
    first = calls[0]
    name = type(first.module).__name__
    if first.refused:
        raise UnsupportedModelError(
            f"{name} has {first.refused}, which remapping methods do not support; use a frequency method (yarn, ntk)"
        )
    for call in calls:
        if not (call.key.isfinite().all() and call.query.isfinite().all()):
            raise UnsupportedModelError(
                f"queries or keys of {name} are not finite numbers (NaN or infinity) for ordinary tokens: weights of "
                "this model are damaged, or too large for its dtype; load it again, or in float32"
            )
    if first.key.shape[-2] != first.query.shape[-2]:
        raise UnsupportedModelError(
            f"{name} has {first.key.shape[-2]} keys for {first.query.shape[-2]} tokens (it compresses them), so "
            "that a key has no position of its own that a remapping method could move"
        )


def _same_queries(query: Tensor, other: Tensor, own_temperature: bool) -> bool:
    """Return whether queries (1, heads, tokens, head_dim) are equal but for rounding.

    `own_temperature`: the model multiplies the queries of all heads by a number that depends on their position, which
    does not count as a difference.
    """
    if own_temperature:
        other_norm, norm = (x.float().square().sum((1, 3), keepdim=True).sqrt() for x in (other, query))
        query = query * (other_norm / norm).to(query.dtype)
    return nearly_equal(query, other)


def _device_of_input(*modules: Any) -> torch.device:
    """Return the device of the input embeddings of the first of these modules that names them."""
    for module in modules:
        try:
            device: torch.device = next(module.get_input_embeddings().parameters()).device
        except (AttributeError, NotImplementedError):  # a model of several language models names none
            continue
        # On the meta device while they are offloaded: hooks of accelerate then move the input where it is needed.
        return torch.device("cpu") if device.type == "meta" else device
    raise UnsupportedModelError(
        f"{type(modules[-1]).__name__} does not name its input embeddings: its get_input_embeddings must return the "
        "one module that embeds token ids. Use a frequency method (yarn, ntk), which does not need it"
    )


def _run(
    decoder: nn.Module, slots: list[tuple[Slot, PatchedRotaryEmbedding]], positions: Tensor, records: list[_ProbeRecord]
) -> list[_ProbeRecord]:
    """Run a few tokens through a decoder, and return the calls of its attention functions.

    Args:
        slots: the slots of the decoder, with the module that stands in each during the run.
        positions: (1, tokens), the positions of the tokens.
        records: the list in which `_probe_attention` records the calls.

    Raises:
        UnsupportedModelError: the decoder does not run on a few tokens, or calls no attention function by name.
    """
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
        way_out = "use a frequency method"
        packages = {package_of_forward(module) for module in decoder.modules()}
        if packages - {"transformers", "torch", "rope_ext_hf"}:
            way_out += (
                ", or let its attention modules call ALL_ATTENTION_FUNCTIONS of transformers by the name "
                "config._attn_implementation (docs/own-models.md)"
            )
        raise UnsupportedModelError(
            f"the attention of {type(decoder).__name__} does not go through transformers' attention interface, so a "
            f"remapping method cannot replace it; {way_out}"
        )
    return list(records)

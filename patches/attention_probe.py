"""Find out what each attention layer of a model does with its rotary embedding, by running a few tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import AttentionRule, LocalAttention, Rotation, RotationTable
from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.attention_interface import (
    PROBE_NAME,
    PROBE_RECORDS,
    UNSUPPORTED_KWARGS,
    Layer,
    register_attention,
    use_attention,
)
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.forward_hooks import decoder_of
from rope_ext_hf.patches.slots import PatchedSlot, Slot
from rope_ext_hf.rotary.kv_cache import candidate_key_layouts, nearly_equal

__all__ = ["probe_layers"]


@dataclass(frozen=True)
class _ProbeRecord:
    """The arguments of one call of an attention function.

    Attributes:
        refused: why a remapping method cannot run this attention; None: it can.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    refused: str | None


def probe_attention(
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
    records.append(_ProbeRecord(module, query, key, kwargs.get("sliding_window"), refused))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


def probe_mask(*args: Any, **kwargs: Any) -> Any:
    """A whole mask, because some decoders read it themselves before their attention is called."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


def probe_layers(
    model: nn.Module, slots: Sequence[Slot], method: RemappingMethod, rotary: Rotary
) -> list[tuple[nn.Module, Layer]]:
    """Every attention module of a model with how it is to attend under a remapping method.

    Raises:
        UnsupportedModelError: attention that cannot be taken over, with the reason.
    """
    if len(slots) != 1:
        raise UnsupportedModelError(
            f"a remapping method needs a model with one rotary module, and {type(model).__name__} has {len(slots)}; "
            "use a frequency method"
        )
    (slot,) = slots
    assert method.max_distance is not None
    decoder = decoder_of(model, slot.parent)
    _check_whole(decoder)
    plain = method.frequency or Default()
    near = torch.arange(4)[None]
    far = method.max_distance + torch.tensor([[1, 2, 5, 9]])
    with _probing(model):
        at_near = _run(model, decoder, slot, plain, rotary, near)
        at_far = _run(model, decoder, slot, plain, rotary, far)
        at_stored = _run(model, decoder, slot, method, rotary, far)
    own_temperature = family(slot.config.model_type).own_temperature
    table = RotationTable(plain.frequencies(rotary).inv_freq)
    layers = [
        (a.module, _layer(a, b, c, method, rotary, table, near, far, own_temperature))
        for a, b, c in zip(at_near, at_far, at_stored, strict=True)
    ]
    if not any(layer.rule is method for _, layer in layers):
        raise UnsupportedModelError(
            f"no layer of this {slot.config.model_type!r} model both rotates and attends to everything before it; a "
            "remapping method would change nothing"
        )
    return layers


def _check_whole(decoder: nn.Module) -> None:
    sharding = sys.modules.get("torch.distributed.tensor")  # without it there are no sharded weights
    if sharding is not None and any(isinstance(parameter, sharding.DTensor) for parameter in decoder.parameters()):
        raise UnsupportedModelError(
            f"the weights of {type(decoder).__name__} are sharded over devices (DTensor), and a remapping method runs "
            "a few tokens through the model when it is patched; patch it first, then shard it (fully_shard)"
        )


def _layer(
    at_near: _ProbeRecord,
    at_far: _ProbeRecord,
    at_stored: _ProbeRecord,
    method: RemappingMethod,
    rotary: Rotary,
    table: RotationTable,
    near: Tensor,
    far: Tensor,
    own_temperature: bool,
) -> Layer:
    """How a layer is to attend, from its queries and keys at near positions, at far ones, and at `key_position`."""
    name = type(at_near.module).__name__
    if at_near.refused:
        raise UnsupportedModelError(f"{name} has {at_near.refused}, which remapping methods do not support")
    for record in (at_near, at_far, at_stored):
        if not (record.key.isfinite().all() and record.query.isfinite().all()):
            raise UnsupportedModelError(
                f"queries or keys of {name} are not finite numbers (NaN or infinity) for ordinary tokens: weights of "
                "this model are damaged, or too large for its dtype; load it again, or in float32"
            )
    if method.zones == 1:  # no position changes, so that it does not matter how the layer rotates
        if at_near.window is not None:
            return Layer(LocalAttention(at_near.window, method), None)
        if (bias := method.score_bias(at_near.query.shape[1], UNBOUNDED)) is not None:
            bias(near, near)  # it raises where it is for another number of heads
        return Layer(method, None)
    if nearly_equal(at_stored.key, at_far.key) and nearly_equal(at_stored.query, at_far.query):
        return Layer(LocalAttention(at_near.window), None)  # no rotation, or one by a rotary module of its own
    device = at_near.key.device
    moved = table.between(RemappedPosition(near), RemappedPosition(far), device)
    stored = table.between(RemappedPosition(near), method.key_position(far), device)
    for layout in candidate_key_layouts(at_near.key.shape[-1], rotary.dim):
        if all(
            nearly_equal(rotation.apply(at_near.key, layout), later.key)
            and nearly_equal(
                _scaled_like(rotation.apply(at_near.query, layout), later.query, own_temperature), later.query
            )
            for rotation, later in ((moved, at_far), (stored, at_stored))
        ):
            rule: AttentionRule = method if at_near.window is None else LocalAttention(at_near.window, method)
            return Layer(rule, Rotation(table, layout))
    raise UnsupportedModelError(
        f"{name} does more with its queries and keys after rotating them than a remapping method can undo (a norm "
        "after the rotation, or another arrangement of its dims)"
    )


def _scaled_like(query: Tensor, other: Tensor, own_temperature: bool) -> Tensor:
    """Queries (1, heads, tokens, head_dim) with the length that others have at each token, over all heads together.

    Attention with a temperature of its own multiplies queries by a number that depends on their position.
    """
    if not own_temperature:
        return query
    norms = [x.float().square().sum((1, 3), keepdim=True).sqrt() for x in (other, query)]
    return query * (norms[0] / norms[1]).to(query.dtype)


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """Keep the model in eval mode, with attention that records its arguments."""
    register_attention(PROBE_NAME, probe_attention, probe_mask)
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    token = PROBE_RECORDS.set([])
    try:
        with use_attention(model, PROBE_NAME), torch.no_grad():
            yield
    finally:
        PROBE_RECORDS.reset(token)
        for module in training:
            module.training = True


def _run(
    model: nn.Module, decoder: nn.Module, slot: Slot, method: RopeMethod, rotary: Rotary, positions: Tensor
) -> list[_ProbeRecord]:
    """Run a few tokens at these positions, with a method in the slot."""
    records = PROBE_RECORDS.get()
    assert records is not None
    records.clear()
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: its hooks move what comes
    occupant = getattr(slot.parent, slot.attribute)
    ids = torch.arange(3, 3 + positions.shape[1], device=device)[None]
    with ExitStack() as stack:
        stack.callback(setattr, slot.parent, slot.attribute, occupant)
        setattr(slot.parent, slot.attribute, PatchedSlot(slot, method, rotary, None))
        try:
            decoder(input_ids=ids, position_ids=positions.to(device), use_cache=False)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
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

"""Find out what each attention layer of a model does with its rotary embedding, by running a few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import AttentionRule, LocalAttention, Rotation, RotationTable
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.attention_interface import PROBE_NAME, UNSUPPORTED_KWARGS, register_attention, use_attention
from rope_ext_hf.patches.forward_context import PROBE_RECORDS, ForwardTracker, Layer
from rope_ext_hf.patches.slots import PatchedSlot, Slot
from rope_ext_hf.rotary.kv_cache import candidate_key_layouts, nearly_equal

__all__ = ["probe_layers"]


@dataclass(frozen=True)
class _ProbeRecord:
    """What an attention function was called with."""

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    refused: str | None


def probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Writes down what it gets and adds nothing, so that what later layers get does not depend on any rotation."""
    records = PROBE_RECORDS.get()
    assert records is not None
    refused = next((name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None), None)
    if not getattr(module, "is_causal", True):
        refused = "attention that is not causal"
    records.append(_ProbeRecord(module, query, key, kwargs.get("sliding_window"), refused))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


def no_mask(*args: Any, **kwargs: Any) -> None: ...


def probe_layers(
    model: nn.Module, slots: Sequence[Slot], method: RemappingMethod, rotary: Rotary, tracker: ForwardTracker
) -> list[tuple[nn.Module, Layer]]:
    """What each attention module of a model must be told.

    Raises:
        UnsupportedModelError: attention that cannot be taken over, with the reason.
    """
    if len(slots) != 1:
        raise UnsupportedModelError(f"an attention-level method needs one rotary module, found {len(slots)}")
    (slot,) = slots
    assert method.max_distance is not None
    plain = method.frequency or Default()
    near = torch.arange(4)[None]
    far = method.max_distance + torch.tensor([[1, 2, 5, 9]])
    with _probing(model):
        here = _run(model, slot, plain, rotary, near)
        there = _run(model, slot, plain, rotary, far)
        stored = _run(model, slot, method, rotary, far)
    if not here:
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} does not go through transformers' attention interface"
        )
    table = RotationTable(plain.frequencies(rotary).inv_freq)
    layers = [
        (a.module, _layer(a, b, c, method, rotary, table, near, far, tracker))
        for a, b, c in zip(here, there, stored, strict=True)
    ]
    if not any(layer.rule is method for _, layer in layers):
        raise UnsupportedModelError(
            f"no layer of this {slot.config.model_type!r} model both rotates and attends to everything before it; an "
            "attention-level method would change nothing"
        )
    return layers


def _layer(
    here: _ProbeRecord,
    there: _ProbeRecord,
    stored: _ProbeRecord,
    method: RemappingMethod,
    rotary: Rotary,
    table: RotationTable,
    near: Tensor,
    far: Tensor,
    tracker: ForwardTracker,
) -> Layer:
    """One layer, from what it was given with positions near, far, and where far keys are stored."""
    name = type(here.module).__name__
    if here.refused:
        raise UnsupportedModelError(f"{name} has {here.refused}, which attention-level methods cannot do")
    if nearly_equal(stored.key, there.key) and nearly_equal(stored.query, there.query):
        return Layer(LocalAttention(here.window), None, tracker)  # no rotation, or one of its own
    device = here.key.device
    moved = table.between(RemappedPosition(near), RemappedPosition(far), device)
    kept = table.between(RemappedPosition(near), method.key_position(far), device)
    for layout in candidate_key_layouts(here.key.shape[-1], rotary.dim):
        if all(
            nearly_equal(turn.apply(before, layout), after)
            for turn, later in ((moved, there), (kept, stored))
            for before, after in ((here.key, later.key), (here.query, later.query))
        ):
            rule: AttentionRule = method if here.window is None else LocalAttention(here.window, method)
            return Layer(rule, Rotation(table, layout), tracker)
    raise UnsupportedModelError(
        f"{name} does more with its queries and keys after rotating them than an attention-level method can undo (a "
        "norm after the rotation, or another arrangement of its dims)"
    )


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, its attention writing down what it gets."""
    register_attention(PROBE_NAME, probe_attention, no_mask)
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


def _run(model: nn.Module, slot: Slot, method: RopeMethod, rotary: Rotary, positions: Tensor) -> list[_ProbeRecord]:
    """A few tokens at these positions, with a method in the slot."""
    records = PROBE_RECORDS.get()
    assert records is not None
    records.clear()
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: its hooks move what comes
    standing = getattr(slot.parent, slot.attribute)
    ids = torch.arange(3, 3 + positions.shape[1], device=device)[None]
    with ExitStack() as stack:
        stack.callback(setattr, slot.parent, slot.attribute, standing)
        setattr(slot.parent, slot.attribute, PatchedSlot(slot, method, rotary, None))
        try:
            slot.parent(input_ids=ids, position_ids=positions.to(device), use_cache=False)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(slot.parent).__name__} cannot be run on a few tokens to see how it attends: {error}"
            ) from error
    return list(records)

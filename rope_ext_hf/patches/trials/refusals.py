"""Checks of models in training: of a trainer's second model, and of parallelism that cuts rows into parts.

TRL's trainers for preferences and rewards (DPO, KTO, GRPO, RLOO) compare the model in training with a second one, which
they load by the name in `model.config._name_or_path`. That one is unpatched, and no error says so; the only sign is
that the first loss of DPO is far from ln 2, which two equal models would give.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import nn

from rope_ext_hf.errors import FingerprintError, LengthError, MethodError, UnsupportedModelError, short
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.saved.fingerprint import fingerprint_of
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, active_patches, patched_slots, tables_of

__all__ = ["check_context_parallel", "check_trainers_above", "unwrapped"]

_SECOND_MODELS = {"ref_model": "reference model", "teacher_model": "teacher"}
"""Attributes of trainers that may hold a model loaded by name, and the names of these models in messages."""


def check_context_parallel(model: nn.Module) -> None:
    """Check that a model, patched or not, rotates correctly where each process holds only a part of every row.

    That is so under context or sequence parallelism. Call this inside `fixed_length` where you use that. In a Trainer
    with such parallelism, `RopeCallback` calls it.

    Raises:
        MethodError: the frequencies follow the length of the input, which each process would take from its own part,
            so that the processes would rotate by different frequencies; or the method is a remapping method, whose
            attention needs all keys.
        UnsupportedModelError: the model has no rotary embeddings that could be replaced.
    """
    rule = "under context parallelism each process holds only a part of every row"
    slots = patched_slots(model)
    for table in tables_of(slots):
        if isinstance(table.method, RemappingMethod):
            raise MethodError(
                f"{rule}, and {table.method.name} needs all keys at their places; choose a frequency method, such as "
                "yarn"
            )
        if table.length_dependent:
            raise MethodError(
                f"{rule}, and the frequencies of {table.method.name} follow the longest position of each part; hold "
                "one length: with rope_ext_hf.fixed_length(model, LENGTH): trainer.train()"
            )
    own_method = None if slots else ModelRope.of_model(model).own_length_dependent
    if own_method is not None:
        raise MethodError(
            f"{rule}, and the model's own {own_method} takes the length of the input from that part; patch the model "
            "with a static method, or patch it and hold one length with rope_ext_hf.fixed_length"
        )


def check_trainers_above(module: nn.Module | None = None) -> None:
    """Check the second model of every trainer that is running, found on the stack of calls.

    A trainer calls `model.train()` before each step, and the callbacks of its user, but gives itself to neither; the
    stack is the only way to find it.

    Args:
        module: check only the trainers of the model that this is a part of; None: all.

    Raises:
        FingerprintError: a second model was loaded by the name of the model in training, and rotates otherwise.
    """
    for trainer in _trainers(sys._getframe(1)):
        model = unwrapped(vars(trainer)["model"])
        if module is not None and not any(part is module for part in model.modules()):
            continue
        for attribute, title in _SECOND_MODELS.items():
            second = vars(trainer).get(attribute)
            if isinstance(second, nn.Module):
                _check(type(trainer).__name__, model, unwrapped(second), attribute, title)


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of data parallelism, compilers and engines."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return model


def _trainers(frame: FrameType | None) -> Iterator[Any]:
    """Yield the trainers whose methods are being called, innermost first: objects with a model and a second one."""
    seen: set[int] = set()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            attributes = getattr(owner, "__dict__", {})
            if id(owner) not in seen and not attributes.keys().isdisjoint(_SECOND_MODELS):
                seen.add(id(owner))
                if isinstance(attributes.get("model"), nn.Module):
                    yield owner
        frame = frame.f_back


def _check(trainer: str, model: Any, second: Any, attribute: str, title: str) -> None:
    """Check that the second model of a trainer rotates as the model in training does.

    `trainer`: the name of its class; `attribute`: where it holds the second model; `title`: the role of that model.
    """
    name = _name(model)
    if second is model or not name or _name(second) != name:
        return  # other weights, with a rotary embedding of their own
    sentences = _differences(model, second)
    if sentences:
        patched = f"{attribute}=rope_ext_hf.from_pretrained({short(name)!r}, method=...)"
        raise FingerprintError(
            f"the {title} of {trainer} was loaded by the name of the trained model, {short(name)!r}, without its "
            f"patch: {' '.join(sentences)} Choose one: (1) train an adapter (peft_config=LoraConfig(...)), which needs "
            f"no {title}; (2) if the trainer accepts one, give a patched {title}: {patched}; (3) under a method that "
            "plain transformers can load, save the patched model, and train the model that "
            f"rope_ext_hf.from_pretrained(FOLDER) loads; (4) if the {title} shall have no patch, give it another name: "
            f"{attribute}.config.name_or_path = 'unpatched'"
        )


def _name(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")


def _differences(model: nn.Module, second: nn.Module) -> list[str]:
    """Return sentences on how a second model rotates differently from the first; none where it does not.

    The lengths that the configs state are not compared, because they change no rotation by themselves.
    """
    try:
        expected, actual = fingerprint_of(model), fingerprint_of(second)
    except UnsupportedModelError:  # a family that rotates by a table
        methods, others = ([patch.method for patch in active_patches(loaded)] for loaded in (model, second))
        return [] if methods == others else ["It is patched otherwise."]
    return expected.differences(replace(actual, length=expected.length))


# --- continuous batching ------------------------------------------------------------------------------------------


class _CheckedBatching:
    """A model's `init_continuous_batching`, with a check before it.

    The forwards of continuous batching run in a thread of their own, whose errors reach a log and not the caller, so
    that the check must come when batching is set up. Inside `fixed_length` batching works; hence the check at each call
    and not when the model is patched.
    """

    def __init__(self, model: Any, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        self.model = model
        self.slots = slots
        model.__dict__["init_continuous_batching"] = self

    def remove(self) -> None:
        """Give the model the method of its class again."""
        self.model.__dict__.pop("init_continuous_batching", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(table.length_dependent for table in tables_of(self.slots)):
            raise LengthError(
                "continuous batching holds parts of many inputs in one cache, whose keys cannot follow the length of "
                f"each. {HOLD_ONE_LENGTH}"
            )
        return type(self.model).init_continuous_batching(self.model, *args, **kwargs)


def check_batching(model: nn.Module, slots: Sequence[PatchedRotaryEmbedding]) -> None:
    """Put a check before continuous batching of a model and of every model inside it; the first slot can undo it."""
    for module in model.modules():
        if hasattr(type(module), "init_continuous_batching"):
            slots[0].hooks.append(_CheckedBatching(module, slots))

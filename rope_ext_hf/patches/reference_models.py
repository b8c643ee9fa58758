"""Reference models that a trainer loads by the name of the model it trains, and that lack its patch.

TRL's trainers for preferences and rewards (DPO, KTO, GRPO, RLOO) compare the trained model with a second one, which
they load from `model.config._name_or_path`. The patch of the live model is not there, and no error says so: the first
loss of DPO is far from ln 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import nn

from rope_ext_hf.errors import FingerprintError, UnsupportedModelError, short
from rope_ext_hf.patches.fingerprint import fingerprint_of
from rope_ext_hf.patches.slots import present_specs

_SECOND_MODELS = {"ref_model": "reference model", "teacher_model": "teacher"}
"""Attributes of trainers that may hold a model loaded by name, and what messages call it."""


def check_trainers_above(module: nn.Module | None = None) -> None:
    """Check the second model of every trainer that is running now, which are those on the stack of calls.

    A trainer calls `model.train()` before each step, and its callbacks, and gives itself to neither. `module`: check
    only the trainers of the model that it is a part of.

    Raises:
        FingerprintError: a second model has the name of the trained one and rotates otherwise.
    """
    for trainer in _trainers(sys._getframe(1)):
        model = unwrapped(vars(trainer)["model"])
        if module is None or any(each is module for each in model.modules()):
            for attribute, title in _SECOND_MODELS.items():
                if isinstance(second := vars(trainer).get(attribute), nn.Module):
                    _check(type(trainer).__name__, model, unwrapped(second), attribute, title)


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of data parallelism, compilers and engines."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return model


def _trainers(frame: FrameType | None) -> Iterator[Any]:
    """Yield the objects with a model and a second one whose methods are being called."""
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
    name = _name(model)
    if second is model or not name or _name(second) != name:
        return  # a model of other weights, whose embeddings are its own
    if sentences := _differences(model, second):
        given = f"{attribute}=rope_ext_hf.from_pretrained({short(name)!r}, method=...)"
        raise FingerprintError(
            f"the {title} of {trainer} was loaded by the name of the trained model, {short(name)!r}, without its "
            f"patch: {' '.join(sentences)} Train an adapter (peft_config=LoraConfig(...)), which needs no {title}; or "
            f"give a patched one, where the trainer takes it: {given}; or save the patched model, and train what "
            "rope_ext_hf.from_pretrained(FOLDER) loads, where plain transformers can load that folder. If no patch is "
            f"meant, give it another name: {attribute}.config.name_or_path = 'unpatched'"
        )


def _name(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")


def _differences(model: nn.Module, second: nn.Module) -> list[str]:
    """Return sentences on how a second model rotates otherwise; the lengths that configs state may differ."""
    try:
        expected, actual = fingerprint_of(model), fingerprint_of(second)
    except UnsupportedModelError:  # a family that rotates by a table
        methods = [[spec.method for spec in present_specs(each)] for each in (model, second)]
        return [] if methods[0] == methods[1] else ["It is patched otherwise."]
    return expected.differences(replace(actual, length=expected.length))

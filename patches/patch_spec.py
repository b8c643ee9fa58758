"""One patch as a value: what is saved with a model, and replayed when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import method_from_dict, rotary_from_dict


@dataclass(frozen=True)
class PatchSpec:
    """One patch, with every parameter of its method filled in."""

    method: RopeMethod
    rotary: Rotary  # what it is applied to, scalings underneath included
    target_length: int | None = None  # tokens that were asked for; None: the method's own
    native: bool = False  # whether a native form that behaves otherwise is accepted
    layers: tuple[str | int, ...] | None = None  # as asked for; None: those that attend to everything before them

    def to_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "method": self.method.to_dict(),
            "rotary": self.rotary.to_dict(),
            "target_length": self.target_length,
            "native": self.native,
        }
        return saved if self.layers is None else saved | {"layers": list(self.layers)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PatchSpec:
        """The inverse of `to_dict`; other keys are left alone."""
        try:
            method = method_from_dict(saved["method"])
            rotary = rotary_from_dict(saved["rotary"])
            layers, target_length, native = saved.get("layers"), saved["target_length"], saved["native"]
        except (KeyError, TypeError) as error:
            raise MethodError(f"not a saved patch: {error!r}") from error
        whole = type(target_length) is int and 0 < target_length <= MOST_TOKENS
        for key, value, right, kind in (
            ("target_length", target_length, target_length is None or whole, "a positive whole number or null"),
            ("native", native, isinstance(native, bool), "true or false"),
            ("layers", layers, layers is None or _is_layers(layers), "a list of layer numbers and layer types"),
        ):
            if not right:
                raise MethodError(f"not a saved patch: {key} must be {kind}, and is {short(repr(value))}")
        return cls(method, rotary, target_length, native, layers and tuple(layers))


def _is_layers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(each) in (int, str) for each in value)

"""Every frequency-level method: a formula from a model's rotary geometry to inverse frequencies.

    >>> from rope_ext_hf.methods import Rotary, frequencies
    >>> frequencies("ntk", Rotary(dim=128, theta=10000.0, trained_length=4096), factor=8).inv_freq[-1]
    tensor(1.4434e-05, dtype=torch.float64)

A method is a frozen dataclass: its fields are its parameters, its `_scale` is the formula, its `native` says how
plain transformers writes the same thing in a config. To add one, write the class here and decorate it; the registry,
the command line, saving and the contract tests find it by its name.

Symbols as in the papers: d = `Rotary.dim`, b = `Rotary.theta`, L0 = `Rotary.trained_length`, L = length, s = factor,
theta_i = b^(-2i/d), wavelength_i = 2 pi / theta_i, turns r_i = L0 / wavelength_i. Everything is float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError

__all__ = ["TWO_PI", "UNBOUNDED", "Frequencies", "RopeMethod", "Rotary"]

UNBOUNDED = 2**62
"""A length in tokens that nothing reaches."""

TWO_PI = 2 * math.pi


@dataclass(frozen=True)
class Rotary:
    """What a model says about its rotary embedding.

    Attributes:
        dim: rotated dims per head (head_dim x partial rotary factor); even.
        theta: the base b of the inverse frequencies.
        trained_length: L0, the context length in tokens the model was trained at.
        rotated_pairs: how many of the dim // 2 pairs turn at all; the rest have inverse frequency 0 (Gemma 4's
            "proportional" embedding). None: all of them.
    """

    dim: int
    theta: float
    trained_length: int
    rotated_pairs: int | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise MethodError(f"a rotary embedding turns an even number of dims, at least 2; got dim={self.dim}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise MethodError(f"theta must be a finite number above 1, got {self.theta}")
        if not self.trained_length >= 1:
            raise MethodError(f"trained_length must be at least 1 token, got {self.trained_length}")
        if self.rotated_pairs is not None and not 0 <= self.rotated_pairs <= self.dim // 2:
            raise MethodError(
                f"rotated_pairs must be between 0 and dim // 2 = {self.dim // 2}, got {self.rotated_pairs}"
            )

    def inv_freq(self, theta: float | Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """theta_i = b^(-2i/d), shape (..., dim // 2) float64, for the model's base or for bases (..., 1) given."""
        dims = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        inv_freq = (self.theta if theta is None else theta) ** (-dims / self.dim)
        return inv_freq if self.rotated_pairs is None else inv_freq * (dims < 2 * self.rotated_pairs)


class Frequencies(NamedTuple):
    """What a method returns.

    Attributes:
        inv_freq: radians per position, float64, shape (dim // 2,).
        attention_factor: what cos and sin are multiplied by.
    """

    inv_freq: Tensor
    attention_factor: float


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_number, value))


# Annotation of a parameter -> what it must be, in words and as a test.
_PARAMETER_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "float": ("a number", is_number),
    "float | None": ("a number", is_number),
    "int | None": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "tuple[float, ...]": ("a list of numbers", _are_numbers),
}


@dataclass(frozen=True, kw_only=True)
class RopeMethod(ABC):
    """Base of the frequency-level methods; a subclass adds its parameters and its formula."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):  # so that a method read from JSON is hashable and equals one written in Python
                object.__setattr__(self, item.name, value := tuple(value))
            what, fits = _PARAMETER_TYPES.get(str(item.type), ("", None))
            if fits is not None and not fits(value) and (value is not None or item.default is not None):
                raise MethodError(f"{self.name}: {item.name} must be {what}, got {value!r}")
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise MethodError(f"{self.name}: {item.name} must be finite, got {value}")
        factor = getattr(self, "factor", None)
        if factor is not None and factor < 1:
            raise MethodError(f"{self.name}: factor must be at least 1, got {factor:g}")

    @classmethod
    def takes_factor(cls, values: Mapping[str, Any]) -> bool:
        """Whether the method has a factor when its other parameters are these."""
        return any(item.name == "factor" for item in fields(cls))

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change with the length of the input."""
        return False

    def frequencies(self, rotary: Rotary, length: int | None = None) -> Frequencies:
        """The method's frequencies for one input of `length` tokens (None: of the trained length)."""
        self.check(rotary)
        if length is not None and length < 1:
            raise MethodError(f"length must be at least 1 token, got {length}")
        tokens = torch.tensor(rotary.trained_length if length is None else length, dtype=torch.float64, device="cpu")
        inv_freq, attention_factor = self.at_lengths(rotary, tokens)
        return Frequencies(inv_freq, float(attention_factor))

    def at_lengths(self, rotary: Rotary, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
        """Per-row frequencies: lengths (...) float64 -> inv_freq (..., dim // 2) and attention factor, 1.0 or (..., 1).

        Runs on the device of `lengths` and never looks at its values from the host.
        """
        return self.compute(rotary, lengths.unsqueeze(-1))

    @property
    def sticky_length(self) -> bool:
        """Whether the rotary module keeps the frequencies of the longest input it has met."""
        return False

    @property
    def steps(self) -> bool:
        """Whether the frequencies, where they depend on the length, change at a few lengths only."""
        return False

    def constant_until(self, rotary: Rotary, length: int) -> int:
        """The longest input with the frequencies of one of `length` tokens, in tokens."""
        return max(length, rotary.trained_length) if self.length_dependent else UNBOUNDED

    @abstractmethod
    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        """The formula: length (..., 1) float64 -> inv_freq (..., dim // 2), attention factor (..., 1) or one number."""

    def check(self, rotary: Rotary) -> None:  # noqa: B027 - most methods fit every geometry
        """Raise MethodError where the parameters cannot go with this geometry."""

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` with which plain transformers computes the same, or None.

        The base class's answer holds for every static method: longrope's per-dim divisors can write any frequencies.
        """
        if self.length_dependent or rotary.rotated_pairs is not None:
            return None
        return self.longrope_parameters(rotary)

    def longrope_parameters(self, rotary: Rotary) -> dict[str, Any]:
        """These frequencies at the trained length, written as transformers' longrope with explicit divisors."""
        scaled = self.frequencies(rotary)
        plain = rotary.inv_freq()
        divisors = (plain / scaled.inv_freq).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": rotary.theta,
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": getattr(self, "factor", None) or 1.0,
            "attention_factor": scaled.attention_factor,
            "original_max_position_embeddings": rotary.trained_length,
        }

    def approximate_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` for something near, known to behave otherwise; used only where the user asks for it."""
        return None

    def extended_length(self, rotary: Rotary) -> int | None:
        """The length the method is meant for, in tokens, where its parameters say; None: it follows the input."""
        factor = getattr(self, "factor", None)
        return round(rotary.trained_length * factor) if factor else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the name and every parameter that is set. `method_from_dict` reads it back."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"method": self.name} | {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values.items()
            if value is not None
        }

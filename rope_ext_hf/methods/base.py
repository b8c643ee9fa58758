"""The ground that every method builds on: the rotary embedding of a model (`Rotary`), the base class, and its result.

Symbols as in the papers: d = `Rotary.dim`, b = `Rotary.theta`, L0 = `Rotary.trained_length`, L = length, s = factor,
theta_i = b^(-2i/d), wavelength_i = 2 pi / theta_i. A model that was trained under a scaling has frequencies w_i and an
attention factor a of its own, and is for C = `Rotary.context_length` tokens: every method extends from there. For a
plain model w_i = theta_i, a = 1 and C = L0. Everything is float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import MethodError, did_you_mean
from rope_ext_hf.methods.guidance import Guidance

UNBOUNDED = 2**62  # a length in tokens that no input reaches
SHORT_AND_LONG = (1, UNBOUNDED)  # lengths that get the two lists of frequencies, where a scaling has two
TWO_PI = 2 * math.pi


@dataclass(frozen=True)
class TrainedScaling:
    """A scaling that a model was trained with."""

    method: RopeMethod  # a frequency method
    rotary: Rotary  # what the method was applied to
    context_length: int  # tokens that the model is for under this scaling

    def __post_init__(self) -> None:
        if not self.context_length >= 1:
            raise MethodError(f"context_length must be at least 1 token, got {self.context_length}")

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method.to_dict(), "rotary": self.rotary.to_dict(), "context_length": self.context_length}


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding, as a model states it.

    Attributes:
        dim: rotated dims per head (head_dim x partial rotary factor); even.
        theta: the base b of the inverse frequencies.
        trained_length: L0 in tokens, the length that RoPE without any scaling is for.
        rotated_pairs: how many of the dim // 2 pairs rotate; the rest have inverse frequency 0 (Gemma 4's
            "proportional" embedding). None: all of them.
        own: the scaling that the model was trained with; None: none. Build it with `scaled`.
    """

    dim: int
    theta: float
    trained_length: int
    rotated_pairs: int | None = None
    own: TrainedScaling | None = None
    _underneath: ClassVar[tuple[tuple[float, ...], float]]  # of `own`: its frequencies and attention factor

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise MethodError(f"a rotary embedding rotates an even number of dims, at least 2; got dim={self.dim}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise MethodError(f"theta must be a finite number above 1, got {self.theta}")
        if not self.trained_length >= 1:
            raise MethodError(f"trained_length must be at least 1 token, got {self.trained_length}")
        if self.rotated_pairs is not None and not 0 <= self.rotated_pairs <= self.dim // 2:
            raise MethodError(
                f"rotated_pairs must be between 0 and dim // 2 = {self.dim // 2}, got {self.rotated_pairs}"
            )
        if self.own is not None and self.own.rotary.plain_geometry != self.plain_geometry:
            raise MethodError(f"the scaling underneath belongs to another rotary embedding: {self.own.rotary}")
        if self.own is not None:  # numbers that no trace could compute; no field, since they follow from `own`
            object.__setattr__(self, "_underneath", _underneath(self))

    @property
    def plain_geometry(self) -> tuple[int, float, int, int | None]:
        """Everything but the scalings: dim, theta, trained_length, rotated_pairs."""
        return self.dim, self.theta, self.trained_length, self.rotated_pairs

    @property
    def plain(self) -> Rotary:
        """This rotary embedding without any scaling."""
        return Rotary(*self.plain_geometry)

    def scaled(self, method: RopeMethod, *, context_length: int) -> Rotary:
        """This rotary embedding in a model that was trained under a method, for `context_length` tokens.

        Raises:
            MethodError: a method that does not fit this rotary embedding.
        """
        method.check(self)
        if not method.composable:
            raise MethodError(f"no method can be applied over {method.name}: its frequencies follow every input")
        return Rotary(*self.plain_geometry, own=TrainedScaling(method, self, context_length))

    @property
    def context_length(self) -> int:
        """C, the length in tokens that the model as loaded is for."""
        return self.trained_length if self.own is None else self.own.context_length

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies underneath depend on the length of the input (Phi-3's two lists)."""
        return self.own is not None and self.own.method.depends_on_length(self.own.rotary)

    @property
    def own_frequencies(self) -> tuple[float, ...]:
        """`inv_freq` of a rotary embedding with a scaling, as numbers, which a trace keeps as they are."""
        return self._underneath[0]

    @property
    def attention_factor(self) -> float:
        """a, the attention factor underneath; 1 for a plain model."""
        return 1.0 if self.own is None else self._underneath[1]

    def inv_freq(self, device: torch.device | str = "cpu") -> Tensor:
        """w_i in radians per position, (dim // 2,) float64: the frequencies that a method changes.

        Where those depend on the length of the input, the ones of long inputs.
        """
        return self.theta_inv_freq(device=device) if self.own is None else constant(self.own_frequencies, device)

    def theta_inv_freq(self, theta: float | Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """theta_i = b^(-2i/d), (..., dim // 2) float64, for this base or for bases (..., 1)."""
        dims = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        inv_freq = (self.theta if theta is None else theta) ** (-dims / self.dim)
        return inv_freq if self.rotated_pairs is None else inv_freq * (dims < 2 * self.rotated_pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the fields that are not set. `rotary_from_dict` reads it back."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["own"] = None if self.own is None else self.own.to_dict()
        return {name: value for name, value in values.items() if value is not None}


class Frequencies(NamedTuple):
    """The frequencies that a method gives, and its attention factor.

    Attributes:
        inv_freq: radians per position, float64, shape (dim // 2,).
        attention_factor: the factor of cos and sin.
    """

    inv_freq: Tensor
    attention_factor: float


@lru_cache(maxsize=64)
def _underneath(rotary: Rotary) -> tuple[tuple[float, ...], float]:
    """The frequencies and the attention factor of the scaling underneath, for long inputs."""
    assert rotary.own is not None
    length = rotary.own.context_length
    if rotary.length_dependent:  # past the length at which its second list begins, whatever the context length is
        length = max(length, rotary.trained_length + 1)
    inv_freq, attention_factor = rotary.own.method.frequencies(rotary.own.rotary, length)
    return tuple(inv_freq.tolist()), attention_factor


def _as_tensor(number: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a float64 tensor; `torch.as_tensor` takes none that a trace with dynamic shapes computed."""
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.float64, device=device)


def constant(numbers: tuple[float, ...], device: torch.device | str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers as a tensor (len(numbers),) on a device, which nobody may write to.

    Kept between calls, because the host waits for the device when it copies; made anew inside a trace, an export or a
    fake mode, whose tensors must not reach a later call.
    """
    if may_keep_tensors():
        return _kept(numbers, dtype, torch.device(device))
    return torch.tensor(numbers, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor would fail in a later forward that needs gradients
        return torch.tensor(numbers, dtype=dtype, device=device)


def may_keep_tensors() -> bool:
    """Whether a tensor made now may outlive the call: not under torch.compile, torch.export, tracing or a fake mode."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return type(torch.empty(0, device="cpu")) is Tensor


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Annotation of a parameter -> what its value must be, for the error message, and the type of it or of each in a tuple.
_PARAMETER_TYPES: dict[str, tuple[str, Any]] = {
    "float": ("a number", (int, float)),
    "float | None": ("a number", (int, float)),
    "int | None": ("a whole number", int),
    "bool": ("True or False", bool),
    "tuple[float, ...]": ("a list of numbers", (int, float)),
}


@dataclass(frozen=True, kw_only=True)
class RopeMethod(ABC):
    """Base of all methods; a subclass adds its parameters as fields, and its formula as `compute`."""

    name: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Other names of the method, each with the parameters that it implies."""
    parameters: ClassVar[Mapping[str, Field[Any]]] = {}
    """The fields by name, of a method that is registered."""

    unlabelled: ClassVar[frozenset[str]] = frozenset()
    """Parameters that `label` leaves out."""
    trainable: ClassVar[str] = ""
    """The parameter with one number for each pair that is trained in a rotary module; empty: none is."""
    guidance: ClassVar[Guidance | None] = None
    """When to use the method; None: docs/choosing.md and `rope-ext extend --dry-run` leave it out."""
    least: ClassVar[Mapping[str, int]] = {"factor": 1}
    """The smallest value of parameters, by name."""
    above_zero: ClassVar[tuple[str, ...]] = ("attention_factor",)
    """Parameters that must be above 0."""
    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """What parameters may be, by name."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):  # so that a method read from JSON is hashable and equals one written in Python
                object.__setattr__(self, item.name, value := tuple(value))
            what, kind = _PARAMETER_TYPES.get(str(item.type), ("", object))
            given, several = value is not None or item.default is not None, str(item.type).startswith("tuple")
            fits = isinstance(value, tuple) or not several
            for each in value if fits and several else (value,):
                fits = fits and isinstance(each, kind) and isinstance(each, bool) is (kind is bool)
            if what and given and not fits:
                raise MethodError(f"{self.name}: {item.name} must be {what}, got {value!r}")
            numbers = [each for each in value if isinstance(each, float)] if isinstance(value, tuple) else ()
            if not all(map(math.isfinite, (value,) if isinstance(value, float) else numbers)):
                raise MethodError(f"{self.name}: {item.name} must be finite, got {value}")
            number = isinstance(value, (int, float))
            if number and value < (least := self.least.get(item.name, -math.inf)):
                raise MethodError(f"{self.name}: {item.name} must be at least {least}, got {value:g}")
            if item.name in self.above_zero and number and value <= 0:
                raise MethodError(f"{self.name}: {item.name} must be above 0, got {value:g}")
            allowed = self.choices.get(item.name)
            if allowed and given and value not in allowed:
                near = did_you_mean(str(value), allowed)
                raise MethodError(f"{self.name}: {item.name} must be one of {', '.join(allowed)}; got {value!r}.{near}")
        factor = getattr(self, "factor", None)
        if factor is not None and factor > MOST_TOKENS:
            raise MethodError(f"{self.name}: factor must be at most {MOST_TOKENS:,}, got {factor:g}")

    @classmethod
    def takes_factor(cls, values: Mapping[str, Any]) -> bool:
        """Whether the method has a factor when its other parameters are these."""
        return "factor" in cls.__dataclass_fields__

    @property
    def length_dependent(self) -> bool:
        """Whether the method itself makes the frequencies depend on the length of the input."""
        return False

    def depends_on_length(self, rotary: Rotary) -> bool:
        """Whether the frequencies depend on the length of the input, by the method or by what is underneath."""
        return self.length_dependent or rotary.length_dependent

    def frequencies(self, rotary: Rotary, length: int | None = None) -> Frequencies:
        """The frequencies for one input of `length` tokens; None: the context length.

        Raises:
            MethodError: parameters that do not fit `rotary`, or a length below 1.
        """
        self.check(rotary)
        if length is not None and length < 1:
            raise MethodError(f"length must be at least 1 token, got {length}")
        tokens = torch.tensor(rotary.context_length if length is None else length, dtype=torch.float64, device="cpu")
        inv_freq, attention_factor = self.at_lengths(rotary, tokens)
        return Frequencies(inv_freq, float(attention_factor))

    def at_lengths(self, rotary: Rotary, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
        """The frequencies of each row, on the device of `lengths`, (...) float64; no value is read on the host.

        Returns:
            inv_freq (..., dim // 2) float64 and the attention factor, one number or (..., 1) float64.
        """
        length = lengths.unsqueeze(-1)
        inv_freq, attention_factor = self.compute(rotary, length)
        if rotary.own is None:
            return inv_freq, attention_factor
        attention_factor = attention_factor * rotary.attention_factor
        if not rotary.length_dependent:
            return inv_freq, attention_factor
        # Inputs up to the original length run as loaded; the step of the scaling underneath stays where it was.
        own_inv_freq, own_factor = rotary.own.method.at_lengths(rotary.own.rotary, lengths)
        long = length > rotary.trained_length
        if isinstance(attention_factor, Tensor) or attention_factor != own_factor:
            new, old = (_as_tensor(factor, lengths.device) for factor in (attention_factor, own_factor))
            attention_factor = torch.where(long, new, old)
        return torch.where(long, inv_freq, own_inv_freq), attention_factor

    @abstractmethod
    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        """The formula.

        Args:
            rotary: `inv_freq()` has the frequencies that the method changes, `context_length` where it counts from.
            length: tokens of each row, (..., 1) float64.

        Returns:
            inv_freq (..., dim // 2) and the method's own attention factor, (..., 1) or one number; that of a scaling
            underneath is multiplied in by `at_lengths`.
        """

    def trained_inv_freq(self, rotary: Rotary, values: Tensor) -> Tensor:
        """`compute` with other `values` of `trainable`, (dim // 2,), through which gradients flow, in their dtype."""
        raise TypeError(f"{self.name} has no parameter that is trained")

    @property
    def composable(self) -> bool:
        """Whether another method can be applied on top: `compute` gives one set of frequencies for long inputs."""
        return not self.length_dependent

    @property
    def sticky_length(self) -> bool:
        """Whether the rotary module keeps the frequencies of the longest input it has met."""
        return False

    @property
    def piecewise_constant(self) -> bool:
        """Whether the frequencies, where the method makes them depend on the length, change at a few lengths only."""
        return False

    def changes_in_steps(self, rotary: Rotary) -> bool:
        """Whether the frequencies change at a few lengths only, by the method and by what is underneath."""
        return self.piecewise_constant or (not self.length_dependent and rotary.length_dependent)

    def constant_until(self, rotary: Rotary, length: int) -> int:
        """The longest input with the frequencies of an input of `length` tokens, in tokens."""
        if rotary.length_dependent and length <= rotary.trained_length:
            return rotary.trained_length
        return self.next_change(rotary, length) if self.length_dependent else UNBOUNDED

    def next_change(self, rotary: Rotary, length: int) -> int:
        """`constant_until` by the method alone, where it depends on the length."""
        return max(length, rotary.context_length)

    def unchanged_length(self, rotary: Rotary) -> int:
        """The longest input whose output is known to stay as it is, in tokens; 0: none, the method changes all."""
        # Over two lists, `at_lengths` runs inputs up to the original length under the scaling underneath.
        kept = rotary.trained_length if rotary.length_dependent else 0
        inv_freq, attention_factor = self.frequencies(rotary, kept + 1)
        same = torch.allclose(inv_freq, rotary.inv_freq(), rtol=1e-12, atol=0)
        if not same or not math.isclose(attention_factor, rotary.attention_factor, rel_tol=1e-12):
            return kept
        return self.constant_until(rotary, kept + 1)

    def cautions(self, rotary: Rotary) -> tuple[str, ...]:
        """The unusual effects of the method on this rotary embedding, a sentence each."""
        return ()

    def check(self, rotary: Rotary) -> None:  # noqa: B027 - most methods fit every rotary embedding
        """Raise MethodError where the parameters do not fit a rotary embedding."""

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` with which plain transformers computes the same, or None.

        longrope's divisors per dim can write any static frequencies, so every static method can be saved natively.
        """
        if rotary.rotated_pairs is not None or self.length_dependent:
            return None
        if rotary.length_dependent:
            factors = (self.frequencies(rotary, length).attention_factor for length in SHORT_AND_LONG)
            return self.longrope_parameters(rotary, SHORT_AND_LONG) if math.isclose(*factors, rel_tol=1e-12) else None
        if rotary.own is None:
            return self.plain_rope_parameters(rotary)
        return self.longrope_parameters(rotary)

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` for a model without a scaling of its own."""
        return self.longrope_parameters(rotary)

    def longrope_parameters(
        self, rotary: Rotary, lengths: tuple[int | None, int | None] = (None, None)
    ) -> dict[str, Any]:
        """Frequencies as transformers' longrope, with explicit divisors of theta_i.

        `lengths`: those of the inputs that get the short and the long list; None: the context length.
        """
        theta = rotary.theta_inv_freq()
        short, long = [self.frequencies(rotary, length) for length in lengths]
        return {
            "rope_type": "longrope",
            "rope_theta": rotary.theta,
            "short_factor": (theta / short.inv_freq).tolist(),
            "long_factor": (theta / long.inv_freq).tolist(),
            "factor": getattr(self, "factor", None) or 1.0,
            "attention_factor": short.attention_factor,
            "original_max_position_embeddings": rotary.trained_length,
        }

    def approximate_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` for something near, known to behave otherwise; used only where the user asks for it."""
        return None

    def extended_length(self, rotary: Rotary) -> int | None:
        """The length in tokens that the method is meant for, by its parameters; None: it follows the input."""
        factor = getattr(self, "factor", None)
        return round(rotary.context_length * factor) if factor else None

    def label(self) -> str:
        """The name in tables and plots: the method, its factor, and the parameters that differ from their defaults."""
        words, numbers, below = [self.name], [], []
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, RopeMethod):
                below.append(f"on {value.label()}")
            elif isinstance(value, str):
                words += [value] if value != item.default else []
            elif item.name == "factor" and value is not None:
                words.append(f"x{value:g}")
            elif item.name == self.name and is_number(value):
                words.append(f"{value:g}")
            elif item.name not in self.unlabelled and value != item.default and is_number(value):
                numbers.append(f"{item.name}={value:g}")
            elif value is True and item.default is not True:
                numbers.append(item.name)
        return " ".join([*words, *numbers, *below])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the name and every parameter that is set. `method_from_dict` reads it back."""
        saved: dict[str, Any] = {"method": self.name}
        for item in fields(self):
            value = getattr(self, item.name)
            value = value.to_dict() if isinstance(value, RopeMethod) else value
            if value is not None:
                saved[item.name] = list(value) if isinstance(value, tuple) else value
        return saved

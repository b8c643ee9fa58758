"""Every frequency-level method: a formula from a model's rotary geometry to inverse frequencies.

    >>> from rope_ext_hf.scaling import Rotary, frequencies
    >>> frequencies("ntk", Rotary(dim=128, theta=10000.0, trained_length=4096), factor=8).inv_freq[-1]
    tensor(1.4434e-05, dtype=torch.float64)

A method is a frozen dataclass: its fields are its parameters, its `_scale` is the formula, its `native` says how
plain transformers writes the same thing in a config. To add one, write the class here and decorate it; the registry,
the command line, saving and the contract tests find it by its name.

Symbols as in the papers: d = `Rotary.dim`, b = `Rotary.theta`, L0 = `Rotary.trained_length`, L = length, s = factor,
theta_i = b^(-2i/d), wavelength_i = 2 pi / theta_i, turns r_i = L0 / wavelength_i. Everything is float64.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError

__all__ = [
    "NTK",
    "ByParts",
    "Default",
    "DynamicNTK",
    "DynamicYarn",
    "Factors",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Rotary",
    "Scaling",
    "Theta",
    "Yarn",
    "frequencies",
    "method_from_dict",
    "methods",
    "resolve_method",
]

FOREVER = 2**62
"""A length in tokens that nothing reaches."""

TWO_PI = 2 * math.pi


@dataclass(frozen=True)
class Rotary:
    """What a model says about its rotary embedding.

    Attributes:
        dim: rotated dims per head (head_dim x partial rotary factor); even.
        theta: the base b of the inverse frequencies.
        trained_length: L0, the context length in tokens the model was trained at.
        turning: how many of the dim // 2 pairs turn at all; the rest have inverse frequency 0 (Gemma 4's
            "proportional" embedding). None: all of them.
    """

    dim: int
    theta: float
    trained_length: int
    turning: int | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise MethodError(f"a rotary embedding turns an even number of dims, at least 2; got dim={self.dim}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise MethodError(f"theta must be a finite number above 1, got {self.theta}")
        if not self.trained_length >= 1:
            raise MethodError(f"trained_length must be at least 1 token, got {self.trained_length}")
        if self.turning is not None and not 0 <= self.turning <= self.dim // 2:
            raise MethodError(f"turning must be between 0 and dim // 2 = {self.dim // 2}, got {self.turning}")

    def inv_freq(self, theta: float | Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """theta_i = b^(-2i/d), shape (..., dim // 2) float64, for the model's base or for bases (..., 1) given."""
        dims = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        inv_freq = (self.theta if theta is None else theta) ** (-dims / self.dim)
        return inv_freq if self.turning is None else inv_freq * (dims < 2 * self.turning)


class Frequencies(NamedTuple):
    """What a method returns.

    Attributes:
        inv_freq: radians per position, float64, shape (dim // 2,).
        attention_factor: what cos and sin are multiplied by.
    """

    inv_freq: Tensor
    attention_factor: float


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_number, value))


# Annotation of a parameter -> what it must be, in words and as a test.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "float": ("a number", _is_number),
    "float | None": ("a number", _is_number),
    "int | None": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "tuple[float, ...]": ("a list of numbers", _are_numbers),
}


@dataclass(frozen=True, kw_only=True)
class Scaling(ABC):
    """Base of the frequency-level methods; a subclass adds its parameters and its formula."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):  # so that a method read from JSON is hashable and equals one written in Python
                object.__setattr__(self, item.name, value := tuple(value))
            what, fits = _KINDS.get(str(item.type), ("", None))
            if fits is not None and not fits(value) and (value is not None or item.default is not None):
                raise MethodError(f"{self.name}: {item.name} must be {what}, got {value!r}")
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise MethodError(f"{self.name}: {item.name} must be finite, got {value}")
        factor = getattr(self, "factor", None)
        if factor is not None and factor < 1:
            raise MethodError(f"{self.name}: factor must be at least 1, got {factor:g}")

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
        return self._scale(rotary, lengths.unsqueeze(-1))

    @property
    def steps(self) -> bool:
        """Whether the frequencies, where they depend on the length, change at a few lengths only."""
        return False

    def constant_until(self, rotary: Rotary, length: int) -> int:
        """The longest input with the frequencies of one of `length` tokens, in tokens."""
        return max(length, rotary.trained_length) if self.length_dependent else FOREVER

    @abstractmethod
    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        """The formula: length (..., 1) float64 -> inv_freq (..., dim // 2), attention factor (..., 1) or one number."""

    def check(self, rotary: Rotary) -> None:  # noqa: B027 - most methods fit every geometry
        """Raise MethodError where the parameters cannot go with this geometry."""

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        """`rope_parameters` with which plain transformers computes the same, or None.

        The base class's answer holds for every static method: longrope's per-dim divisors can write any frequencies.
        """
        if self.length_dependent or rotary.turning is not None:
            return None
        return self.as_longrope(rotary)

    def as_longrope(self, rotary: Rotary) -> dict[str, Any]:
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

    def native_approximation(self, rotary: Rotary) -> dict[str, Any] | None:
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


_METHODS: dict[str, type[Scaling]] = {}
# Other names in use, and the parameters they imply.
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {"dynamic": ("dynamic-ntk", {"growth": "hf"})}

_S = TypeVar("_S", bound=Scaling)


def scaling(name: str) -> Callable[[type[_S]], type[_S]]:
    """Register a method under its name; a second holder of a name is an error."""

    def register(cls: type[_S]) -> type[_S]:
        if name in _METHODS or name in _ALIASES:
            raise TypeError(f"the method name {name!r} is taken")
        cls.name = name
        _METHODS[name] = cls
        return cls

    return register


@scaling("default")
@dataclass(frozen=True, kw_only=True)
class Default(Scaling):
    """RoPE as trained (Su et al. 2021, arXiv 2104.09864)."""

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _changed_theta(rotary, rotary.theta)

    def extended_length(self, rotary: Rotary) -> int | None:
        return rotary.trained_length


@scaling("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595): positions divided by the factor."""

    factor: float

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device) / self.factor, 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return {
            "rope_type": "linear" if rotary.turning is None else "proportional",
            "rope_theta": rotary.theta,
            "factor": self.factor,
        }


@scaling("theta")
@dataclass(frozen=True, kw_only=True)
class Theta(Scaling):
    """Adjusted base frequency (Code Llama, Roziere et al. 2023, arXiv 2308.12950, sec. 2.4): another base, given."""

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta <= 1:
            raise MethodError(f"theta: theta must be above 1, got {self.theta:g}")

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(self.theta, length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _changed_theta(rotary, self.theta)


def _changed_theta(rotary: Rotary, theta: float) -> dict[str, Any]:
    return {"rope_type": "default" if rotary.turning is None else "proportional", "rope_theta": theta}


def ntk_theta(rotary: Rotary, alpha: Any) -> Any:
    """b' = b alpha^(d/(d-2)): leaves the highest frequency alone and divides the lowest by exactly alpha."""
    return rotary.theta * alpha ** (rotary.dim / (rotary.dim - 2))


def _needs_four_dims(name: str, rotary: Rotary) -> None:
    if rotary.dim < 4:
        raise MethodError(f"{name} needs at least 4 rotated dims (its exponent is d/(d-2)), got {rotary.dim}")


@scaling("ntk")
@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    """NTK-aware scaling (bloc97 2023; YaRN paper, arXiv 2309.00071, sec. 3.1): a larger base, alpha = factor."""

    factor: float

    def check(self, rotary: Rotary) -> None:
        _needs_four_dims(self.name, rotary)

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(ntk_theta(rotary, self.factor), length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _changed_theta(rotary, ntk_theta(rotary, self.factor))


Growth = Literal["paper", "hf", "even", "pow2"]


@scaling("dynamic-ntk")
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """NTK-aware scaling whose alpha follows the length L of the input (emozilla 2023).

    `growth` names the rule, with ratio = L / L0:
        paper   max(1, ratio)                                     YaRN paper, sec. 3.3
        hf      s ratio - (s - 1), 1 while L <= L0                transformers' "dynamic", s = factor
        even    `initial` while ratio <= initial, then the smallest even k >= ratio
        pow2    max(1, 2^ceil(log2(ratio) + 1) - 1)               Qwen, lmdeploy

    `sticky` keeps the largest k of "even" ever met by the module until it is reset: an explicit choice against purity.
    """

    growth: Growth = "paper"
    factor: float | None = None
    initial: float = 1.0
    sticky: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = ("paper", "hf", "even", "pow2")
        if self.growth not in rules:
            raise MethodError(f"dynamic-ntk: growth must be one of {', '.join(rules)}; got {self.growth!r}")
        if self.growth == "hf" and self.factor is None:
            raise MethodError("dynamic-ntk: growth='hf' needs factor (or target_length)")
        if self.growth != "hf" and self.factor is not None:
            raise MethodError(f"dynamic-ntk: factor goes with growth='hf' only, got it with growth={self.growth!r}")
        if self.growth != "even" and (self.sticky or self.initial != 1):
            raise MethodError(f"dynamic-ntk: sticky and initial go with growth='even' only, got growth={self.growth!r}")
        if self.initial < 1:
            raise MethodError(f"dynamic-ntk: initial must be at least 1, got {self.initial:g}")

    @property
    def length_dependent(self) -> bool:
        return True

    @property
    def steps(self) -> bool:
        return self.growth in ("even", "pow2")

    def constant_until(self, rotary: Rotary, length: int) -> int:
        ratio = length / rotary.trained_length
        if self.growth == "even":
            k = self.initial if ratio <= self.initial else 2 * math.ceil(ratio / 2)
            return math.floor(k * rotary.trained_length)
        if self.growth == "pow2":
            return int(rotary.trained_length * 2 ** max(0, math.ceil(math.log2(ratio))))
        return super().constant_until(rotary, length)

    def check(self, rotary: Rotary) -> None:
        _needs_four_dims(self.name, rotary)

    def alpha(self, rotary: Rotary, length: Tensor) -> Tensor:
        ratio = length / rotary.trained_length
        grown = ratio.clamp(min=1)
        if self.growth == "hf":
            assert self.factor is not None
            return self.factor * grown - (self.factor - 1)
        if self.growth == "even":
            return torch.where(ratio <= self.initial, self.initial, 2 * torch.ceil(ratio / 2))
        if self.growth == "pow2":
            return torch.where(ratio > 1, 2 ** torch.ceil(torch.log2(grown) + 1) - 1, 1.0)
        return grown

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(ntk_theta(rotary, self.alpha(rotary, length)), length.device), 1.0

    def native_approximation(self, rotary: Rotary) -> dict[str, Any] | None:
        """transformers' "dynamic": the same rule, with a memory of earlier calls and one length for a whole batch."""
        if self.growth != "hf":
            return None
        return {"rope_type": "dynamic", "rope_theta": rotary.theta, "factor": self.factor}


def _ramp_by_dimension(rotary: Rotary, beta_fast: float, beta_slow: float, truncate: bool, inv_freq: Tensor) -> Tensor:
    """0 (keep) to 1 (interpolate), linear in the dim index, as in the YaRN authors' code; (dim // 2,)."""

    def dimension(turns: float) -> float:
        return rotary.dim * math.log(rotary.trained_length / (TWO_PI * turns)) / (2 * math.log(rotary.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rotary.dim // 2, dtype=torch.float64, device=inv_freq.device)
    return ((index - low) / (high - low)).clamp(0, 1)


def _ramp_by_turns(rotary: Rotary, beta_fast: float, beta_slow: float, inv_freq: Tensor) -> Tensor:
    """0 (keep) to 1 (interpolate), linear in the turns over the trained length (YaRN paper, Def. 2); (dim // 2,)."""
    turns = rotary.trained_length * inv_freq / TWO_PI
    return ((beta_fast - turns) / (beta_fast - beta_slow)).clamp(0, 1)


def _mix(inv_freq: Tensor, factor: float | Tensor, ramp: Tensor) -> Tensor:
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


@dataclass(frozen=True, kw_only=True)
class _Ramped(Scaling):
    """What by-parts, yarn and dynamic-yarn share: which dims are interpolated.

    A dim that makes `beta_fast` turns or more over the trained length keeps its frequency, one that makes `beta_slow`
    or fewer is interpolated. `ramp` says what is linear in between: the "dimension" index (the authors' code and
    transformers; `truncate` rounds its ends to whole dims) or the number of "turns" (the paper's text).
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["dimension", "turns"] = "dimension"
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp not in ("dimension", "turns"):
            raise MethodError(f"{self.name}: ramp must be 'dimension' or 'turns', got {self.ramp!r}")
        if not self.beta_fast > self.beta_slow > 0:
            raise MethodError(
                f"{self.name}: beta_fast must be above beta_slow and both above 0, "
                f"got beta_fast={self.beta_fast:g}, beta_slow={self.beta_slow:g}"
            )

    def interpolate(self, rotary: Rotary, factor: float | Tensor, device: torch.device) -> Tensor:
        inv_freq = rotary.inv_freq(device=device)
        if self.ramp == "turns":
            return _mix(inv_freq, factor, _ramp_by_turns(rotary, self.beta_fast, self.beta_slow, inv_freq))
        ramp = _ramp_by_dimension(rotary, self.beta_fast, self.beta_slow, self.truncate, inv_freq)
        return _mix(inv_freq, factor, ramp)


@scaling("by-parts")
@dataclass(frozen=True, kw_only=True)
class ByParts(_Ramped):
    """NTK-by-parts (YaRN paper, arXiv 2309.00071, sec. 3.2): interpolate slow dims, keep fast ones."""

    factor: float

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "turns":
            return _native_llama3(rotary, self.factor, self.beta_slow, self.beta_fast)
        return _native_yarn(self, rotary, self.factor, attention_factor=1.0)


@scaling("yarn")
@dataclass(frozen=True, kw_only=True)
class Yarn(_Ramped):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, sec. 3.4): by-parts interpolation with a warmer softmax.

    cos and sin are multiplied by `attention_factor` if given; else by g(s, mscale) / g(s, mscale_all_dim) if both are
    set (DeepSeek); else by g(s, 1), where g(s, m) = 0.1 m ln s + 1.
    """

    factor: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention_factor(self.name, self.attention_factor)

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), self._attention_factor()

    def _attention_factor(self) -> float:
        def g(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:  # 0 means "not set" in every published config
            return g(self.mscale) / g(self.mscale_all_dim)
        return g(1)

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "turns":
            return super().native(rotary)
        optional = {
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
            "attention_factor": self.attention_factor,
        }
        return _native_yarn(
            self, rotary, self.factor, **{key: float(value) for key, value in optional.items() if value is not None}
        )


@scaling("dynamic-yarn")
@dataclass(frozen=True, kw_only=True)
class DynamicYarn(_Ramped):
    """YaRN with s = max(1, L / L0) (YaRN paper, arXiv 2309.00071, sec. 3.3); the attention factor follows s."""

    @property
    def length_dependent(self) -> bool:
        return True

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        factor = (length / rotary.trained_length).clamp(min=1)
        return self.interpolate(rotary, factor, length.device), 0.1 * factor.log() + 1


def _native_yarn(method: _Ramped, rotary: Rotary, factor: float, **optional: float) -> dict[str, Any] | None:
    if rotary.turning is not None:
        return None
    return {
        "rope_type": "yarn",
        "rope_theta": rotary.theta,
        "factor": factor,
        "beta_fast": method.beta_fast,
        "beta_slow": method.beta_slow,
        "truncate": method.truncate,
        "original_max_position_embeddings": rotary.trained_length,
        **optional,
    }


def _native_llama3(rotary: Rotary, factor: float, low: float, high: float) -> dict[str, Any] | None:
    if rotary.turning is not None:
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": rotary.theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": rotary.trained_length,
    }


@scaling("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Llama 3.1's scaling (Dubey et al. 2024, arXiv 2407.21783): by-parts with the ramp in turns, 1 to 4."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise MethodError(
                "llama3: high_freq_factor must be above low_freq_factor and both above 0, "
                f"got high_freq_factor={self.high_freq_factor:g}, low_freq_factor={self.low_freq_factor:g}"
            )

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(device=length.device)
        return _mix(
            inv_freq, self.factor, _ramp_by_turns(rotary, self.high_freq_factor, self.low_freq_factor, inv_freq)
        ), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _native_llama3(rotary, self.factor, self.low_freq_factor, self.high_freq_factor)


def _check_divisors(name: str, key: str, divisors: Sequence[float], rotary: Rotary | None = None) -> None:
    if rotary is not None and len(divisors) != rotary.dim // 2:
        raise MethodError(
            f"{name}: {key} needs one number per pair of rotated dims, {rotary.dim // 2} for this model; "
            f"got {len(divisors)}"
        )
    if any(divisor <= 0 for divisor in divisors):
        raise MethodError(f"{name}: every number in {key} must be above 0, got {min(divisors):g}")


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Copied once, because a copy from the host makes the host wait for the device."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _check_attention_factor(name: str, attention_factor: float | None) -> None:
    if attention_factor is not None and attention_factor <= 0:
        raise MethodError(f"{name}: attention_factor must be above 0, got {attention_factor:g}")


@scaling("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): searched per-dim divisors, one list up to L0, another beyond.

    cos and sin are multiplied by `attention_factor` if given, else by sqrt(1 + ln s / ln L0) with s = `factor`, at
    every length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_divisors(self.name, "short_factor", self.short_factor)
        _check_divisors(self.name, "long_factor", self.long_factor)
        _check_attention_factor(self.name, self.attention_factor)
        if self.factor is None and self.attention_factor is None:
            raise MethodError("longrope: give factor (or target_length), or attention_factor")

    @property
    def length_dependent(self) -> bool:
        return self.short_factor != self.long_factor

    @property
    def steps(self) -> bool:
        return self.length_dependent

    def constant_until(self, rotary: Rotary, length: int) -> int:
        return FOREVER if length > rotary.trained_length else super().constant_until(rotary, length)

    def check(self, rotary: Rotary) -> None:
        _check_divisors(self.name, "short_factor", self.short_factor, rotary)
        _check_divisors(self.name, "long_factor", self.long_factor, rotary)
        if self.attention_factor is None and rotary.trained_length == 1:
            raise MethodError("longrope: a trained length of 1 token has no attention factor (ln 1 = 0); give one")

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        short = _on_device(self.short_factor, length.device)
        long = _on_device(self.long_factor, length.device)
        divisors = torch.where(length > rotary.trained_length, long, short) if self.length_dependent else long
        return rotary.inv_freq(device=length.device) / divisors, self._attention_factor(rotary)

    def _attention_factor(self, rotary: Rotary) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        if self.factor == 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(rotary.trained_length))

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        if rotary.turning is not None:
            return None
        lists = {"short_factor": list(self.short_factor), "long_factor": list(self.long_factor)}
        return self.as_longrope(rotary) | lists


@scaling("factors")
@dataclass(frozen=True, kw_only=True)
class Factors(Scaling):
    """Any static scaling, spelled out: inverse frequency i divided by factors[i]."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_divisors(self.name, "factors", self.factors)
        _check_attention_factor(self.name, self.attention_factor)

    def check(self, rotary: Rotary) -> None:
        _check_divisors(self.name, "factors", self.factors, rotary)

    def _scale(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device) / _on_device(self.factors, length.device), self.attention_factor


def _registry() -> dict[str, type[Scaling]]:
    import rope_ext_hf.relative  # noqa: F401 - registers the attention-level methods, which build on this module

    return _METHODS


def methods() -> dict[str, type[Scaling]]:
    """Every method by name."""
    return dict(_registry())


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def resolve_method(
    method: str | Scaling,
    rotary: Rotary | None,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    **params: Any,
) -> Scaling:
    """A method object from what a user may write: a name and parameters, or an object and nothing beside it.

    Args:
        method: a name of `methods()`, the alias "dynamic", or a method object.
        rotary: the geometry that turns target_length into a factor and that list lengths are checked against.
        factor: how many times the trained length.
        target_length: the same in tokens; where the method has no factor it only states the extended length.

    Raises:
        MethodError: unknown name or parameter (with the nearest one), both factor and target_length, or a value the
            method cannot work with.
        TypeError: parameters beside a method object.
    """
    if isinstance(method, Scaling):
        given = {"factor": factor} | params
        if extra := sorted(key for key, value in given.items() if value is not None):
            raise TypeError(f"{', '.join(extra)} given beside a {type(method).__name__} object; put it into the object")
        if target_length is not None:
            raise TypeError(
                f"target_length given beside a {type(method).__name__} object; put its factor into the object"
            )
        if rotary is not None:
            method.check(rotary)
        return method
    if not isinstance(method, str):
        raise TypeError(f"method must be a name or a method object, got {type(method).__name__}")

    registry = _registry()
    name, implied = _ALIASES.get(method, (method, {}))
    if name not in registry:
        known = sorted([*registry, *_ALIASES])
        raise MethodError(f"unknown method {method!r}.{_nearest(method, known)} Known methods: {', '.join(known)}")
    cls = registry[name]
    accepted = {item.name: item for item in fields(cls)}
    values = implied | params
    if "frequency" in accepted and isinstance(values.get("frequency"), str):  # which gets what is not the method's own
        below = {key: values.pop(key) for key in list(values) if key not in accepted}
        values["frequency"] = resolve_method(values["frequency"], rotary, factor=factor, **below)
        factor = None
    for key in values:
        if key not in accepted:
            parameters = ", ".join(["factor", "target_length", *(k for k in accepted if k != "factor")])
            raise MethodError(f"{name} has no parameter {key!r}.{_nearest(key, list(accepted))} It takes: {parameters}")
    if factor is not None and target_length is not None:
        raise MethodError(f"factor={factor} and target_length={target_length} say the same thing; give one of them")
    if target_length is not None:
        factor = _factor_for(cls, values, rotary, target_length)
    if factor is not None:
        if "factor" not in accepted:
            raise MethodError(f"{name} takes no factor; target_length=... states the length it is meant for")
        values["factor"] = float(factor) if _is_number(factor) else factor
    missing = [k for k, item in accepted.items() if item.default is MISSING and k not in values]
    if missing:
        hint = " (or target_length)" if "factor" in missing else ""
        raise MethodError(f"{name} needs {', '.join(missing)}{hint}")
    resolved = cls(**values)
    if rotary is not None:
        resolved.check(rotary)
    return resolved


def _factor_for(
    cls: type[Scaling], values: Mapping[str, Any], rotary: Rotary | None, target_length: int
) -> float | None:
    """target_length as a factor, None where the method (or its growth rule) has none."""
    takes_factor = any(item.name == "factor" for item in fields(cls))
    if issubclass(cls, DynamicNTK):
        takes_factor = values.get("growth") == "hf"
    if not isinstance(target_length, int):
        raise MethodError(f"target_length must be a whole number of tokens, got {target_length!r}")
    if rotary is None:
        raise MethodError("target_length needs a model or a Rotary to be measured against; give factor")
    if target_length < rotary.trained_length:
        raise MethodError(
            f"target_length={target_length} is below the trained length {rotary.trained_length}: nothing to extend"
        )
    return target_length / rotary.trained_length if takes_factor else None


def method_from_dict(saved: Mapping[str, Any]) -> Scaling:
    """The inverse of `Scaling.to_dict`."""
    values = dict(saved)
    if not isinstance(name := values.pop("method", None), str):
        raise MethodError(f"no method in {dict(saved)}")
    return resolve_method(name, None, **values)


def frequencies(method: str | Scaling, rotary: Rotary, *, length: int | None = None, **params: Any) -> Frequencies:
    """A method's frequencies, no model needed.

    Args:
        method: a name of `methods()`, or a method object.
        rotary: the geometry they are for.
        length: tokens in the input, for length-dependent methods; None means the trained length.
        **params: the method's parameters, `factor` or `target_length` among them.

    Returns:
        Frequencies: inv_freq (dim // 2,) float64 in radians per position, and the attention factor.

    Raises:
        MethodError: see `resolve_method`.
    """
    return resolve_method(method, rotary, **params).frequencies(rotary, length)

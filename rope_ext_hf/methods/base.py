"""The rotary embedding of a model (`Rotary`), the base class of all methods (`RopeMethod`), and its result.

Symbols as in the papers: d = `Rotary.dim`, b = `Rotary.theta`, L0 = `Rotary.trained_length`, L = the length of the
input, s = `factor`, theta_i = b^(-2i/d) for pair i = 0 ... d/2 - 1. A model that was trained under a scaling has
frequencies w_i and an attention factor a of its own, and is for C = `Rotary.context_length` tokens: every method starts
from these. For a plain model w_i = theta_i, a = 1 and C = L0. All frequencies are float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self, get_args

import torch
from torch import Tensor

from rope_ext_hf.bounds import NO_ROTATION
from rope_ext_hf.errors import MethodError, did_you_mean
from rope_ext_hf.methods.parameters import field_annotations, is_number, parameter_types

UNBOUNDED = 2**62  # a length in tokens that no input reaches
SHORT_AND_LONG = (1, UNBOUNDED)  # lengths in tokens that get the first and the second list of a scaling with two lists
TWO_PI = 2 * math.pi


@dataclass(frozen=True)
class TrainedScaling:
    """A RoPE scaling (such as YaRN) that a model was trained with, and the context length that it gave the model."""

    method: RopeMethod  # a frequency method
    rotary: Rotary  # the rotary embedding that the method was applied to
    context_length: int  # tokens that the model is for under this scaling

    def __post_init__(self) -> None:
        if not self.context_length >= 1:
            raise MethodError(f"context_length must be at least 1 token, got {self.context_length}")

    def to_dict(self) -> dict[str, Any]:
        """Return this scaling as a dictionary that can be written as JSON."""
        return {"method": self.method.to_dict(), "rotary": self.rotary.to_dict(), "context_length": self.context_length}


@dataclass(frozen=True)
class Rotary:
    """The parameters of the rotary embedding of a model, as its config states them.

    Attributes:
        dim: rotated dims per head (head_dim x partial rotary factor); even.
        theta: the base b of the inverse frequencies.
        trained_length: L0 in tokens, the length that RoPE without any scaling is for.
        rotated_pairs: how many of the dim // 2 pairs rotate; the rest have inverse frequency 0 (Gemma 4's
            "proportional" embedding). None: all of them.
        own: the scaling that the model was trained with; None: it has none. Build it with `scaled`.

    Raises:
        MethodError: an odd dim, a theta not above 1, or another impossible value.
    """

    dim: int
    theta: float
    trained_length: int
    rotated_pairs: int | None = None
    own: TrainedScaling | None = None
    _underneath: ClassVar[tuple[tuple[float, ...], float]]  # the frequencies and the attention factor of `own`

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
        if self.own is not None:
            # Computed now, because a trace cannot turn tensors into numbers; not a field, because `own` determines it.
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
        """Return this rotary embedding as part of a model that was trained under `method` for `context_length` tokens.

        Raises:
            MethodError: the method does not fit this rotary embedding, or no other method can be applied on top of it.
        """
        method.check_all(self)
        if not method.composable:
            raise MethodError(
                f"no method can be applied over {method.name}, because no single set of frequencies describes it"
            )
        return Rotary(*self.plain_geometry, own=TrainedScaling(method, self, context_length))

    @property
    def context_length(self) -> int:
        """C, the length in tokens that the unpatched model is for."""
        return self.trained_length if self.own is None else self.own.context_length

    @property
    def rotation_dropped(self) -> bool:
        """True if the scaling of the model stops every pair, as `nope` does."""
        return self.own is not None and self.rotated_pairs != 0 and not any(self.own_frequencies)

    @property
    def length_dependent(self) -> bool:
        """True if the model's own scaling makes the frequencies depend on the input's length (Phi-3's two lists)."""
        return self.own is not None and self.own.method.depends_on_length(self.own.rotary)

    @property
    def own_frequencies(self) -> tuple[float, ...]:
        """The inverse frequencies under the model's own scaling, for long inputs, one for each pair of dims.

        They are Python numbers, which a trace records as constants. A rotary embedding without a scaling has none.
        """
        return self._underneath[0]

    @property
    def attention_factor(self) -> float:
        """a, the attention factor of the model's own scaling; 1 for a plain model."""
        return 1.0 if self.own is None else self._underneath[1]

    def inv_freq(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the model's own inverse frequencies w_i, which a method then changes.

        They are (dim // 2,) float64, in radians per position. If they depend on the length of the input, those for long
        inputs are returned.
        """
        if self.own is None:
            return self.theta_inv_freq(device=device)
        return constant(self.own_frequencies, device)

    def theta_inv_freq(self, theta: float | Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the inverse frequencies of plain RoPE with a base: theta_i = b^(-2i/d) in radians per position.

        Args:
            theta: the base b, one number or a tensor (..., 1). None: the base that the model states.
            device: the device of the result.

        Returns:
            (..., dim // 2) float64.
        """
        dims = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        inv_freq = (self.theta if theta is None else theta) ** (-dims / self.dim)
        return inv_freq if self.rotated_pairs is None else inv_freq * (dims < 2 * self.rotated_pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None as a dictionary that can be written as JSON.

        `rotary_from_dict` turns it back into a `Rotary`.
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["own"] = None if self.own is None else self.own.to_dict()
        return {name: value for name, value in values.items() if value is not None}


class Frequencies(NamedTuple):
    """The result of a method: the inverse frequencies, and the attention factor.

    Attributes:
        inv_freq: (dim // 2,) float64, radians per position.
        attention_factor: the number that cos and sin are multiplied by.
    """

    inv_freq: Tensor
    attention_factor: float


class TrainingDefaults(NamedTuple):
    """The settings with which `rope-ext finetune` trains a model under a method, where its user gives none.

    Attributes:
        learning_rate: the peak of the learning rate.
        train_all: whether all weights are trained; False: adapters, norms and embeddings.
        guard: the weight of keeping the unpatched model's predictions on short inputs.
        extended_rows: whether rows are as long as the extended length; False: as long as the context length.
        published: a clause on how many tokens the authors of the method train on; empty: it is not stated.
    """

    learning_rate: float = 2e-4
    train_all: bool = False
    guard: float = 1.0
    extended_rows: bool = True
    published: str = ""


@lru_cache(maxsize=64)
def _underneath(rotary: Rotary) -> tuple[tuple[float, ...], float]:
    """Return the inverse frequencies and the attention factor under the model's own scaling, for long inputs."""
    assert rotary.own is not None
    length = rotary.own.context_length
    if rotary.length_dependent:  # the second list begins above the trained length, whatever the context length is
        length = max(length, rotary.trained_length + 1)
    inv_freq, attention_factor = rotary.own.method.frequencies(rotary.own.rotary, length)
    return tuple(inv_freq.tolist()), attention_factor


def _as_tensor(number: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a float64 tensor; `torch.as_tensor` refuses a number computed in a trace of dynamic shapes."""
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.float64, device=device)


def constant(numbers: tuple[float, ...], device: torch.device | str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers as a tensor (len(numbers),) on a device. The tensor is shared: do not write to it.

    The tensor is kept for later calls, because the host waits for the device at every copy. Under torch.compile,
    torch.export, tracing or a fake mode it is made anew, because tensors made there must not reach a later call.
    """
    if may_keep_tensors():
        return _kept(numbers, dtype, torch.device(device))
    return torch.tensor(numbers, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor would fail in a later forward that needs gradients
        return torch.tensor(numbers, dtype=dtype, device=device)


def divide(inv_freq: Tensor, divisors: tuple[float, ...]) -> Tensor:
    """Return inverse frequencies, each divided by a number of its own; `NO_ROTATION` makes it 0.

    `inv_freq`: a tensor (dim // 2,) float64, like the result.
    """
    numbers = constant(divisors, inv_freq.device)
    return torch.where(numbers < NO_ROTATION, inv_freq / numbers, 0.0)


def may_keep_tensors() -> bool:
    """Return whether a tensor made now may outlive the call.

    It may not under torch.compile, torch.export, tracing or a fake mode.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return type(torch.empty(0, device="cpu")) is Tensor


@dataclass(frozen=True, kw_only=True)
class RopeMethod(ABC):
    """Base class of all methods: a subclass has its parameters as fields, and its formula as `compute`.

    Parameters are checked by their types: `float`, `int`, `bool`, `tuple[float, ...]` and `Literal[...]`, each with or
    without `| None`. Numbers must be finite, a parameter named `factor` at least 1, and one named `attention_factor`
    above 0. A subclass with further limits checks them in its `__post_init__`, after `super().__post_init__()`, and
    those that depend on the model in `check`.

    `compute` is all that a method must define. These members may be overridden to say more about it:
    `length_dependent`, `piecewise_constant` and `next_change`, `extended_length`, `takes_factor`, `sticky_length`, and
    `plain_rope_parameters` where transformers has a rope type for the method.
    """

    name: ClassVar[str] = ""
    """The name that the method is registered under; `register_method` sets it and the next two."""
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Other names of the method, each with the parameters that it implies."""
    parameters: ClassVar[Mapping[str, Field[Any]]] = {}
    """The fields by name."""
    changes_frequencies: ClassVar[bool] = True
    """True if the method needs pairs that rotate."""
    drops_rotation: ClassVar[bool] = False
    """True if every angle is 0 under the method, so that any layer can have it without the others."""
    trainable: ClassVar[str] = ""
    """The parameter, one number for each pair, that is trained in a rotary module; empty: no parameter is trained."""
    training: ClassVar[TrainingDefaults] = TrainingDefaults()
    """The settings with which `rope-ext finetune` trains a model under the method."""

    def __post_init__(self) -> None:
        """Raise MethodError if a parameter is of the wrong type, or beyond the limits that hold for every method."""
        for name, kind in parameter_types(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, list):  # so that a method read from JSON is hashable and equals one written in Python
                value = tuple(value)
                object.__setattr__(self, name, value)
            if value is None and kind.optional:
                continue
            fault = kind.fault(value)
            if fault is not None:
                raise MethodError(f"{self.name}: {name} must be {fault}")
            if kind.choices:
                self.check_choice(name, kind.choices)

    def check_least(self, least: int, *parameters: str) -> None:
        """Raise MethodError if one of these parameters is below `least`.

        Parameters that the method lacks, or whose value is not a number, are not checked.
        """
        for name in parameters:
            value: Any = getattr(self, name, None)
            if is_number(value) and value < least:
                raise MethodError(f"{self.name}: {name} must be at least {least}, got {value:g}")

    def check_above_zero(self, *parameters: str) -> None:
        """Raise MethodError if one of these parameters is 0 or negative.

        Parameters that the method lacks, or whose value is not a number, are not checked.
        """
        for name in parameters:
            value: Any = getattr(self, name, None)
            if is_number(value) and value <= 0:
                raise MethodError(f"{self.name}: {name} must be above 0, got {value:g}")

    def check_choice(self, parameter: str, choices: Collection[str]) -> None:
        """Raise MethodError unless the value of the field `parameter` is one of `choices`.

        The message suggests the choice that is spelt most like the value.
        """
        value = getattr(self, parameter)
        if value not in choices:
            near = did_you_mean(str(value), choices)
            raise MethodError(f"{self.name}: {parameter} must be one of {', '.join(choices)}; got {value!r}.{near}")

    @classmethod
    def method_parameter(cls) -> str | None:
        """Return the name of the parameter whose value is another method; None if there is no such parameter.

        Remapping methods have one: `frequency`.
        """
        for item in fields(cls):
            if RopeMethod in get_args(field_annotations(cls).get(item.name)):
                return item.name
        return None

    @classmethod
    def takes_factor(cls, values: Mapping[str, Any]) -> bool:
        """Return whether the method takes a `factor` when its other parameters have these `values`."""
        return "factor" in cls.__dataclass_fields__

    @property
    def length_dependent(self) -> bool:
        """True if the method itself makes the frequencies depend on the length of the input."""
        return False

    def depends_on_length(self, rotary: Rotary) -> bool:
        """Return whether the method, or the model's own scaling, makes the frequencies depend on the input's length."""
        return self.length_dependent or rotary.length_dependent

    def frequencies(self, rotary: Rotary, length: int | None = None) -> Frequencies:
        """Return the frequencies and the attention factor for one input of `length` tokens.

        Without a length, they are those for an input as long as the context length.

        Raises:
            MethodError: parameters that do not fit `rotary`, or a length below 1.
        """
        self.check_all(rotary)
        if length is not None and length < 1:
            raise MethodError(f"length must be at least 1 token, got {length}")
        tokens = torch.tensor(rotary.context_length if length is None else length, dtype=torch.float64, device="cpu")
        inv_freq, attention_factor = self.at_lengths(rotary, tokens)
        return Frequencies(inv_freq, float(attention_factor))

    def at_lengths(self, rotary: Rotary, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return frequencies and attention factor for inputs of several lengths; the host reads no tensor value.

        Args:
            rotary: the rotary embedding of the model.
            lengths: the number of tokens in each input, a tensor (...) float64.

        Returns:
            The inverse frequencies, (..., dim // 2) float64; and the attention factor, one number or a tensor (..., 1)
            float64. Both are on the device of `lengths`.
        """
        length = lengths.unsqueeze(-1)
        inv_freq, attention_factor = self.compute(rotary, length)
        if rotary.own is None:
            return inv_freq, attention_factor
        attention_factor = attention_factor * rotary.attention_factor
        if not rotary.length_dependent:
            return inv_freq, attention_factor
        # The model's own scaling has two lists. Inputs up to the trained length keep the first, as in the unpatched
        # model; the method extends the second.
        own_inv_freq, own_factor = rotary.own.method.at_lengths(rotary.own.rotary, lengths)
        long = length > rotary.trained_length
        if isinstance(attention_factor, Tensor) or attention_factor != own_factor:
            new, own = _as_tensor(attention_factor, lengths.device), _as_tensor(own_factor, lengths.device)
            attention_factor = torch.where(long, new, own)
        return torch.where(long, inv_freq, own_inv_freq), attention_factor

    @abstractmethod
    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the frequencies and the attention factor for inputs of these lengths, by the formula of the method.

        Args:
            rotary: `inv_freq()` has the frequencies that the method changes, and `context_length` is the length that it
                extends.
            length: the number of tokens in each input, a tensor (..., 1) float64.

        Returns:
            The inverse frequencies, (..., dim // 2) in radians per position; and the method's own attention factor, one
            number or a tensor (..., 1). `at_lengths` multiplies the factor by that of the model's own scaling.
        """

    def trained_inv_freq(self, rotary: Rotary, values: Tensor) -> Tensor:
        """Return the inverse frequencies for given values of the trainable parameter; gradients flow through them.

        `values`: a tensor (dim // 2,). The result has its shape and dtype.
        """
        raise TypeError(f"{self.name} has no parameter that is trained")

    @property
    def composable(self) -> bool:
        """True if another method can extend a model that was trained under this one.

        That needs frequencies that are the same for all long inputs.
        """
        return not self.length_dependent

    @property
    def sticky_length(self) -> bool:
        """True if the rotary module keeps the frequencies of the longest input it has met."""
        return False

    @property
    def piecewise_constant(self) -> bool:
        """True if the frequencies of a length-dependent method change at a few lengths only, not with every token."""
        return False

    def changes_in_steps(self, rotary: Rotary) -> bool:
        """Return whether the frequencies change at a few lengths only, and not with every token.

        Both the method and the model's own scaling count.
        """
        return self.piecewise_constant or (not self.length_dependent and rotary.length_dependent)

    def constant_until(self, rotary: Rotary, length: int) -> int:
        """Return the longest input, in tokens, that has the same frequencies as an input of `length` tokens."""
        if rotary.length_dependent and length <= rotary.trained_length:
            return rotary.trained_length
        return self.next_change(rotary, length) if self.length_dependent else UNBOUNDED

    def next_change(self, rotary: Rotary, length: int) -> int:
        """Return the longest input, in tokens, that has the same frequencies as one of `length` tokens.

        Unlike `constant_until`, it leaves out the model's own scaling. It is called for length-dependent methods only.
        """
        return max(length, rotary.context_length)

    @property
    def keeps_bits(self) -> bool:
        """True if the model's own modules read inputs of up to `unchanged_length` tokens, so that no bit changes.

        Under other methods such inputs differ by rounding, because this package computes angles more accurately than
        transformers, and some methods sum the attention of a query in another order.
        """
        return False

    def unchanged_length(self, rotary: Rotary) -> int:
        """Return the longest input, in tokens, that the method reads as the model does that it extends.

        The output is then the same up to rounding, and bit for bit if `keeps_bits`. 0: it changes at every length.
        """
        # Over a scaling with two lists, `at_lengths` leaves inputs up to the trained length as they are.
        kept = rotary.trained_length if rotary.length_dependent else 0
        inv_freq, attention_factor = self.frequencies(rotary, kept + 1)
        same = torch.allclose(inv_freq, rotary.inv_freq(), rtol=1e-12, atol=0)
        if not same or not math.isclose(attention_factor, rotary.attention_factor, rel_tol=1e-12):
            return kept
        return self.constant_until(rotary, kept + 1)

    def cautions(self, rotary: Rotary) -> tuple[str, ...]:
        """Return warnings about unusual effects of the method on this rotary embedding, one sentence each."""
        return ()

    @property
    def note(self) -> str | None:
        """A sentence on what the method does to the model, for `describe`; None in most methods."""
        return None

    @property
    def warning(self) -> str | None:
        """A sentence that `patch` warns with; None: there is nothing to warn of."""
        return None

    def after_training(self, tokens: int, before: RopeMethod | None) -> Self:
        """Return the method that is saved with a model after `rope-ext finetune` has trained it.

        Args:
            tokens: the number of tokens in the rows of that training.
            before: the method that the model was loaded with; None: it was not patched.
        """
        return self

    def check_all(self, rotary: Rotary) -> None:
        """Raise MethodError if the method cannot be applied to this rotary embedding."""
        if self.changes_frequencies and rotary.rotation_dropped:
            raise MethodError(
                f"no pair of this model rotates, so {self.name} has no frequency to change. Its rotation was dropped "
                "(nope); over='original' extends the model as it was before"
            )
        self.check(rotary)

    def check(self, rotary: Rotary) -> None:  # noqa: B027 - most methods fit every rotary embedding
        """Raise MethodError if the parameters of the method do not fit this rotary embedding."""

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """Return the `rope_parameters` with which plain transformers computes the same; None if there are none.

        transformers' longrope has a divisor for each pair, so it can state any static frequencies. Override
        `plain_rope_parameters` to give a better form; this function adds the model's own scaling.
        """
        if rotary.rotated_pairs is not None or self.length_dependent:
            return None
        if rotary.length_dependent:
            short, long = [self.frequencies(rotary, length).attention_factor for length in SHORT_AND_LONG]
            if not math.isclose(short, long, rel_tol=1e-12):  # longrope has one attention factor for both lists
                return None
            return self.longrope_parameters(rotary, SHORT_AND_LONG)
        if rotary.own is None:
            return self.plain_rope_parameters(rotary)
        return self.longrope_parameters(rotary)

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """Return the `rope_parameters` for a model without a scaling of its own."""
        return self.longrope_parameters(rotary)

    def longrope_parameters(
        self, rotary: Rotary, lengths: tuple[int | None, int | None] = (None, None)
    ) -> dict[str, Any]:
        """Return the method as `rope_parameters` for transformers' longrope, which has a divisor for each frequency.

        `lengths`: the lengths in tokens whose frequencies become the short and the long list; None stands for the
        context length.
        """
        theta = rotary.theta_inv_freq()
        short, long = [self.frequencies(rotary, length) for length in lengths]
        divisors = [(theta / each.inv_freq).clamp(max=NO_ROTATION).tolist() for each in (short, long)]
        return {
            "rope_type": "longrope",
            "rope_theta": rotary.theta,
            "short_factor": divisors[0],
            "long_factor": divisors[1],
            "factor": getattr(self, "factor", None) or 1.0,
            "attention_factor": short.attention_factor,
            "original_max_position_embeddings": rotary.trained_length,
        }

    def approximate_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """Return `rope_parameters` for something similar in transformers; None if there is nothing similar.

        They are used only where the user asks for an approximation.
        """
        return None

    def extended_length(self, rotary: Rotary) -> int | None:
        """Return the length in tokens to which the method extends the model by its parameters.

        None: the parameters state no such length.
        """
        factor = getattr(self, "factor", None)
        return round(rotary.context_length * factor) if factor else None

    def label(self) -> str:
        """Return the text that stands for the method in tables and plots.

        It has the name, the factor, and the parameters that differ from their defaults, except for fields with the
        metadata {"in_label": False}.
        """
        words, settings, methods = [self.name], [], []
        for item in fields(self):
            value = getattr(self, item.name)
            differs = value != item.default
            if isinstance(value, RopeMethod):
                methods.append(f"on {value.label()}")
            elif item.name == "factor" and value is not None:
                words.append(f"x{value:g}")
            elif item.name == self.name and is_number(value):  # theta
                words.append(f"{value:g}")
            elif not differs or not item.metadata.get("in_label", True):
                continue
            elif isinstance(value, str):
                words.append(value)
            elif is_number(value):
                settings.append(f"{item.name}={value:g}")
            elif value is True:
                settings.append(item.name)
        return " ".join([*words, *settings, *methods])

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name, and its parameters that are not None, as a dictionary that can be written as JSON.

        `method_from_dict` turns it back into a method.
        """
        saved: dict[str, Any] = {"method": self.name}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, RopeMethod):
                value = value.to_dict()
            elif isinstance(value, tuple):
                value = list(value)
            if value is not None:
                saved[item.name] = value
        return saved

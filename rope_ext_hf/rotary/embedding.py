"""The rotary modules: `RotaryEmbedding`, which fills a slot of a model, and the standalone `NTKAwareRoPE`.

    rope = RotaryEmbedding("yarn", Rotary(dim=128, theta=10000.0, trained_length=4096), factor=8)
    cos, sin = rope(x, position_ids)          # (batch, length, 128) each, in x's dtype

Angles are kept as fixed-point fractions of a turn: a frequency is an integer number of 2^-64 turns per position, and
position x frequency in wrapping 64-bit arithmetic is the angle modulo one turn, exact to 2^-41 turns at position 2^24.
A float32 product is off by 3e-2 rad at a position of a million, and by 160 rad at 131 thousand once
`model.to(bfloat16)` has rounded the frequencies; integers are out of reach of such casts and need no float64, which
some devices lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.rotary.phase import angles, fixed_point

__all__ = ["Layout", "RotaryEmbedding", "segment_lengths"]

Layout = Literal["half", "interleaved", "bare", "complex"]
"""How a model wants its angles: each twice, side by side ("half": cos has dim columns, i and i + dim/2 alike) or next
to each other ("interleaved": 2i and 2i + 1 alike), each once ("bare"), or as cos + i sin in one tensor ("complex")."""


def segment_lengths(position_ids: Tensor) -> Tensor:
    """How many tokens the input of each token has, (rows, tokens): positions that do not ascend begin another input."""
    begins = torch.nn.functional.pad(position_ids.diff(dim=-1) <= 0, (1, 0), value=True)
    segment = begins.cumsum(-1) - 1
    longest = torch.zeros_like(segment).scatter_reduce(-1, segment, position_ids.to(segment.dtype) + 1, "amax")
    return longest.gather(-1, segment)


class RotaryEmbedding(nn.Module):
    """cos and sin of any frequency-level method, with the call signature of transformers' rotary modules.

    Args:
        method: a name of `rope_ext_hf.methods()` or a method object.
        rotary: the geometry it works on.
        layout: how the angles are arranged, see `Layout`.
        cast: give cos and sin in x's dtype; False: float32 whatever x is (OLMo).
        **params: the method's parameters, when it is given by name.

    cos and sin depend on this call's positions alone. Under a length-dependent method a row's length is its largest
    position + 1, unless `at_length` fixes it. |cos error| and |sin error| are below 1e-6 before the cast at every
    position below 2^24, whatever dtype the module or model is moved to.
    """

    frequency: Tensor
    attention_factor: float
    fixed_length: int | None

    def __init__(
        self,
        method: str | RopeMethod,
        rotary: Rotary,
        *,
        layout: Layout = "half",
        cast: bool = True,
        **params: Any,
    ) -> None:
        super().__init__()
        if layout not in get_args(Layout):
            raise MethodError(f"layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")
        self.method = resolve_method(method, rotary, **params)
        self.rotary = rotary
        self.layout = layout
        self.cast = cast
        self.row_lengths: Tensor | None = None  # of the forward under way, from whoever knows more than its positions
        self.longest_seen: Tensor | None = None  # sticky growth only: the longest length met, (), on the device
        self.register_buffer("frequency", torch.empty(0, dtype=torch.int64, device="cpu"), persistent=False)
        self._set_length(None)

    @property
    def length_dependent(self) -> bool:
        """Whether the next call's frequencies depend on how long its input is."""
        return self.method.length_dependent and self.fixed_length is None

    def frequencies(self, length: int | None = None) -> Frequencies:
        """The method's frequencies for an input of `length` tokens (None: the fixed length, else the trained one)."""
        return self.method.frequencies(self.rotary, self.fixed_length if length is None else length)

    @contextmanager
    def at_length(self, length: int) -> Iterator[None]:
        """Every forward inside uses the frequencies of an input of `length` tokens."""
        before = self.fixed_length
        self._set_length(length)
        try:
            yield
        finally:
            self._set_length(before)

    @contextmanager
    def override_angles(self, radians: Tensor, attention_factor: float) -> Iterator[None]:
        """Every forward inside turns each pair by its own radians (dim // 2,) per position, whatever the length."""
        before = self.fixed_length
        self._values, self.attention_factor = tuple(fixed_point(radians.double()).tolist()), attention_factor
        self.fixed_length = 1  # any: these frequencies do not follow the input
        self._refresh_buffer()
        try:
            yield
        finally:
            self._set_length(before)

    def reset(self) -> None:
        """Forget the longest input met (matters to sticky growth only)."""
        self.longest_seen = None

    def _set_length(self, length: int | None) -> None:
        """Take the method's frequencies at `length` (None: the trained length, for static methods) as the table."""
        inv_freq, self.attention_factor = self._at(length)
        self._values = tuple(fixed_point(inv_freq).tolist())
        self.fixed_length = length
        self._refresh_buffer()

    def _at(self, length: int | None) -> Frequencies:
        return self.method.frequencies(self.rotary, length)

    def _refresh_buffer(self) -> None:
        if self.frequency.device.type != "meta":
            self.frequency = torch.tensor(self._values, dtype=torch.int64, device=self.frequency.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `to_empty` hands back an uninitialised buffer, and it is not in any checkpoint: the tuple is the truth.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh_buffer()
        return self

    def phase_per_position(self, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
        """Fixed-point frequencies and attention factor of inputs of these lengths, on their device.

        Args:
            lengths: (rows,) or, where a row holds several inputs, (rows, tokens); integers.

        Returns:
            int64 (rows, 1 or tokens, dim // 2), and (rows, 1 or tokens, 1) float32 or one number.
        """
        device = lengths.device
        wide = lengths.cpu() if device.type == "mps" else lengths  # no float64 there
        inv_freq, attention_factor = self.method.at_lengths(self.rotary, wide.to(torch.float64))
        frequency = fixed_point(inv_freq).to(device)
        if isinstance(attention_factor, Tensor):
            attention_factor = attention_factor.to(device, torch.float32)
        if lengths.ndim > 1:
            return frequency, attention_factor
        return frequency.unsqueeze(-2), (
            attention_factor.unsqueeze(-2) if isinstance(attention_factor, Tensor) else attention_factor
        )

    def resolve_lengths(self, lengths: Tensor) -> Tensor:
        """The lengths whose frequencies rows of these lengths get: their own; under sticky growth the longest met."""
        if not self.method.sticky_length:
            return lengths
        self.longest_seen = (
            lengths.amax() if self.longest_seen is None else torch.maximum(lengths.amax(), self.longest_seen)
        )
        return self.longest_seen.expand_as(lengths)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Angles for the positions of one call.

        Args:
            x: any tensor of the dtype and on the device the angles are wanted in.
            position_ids: (batch, length) integers.

        Returns:
            cos and sin, (batch, length, dim), (batch, length, dim // 2) if bare; or one complex64 tensor
            (batch, length, dim // 2).

        Raises:
            TypeError: positions that are not integers.
        """
        if position_ids.is_floating_point():
            raise TypeError(f"position_ids must be integers, got {position_ids.dtype}")
        position_ids = position_ids.to(x.device)
        attention_factor: Tensor | float = self.attention_factor
        if self.length_dependent:
            lengths = self.row_lengths
            if lengths is None:
                lengths = self.resolve_lengths(segment_lengths(position_ids))
            frequency, attention_factor = self.phase_per_position(lengths)
        else:
            frequency = self.frequency.to(x.device)
        angle = angles(position_ids, frequency)
        cos, sin = angle.cos(), angle.sin()
        if isinstance(attention_factor, Tensor) or attention_factor != 1.0:
            cos, sin = cos * attention_factor, sin * attention_factor
        if self.layout == "complex":
            return torch.complex(cos, sin)
        if self.cast:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        if self.layout == "half":
            return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        if self.layout == "interleaved":
            return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return cos, sin

    def extra_repr(self) -> str:
        parameters = ", ".join(f"{key}={value}" for key, value in self.method.to_dict().items() if key != "method")
        return f"{self.method.name}({parameters}), {self.rotary}, layout={self.layout!r}"

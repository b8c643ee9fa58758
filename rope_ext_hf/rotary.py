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

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, MethodError
from rope_ext_hf.scaling import TWO_PI, DynamicNTK, Frequencies, Rotary, Scaling, ntk_theta, resolve_method

__all__ = ["Layout", "NTKAwareRoPE", "RotaryEmbedding", "apply_rotary_pos_emb"]

Layout = Literal["half", "interleaved", "bare", "complex"]
"""How a model wants its angles: each twice, side by side ("half": cos has dim columns, i and i + dim/2 alike) or next
to each other ("interleaved": 2i and 2i + 1 alike), each once ("bare"), or as cos + i sin in one tensor ("complex")."""

_TURN = 2.0**64


def fixed_point(inv_freq: Tensor) -> Tensor:
    """Radians per position (float64) -> int64 units of 2^-64 turns per position, whole turns dropped."""
    turns = inv_freq / TWO_PI
    fraction = turns - turns.round()
    # At exactly half a turn 2^63 does not fit; 2^63 - 2^10 is the double below it.
    return (fraction * _TURN).clamp(max=2.0**63 - 1024).to(torch.int64)


def angles(position_ids: Tensor, frequency: Tensor) -> Tensor:
    """Angles modulo a turn, float32 in [-pi, pi], (..., length, dim // 2), from integer positions and `fixed_point`."""
    return radians(position_ids[..., None].to(torch.int64) * frequency)


def radians(phase: Tensor) -> Tensor:
    """Fixed-point angles, int64 units of 2^-64 turns, as float32 in [-pi, pi]."""
    return phase.to(torch.float32) * (TWO_PI / _TURN)


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
        method: str | Scaling,
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
        self.longest: Tensor | None = None  # sticky growth only: the longest length met, (), on the device
        self.register_buffer("frequency", torch.empty(0, dtype=torch.int64, device="cpu"), persistent=False)
        self._fix(None)

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
        self._fix(length)
        try:
            yield
        finally:
            self._fix(before)

    @contextmanager
    def turning_by(self, radians: Tensor, attention_factor: float) -> Iterator[None]:
        """Every forward inside turns each pair by its own radians (dim // 2,) per position, whatever the length."""
        before = self.fixed_length
        self._table, self.attention_factor = tuple(fixed_point(radians.double()).tolist()), attention_factor
        self.fixed_length = 1  # any: these frequencies do not follow the input
        self._fill()
        try:
            yield
        finally:
            self._fix(before)

    def reset(self) -> None:
        """Forget the longest input met (matters to sticky growth only)."""
        self.longest = None

    def _fix(self, length: int | None) -> None:
        """Take the method's frequencies at `length` (None: the trained length, for static methods) as the table."""
        inv_freq, self.attention_factor = self._at(length)
        self._table = tuple(fixed_point(inv_freq).tolist())
        self.fixed_length = length
        self._fill()

    def _at(self, length: int | None) -> Frequencies:
        return self.method.frequencies(self.rotary, length)

    def _fill(self) -> None:
        if self.frequency.device.type != "meta":
            self.frequency = torch.tensor(self._table, dtype=torch.int64, device=self.frequency.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `to_empty` hands back an uninitialised buffer, and it is not in any checkpoint: the tuple is the truth.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill()
        return self

    def row_frequency(self, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
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

    def effective(self, lengths: Tensor) -> Tensor:
        """The lengths whose frequencies rows of these lengths get: their own; under sticky growth the longest met."""
        if not (isinstance(self.method, DynamicNTK) and self.method.sticky):
            return lengths
        self.longest = lengths.amax() if self.longest is None else torch.maximum(lengths.amax(), self.longest)
        return self.longest.expand_as(lengths)

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
                lengths = self.effective(segment_lengths(position_ids))
            frequency, attention_factor = self.row_frequency(lengths)
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


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by half pairing: dims i and i + rotated/2 turn together (RoFormer, arXiv 2104.09864, sec. 3.2).

    Args:
        x: (batch, length, heads, head_dim).
        cos, sin: (length, rotated) or (batch, length, rotated) with rotated <= head_dim; dims past `rotated` pass
            through unchanged.

    Returns:
        x's shape, dtype and device; computed in the wider of x's dtype and cos's.
    """
    rotated = cos.shape[-1]
    if x.ndim != 4:
        raise ValueError(f"x must be (batch, length, heads, head_dim), got {tuple(x.shape)}")
    if rotated > x.shape[-1] or rotated % 2:
        raise ValueError(f"cos has {rotated} columns; they must be even in number and at most head_dim = {x.shape[-1]}")
    if cos.shape != sin.shape or cos.shape[:-1] not in ((x.shape[1],), (1, x.shape[1]), tuple(x.shape[:2])):
        raise ValueError(
            f"cos and sin must both be ({x.shape[1]}, rotated) or ({x.shape[0]}, {x.shape[1]}, rotated), "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = x[..., :rotated] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), x[..., rotated:]), dim=-1) if rotated < x.shape[-1] else turned.to(x.dtype)


class NTKAwareRoPE(nn.Module):
    """NTK-aware RoPE that holds its own tables and applies itself, for models written by hand.

    Args:
        head_dim: rotated dims per head, all of them; even and at least 4.
        max_seq_len: trained length L0 in tokens.
        base: theta.
        k: NTK scale alpha; the tables reach max_seq_len x k positions. At least 1.
        dynamic: what happens when an input is longer than the tables reach. The smallest even k' with
            max_seq_len x k' >= length is taken in either case; True keeps k' and its tables for all later calls,
            False uses them for that call only.
        dtype: dtype of the tables.
        device: where they are made.

    Attributes:
        C, S: cos and sin, (max_seq_len x k, head_dim), half pairing; buffers that are not in the state_dict.

    The formula is `ntk`'s: base x k^(d/(d-2)) (YaRN paper, arXiv 2309.00071, sec. 3.1).
    """

    C: Tensor
    S: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        base: float = 10000,
        k: float = 1,
        dynamic: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 4:
            raise MethodError(f"NTK-aware RoPE needs head_dim of at least 4 (its exponent is d/(d-2)), got {head_dim}")
        if not (math.isfinite(k) and k >= 1):
            raise MethodError(f"k must be a finite number of at least 1, got {k}")
        if not dtype.is_floating_point:
            raise MethodError(f"dtype must be a floating-point type, got {dtype}")
        self.rotary = Rotary(head_dim, float(base), max_seq_len)
        self.k = k
        self.dynamic = dynamic
        cos, sin = self._tables(k, dtype, torch.get_default_device() if device is None else device)
        self.register_buffer("C", cos, persistent=False)
        self.register_buffer("S", sin, persistent=False)

    def _tables(self, k: float, dtype: torch.dtype, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        frequency = fixed_point(self.rotary.inv_freq(ntk_theta(self.rotary, k))).to(device)
        reach = math.floor(round(self.rotary.trained_length * k, 6))  # 100 x 1.15 is 114.99999999999999
        positions = torch.arange(reach, device=frequency.device)
        angle = angles(positions, frequency)
        return torch.cat((angle.cos(),) * 2, dim=-1).to(dtype), torch.cat((angle.sin(),) * 2, dim=-1).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NTKAwareRoPE:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.C.device.type != "meta":  # `to_empty` leaves them uninitialised
            self.C, self.S = self._tables(self.k, self.C.dtype, self.C.device)
        return self

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate x: (batch, length, heads, head_dim), whose first token stands at position `offset`."""
        if x.ndim != 4 or x.shape[-1] != self.rotary.dim:
            raise ValueError(f"x must be (batch, length, heads, {self.rotary.dim}), got {tuple(x.shape)}")
        if offset < 0:
            raise LengthError(f"offset must not be negative, got {offset}")
        reach = offset + x.shape[1]
        cos, sin = self.C, self.S
        if reach > cos.shape[0]:
            k = 2 * math.ceil(reach / (2 * self.rotary.trained_length))
            cos, sin = self._tables(k, cos.dtype, cos.device)
            if self.dynamic:
                self.k, self.C, self.S = k, cos, sin
        return apply_rotary_pos_emb(x, cos[offset:reach].to(x.device), sin[offset:reach].to(x.device))

"""`NTKAwareRoPE` and `apply_rotary_pos_emb`: rotary embedding for models written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, MethodError
from rope_ext_hf.methods.base import Rotary, may_keep_tensors
from rope_ext_hf.methods.static import ntk_theta
from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.phase import angles, fixed_point


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by half pairing: dims i and i + rotated/2 form a pair (RoFormer, arXiv 2104.09864, sec. 3.2).

    Args:
        x: (batch, length, heads, head_dim).
        cos, sin: (length, rotated) or (batch, length, rotated) with rotated <= head_dim; dims past `rotated` pass
            through unchanged.

    Returns:
        Rotated x, of the same shape, dtype and device; it is computed in the wider dtype of x and cos.

    Raises:
        ValueError: shapes that do not fit each other.
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
    out = x[..., :rotated] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((out.to(x.dtype), x[..., rotated:]), dim=-1) if rotated < x.shape[-1] else out.to(x.dtype)


class NTKAwareRoPE(nn.Module):
    """A module that rotates queries or keys by NTK-aware RoPE and holds its own tables, for models written by hand.

    Args:
        head_dim: rotated dims per head, all of them; even and at least 4.
        max_seq_len: trained length L0 in tokens.
        base: theta.
        k: NTK scale alpha, at least 1; the tables have max_seq_len x k positions.
        dynamic: whether the tables grow for good. For an input longer than the tables, those of the smallest even k'
            with max_seq_len x k' >= length are used. True: they replace the tables for all later calls (unless the call
            is being compiled). False: they are for that call only. A traced or exported module cannot grow.
        dtype: dtype of the tables.
        device: device of the tables.

    Attributes:
        C, S: cos and sin, (max_seq_len x k, head_dim), half pairing; buffers that are not in the state_dict.

    Raises:
        MethodError: a head_dim below 4 or odd, a base not above 1, a k below 1, or a dtype that is not floating-point.

    The formula is that of the method `ntk`: theta_i = b'^(-2i/d) with b' = base x k^(d/(d-2)) (YaRN paper, arXiv
    2309.00071, sec. 3.1).
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
        """Return the tables of cos and sin for the NTK scale k, each (max_seq_len x k, head_dim)."""
        frequency = fixed_point(self.rotary.theta_inv_freq(ntk_theta(self.rotary, k))).to(device)
        reach = math.floor(round(self.rotary.trained_length * k, 6))  # 100 x 1.15 is 114.99999999999999
        positions = torch.arange(reach, device=frequency.device)
        angle = angles(positions, frequency)
        return torch.cat((angle.cos(),) * 2, dim=-1).to(dtype), torch.cat((angle.sin(),) * 2, dim=-1).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NTKAwareRoPE:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Computed anew: `to_empty` leaves buffers without values, and a cast to a shorter dtype and back rounds them.
        if self.C.device.type != "meta":
            self.C, self.S = self._tables(self.k, self.C.dtype, self.C.device)
        return self

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return x, (batch, length, heads, head_dim), rotated; its first token has position `offset`.

        Raises:
            ValueError: x has another number of dimensions or another head_dim.
            LengthError: a negative offset, or an input longer than the tables in a trace or an export.
        """
        if x.ndim != 4 or x.shape[-1] != self.rotary.dim:
            raise ValueError(f"x must be (batch, length, heads, {self.rotary.dim}), got {tuple(x.shape)}")
        if offset < 0:
            raise LengthError(f"offset must not be negative, got {offset}")
        reach = offset + x.shape[1]
        cos, sin = self.C, self.S
        if reach > cos.shape[0]:
            if is_exporting():
                least = int(reach) / self.rotary.trained_length
                raise LengthError(
                    f"a traced or exported module keeps its tables, which have {cos.shape[0]} positions, and this "
                    f"input ends at {int(reach)}: make the module with a k of at least {least:g}"
                )
            k = 2 * math.ceil(reach / (2 * self.rotary.trained_length))
            with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
                cos, sin = self._tables(k, cos.dtype, cos.device)
            if self.dynamic and may_keep_tensors():
                self.k, self.C, self.S = k, cos, sin
        return apply_rotary_pos_emb(x, cos[offset:reach].to(x.device), sin[offset:reach].to(x.device))

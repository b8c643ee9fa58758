"""`AxialRotaryEmbedding`: RoPE for positions with several axes, such as time, height and width.

    rope = AxialRotaryEmbedding("default", Rotary(dim=64, theta=1e4, trained_length=32), sections=(16, 16), table="own")
    cos, sin = rope(x, positions)             # positions (2, batch, length): height and width of each patch

Every pair of dims is rotated by the position on one axis. Scores then depend only on the differences of positions along
each axis, as they do in one dimension (https://kexue.fm/archives/8397).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.rotary.embedding import Layout, RotaryEmbedding, arrange

_Arrangement = Literal["contiguous", "interleaved"]
"""The places of an axis's pairs in a head.

"contiguous": side by side. "interleaved": the axes take turns, and an axis that has all its pairs is skipped.
"""

_Table = Literal["shared", "dealt", "own"]
"""The frequencies of an axis.

"shared": the head has one table, theta^(-2i/dim), and pair i has frequency i whatever its axis is. "dealt": the same
table, dealt to the axes in turn, so that each has fast and slow frequencies even if its pairs are contiguous. "own":
each axis has a table over its own dims, theta^(-2j/(2 section)).
"""


class AxialRotaryEmbedding(nn.Module):
    """A module that returns cos and sin for positions with any number of axes.

    Args:
        method: a name of `rope_ext_hf.list_methods()` or a method object, for all axes; or a sequence, one per axis.
        rotary: the geometry of a head; its `dim` counts the dims of all axes together.
        sections: the number of pairs of each axis, as in transformers' `mrope_section`; their sum is dim // 2.
        arrangement: the places of an axis's pairs in the head: "contiguous", side by side; or "interleaved", the axes
            take turns, and an axis that has all its pairs is skipped.
        table: the frequencies of an axis: "shared", one table for the head, theta^(-2i/dim), in which pair i has
            frequency i; "dealt", the same table, dealt to the axes in turn, so that each has fast and slow frequencies;
            or "own", a table for each axis over its own dims, theta^(-2j/(2 section)).
        trained_lengths: the number of positions that each axis was trained with; None: `rotary.trained_length` for all.
        layout: the arrangement of the angles, as in `RotaryEmbedding`.
        cast: whether cos and sin have x's dtype; False: they are float32.
        **params: parameters of methods that are given by name; all axes get them.

    Attributes:
        tables: a `RotaryEmbedding` for each axis. `with module.tables[axis].at_length(length)` sets the length for a
            length-dependent method on this axis; by default it is the largest position of a row on this axis plus 1.

    Raises:
        MethodError: the sections do not make up the head, a method does not suit its axis, or a method changes relative
            positions instead of frequencies.

    | model                                                         | arrangement | table  |
    | ------------------------------------------------------------- | ----------- | ------ |
    | Qwen2-VL, Qwen2.5-VL, GLM-4V: text (time, height, width)      | contiguous  | shared |
    | Qwen3-VL, Qwen3.5: text (time, height, width)                 | interleaved | shared |
    | Qwen2-VL, Qwen3-VL, GLM-4V: vision tower (height, width)      | contiguous  | own    |
    | Pixtral: vision tower (height, width)                         | contiguous  | dealt  |

    M-RoPE: Wang et al. 2024, arXiv 2409.12191, sec. 2.1. With one axis this is `RotaryEmbedding`. The attention factor
    of a method multiplies the cos and sin of its own axis only.
    """

    columns: Tensor

    def __init__(
        self,
        method: str | RopeMethod | Sequence[str | RopeMethod],
        rotary: Rotary,
        *,
        sections: Sequence[int],
        arrangement: _Arrangement = "contiguous",
        table: _Table = "shared",
        trained_lengths: Sequence[int] | None = None,
        layout: Layout = "half",
        cast: bool = True,
        **params: Any,
    ) -> None:
        super().__init__()
        for name, value, kinds in (
            ("arrangement", arrangement, _Arrangement),
            ("table", table, _Table),
            ("layout", layout, Layout),
        ):
            if value not in get_args(kinds):
                raise MethodError(f"{name} must be one of {', '.join(get_args(kinds))}; got {value!r}")
        if not sections or min(sections) < 1 or sum(sections) != rotary.dim // 2:
            raise MethodError(
                f"sections must have a number of pairs for each axis, at least 1, with the sum {rotary.dim // 2}; got "
                f"{list(sections)}"
            )
        axes = len(sections)
        methods = [method] * axes if isinstance(method, (str, RopeMethod)) else list(method)
        lengths = [rotary.trained_length] * axes if trained_lengths is None else list(trained_lengths)
        for name, values in (("methods", methods), ("trained_lengths", lengths)):
            if len(values) != axes:
                raise MethodError(f"{name} must have one entry for each of {axes} axes, got {len(values)}")
        per_axis = table == "own" or trained_lengths is not None
        if per_axis and (rotary.rotated_pairs is not None or rotary.own is not None):
            raise MethodError(
                "table='own' and trained_lengths need a Rotary without rotated_pairs and without a scaling of its own, "
                "because both of these concern the head as a whole"
            )
        self.sections, self.arrangement, self.table = tuple(sections), arrangement, table
        self.layout, self.cast = layout, cast
        self.tables = nn.ModuleList()
        for pairs, axis_method, length in zip(sections, methods, lengths, strict=True):
            geometry = replace(rotary, dim=2 * pairs if table == "own" else rotary.dim, trained_length=length)
            self.tables.append(RotaryEmbedding(axis_method, geometry, layout="bare", cast=False, **params))
        self._columns = _columns(self.sections, arrangement, table)
        self.register_buffer("columns", torch.tensor(self._columns, device="cpu"), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AxialRotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.columns.device.type != "meta":  # `to_empty` does not fill buffers
            self.columns = torch.tensor(self._columns, device=self.columns.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Return cos and sin for positions.

        Args:
            x: any tensor with the dtype and on the device of the result.
            position_ids: (axes, batch, length) integers; or (batch, length) if all axes have the same, as for text.

        Returns:
            cos and sin, (batch, length, dim) each, or (batch, length, dim // 2) in the layout "bare"; or one complex64
            tensor (batch, length, dim // 2) in the complex layout.

        Raises:
            TypeError: the positions are not integers.
            ValueError: the positions have another number of axes.
        """
        if position_ids.is_floating_point():
            raise TypeError(f"position_ids must be integers, got {position_ids.dtype}")
        axes = len(self.sections)
        if position_ids.ndim == 2:
            position_ids = position_ids.expand(axes, -1, -1)
        if position_ids.ndim != 3 or position_ids.shape[0] != axes:
            raise ValueError(f"position_ids must be ({axes}, batch, length), got {tuple(position_ids.shape)}")
        parts = []
        for child, positions in zip(self.tables, position_ids.to(x.device, torch.int64), strict=True):
            assert isinstance(child, RotaryEmbedding)
            # Positions on an axis rise and fall within one input, so its length is the largest position plus 1.
            parts.append(child.of_rows(x, positions, partial(lambda on_axis: on_axis.amax(-1) + 1, positions)))
        columns = self.columns.to(x.device)
        cos, sin = (torch.cat(every, dim=-1).index_select(-1, columns) for every in zip(*parts, strict=True))
        return arrange(cos, sin, self.layout, x.dtype if self.cast else None)

    def extra_repr(self) -> str:
        return f"sections={self.sections}, arrangement={self.arrangement!r}, table={self.table!r}"


def _axis_of_pair(sections: Sequence[int], arrangement: str) -> list[int]:
    """Return the axis of each pair of a head, in the order of the pairs."""
    if arrangement == "contiguous":
        return [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    return [axis for turn in range(max(sections)) for axis, pairs in enumerate(sections) if turn < pairs]


def _columns(sections: Sequence[int], arrangement: _Arrangement, table: _Table) -> list[int]:
    """Return, for each pair of a head, the column of its frequency when the tables of all axes stand side by side."""
    order = _axis_of_pair(sections, arrangement)
    owners = _axis_of_pair(sections, {"shared": arrangement, "dealt": "interleaved", "own": "contiguous"}[table])
    width = 0 if table == "own" else len(order)  # of an axis's table, unless it has only its own columns
    places = [
        iter([axis * width + column for column, owner in enumerate(owners) if owner == axis])
        for axis in range(len(sections))
    ]
    return [next(places[axis]) for axis in order]

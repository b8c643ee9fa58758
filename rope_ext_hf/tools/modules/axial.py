"""`AxialRotaryEmbedding`: RoPE for positions with several axes, such as time, height and width.

    rope = AxialRotaryEmbedding("default", Rotary(dim=64, theta=1e4, trained_length=32), sections=(16, 16), table="own")
    cos, sin = rope(x, positions)             # positions (2, batch, length): height and width of each patch

Every pair of dims is rotated by the position on one axis. Scores then depend on the differences per axis alone, as in
one dimension (https://kexue.fm/archives/8397).
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
"""Where the pairs of an axis stand in a head: side by side ("contiguous"), or the axes take turns ("interleaved"), an
axis that has all its pairs being passed over."""

_Table = Literal["shared", "dealt", "own"]
"""Which frequencies an axis has. "shared": there is one table for the head, theta^(-2i/dim), and pair i has frequency i
whichever its axis is. "dealt": the same table, dealt to the axes in turn, so that each has fast and slow ones, also
where its pairs are contiguous. "own": a table for each axis over its own dims, theta^(-2j/(2 section))."""


class AxialRotaryEmbedding(nn.Module):
    """cos and sin for positions with any number of axes.

    Args:
        method: a name of `rope_ext_hf.list_methods()` or a method object, for every axis; or a sequence, one for each.
        rotary: the geometry of a head: dim counts the dims of all axes together.
        sections: how many pairs each axis has, as in transformers' `mrope_section`; together dim // 2.
        arrangement: where the pairs of an axis stand, see `_Arrangement`.
        table: which frequencies an axis has, see `_Table`.
        trained_lengths: how many positions each axis was trained with; None: `rotary.trained_length` for each.
        layout: how the angles are arranged, as in `RotaryEmbedding`.
        cast: give cos and sin in x's dtype; False: float32 whatever x is.
        **params: the parameters of methods given by name; every axis gets them.

    Attributes:
        tables: a `RotaryEmbedding` for each axis. `with module.tables[axis].at_length(length)` fixes the length that a
            length-dependent method on this axis is for; else it is the largest position of a row on this axis + 1.

    Raises:
        MethodError: sections that do not make up the head, a method that cannot go with its axis, or one that changes
            relative positions instead of frequencies.

    | model                                                         | arrangement | table  |
    | ------------------------------------------------------------- | ----------- | ------ |
    | Qwen2-VL, Qwen2.5-VL, GLM-4V: text (time, height, width)      | contiguous  | shared |
    | Qwen3-VL, Qwen3.5: text (time, height, width)                 | interleaved | shared |
    | Qwen2-VL, Qwen3-VL, GLM-4V: vision tower (height, width)      | contiguous  | own    |
    | Pixtral: vision tower (height, width)                         | contiguous  | dealt  |

    M-RoPE: arXiv 2409.12191, sec. 2.1. With one axis this is `RotaryEmbedding`. A method with an attention factor
    multiplies the cos and sin of its own axis alone.
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
                f"sections must be a number of pairs for each axis, at least 1, that make {rotary.dim // 2} together; "
                f"got {list(sections)}"
            )
        axes = len(sections)
        methods = [method] * axes if isinstance(method, (str, RopeMethod)) else list(method)
        lengths = [rotary.trained_length] * axes if trained_lengths is None else list(trained_lengths)
        for name, values in (("methods", methods), ("trained_lengths", lengths)):
            if len(values) != axes:
                raise MethodError(f"there are {axes} axes; {name} has {len(values)} entries")
        per_axis = table == "own" or trained_lengths is not None
        if per_axis and (rotary.rotated_pairs is not None or rotary.own is not None):
            raise MethodError(
                "table='own' and trained_lengths need a Rotary without rotated_pairs and without a scaling of its own, "
                "which are about the head as a whole"
            )
        self.sections, self.arrangement, self.table = tuple(sections), arrangement, table
        self.layout, self.cast = layout, cast
        self.tables = nn.ModuleList()
        for pairs, one, length in zip(sections, methods, lengths, strict=True):
            geometry = replace(rotary, dim=2 * pairs if table == "own" else rotary.dim, trained_length=length)
            self.tables.append(RotaryEmbedding(one, geometry, layout="bare", cast=False, **params))
        self._columns = _columns(self.sections, arrangement, table)
        self.register_buffer("columns", torch.tensor(self._columns, device="cpu"), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AxialRotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.columns.device.type != "meta":  # `to_empty` does not fill buffers
            self.columns = torch.tensor(self._columns, device=self.columns.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Angles for the positions of one call.

        Args:
            x: any tensor of the dtype and on the device the angles are returned in.
            position_ids: (axes, batch, length) integers; (batch, length) where all axes have the same, as text has.

        Returns:
            cos and sin, (batch, length, dim), (batch, length, dim // 2) if bare; or one complex64 tensor
            (batch, length, dim // 2).

        Raises:
            TypeError: positions that are not integers.
            ValueError: positions of another number of axes.
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
            # Positions along an axis go up and down within one input, so its length is the largest of them, plus 1.
            parts.append(child.of_rows(x, positions, partial(lambda along: along.amax(-1) + 1, positions)))
        columns = self.columns.to(x.device)
        cos, sin = (torch.cat(every, dim=-1).index_select(-1, columns) for every in zip(*parts, strict=True))
        return arrange(cos, sin, self.layout, x.dtype if self.cast else None)

    def extra_repr(self) -> str:
        return f"sections={self.sections}, arrangement={self.arrangement!r}, table={self.table!r}"


def _axis_of_pair(sections: Sequence[int], arrangement: str) -> list[int]:
    """The axis of each pair of a head, in the order of the pairs."""
    if arrangement == "contiguous":
        return [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    return [axis for turn in range(max(sections)) for axis, pairs in enumerate(sections) if turn < pairs]


def _columns(sections: Sequence[int], arrangement: _Arrangement, table: _Table) -> list[int]:
    """For each pair of a head, the column of its frequency in the tables of all axes side by side."""
    order = _axis_of_pair(sections, arrangement)
    owners = _axis_of_pair(sections, {"shared": arrangement, "dealt": "interleaved", "own": "contiguous"}[table])
    width = 0 if table == "own" else len(order)  # an axis has either its own columns alone, or those of the whole head
    places = [
        iter([axis * width + column for column, owner in enumerate(owners) if owner == axis])
        for axis in range(len(sections))
    ]
    return [next(places[axis]) for axis in order]

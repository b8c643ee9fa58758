"""The rows of a tensor as blocks of heads, and how they are reordered between pairings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rope_ext_hf.rotary.pairing import to_pairing


@dataclass(frozen=True)
class HeadBlock:
    """Consecutive heads in the rows of a tensor.

    Attributes:
        count: the number of heads.
        size: rows per head.
        rotary: rows per head that rotate.
        start: the first of them.
        side: the scores that the rotated rows take part in: "q" with "k", "index_q" with "index_k". Blocks that differ
            only in it are equal, because their rows move alike.
    """

    count: int
    size: int
    rotary: int = 0
    start: int = 0
    side: str = field(default="", compare=False)


@dataclass(frozen=True)
class RowLayout:
    """The rows of a tensor: the same head blocks `repeat` times, in the order in which they are stored.

    Attributes:
        repeat: how many times the blocks follow each other.
        blocks: the blocks.
        pairing: the pairing that the rows stay in, whatever a conversion does to others; None: they are converted.
    """

    repeat: int
    blocks: tuple[HeadBlock, ...]
    pairing: str | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.repeat * sum(block.count * block.size for block in self.blocks)

    @property
    def vector_shapes(self) -> set[tuple[int, ...]]:
        """Shapes other than (rows,) of a vector with one element per row: DoRA's magnitudes, Cohere's norms."""
        shapes: set[tuple[int, ...]] = {(1, self.rows)}
        if len(self.blocks) == 1:
            shapes.add((self.blocks[0].count, self.blocks[0].size))
        return shapes

    def to_pairing(self, tensor: Tensor, to: str) -> Tensor:
        """Reorder rows (rows, ...), or a vector in one of `vector_shapes`, from the other pairing to this one."""
        flat = tensor if tensor.shape[:1] == (self.rows,) else tensor.reshape(self.rows)
        parts = []
        for block, part in self._parts(flat):
            if block.rotary:
                part = to_pairing(part, to, heads=block.count, rotary_dim=block.rotary, start=block.start, dim=1)
            parts.append(part)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(tensor.shape)

    def heads(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of a tensor (rows, ...) with its heads in every repeat: (repeat * count, size, ...)."""
        for block, part in self._parts(tensor):
            yield block, part.reshape(self.repeat * block.count, block.size, *tensor.shape[1:])

    def _parts(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of a tensor (rows, ...) with its rows in every repeat: (repeat, count * size, ...)."""
        repeats = tensor.reshape(self.repeat, self.rows // self.repeat, *tensor.shape[1:])  # -1 fails for empty tensors
        sizes = [block.count * block.size for block in self.blocks]
        yield from zip(self.blocks, torch.split(repeats, sizes, dim=1), strict=True)


@dataclass(frozen=True)
class ScaleBlocks:
    """The scales of a tensor that is quantised in blocks of rows.

    Attributes:
        layout: the layout of the quantised tensor.
        size: rows per block.

    Raises:
        ValueError: a conversion would move rows of one block to several blocks, each with a scale of its own.
    """

    layout: RowLayout
    size: int

    def __post_init__(self) -> None:
        self._order("half")  # raises; the other direction is the inverse of this one, and exact if this one is

    def to_pairing(self, tensor: Tensor, to: str) -> Tensor:
        """Reorder scales (blocks, ...) from the other pairing to this one."""
        return tensor[self._order(to)]

    def _order(self, to: str) -> Tensor:
        """Return for each block the number of the block that its rows come from, (blocks,) int64."""
        origins = self.layout.to_pairing(torch.arange(self.layout.rows), to) // self.size
        blocks = torch.split(origins, self.size)
        if any(bool((block != block[0]).any()) for block in blocks):
            raise ValueError(f"rows of one block of {self.size} go to several blocks, each with a scale of its own")
        return torch.stack([block[0] for block in blocks])

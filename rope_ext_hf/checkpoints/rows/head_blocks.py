"""The rows of a tensor as blocks of heads, and how they are reordered between pairings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from rope_ext_hf.rotary.pairing import to_pairing


@dataclass(frozen=True)
class HeadBlock:
    """A block of rows in a tensor, those of consecutive attention heads.

    Attributes:
        count: the number of heads.
        size: rows per head.
        rotary: rows per head that rotate.
        start: the first rotated row of each head.
        side: the side of the attention scores that the rotated rows compute: "q" or "k", or "index_q" or "index_k" for
            the scores of an indexer; empty: no rows rotate. Blocks that differ only in their side are equal, because a
            conversion moves their rows alike.
    """

    count: int
    size: int
    rotary: int = 0
    start: int = 0
    side: str = field(default="", compare=False)


@dataclass(frozen=True)
class RowLayout:
    """The arrangement of the rows of a tensor: the same blocks of heads `repeat` times, in the order of storage.

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

    def head_count(self, side: str) -> int:
        """Return the number of heads with rotated rows on a side of the attention scores, such as "q"."""
        return self.repeat * sum(block.count for block in self.blocks if block.rotary and block.side == side)

    @property
    def vector_shapes(self) -> set[tuple[int, ...]]:
        """The shapes that a vector with one element per row may have beside (rows,).

        DoRA's magnitudes and Cohere's norms have such shapes.
        """
        shapes: set[tuple[int, ...]] = {(1, self.rows)}
        if len(self.blocks) == 1:
            shapes.add((self.blocks[0].count, self.blocks[0].size))
        return shapes

    def to_pairing(self, tensor: Tensor, to: str) -> Tensor:
        """Return a tensor with its rotated rows reordered from the other pairing to the pairing `to`.

        `tensor`: (rows, ...), or a vector in one of `vector_shapes`.
        """
        flat = tensor if tensor.shape[:1] == (self.rows,) else tensor.reshape(self.rows)
        parts = []
        for block, part in self._parts(flat):
            if block.rotary:
                part = to_pairing(part, to, heads=block.count, rotary_dim=block.rotary, start=block.start, dim=1)
            parts.append(part)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(tensor.shape)

    def heads(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of heads, and the rows of its heads, taken from all repeats together.

        `tensor`: (rows, ...). The rows of a block are (repeat * count, size, ...), one entry for each head.
        """
        for block, part in self._parts(tensor):
            yield block, part.reshape(self.repeat * block.count, block.size, *tensor.shape[1:])

    def _parts(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of heads, and its rows in each repeat.

        `tensor`: (rows, ...). The rows of a block are (repeat, count * size, ...).
        """
        repeats = tensor.reshape(self.repeat, self.rows // self.repeat, *tensor.shape[1:])  # -1 fails for empty tensors
        sizes = [block.count * block.size for block in self.blocks]
        yield from zip(self.blocks, torch.split(repeats, sizes, dim=1), strict=True)


@dataclass(frozen=True)
class ScaleBlocks:
    """The arrangement of the scales of a quantised tensor, where each block of rows has one scale.

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
        """Return scales (blocks, ...) reordered from the other pairing to the pairing `to`."""
        return tensor[self._order(to)]

    def _order(self, to: str) -> Tensor:
        """Return for each block the number of the block that its rows come from, a tensor (blocks,) int64."""
        origins = self.layout.to_pairing(torch.arange(self.layout.rows), to) // self.size
        blocks = torch.split(origins, self.size)
        if any(bool((block != block[0]).any()) for block in blocks):
            raise ValueError(f"rows of one block of {self.size} go to several blocks, each with a scale of its own")
        return torch.stack([block[0] for block in blocks])


# --- a few layers in place of all of them -------------------------------------------------------------------------


T = TypeVar("T")


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced, with the first and the last among them."""
    steps = torch.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[i] for i in steps.round().int().tolist()]

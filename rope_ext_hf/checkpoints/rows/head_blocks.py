"""The rows of a tensor as blocks of heads, and how they are reordered between pairings.

Rows are moved by their numbers, so that arrays of numpy and tensors of torch are reordered alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rope_ext_hf.rotary.pairing_names import row_order

A = TypeVar("A", bound=Any)
"""An array of numpy, or a tensor of torch."""


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

    def order(self, to: str) -> NDArray[np.int64]:
        """Return for each row in the pairing `to` the number that the row has in the other pairing, (rows,)."""
        parts = []
        for block, numbers in self._parts(np.arange(self.rows)):
            of_heads = numbers.reshape(self.repeat, block.count, block.size)
            parts.append(of_heads[..., row_order(to, block.size, block.rotary, block.start)].reshape(self.repeat, -1))
        return np.concatenate(parts, axis=1).reshape(self.rows)

    def to_pairing(self, tensor: A, to: str) -> A:
        """Return a tensor with its rotated rows reordered from the other pairing to the pairing `to`.

        `tensor`: (rows, ...), or a vector in one of `vector_shapes`; an array of numpy, or a tensor of torch.
        """
        flat = tensor if tuple(tensor.shape[:1]) == (self.rows,) else tensor.reshape(self.rows)
        moved: A = flat[self.order(to)].reshape(tensor.shape)
        return moved

    def heads(self, tensor: A) -> Iterator[tuple[HeadBlock, A]]:
        """Yield each block of heads, and the rows of its heads, taken from all repeats together.

        `tensor`: (rows, ...). The rows of a block are (repeat * count, size, ...), one entry for each head.
        """
        for block, part in self._parts(tensor):
            yield block, part.reshape(self.repeat * block.count, block.size, *tensor.shape[1:])

    def _parts(self, tensor: A) -> Iterator[tuple[HeadBlock, A]]:
        """Yield each block of heads, and its rows in each repeat.

        `tensor`: (rows, ...). The rows of a block are (repeat, count * size, ...).
        """
        repeats = tensor.reshape(self.repeat, self.rows // self.repeat, *tensor.shape[1:])  # -1 fails for empty tensors
        begin = 0
        for block in self.blocks:
            end = begin + block.count * block.size
            yield block, repeats[:, begin:end]
            begin = end


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
        self.order("half")  # raises; the other direction is the inverse of this one, and exact if this one is

    def to_pairing(self, tensor: A, to: str) -> A:
        """Return scales (blocks, ...) reordered from the other pairing to the pairing `to`."""
        moved: A = tensor[self.order(to)]
        return moved

    def order(self, to: str) -> NDArray[np.int64]:
        """Return for each block the number of the block that its rows come from, (blocks,)."""
        origins = self.layout.order(to) // self.size
        first = origins[:: self.size]
        if (origins != first.repeat(self.size)[: len(origins)]).any():
            raise ValueError(f"rows of one block of {self.size} go to several blocks, each with a scale of its own")
        return first


# --- a few layers in place of all of them -------------------------------------------------------------------------


T = TypeVar("T")


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced, with the first and the last among them."""
    count = min(most, len(items))
    if count < 2:
        return list(items[:count])
    # In float32 from either end, as torch.linspace has it: the same layers are read as ever.
    places, step = np.arange(count, dtype=np.float32), np.float32(len(items) - 1) / np.float32(count - 1)
    steps = np.where(places < count // 2, step * places, np.float32(len(items) - 1) - step * places[::-1])
    return [items[i] for i in steps.round().astype(int).tolist()]

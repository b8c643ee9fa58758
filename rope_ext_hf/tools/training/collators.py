"""Collators that set positions, so that a model learns long distances from shorter rows.

    collator = PoSECollator(length=4096, target_length=32768)
    Trainer(model, arguments, train_dataset=rows, data_collator=collator)   # or a DataLoader's collate_fn

An example is one document: a dict with `input_ids`, and optionally `labels` (default: the ids) and `attention_mask`
(tokens that it masks are left out). Other keys are dropped. The draws follow from the seed and the ids of the example
alone, not from its batch, the worker or earlier draws, so that a resumed training draws the same positions.

Rows of PoSE and of random positions stand for longer inputs. A length-dependent method counts the tokens of a row, so
with such a method train inside `rope_ext_hf.fixed_length(model, target_length)`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError

_IGNORED = -100  # the label of a token that is not predicted, in transformers


@dataclass(frozen=True)
class _PositionCollator:
    """Base class for collators that cut rows, pad them on the right, and draw random numbers for each example."""

    length: int
    target_length: int
    seed: int = 0
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.length <= self.target_length:
            raise MethodError(
                f"length must be from 2 to target_length, got {self.length} with target_length={self.target_length}"
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch: input_ids, labels, position_ids and attention_mask, each (examples, tokens) int64.

        The batch has a mask even without padding. Without a mask, transformers takes a jump in the positions for the
        beginning of another document, so that tokens after the jump could not attend to tokens before it.
        """
        rows = []
        for example in examples:
            ids, labels = _tokens(example)
            generator = torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes(), self.seed & 0xFFFFFFFF))
            chosen, positions = self.place(len(ids), generator)
            rows.append((ids[chosen], labels[chosen], positions, torch.ones_like(positions)))
        paddings = (self.pad_token_id, _IGNORED, 0, 0)
        batch = [
            torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=padding)
            for parts, padding in zip(zip(*rows, strict=True), paddings, strict=True)
        ]
        return dict(zip(("input_ids", "labels", "position_ids", "attention_mask"), batch, strict=True))

    def place(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the indices of those tokens of a document that make a row, and their positions, each (row,) int64."""
        raise NotImplementedError


@dataclass(frozen=True)
class PoSECollator(_PositionCollator):
    """Positional skip-wise training: two chunks of a document, the second moved to a random later position.

    PoSE (Zhu et al. 2023, arXiv 2309.10400, sec. 3.2), with the draws of its code (dwzhu-pku/PoSE, src/train_pose.py,
    `train_preprocess_function_pose`). In a row of L tokens, the first chunk has 1 to (L + 1) // 2 tokens from the
    beginning of the document. The second chunk begins anywhere behind it in the document, and its positions are moved
    by 0 to target_length - L. Each draw is uniform. Within a chunk, positions rise by one. So distances up to
    target_length - 1 occur, at the cost of rows of L tokens. The first token of the second chunk is predicted, as in
    that code.

    Args:
        length: the most tokens of a row, commonly the trained length; longer documents are cut.
        target_length: the extended length in tokens; every position is below it.
        seed: the seed of all draws.
        pad_token_id: the token that pads shorter rows of a batch.

    Raises:
        MethodError: `length` is below 2 or above `target_length`; or, from a batch, an example has no tokens, has
            position_ids of its own, or has not as many labels as tokens.
    """

    def place(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        row = min(tokens, self.length)
        first = _draw(1, (row + 1) // 2, generator)
        skipped_text = _draw(0, tokens - row, generator)
        skipped_positions = _draw(0, self.target_length - row, generator)
        chosen, positions = torch.arange(row), torch.arange(row)
        chosen[first:] += skipped_text
        positions[first:] += skipped_positions
        return chosen, positions


@dataclass(frozen=True)
class RandomPositionsCollator(_PositionCollator):
    """Randomised positions: an ascending random sample of all positions up to the target length.

    Ruoss et al. 2023, arXiv 2305.16843, sec. 3.1. The positions of a row are drawn without replacement from 0 to
    target_length - 1 and sorted, so that only their order is informative. The row is the beginning of the document. The
    arguments are those of `PoSECollator`.
    """

    def place(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        row = min(tokens, self.length)
        return torch.arange(row), torch.randperm(self.target_length, generator=generator)[:row].sort().values


@dataclass(frozen=True)
class MixedWindowsCollator(_PositionCollator):
    """Mixed windows: some documents are read in one long window, others in several short windows.

    After LongRoPE2 (Shang et al. 2025, arXiv 2502.20082, sec. 3.3): short windows preserve the model's quality within
    its trained length, while long ones extend it. Under a length-dependent method (dynamic-yarn, or longrope with two
    lists) each window gets the frequencies of its own length, and short windows get the model's own. Under a static
    method all windows get the same.

    Positions begin at 0 in every window. The batch has no mask: transformers and length-dependent methods recognise
    windows by their positions. Padding is a window of its own without labels.

    Args:
        length: tokens of a row, and of a long window.
        target_length: the extended length in tokens.
        seed: the seed of all draws.
        pad_token_id: the token that pads shorter rows of a batch.
        short_length: tokens of a short window, commonly the trained length.
        short_share: the share of documents that are read in short windows.

    Raises:
        MethodError: `short_length` is above `length`, or `short_share` is outside 0 to 1.
    """

    short_length: int = 0
    short_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.short_length <= self.length or not 0 <= self.short_share <= 1:
            raise MethodError(
                f"short_length must be from 2 to length={self.length} and short_share from 0 to 1, got "
                f"{self.short_length} and {self.short_share}"
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch: input_ids, labels and position_ids, each (examples, tokens) int64."""
        batch = super().__call__(examples)
        mask = batch.pop("attention_mask")
        batch["position_ids"] = torch.where(mask == 1, batch["position_ids"], (1 - mask).cumsum(-1) - 1)
        return batch

    def place(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        row = torch.arange(min(tokens, self.length))
        is_short = bool(torch.rand((), generator=generator) < self.short_share)
        return row, row % self.short_length if is_short else row


def _tokens(example: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the ids and the labels of an example without its padding, each (tokens,) int64."""
    if "position_ids" in example:
        raise MethodError(
            "an example has position_ids of its own, as packed documents do; give this collator one document per "
            "example, with packing off"
        )
    ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)
    labels = torch.as_tensor(example.get("labels", ids), dtype=torch.int64)
    if ids.ndim != 1 or not len(ids) or labels.shape != ids.shape:
        raise MethodError(
            f"an example must have a row of input_ids and as many labels, got the shapes {tuple(ids.shape)} and "
            f"{tuple(labels.shape)}"
        )
    mask = example.get("attention_mask")
    if mask is not None:
        kept = torch.as_tensor(mask, dtype=torch.bool)
        ids, labels = ids[kept], labels[kept]
    return ids, labels


def _draw(least: int, most: int, generator: torch.Generator) -> int:
    """Return a random whole number from `least` to `most`, both included."""
    return int(torch.randint(least, most + 1, (), generator=generator))

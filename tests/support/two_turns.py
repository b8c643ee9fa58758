"""A chat of two turns by `generate`, through one cache: what the model answers, and what it must be equal to.

    chat = two_turns(model, opening(entry, 20), 9)
    assert difference(chat.logits, logits_of_whole_rows(model, chat)) < 1e-4

The first turn has a mask; with several rows the second one is padded on the left, and each row may have an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rope_ext_hf.models.decoder_arguments import cache_of_output, cache_parameter
from tests.support.every_model import Entry, data, image_inputs, inputs

ANSWER = 3
"""Tokens that each turn generates."""
PADDING = 7
"""Tokens of padding on the left of the second row."""


@dataclass(frozen=True)
class Opening:
    """The first prompt of a chat.

    Attributes:
        ids, mask: (rows, tokens).
        beside: what the model reads beside them in the first turn, one of each for every row (images).
        token_types: the argument that says which tokens are an image; None: the model takes none.
    """

    ids: Tensor
    mask: Tensor
    beside: dict[str, Tensor]
    token_types: str | None = None

    def types_of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the argument that says which of these tokens are an image, where the model takes one."""
        return {} if self.token_types is None else {self.token_types: (ids == data()["sizes"]["image_token_id"]).int()}

    def of_row(self, row: int) -> dict[str, Tensor]:
        """Return what the model reads beside the tokens of one row."""
        rows = len(self.ids)
        return {name: value.chunk(rows)[row] for name, value in self.beside.items()}


@dataclass(frozen=True)
class Chat:
    """A chat that has been generated.

    Attributes:
        opening: its first prompt.
        ids: (rows, tokens), prompts and answers; answers are the places `answers`.
        logits: (rows, answers, vocabulary) of every token of the answers, in float32.
    """

    opening: Opening
    ids: Tensor
    answers: tuple[int, ...]
    logits: Tensor


def opening(entry: Entry, length: int, *, rows: int = 2, image: bool = False) -> Opening | None:
    """Return a prompt for a class; None where every_model.toml has no image for it, or it reads more than tokens."""
    if set(inputs(entry, length)) != {"input_ids"}:
        return None
    ids = torch.cat([inputs(entry, length, seed=1 + row)["input_ids"] for row in range(rows)])
    mask = torch.ones_like(ids)
    mask[1:, :PADDING] = 0
    ids[1:, :PADDING] = data()["sizes"]["pad_token_id"]
    if not image:
        return Opening(ids, mask, {})
    if (read := image_inputs(entry)) is None:
        return None
    token_types = read.pop("token_types", None)
    placeholders = read.pop("ids")
    ids[:, PADDING + 2 : PADDING + 2 + len(placeholders)] = placeholders
    return Opening(ids, mask, {name: torch.cat([value] * rows) for name, value in read.items()}, token_types)


@torch.no_grad()
def two_turns(model: Any, first: Opening, second: int, **options: Any) -> Chat:
    """Generate an answer, append a prompt of `second` random tokens, and generate from there with the same cache."""
    special = [value for name, value in data()["sizes"].items() if name.endswith(("_token_id", "_token_index"))]
    config = GenerationConfig(
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        do_sample=False,
        suppress_tokens=sorted({*special, *range(data()["sizes"]["image_token_id"], data()["sizes"]["vocab_size"])}),
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=data()["sizes"]["pad_token_id"],
    )
    torch.manual_seed(0)
    prompt = {"input_ids": first.ids, "attention_mask": first.mask} | first.types_of(first.ids) | first.beside
    before = model.generate(**prompt, generation_config=config, **options)
    draws = torch.Generator().manual_seed(5)
    more = torch.randint(3, data()["sizes"]["image_token_id"], (len(first.ids), second), generator=draws)
    ids = torch.cat([before.sequences, more], dim=1)
    mask = torch.nn.functional.pad(first.mask, (0, ids.shape[1] - first.mask.shape[1]), value=1)
    cache = {cache_parameter(model, model.base_model): cache_of_output(before)}
    after = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **cache, **options)
    starts = first.ids.shape[1], ids.shape[1]
    return Chat(
        opening=first,
        ids=after.sequences,
        answers=tuple(start + step for start in starts for step in range(ANSWER)),
        logits=torch.stack([*before.logits, *after.logits], dim=1).float(),
    )


@torch.no_grad()
def logits_of_whole_rows(model: Any, chat: Chat) -> Tensor:
    """Return the logits of the answers in a chat, each row read alone, without padding, in one forward and no cache."""
    rows = []
    for row, (ids, mask) in enumerate(zip(chat.ids, chat.opening.mask, strict=True)):
        padding = int((mask == 0).sum())
        alone = ids[None, padding:]
        beside = chat.opening.types_of(alone) | chat.opening.of_row(row)
        torch.manual_seed(0)
        out = model(input_ids=alone, attention_mask=torch.ones_like(alone), use_cache=False, **beside)
        rows.append(out.logits[0, [place - padding - 1 for place in chat.answers]])
    return torch.stack(rows).float()

"""Documents that are given as token ids: the ids of their text alone, and the bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rope_ext_hf.reading.text.token_bytes import PLAIN, byte_ends, spelled_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 8  # tokens before a token, with which it is decoded


def without_added(ids: Sequence[int], added: tuple[Sequence[int], Sequence[int]]) -> Sequence[int]:
    """Return token ids without the tokens that stand before and after a text, such as BOS and EOS, if they are there.

    `added` holds both.
    """
    before, after = map(list, added)
    start, stop = 0, len(ids)
    if before and list(ids[: len(before)]) == before:
        start = len(before)
    if after and stop - start >= len(after) and list(ids[stop - len(after) :]) == after:
        stop -= len(after)
    return ids[start:stop]


def ends_of_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end of each token in the text that token ids are decoded to, in UTF-8 bytes."""
    text = _decoded(ids, tokenizer)
    spelled = spelled_ends(text, names_of_ids(ids, tokenizer), cut=True)
    if spelled is not None:
        return spelled
    if tokenizer.is_fast:
        encoded = tokenizer(text, **PLAIN, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == list(ids):
            return byte_ends(text, encoded.tokens(), encoded["offset_mapping"])
    return decoded_ends(ids, tokenizer, len(text.encode("utf-8", errors="replace")))


def names_of_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens with these ids, as the vocabulary writes them."""
    names = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in set(ids)}
    return list(map(names.__getitem__, ids))


def decoded_ends(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, total: int) -> tuple[int, ...]:
    """Return the end of each token of a text, by the bytes that it adds when it is decoded after those before it.

    `total` is the number of bytes of the text, which the ends are scaled to.
    """
    added = []
    for place in range(len(ids)):
        before = ids[max(0, place - _CONTEXT) : place]
        longer, shorter = (
            _decoded(part, tokenizer).encode("utf-8", errors="replace") for part in ([*before, ids[place]], before)
        )
        added.append(max(0, len(longer) - len(shorter)))
    ends = list(accumulate(added if any(added) else [1] * len(ids)))
    return tuple(round(total * end / ends[-1]) for end in ends)


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

"""A sentence about texts that a tokenizer does not know, because their losses say little.

One unknown token stands for any text, and is easy to predict; characters that a tokenizer drops are not read at all.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.reading.text.given_ids import names_of_ids
from rope_ext_hf.reading.text.token_bytes import spelled_ends, tokenize_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARE = 0.03  # of tokens or characters; a smaller share changes no comparison
_SAMPLES = 32  # stretches of text whose characters are looked for in their tokens
_STRETCH = 500  # characters


def unknown_note(documents: Sequence[Document | Tokens], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sentence if more than a few per cent of texts are unknown tokens, or dropped by the tokenizer.

    Unknown tokens are counted in the token ids that documents have, and else in a sample of their texts, in which
    dropped characters are looked for as well. The result is empty if the tokenizer knows the texts.
    """
    stretches = list(_stretches([document.text for document in documents]))
    ids_of_stretches = [list(ids) for ids in tokenize_texts(tokenizer, stretches)]
    unknown, total = _unknown_tokens(documents, ids_of_stretches, tokenizer)
    if unknown > _SHARE * total:
        return (
            f"{unknown / total:.0%} of the tokens are the tokenizer's unknown token, {tokenizer.unk_token!r}, which "
            "stands for any text: losses, perplexity and bits per byte say little about this text under this model"
        )
    dropped = sum(_dropped(text, ids, tokenizer) for text, ids in zip(stretches, ids_of_stretches, strict=True))
    characters = sum(_letters(text).total() for text in stretches) if dropped else 0
    if dropped > _SHARE * characters:
        return (
            f"the tokenizer drops about {dropped / characters:.0%} of the characters, so that the model reads another "
            "text: losses, perplexity and bits per byte say little about this one"
        )
    return ""


def _stretches(texts: Sequence[str]) -> Iterator[str]:
    """Yield stretches of texts, spread evenly over all of them; short texts as a whole."""
    total = sum(map(len, texts))
    if total <= _SAMPLES * _STRETCH:
        yield from filter(None, texts)
        return
    step = math.ceil(total / _SAMPLES)
    begin = 0  # of the next stretch, counted from the first character of the present text
    for text in texts:
        while begin < len(text):
            yield text[begin : begin + _STRETCH]
            begin += step
        begin -= len(text)


def _unknown_tokens(
    documents: Sequence[Document | Tokens], sample: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """Return the number of unknown tokens, and the number of all tokens among which they were counted.

    `sample` holds the token ids of stretches of the texts. An unknown token that is BOS or EOS as well, as in GPT-2, is
    not counted, because it separates texts.
    """
    token = tokenizer.unk_token_id
    if token is None or token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return 0, 0
    unknown = total = 0
    for document in documents:
        ids = document.ids
        if isinstance(document, Tokens):
            unknown, total = unknown + int((document.ids == token).sum()), total + len(document.ids)
        elif ids is not None:
            unknown, total = unknown + list(ids).count(token), total + len(ids)
    if total:
        return unknown, total
    return sum(list(ids).count(token) for ids in sample), sum(map(len, sample))


def _dropped(text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of a text that its tokens do not decode to; case and accents do not count."""
    if spelled_ends(text, names_of_ids(ids, tokenizer)) is not None:
        return 0
    shown = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return (_letters(text) - _letters(shown)).total()


def _letters(text: str) -> Counter[str]:
    """Count the characters of a text but spaces, accents and control characters, which tokenizers normalise away."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return Counter(
        {letter: count for letter, count in Counter(plain).items() if unicodedata.category(letter)[0] not in "ZMC"}
    )

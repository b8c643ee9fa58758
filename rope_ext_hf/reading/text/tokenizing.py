"""Tokenise documents as evaluations do, with the tokens that every input begins with, and check their token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, warn_caller
from rope_ext_hf.files.model_files import loaded_from
from rope_ext_hf.hub import added_tokens, leading_tokens, load_tokenizer
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.reading.protocols import DefaultPrefix
from rope_ext_hf.reading.text.documents import Document, LateEnds, Tokens, token_ids, utf8_bytes
from rope_ext_hf.reading.text.given_ids import decoded_ends, ends_of_ids, names_of_ids, without_added
from rope_ext_hf.reading.text.token_bytes import PLAIN, byte_ends, spelled_ends, tokenize_texts
from rope_ext_hf.reading.text.unknown_tokens import unknown_note

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "check_vocabulary",
    "encode",
    "encode_answer",
    "own_tokenizer",
    "prefix_tokens",
    "text_of",
    "tokenize",
    "warn_of_unknown",
]

_TOKENIZED_AT_ONCE = 4_000_000  # characters; while they are tokenised, each takes some 25 bytes


def tokenize(
    documents: Iterable[Document | Tokens],
    tokenizer: PreTrainedTokenizerBase,
    *,
    bos: bool | None = None,
    default: DefaultPrefix = "added",
) -> list[Tokens]:
    """Tokenise documents without adding special tokens; documents that are tokenised already stay as they are.

    Documents that are given as token ids lose the tokens that a text gets from the tokenizer or from `bos` and
    `default`, see `prefix_tokens`, so that they are the same as their text; with bos=False they stay as they are. The
    ends of the tokens are found for the documents that are read, when they are read.
    """
    documents = list(documents)
    with_ids = any(isinstance(document, Document) and document.ids is not None for document in documents)
    added = _added_tokens(tokenizer, bos, default) if with_ids else ((), ())
    tokenized: list[Tokens] = []
    for group in _groups(documents):
        texts = [document for document in group if isinstance(document, Document) and document.ids is None]
        for text in texts:
            utf8_bytes(text.name, text.text)
        ids_of_texts = iter(tokenize_texts(tokenizer, [document.text for document in texts]))
        for document in group:
            if isinstance(document, Tokens):
                tokenized.append(document)
            elif document.ids is None:
                tokenized.append(_tokens_of_text(document, next(ids_of_texts), tokenizer))
            else:
                tokenized.append(_tokens_of_ids(document, document.ids, tokenizer, added))
    return tokenized


def text_of(documents: Iterable[Document | Tokens], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the texts of documents as one text, with an empty line between them.

    Documents that are given as token ids are decoded.
    """
    texts = []
    for document in documents:
        if document.text or document.ids is None:
            texts.append(document.text)
        else:
            ids = without_added(list(document.ids), added_tokens(tokenizer))
            texts.append(str(tokenizer.decode(ids)))
    return "\n\n".join(texts)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a part of a prompt, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_answer(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a question and of the answer that follows it.

    The question is the text before the answer. Both are tokenised together. The question ends before the first token
    that it would not have alone, because a tokenizer may join its end to the beginning of the answer.
    """
    alone, both = encode(tokenizer, question), encode(tokenizer, question + answer)
    shared = 0
    while shared < min(len(alone), len(both)) and alone[shared] == both[shared]:
        shared += 1
    return both[:shared], both[shared:]


def _groups(documents: Iterable[Document | Tokens]) -> Iterator[list[Document | Tokens]]:
    """Yield documents in groups that are tokenised at once: large enough for all cores, and small enough for memory."""
    group: list[Document | Tokens] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _TOKENIZED_AT_ONCE:
            yield group
            group, size = [], 0
    yield group


def _tokens_of_text(document: Document, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return a document that was given as text, with its token ids."""
    text, tensor = document.text, torch.tensor(ids, dtype=torch.int64)
    return Tokens(document.name, tensor, LateEnds(len(ids), partial(_ends_in_text, text, tensor, tokenizer)), text)


def _ends_in_text(text: str, ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end of each token of a text, in UTF-8 bytes."""
    numbers = ids.tolist()
    spelled = spelled_ends(text, names_of_ids(numbers, tokenizer))
    if spelled is not None:
        return spelled
    if not tokenizer.is_fast:  # it gives no offsets
        return decoded_ends(numbers, tokenizer, len(text.encode("utf-8")))
    encoded = tokenizer(text, **PLAIN, return_offsets_mapping=True)
    return byte_ends(text, encoded.tokens(), encoded["offset_mapping"])


def _added_tokens(
    tokenizer: PreTrainedTokenizerBase, bos: bool | None, default: DefaultPrefix
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that stand before a text, see `prefix_tokens`, and those that the tokenizer puts after it."""
    if bos is False:
        return (), ()
    before, after = added_tokens(tokenizer)
    return prefix_tokens(tokenizer, bos, default) or before, after


def _tokens_of_ids(
    document: Document,
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    added: tuple[Sequence[int], Sequence[int]],
) -> Tokens:
    """Return a document that was given as token ids, without those that the tokenizer or the protocol has `added`."""
    numbers = list(without_added(token_ids(ids, document.name), added))
    ends = LateEnds(len(numbers), partial(ends_of_ids, numbers, tokenizer))
    return Tokens(document.name, torch.tensor(numbers, dtype=torch.int64), ends)


def prefix_tokens(
    tokenizer: PreTrainedTokenizerBase | None, bos: bool | None, default: DefaultPrefix = "added"
) -> tuple[int, ...]:
    """Return the token ids that an input begins with.

    Args:
        tokenizer: the tokenizer; without one there is no prefix.
        bos: True: the tokens that the tokenizer puts before every text, or BOS if there are none. False: no tokens.
            None: those of `default`.
        default: see `Protocol.default_prefix`.

    Raises:
        MethodError: bos is True, and there is no tokenizer, or it has no such token.
    """
    if bos is False or (bos is None and (tokenizer is None or default == "none")):
        return ()
    if tokenizer is None:
        raise MethodError("bos=True needs a tokenizer")
    leading = leading_tokens(tokenizer)
    if leading or (bos is None and default == "added"):
        return leading
    token: int | None = tokenizer.bos_token_id
    if token is None and bos is None and default == "bos or eos":
        token = tokenizer.eos_token_id
    if token is None and bos:
        raise MethodError(
            f"bos=True, but {type(tokenizer).__name__} puts no tokens before a text and has no BOS token; leave out bos"
        )
    return () if token is None else (token,)


def warn_of_unknown(documents: Sequence[Document | Tokens], tokenizer: PreTrainedTokenizerBase) -> str:
    """Warn if the tokenizer does not know a part of some texts, and return the warning; see `unknown_note`."""
    note = unknown_note(documents, tokenizer)
    if note:
        warn_caller(note)
    return note


def check_vocabulary(model: PreTrainedModel, documents: Sequence[Tokens]) -> None:
    """Raise a CorpusError if a document has a token id for which the model has no embedding."""
    vocabulary = vocabulary_size(model)
    for document in documents:
        ids = document.ids
        if ids.is_floating_point() or ids.is_complex() or ids.ndim != 1:
            raise CorpusError(f"{document.name}: token ids must be whole numbers, (tokens,); got {ids.dtype}")
        for token in (int(ids.min()), int(ids.max())) if len(ids) else ():
            if not 0 <= token < vocabulary:
                raise CorpusError(
                    f"{document.name}: token id {token} is outside the model's vocabulary of {vocabulary}; "
                    "wrong tokenizer?"
                )


def own_tokenizer(model: PreTrainedModel, *, needed: bool) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that is stored beside the model's weights.

    None: the model has no folder, and no tokenizer is `needed`.
    """
    if model.name_or_path:
        return load_tokenizer(loaded_from(model))
    if needed:
        raise CorpusError("this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=...")
    return None

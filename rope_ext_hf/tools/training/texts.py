"""The texts for a fine-tuning, split into a part to train on and a part to measure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rope_ext_hf.reading.text.documents import LateEnds, Tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize, warn_of_unknown
from rope_ext_hf.tools.training.finetuning_options import Finetuning

_HELD_OUT = 10  # one document, or one token, in this many is measured instead of trained on


def split_texts(options: Finetuning, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Tokens], list[Tokens]]:
    """Return the texts to train on, and the texts to measure.

    With `eval_data`, all of `data` is trained on; without it a part is held out, see `split`.
    """
    documents = tokenize(load(options.data), tokenizer)
    warn_of_unknown(documents, tokenizer)
    training, held_out = split(documents, _HELD_OUT)
    if options.eval_data is None:
        return training, held_out
    measured = tokenize(load(options.eval_data), tokenizer)
    warn_of_unknown(measured, tokenizer)
    return training + held_out, measured


def split(documents: Sequence[Tokens], one_in: int) -> tuple[list[Tokens], list[Tokens]]:
    """Return the documents to train on, and the documents to hold out, about one in `one_in`.

    A document's name decides, so that it stays on its side when others are added. If all documents fall on one side,
    the last part of each document is held out instead.
    """
    held_out_names = {document.name for document in documents if zlib.crc32(document.name.encode()) % one_in == 0}
    training = [document for document in documents if document.name not in held_out_names]
    held_out = [document for document in documents if document.name in held_out_names]
    if training and held_out:
        return training, held_out
    training, held_out = [], []
    for document in documents:
        middle = len(document.ids) - len(document.ids) // one_in
        training.append(cut(document, 0, middle))
        held_out.append(cut(document, middle, len(document.ids)))
    return training, held_out


def cut(document: Tokens, start: int, stop: int) -> Tokens:
    """Return the tokens `start` to `stop` - 1 of a document as a document of their own.

    The byte offset at which each token ends in the text is counted from the beginning of this part.
    """

    def ends() -> tuple[int, ...]:
        before = document.ends[start - 1] if start else 0
        return tuple(end - before for end in document.ends[start:stop])

    ids = document.ids[start:stop]
    return Tokens(document.name, ids, LateEnds(len(ids) if document.ends else 0, ends))

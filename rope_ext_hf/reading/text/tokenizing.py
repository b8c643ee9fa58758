"""Tokenise texts as fast as the tokenizer can: many at a time, and without their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
"""Arguments of a tokenizer for the tokens of a text alone, without warnings of its length."""
_ENCODERS = ("__call__", "_call_one", "_encode_plus", "_batch_encode_plus")
"""The methods of a tokenizer between its call and its compiled part; releases of transformers have some of them."""


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return the token ids of each text, without special tokens.

    The compiled part of a tokenizer is called directly where its class does nothing else: with several texts at a time
    it uses all cores, and without offsets, which nobody reads for a text that is only counted, it takes half the time.
    """
    if not texts:
        return []
    if not _calls_compiled_part_alone(tokenizer):
        return [list(tokenizer(text, **PLAIN)["input_ids"]) for text in texts]
    tokenizer("", **PLAIN)  # switches truncation and padding off in the compiled part
    compiled: Any = tokenizer
    encoded = compiled.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


def _calls_compiled_part_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the class of a tokenizer encodes as every fast tokenizer of transformers does.

    A few classes treat some texts on their own before they call the compiled part, as CodeLlama's does.
    """
    from transformers import PreTrainedTokenizerFast

    plain, actual = PreTrainedTokenizerFast, type(tokenizer)
    if not isinstance(tokenizer, plain):
        return False
    return all(getattr(actual, name, None) is getattr(plain, name, None) for name in _ENCODERS)

"""Behaviour that all suites share."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.suites.base import list_suites


@pytest.mark.parametrize("name", list_suites())
def test_a_tokenizer_without_tokens_is_refused(name: str) -> None:
    """A tokenizer that is loaded with the wrong class may have no tokens; no prompt would ever fill its length."""
    empty, asked = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())), list_suites()[name]
    assert not empty("a text").input_ids
    with pytest.raises(MethodError, match="returns no tokens for a text"):
        asked.samples(asked.tasks[0], empty, length=512, count=1, seed=0, haystack="A text to hide in. " * 400)

"""Documents are tokenised many at a time and without offsets, with the tokens that the tokenizer itself gives."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import ByT5Tokenizer, PerceiverTokenizer, PreTrainedTokenizerFast

from rope_ext_hf.reading.spans import make_plan
from rope_ext_hf.reading.text import token_bytes, tokenizing
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.token_bytes import byte_ends, tokenize_texts
from rope_ext_hf.reading.text.tokenizing import tokenize
from tests.reading.text.test_token_bytes import TOKENIZERS, built, byte_level

TEXTS = ["Some words, and 42 more.\n\n  naïve façade 漢字 🙂 <s> </s> <|endoftext|>", "", " two  spaces", "ab" * 300]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_tokens_and_their_ends_are_those_of_the_tokenizer(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = built(name)
    monkeypatch.setattr(tokenizing, "_TOKENIZED_AT_ONCE", at_once)
    documents = tokenize([Document(text[:5], text) for text in TEXTS], tokenizer)
    for document, text in zip(documents, TEXTS, strict=True):
        assert document.name == text[:5]
        assert document.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.is_fast:
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            assert document.ends == byte_ends(text, encoded.tokens(), encoded["offset_mapping"])
            assert len(document.ends) == len(document.ids)


def test_truncation_and_padding_of_an_earlier_call_do_not_matter() -> None:
    tokenizer = byte_level()
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    tokenizer.pad_token = "a"
    tokenizer(TEXTS, padding=True, truncation=True, max_length=8)
    assert [list(ids) for ids in tokenize_texts(tokenizer, TEXTS)] == expected


def test_a_class_that_changes_texts_itself_is_called() -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            return super()._encode_plus(text.upper() if isinstance(text, str) else text, *args, **options)

    plain = byte_level()
    tokenizer = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert [list(ids) for ids in tokenize_texts(tokenizer, ["quiet"])] == [
        plain("QUIET", add_special_tokens=False)["input_ids"]
    ]


@pytest.mark.parametrize("tokenizer", [ByT5Tokenizer(), PerceiverTokenizer()], ids=["byt5", "perceiver"])
def test_tokens_are_those_of_a_tokenizer_in_python(tokenizer: Any) -> None:
    texts = [*TEXTS, "no special tokens", "in capitals </S> [cls]", "[CLS] in a class that knows it"]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert tokenize_texts(tokenizer, texts) == expected


def test_a_tokenizer_in_python_that_changes_texts_itself_is_called() -> None:
    class Shouting(ByT5Tokenizer):  # type: ignore[misc]
        def convert_tokens_to_ids(self, tokens: Any) -> Any:
            return super().convert_tokens_to_ids([token.upper() for token in tokens])

    assert tokenize_texts(Shouting(), ["quiet"]) == [[byte + 3 for byte in b"QUIET"]]


def test_only_the_ends_of_documents_that_are_read_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a corpus of eight books, four spans are in four of them at most."""
    tokenizer = byte_level()
    searched: list[str] = []
    spelled_ends = token_bytes.spelled_ends

    def counted(text: str, tokens: Any) -> Any:
        searched.append(text)
        return spelled_ends(text, tokens)

    monkeypatch.setattr(tokenizing, "spelled_ends", counted)
    texts = [f"{index} {'some words ' * 40}" for index in range(8)]
    plan = make_plan(tokenize([Document(text[0], text) for text in texts], tokenizer), lengths=[32], max_spans=2)
    assert not searched
    for document, read in plan.documents:
        assert document.bytes_between(read[0].score_from, read[0].score_to) > 0
    assert len(plan.documents) == len(searched) == 2

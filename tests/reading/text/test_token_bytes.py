from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.token_bytes import byte_ends
from rope_ext_hf.reading.text.tokenizing import tokenize

TEXTS = [
    "grün 漢字 😀👩‍👩‍👧 hello  world\n\t x",
    "漢",
    "😀😀",
    " é",
    "plain ascii text, twice. " * 2,
    "\u0301combining \u200bzero width",
]


def byte_level(prefix_space: bool = False, trim: bool = True) -> Any:
    """Return a byte-level BPE tokenizer that is trained here, with tokens that end within a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=275, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world, grün 漢学 漢子 😀 😁"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback(unigram: bool = False) -> Any:
    """Return a tokenizer like that of Llama 2 (or Gemma's Unigram), which writes unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "▁", "a", "e", "▁a", "x", "字"]
    names = known + [f"<0x{byte:02X}>" for byte in range(256)]
    if unigram:
        scores = [(name, -1.0 if name in known else -5.0) for name in names]
        tokenizer = Tokenizer(models.Unigram(scores, 0, True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        vocabulary = {name: index for index, name in enumerate(names)}
        merges = [("▁", "a")]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(prefix_space=True),
    "byte-level, whole offsets": lambda: byte_level(prefix_space=True, trim=False),
    "byte fallback": byte_fallback,
    "byte fallback, unigram": lambda: byte_fallback(unigram=True),
}
BUILT: dict[str, Any] = {}


def built(name: str) -> Any:
    return BUILT.setdefault(name, TOKENIZERS[name]())


def decoded_lengths(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return the bytes of each token by the library's own decoder, or by its alphabet for parts of characters."""
    lengths = []
    for token in tokenizer.convert_ids_to_tokens(ids):
        alone = tokenizer.backend_tokenizer.decoder.decode([token])
        if "\ufffd" in alone or token.startswith("<0x"):
            lengths.append(1 if token.startswith("<0x") else len(token))
        else:
            lengths.append(len(alone.encode("utf-8")))
    return lengths


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_those_of_the_tokenizers_decoder(name: str, text: str) -> None:
    tokenizer = built(name)
    (document,) = tokenize([Document("a", text)], tokenizer)
    ids = document.ids.tolist()
    expected = decoded_lengths(tokenizer, ids)
    added = sum(expected) - len(text.encode("utf-8"))  # a space before the text
    assert added in (0, 1)
    if added and expected[0]:
        expected[0] -= 1
    assert [document.bytes_between(i, i + 1) for i in range(len(ids))] == expected


@pytest.mark.slow
@given(st.sampled_from(sorted(TOKENIZERS)), st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_ends_ascend_to_the_length_of_any_text(name: str, text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return
    (document,) = tokenize([Document("a", text)], built(name))
    assert list(document.ends) == sorted(document.ends)
    assert not document.ends or (document.ends[0] >= 0 and document.ends[-1] == size)


def test_tokens_that_do_not_spell_the_text_share_its_characters() -> None:
    """In a normalised text, the tokens' own bytes differ from those of the text."""
    assert byte_ends("ﬃ!", ["f", "f", "i", "!"], [(0, 1), (0, 1), (0, 1), (1, 2)]) == (1, 2, 3, 4)
    assert byte_ends("abc½", ["abcX", "Y"], [(0, 4), (3, 4)]) == (4, 5)
    assert byte_ends("½ ½", ["1", "/2", "1", "/2"], [(0, 1), (0, 1), (2, 3), (2, 3)]) == (1, 2, 4, 5)
    assert byte_ends("", [], []) == ()


def test_a_word_piece_tokenizer_that_changes_the_text() -> None:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate("?ficex")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.normalizer = normalizers.NFKD()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    (document,) = tokenize([Document("a", "xﬁé")], PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?"))
    assert document.ends == (1, 3, 4, 5, 6)  # x; f and i of three bytes; e and its accent of two

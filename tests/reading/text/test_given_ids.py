"""Texts that are given as token ids have the results of the texts themselves, in every form that ids come in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import BatchEncoding

import rope_ext_hf as rope
from rope_ext_hf.eval import Passkey, measure, perplexity
from rope_ext_hf.reading.protocols import PROTOCOLS
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import text_of, tokenize
from tests.reading.text.test_token_bytes import TEXTS, TOKENIZERS, built
from tests.support.byte_tokenizers import TEMPLATES, VOCABULARY, byte_tokenizer
from tests.support.models import build

LINES = [
    "How much is the cheese? The mice pay in kind; nobody counts. ",
    "Größe und 漢字 count as much as bytes do, don't they? So we ask.",
]
CHAIN = "<s> $A"


def encoded(tokenizer: Any, side: str = "right", **options: Any) -> Any:
    """Return what a tokenizer makes of two texts of different lengths, padded on one side."""
    tokenizer.padding_side = side
    return tokenizer(LINES, padding=True, **options)


FORMS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda tokenizer: tokenizer(LINES)["input_ids"],
    "tensors": lambda tokenizer: [torch.tensor(tokenizer(line)["input_ids"]) for line in LINES],
    "batches of one": lambda tokenizer: [tokenizer(line, return_tensors="pt")["input_ids"] for line in LINES],
    "nested batches": lambda tokenizer: [[tokenizer(line)["input_ids"]] for line in LINES],
    "encoding": lambda tokenizer: tokenizer(LINES),
    "padded right": lambda tokenizer: encoded(tokenizer, return_tensors="pt"),
    "padded left": lambda tokenizer: encoded(tokenizer, "left", return_tensors="np"),
    "dict": lambda tokenizer: dict(encoded(tokenizer, "left")),
    "encodings": lambda tokenizer: [tokenizer(line, padding="max_length", max_length=90) for line in LINES],
    "encodings of batches": lambda tokenizer: [encoded(tokenizer, return_tensors="pt")],
    "rows": lambda tokenizer: [dict(tokenizer(line, padding="max_length", max_length=90)) for line in LINES],
    "dataset": lambda tokenizer: datasets.Dataset.from_dict(dict(encoded(tokenizer))),
    "dataset of tensors": lambda tokenizer: datasets.Dataset.from_dict(dict(encoded(tokenizer))).with_format("torch"),
    "streamed dataset": lambda tokenizer: datasets.Dataset.from_dict(dict(encoded(tokenizer))).to_iterable_dataset(),
    "batch of a dataset": lambda tokenizer: datasets.Dataset.from_dict(dict(encoded(tokenizer)))[:2],
    "documents": lambda tokenizer: [Document("x", "", tokenizer(line)["input_ids"]) for line in LINES],
}


def measured(data: Any, tokenizer: Any, **options: Any) -> list[Any]:
    """Return the results by length without the names of documents."""
    model = build("llama", vocab_size=VOCABULARY)
    spans: dict[str, Any] = {"lengths": [16, 32], "stride": 16, "targets": 8}
    results = perplexity(model, data, tokenizer=tokenizer, **spans | options)
    return [[document[1:] for document in result.documents] for result in results]


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
@pytest.mark.parametrize("template", TEMPLATES)
def test_token_ids_have_the_result_of_their_text_under_every_protocol(template: str, protocol: str) -> None:
    tokenizer = byte_tokenizer(template)
    for bos in (None, True) if TEMPLATES[template] else (None,):
        expected = measured(LINES, tokenizer, protocol=protocol, bos=bos)
        assert measured(tokenizer(LINES)["input_ids"], tokenizer, protocol=protocol, bos=bos) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", ["<s> $A", "[CLS] $A [SEP]"])
def test_token_ids_have_the_result_of_their_text_in_every_form(template: str, form: str) -> None:
    tokenizer = byte_tokenizer(template)
    assert measured(FORMS[form](tokenizer), tokenizer, protocol="blocks") == measured(
        LINES, tokenizer, protocol="blocks"
    )


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ["input_ids", "chosen_input_ids"])
def test_padding_in_files_is_left_out(tmp_path: Path, kind: str, name: str) -> None:
    tokenizer = byte_tokenizer(CHAIN)
    padded = encoded(tokenizer, "left")
    columns = {name: padded["input_ids"], name.replace("input_ids", "attention_mask"): padded["attention_mask"]}
    rows = datasets.Dataset.from_dict(columns)
    file = tmp_path / f"ids.{kind}"
    if kind == "parquet":
        rows.to_parquet(str(file))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows) if kind == "jsonl" else json.dumps(list(rows))
        file.write_text(text)
    found = load(f"{file}?column={name}")
    assert [list(document.ids or ()) for document in found] == tokenizer(LINES)["input_ids"]
    if name == "input_ids":
        assert load(str(file)) == found


@pytest.mark.parametrize("protocol", ["truncate", "position"])
def test_one_bos_is_read(protocol: str) -> None:
    """The loss is that of transformers over the ids that the tokenizer gives."""
    tokenizer, model = byte_tokenizer(CHAIN), build("llama", vocab_size=VOCABULARY)
    ids = torch.tensor(tokenizer(LINES[1])["input_ids"])
    with torch.no_grad():
        likely = model(ids[None, :32]).logits[0].double().log_softmax(-1)
    expected = -likely[:-1].gather(1, ids[1:32, None]).mean().item()
    found = perplexity(model, ids, lengths=[32], protocol=protocol, tokenizer=tokenizer)
    assert found[0].loss == pytest.approx(expected, rel=1e-5)
    # without a tokenizer, and with bos=False, ids are read as they are
    for options in ({}, {"tokenizer": tokenizer, "bos": False}):
        (same,) = perplexity(model, ids, lengths=[32], protocol=protocol, **options)
        assert same.loss == pytest.approx(expected, rel=1e-5)
        assert (same.bits_per_byte is None) == (not options)


def test_a_prefix_that_only_the_protocol_puts_is_not_read_twice() -> None:
    """`blocks` begins with EOS where there is no BOS, and `truncate` with a BOS that the tokenizer does not add."""
    without_bos = byte_tokenizer("$A </s>")
    ids = without_bos(LINES[0], add_special_tokens=False)["input_ids"]
    with_eos = [[without_bos.eos_token_id, *ids]]
    assert measured(with_eos, without_bos, protocol="blocks") == measured(LINES[:1], without_bos, protocol="blocks")
    own_bos = byte_tokenizer("$A </s>")
    own_bos.bos_token = "<s>"
    assert measured([[own_bos.bos_token_id, *ids]], own_bos, protocol="truncate") == measured(
        LINES[:1], own_bos, protocol="truncate"
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 1, 0, 1, 1], "row:1: the attention mask has zeros between tokens"),
        ([1, 1, 1], "row:1: the attention mask must be a 0 or 1 for each of the 5 token ids"),
        ([0, 2, 2, 2, 0], "must be a 0 or 1"),
        (1, "must be a 0 or 1"),
        ([[1] * 5], "must be a 0 or 1"),
        (torch.zeros(5, dtype=torch.int64), "no document has any text"),
    ],
)
def test_a_mask_that_is_not_one_of_padding_is_refused(mask: Any, message: str) -> None:
    for encoding in (
        {"input_ids": [9, 8, 7, 6, 5], "attention_mask": mask},
        [{"input_ids": torch.tensor([9, 8, 7, 6, 5]), "attention_mask": mask}],
    ):
        with pytest.raises(rope.CorpusError, match=message):
            load(encoding)
    with pytest.raises(rope.CorpusError, match="must have the same shape"):
        load(BatchEncoding({"input_ids": [[1, 2], [3, 4]], "attention_mask": [1, 1]}))


# --- bytes ------------------------------------------------------------------------------------------------------------


def wordpiece() -> Any:
    """Return a tokenizer whose tokens do not spell the text, so that the offsets of its encoding tell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "how", "much", "wonder", "##ful", "chee", "##se", "größe", "?"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_token_has_the_bytes_that_it_has_in_its_text(name: str, text: str) -> None:
    tokenizer = built(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    of_text, of_ids = tokenize([Document("a", text), Document("b", "", ids)], tokenizer)
    spaces = len(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) - len(text)  # before the text
    assert list(of_ids.ends) == [end + spaces for end in of_text.ends]


def test_bytes_of_ids_that_end_within_a_character() -> None:
    tokenizer = built("byte fallback")
    ids = tokenizer("aa 漢漢", add_special_tokens=False)["input_ids"][:-1]
    (document,) = tokenize([Document("a", "", ids)], tokenizer)
    assert [document.bytes_between(i, i + 1) for i in range(len(ids))][-5:] == [1] * 5
    assert document.ends[-1] == len("aa 漢漢".encode()) - 1 + tokenizer.decode(ids).startswith(" ")


def test_bytes_of_tokens_that_do_not_spell_the_text() -> None:
    tokenizer = wordpiece()
    ids = tokenizer("how wonderful cheese ? größe")["input_ids"]
    shown = tokenizer.decode(ids)
    assert shown == "how wonderful cheese? größe"
    (document,) = tokenize([Document("a", "", ids)], tokenizer)
    expected = [3, 7, 3, 5, 2, 1, 8]  # how | ' wonder' | ful | ' chee' | se | ? | ' größe'
    assert [document.bytes_between(i, i + 1) for i in range(len(ids))] == expected
    # ids that the tokenizer would not give for their text: "how ful"
    (odd,) = tokenize([Document("a", "", [*ids, 3, 3])], tokenizer)
    assert odd.ends[-1] == len(tokenizer.decode([*ids, 3, 3]).encode())


def test_bits_per_byte_count_the_bytes_of_the_scored_tokens() -> None:
    """A model that knows nothing has log2(V) bits for each token, whatever the bytes of the token."""
    tokenizer = built("byte-level")
    model = build("llama", vocab_size=len(tokenizer))
    torch.nn.init.zeros_(model.lm_head.weight)
    ids = tokenizer("hello world" * 64, add_special_tokens=False)["input_ids"][:32]  # tokens of several bytes
    ids += tokenizer("QZXJ" * 64, add_special_tokens=False)["input_ids"][:32]  # of one byte each
    (result,) = perplexity(model, ids, lengths=[64], targets=32, tokenizer=tokenizer)
    assert result.bits_per_byte == pytest.approx(math.log2(len(tokenizer)), rel=1e-5)


def test_bytes_of_a_tokenizer_without_offsets() -> None:
    """A slow tokenizer of words gives no offsets; its tokens have the bytes that decoding shows."""
    from transformers import PreTrainedTokenizer

    class Words(PreTrainedTokenizer):  # type: ignore[misc]
        words = ("<unk>", "a", "wonderful", "größe")

        @property
        def vocab_size(self) -> int:
            return len(self.words)

        def get_vocab(self) -> dict[str, int]:
            return {word: index for index, word in enumerate(self.words)}

        def _tokenize(self, text: str, **options: Any) -> list[str]:
            return text.split()

        def _convert_token_to_id(self, token: str) -> int:
            return self.words.index(token)

        def _convert_id_to_token(self, index: int) -> str:
            return self.words[index]

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return " ".join(tokens)

    text = "a wonderful a größe"
    for document in (Document("a", text), Document("a", "", [1, 2, 1, 3])):
        (tokens,) = tokenize([document], Words(unk_token="<unk>"))
        assert list(tokens.ends) == [1, 11, 13, 21]


# --- other readers of texts -------------------------------------------------------------------------------------------


def test_other_readers_leave_out_added_tokens_too() -> None:
    tokenizer = byte_tokenizer("[gMASK] <sop> $A </s>")
    ids = tokenizer(LINES[0])["input_ids"]
    assert text_of([Document("a", "", ids)], tokenizer) == LINES[0]
    model = build("llama", vocab_size=VOCABULARY)
    question: dict[str, Any] = {"lengths": [256], "depths": [0.5], "trials": 1, "distractors": 1, "task": "passkey"}
    of_text, of_ids = (
        measure(model, Passkey(haystack=haystack, **question), tokenizer=tokenizer).results
        for haystack in (LINES[:1], [ids])
    )
    assert of_ids == of_text

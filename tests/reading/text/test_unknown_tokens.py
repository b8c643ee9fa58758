"""Results say where a tokenizer does not know a text: unknown tokens, or characters that it drops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.eval import Passkey, measure, perplexity
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reading.text.unknown_tokens import unknown_note
from rope_ext_hf.runs.folder.folder import read_run
from tests.reading.text.test_token_bytes import TOKENIZERS, built
from tests.support.commands import run, run_json
from tests.support.models import build

KNOWN = "the quick brown fox jumps over the lazy dog "
FOREIGN = "Тёмная вода стояла в колодце и не двигалась "


def fast(model: Any, pre_tokenizer: Any, decoder: Any = None, normalizer: Any = None, **tokens: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def words() -> Any:
    """Return a tokenizer of whole words, in which every other word is one unknown token."""
    from tokenizers import models, pre_tokenizers

    known = {word: index for index, word in enumerate(["[UNK]", "</s>", *sorted({*KNOWN.split()})])}
    return fast(
        models.WordLevel(known, unk_token="[UNK]"), pre_tokenizers.Whitespace(), unk_token="[UNK]", eos_token="</s>"
    )


def letters(**options: Any) -> Any:
    """Return a tokenizer of letters without an unknown token, which drops all other characters."""
    from tokenizers import decoders, models, pre_tokenizers

    known = {letter: index for index, letter in enumerate(["[UNK]", *sorted({*KNOWN, "▁"} - {" "})])}
    return fast(models.BPE(known, [], **options), pre_tokenizers.Metaspace(), decoders.Metaspace())


def fused() -> Any:
    """Return a tokenizer that makes one unknown token of all unknown characters in a row, like Unigram in Llama."""
    return letters(unk_token="[UNK]", fuse_unk=True)


def uncased() -> Any:
    """Return a tokenizer like that of an uncased BERT, which has no capitals, no accents and no control characters."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pieces = [chr(code) for code in range(33, 127)]
    known = ["[UNK]", *pieces, *(f"##{piece}" for piece in pieces)]
    return fast(
        models.WordPiece({piece: index for index, piece in enumerate(known)}, unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        normalizers.BertNormalizer(lowercase=True),
        unk_token="[UNK]",
    )


UNKNOWN = r"(\d+)% of the tokens are the tokenizer's unknown token, '\[UNK\]'"
DROPPED = r"the tokenizer drops about (\d+)% of the characters"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(words, UNKNOWN), (letters, DROPPED), (fused, DROPPED)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("foreign", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_a_text_that_is_not_known_is_said(tokenizer: Callable[[], Any], message: str, foreign: float) -> None:
    import re

    made = tokenizer()
    text = "".join(FOREIGN if index < foreign * 200 else KNOWN for index in range(200))
    for documents in (
        [Document("a", text)],
        [Document(str(start), text[start : start + 300]) for start in range(0, len(text), 300)],
        tokenize([Document("a", text)], made),
    ):
        found = re.match(message, unknown_note(documents, made))
        assert (found is not None) == (foreign > 0.03)
        if found is not None:
            assert int(found[1]) == pytest.approx(100 * foreign, abs=4)


def test_unknown_tokens_in_token_ids_are_counted() -> None:
    made = words()
    ids = made(FOREIGN + KNOWN * 9)["input_ids"]
    for documents in ([Document("a", "", ids)], tokenize([Document("a", "", ids)], made)):
        assert unknown_note(documents, made).startswith("9% of the tokens")


@pytest.mark.parametrize("text", [KNOWN * 20, FOREIGN * 20, "“Grüße” — 漢字 ﬁn… naïve\u200b\n\t🙂 " * 20])
@pytest.mark.parametrize("name", [*TOKENIZERS, "without decoder"])
def test_a_tokenizer_of_bytes_knows_every_text(name: str, text: str) -> None:
    from tokenizers import models, pre_tokenizers

    if name == "without decoder":
        alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = fast(models.BPE(alphabet, []), pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        tokenizer = built(name)
    assert unknown_note([Document("a", text)], tokenizer) == ""


def test_normalised_text_is_not_dropped() -> None:
    assert unknown_note([Document("a", "Ça va, Élodie ?  Très bien,\u200b HÉLÈNE!\n" * 50)], uncased()) == ""


def test_an_unknown_token_that_separates_texts_is_not_counted() -> None:
    made = words()
    made.eos_token = "[UNK]"
    assert unknown_note([Document("a", "", [0] * 10)], made) == ""


def saved(folder: Path) -> Path:
    """Save a small model with the tokenizer of whole words."""
    tokenizer = words()
    build("llama", vocab_size=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_note_stands_beside_the_result(tmp_path: Path, as_ids: bool) -> None:
    model = saved(tmp_path / "model")
    text = (FOREIGN + KNOWN) * 20
    data = [words()(text)["input_ids"]] if as_ids else [text]
    with pytest.warns(UserWarning, match=UNKNOWN):
        results = perplexity(model, data, lengths=[16], out=tmp_path / "runs")
    assert results[0].setting.note.startswith("47% of the tokens are")
    again = read_run(results.run.folder)
    assert again.results[0].setting == results[0].setting
    for shown in (str(again.kind.table(again).caption), (results.run.folder / "report.html").read_text()):
        assert "of the tokens are the tokenizer" in shown
    known = perplexity(model, [KNOWN * 20], lengths=[16])
    assert known[0].setting.note == ""


@pytest.mark.filterwarnings("always::UserWarning")
def test_commands_print_the_note(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text((FOREIGN + KNOWN) * 20, encoding="utf-8")
    (tmp_path / "other.txt").write_text(KNOWN, encoding="utf-8")
    (tmp_path / "books" / "b.txt").symlink_to(tmp_path / "other.txt")
    options = ("--data", tmp_path / "books", "--lengths", "16", "--out", tmp_path / "runs")
    code, out, err = run("ppl", model, *options)
    assert code == 0, err
    for sentence in ("47% of the tokens are", "has links that lead out of it"):
        assert sentence in " ".join(err.split())
        assert sentence in " ".join(out.split())
    notes = run_json("ppl", model, *options)["results"][0]["setting"]["note"]
    assert notes.count("\n") == 1


def test_passkey_warns_of_its_haystack() -> None:
    model, tokenizer = build("llama", vocab_size=512), letters()
    question = Passkey(
        lengths=[256], depths=[0.5], trials=1, distractors=1, haystack=[FOREIGN * 100 + KNOWN], task="passkey"
    )
    with pytest.warns(UserWarning, match=DROPPED):
        measure(model, question, tokenizer=tokenizer)

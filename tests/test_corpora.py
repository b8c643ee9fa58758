from __future__ import annotations

from pathlib import Path

import pytest

from rope_ext_hf import CorpusError
from rope_ext_hf.eval.corpora import HELD_OUT, Document, load, stdlib_held_out, stdlib_training


def test_held_out_modules_are_never_trained_on() -> None:
    held_out = stdlib_held_out()
    training = stdlib_training()
    assert {document.name for document in held_out} <= set(HELD_OUT)
    assert {document.name for document in held_out}.isdisjoint(document.name for document in training)
    assert not {document.text for document in held_out} & {document.text for document in training}
    assert sum(len(document.text) for document in held_out) > 500_000
    assert sum(len(document.text) for document in training) > 3_000_000


def test_a_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Grüße, world", encoding="utf-8")
    assert load(str(file)) == [Document("a.txt", "Grüße, world")]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such text file"), (b"", "is empty"), (b" \n ", "is empty"), (b"\xff\xfe", "UTF-8")],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        load(str(file))
    assert "a.txt" in str(caught.value)

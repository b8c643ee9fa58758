"""Line ends of a file, CR and CRLF too, stay as they are, whatever its name and compression."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.pairing.text_losses import TEXT_CHARACTERS
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reading.text.load import load, stdlib_held_out
from tests.support.commands import run_json

BODY = ["A line", "", "  and one that is indented,", "the last: é, 猫", ""]
ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r", "LF and CR": "\n\r", "NEL": "\x85", "LS": "\u2028", "FF": "\x0c"}
TEXTS = {name: end.join(BODY) for name, end in ENDS.items()} | {"mixed": "a\rb\r\nc\nd\r\n\r\r\n"}
MARK = "\ufeff"


def _plain(folder: Path, text: str) -> Any:
    (folder / "a.txt").write_bytes(text.encode())
    return str(folder / "a.txt")


def _compressed(folder: Path, text: str) -> Any:
    (folder / "a.md.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "a.md.gz")


def _zstandard(folder: Path, text: str) -> Any:
    import pyarrow

    with pyarrow.output_stream(str(folder / "a.txt.zst"), compression="zstd") as file:
        file.write(text.encode())
    return folder / "a.txt.zst"


def _parquet(folder: Path, text: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [text]}), folder / "a.parquet")
    return str(folder / "a.parquet")


def _lines(folder: Path, text: str) -> Any:
    (folder / "a.jsonl").write_bytes(json.dumps({"text": text}).encode() + b"\r\n")
    return str(folder / "a.jsonl")


FILES: dict[str, Callable[[Path, str], Any]] = {
    "a name": _plain,
    "a path": lambda folder, text: Path(_plain(folder, text)),
    "a list of paths": lambda folder, text: [Path(_plain(folder, text))],
    "a folder": lambda folder, text: str(Path(_plain(folder, text)).parent),
    "a pattern": lambda folder, text: str(Path(_plain(folder, text)).parent / "*.txt"),
    "gzip": _compressed,
    "zstandard": _zstandard,
}
TABLES: dict[str, Callable[[Path, str], Any]] = {
    "JSON lines": _lines,
    "parquet": _parquet,
    "a list": lambda folder, text: [text],
    "rows": lambda folder, text: [{"text": text}],
}


@pytest.mark.parametrize("ends", TEXTS)
@pytest.mark.parametrize("form", [*FILES, *TABLES])
def test_line_ends_stay_as_they_are(form: str, ends: str, tmp_path: Path) -> None:
    (document,) = load((FILES | TABLES)[form](tmp_path, TEXTS[ends]))
    assert document.text == TEXTS[ends]


@pytest.mark.parametrize("form", [*FILES, *TABLES])
def test_a_byte_order_mark_is_of_the_file_and_not_of_the_text(form: str, tmp_path: Path) -> None:
    """It is left out only at the beginning of a text file; within a string it is a character like any other."""
    text = f"a\r\n{MARK}b"
    (document,) = load((FILES | TABLES)[form](tmp_path, MARK + text))
    assert document.text == (text if form in FILES else MARK + text)


@pytest.mark.slow
def test_the_loss_of_a_file_is_that_of_its_text(tmp_path: Path) -> None:
    text = stdlib_held_out()[1].text[:1500].replace("\n", "\r\n")
    (tmp_path / "a.txt").write_bytes(text.encode())
    model = rope.from_pretrained("reference")
    options: dict[str, Any] = {"lengths": [256], "protocol": "blocks"}
    of_list, of_file = (perplexity(model, data, **options)[0] for data in ([text], tmp_path / "a.txt"))
    assert (of_file.loss, of_file.bits_per_byte) == (of_list.loss, of_list.bits_per_byte)
    assert of_file.documents[0].tokens == len(text.encode())


@pytest.mark.slow
@pytest.mark.sampled(3)
def test_the_text_of_detection_is_that_of_its_file(tmp_path: Path) -> None:
    text = stdlib_held_out()[1].text[:8000].replace("\n", "\r\n")
    (tmp_path / "a.txt").write_bytes((MARK + text).encode())
    of_text = rope.detect_pairing("reference", text=text[:TEXT_CHARACTERS]).text
    assert of_text is not None
    of_file = run_json("detect", "reference", "--text", tmp_path / "a.txt")["text"]
    assert (of_file["half"], of_file["tokens"]) == (of_text.half, of_text.tokens)

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from training_text import stdlib_training

from rope_ext_hf import CorpusError
from rope_ext_hf.reading.text import text_files
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import HELD_OUT, load, stdlib_held_out

TEXTS = ["Grüße, world", "zwei\nlines", "three"]
ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS, 1)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def texts(data: str | Path, **options: Any) -> list[str]:
    return [document.text for document in load(str(data), **options)]


def names(data: str | Path, **options: Any) -> list[str]:
    return [document.name for document in load(str(data), **options)]


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def zstd(content: bytes) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


def parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


# -- the standard library ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_held_out_modules_are_never_trained_on() -> None:
    held_out = stdlib_held_out()
    training = stdlib_training()
    assert {document.name for document in held_out} <= set(HELD_OUT)
    assert {document.name for document in held_out}.isdisjoint(document.name for document in training)
    assert not {document.text for document in held_out} & {document.text for document in training}
    assert sum(len(document.text) for document in held_out) > 500_000
    assert sum(len(document.text) for document in training) > 3_000_000


def test_the_held_out_modules_are_a_corpus_like_any_other() -> None:
    assert load("stdlib") == stdlib_held_out()


# -- one file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "README", "a.tex", "a b?c=d.txt", "a[1].txt"])
def test_a_file_of_any_name_is_one_document(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes("Grüße,\r\nworld".encode())
    assert load(str(file)) == [Document(name, "Grüße,\r\nworld")]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße".encode())
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert texts(tmp_path / "a.txt") == ["Grüße"]
    assert texts(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.NDJSON", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", LINES.removesuffix(b"\n")),
        ("a.jsonl.gz", gz(LINES)),
        ("a.jsonl.zst", zstd(LINES)),
        ("two-frames.jsonl.zst", zstd(LINES[:30]) + zstd(LINES[30:])),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json.gz", gz(json.dumps(ROWS).encode())),
        ("a.parquet", parquet({"text": TEXTS, "id": [1, 2, 3]})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_row_of_a_table_is_a_document(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert load(str(file)) == [Document(f"{name}:{i}", text) for i, text in enumerate(TEXTS, 1)]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gz), (".zst", zstd)])
def test_compressed_text_is_one_document(tmp_path: Path, suffix: str, pack: Any) -> None:
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(pack("Grüße\nworld".encode()))
    assert load(str(file)) == [Document(file.name, "Grüße\nworld")]


def test_a_line_separator_within_a_string_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\u2028b\x85c"}\n\n{"text": "d"}\n', encoding="utf-8")
    assert load(str(file)) == [Document("a.jsonl:1", "a\u2028b\x85c"), Document("a.jsonl:3", "d")]


def test_more_parquet_rows_than_are_decoded_at_a_time(tmp_path: Path) -> None:
    expected = [f"row {i}" for i in range(100)]
    (tmp_path / "a.parquet").write_bytes(parquet({"text": expected}))
    assert texts(tmp_path / "a.parquet") == expected


# -- which column ------------------------------------------------------------------------------------------------------


def write_columns(folder: Path, kind: str, columns: dict[str, list[Any]]) -> Path:
    file = folder / f"a.{kind}"
    if kind == "parquet":
        file.write_bytes(parquet(columns))
    else:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_column_of_the_text(tmp_path: Path, kind: str) -> None:
    file = write_columns(tmp_path, kind, {"title": ["t", "u"], "text": ["a", "b"], "the body&": ["c", "d"]})
    assert texts(file) == ["a", "b"]
    assert texts(f"{file}?column=title") == ["t", "u"]
    assert texts(f"{file}?column=the%20body%26") == texts(f"{file}?column=the body%26") == ["c", "d"]
    assert texts(file, column="title") == texts(f"{file}?column=title", column="title") == ["t", "u"]
    only = write_columns(tmp_path, kind, {"id": [1, 2], "body": ["c", "d"], "tags": [["x"], ["y"]]})
    assert texts(only) == ["c", "d"]
    assert texts(f"{tmp_path}/?.{kind}?column=body") == ["c", "d"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_in_doubt_is_asked_for(tmp_path: Path, kind: str) -> None:
    file = write_columns(tmp_path, kind, {"id": [1], "title": ["t"], "body": ["c"]})
    with pytest.raises(CorpusError, match=r"2 others are text.*\?column=NAME\. Its columns: id, title, body"):
        load(str(file))
    with pytest.raises(CorpusError, match=r"no column 'bodi'\. Did you mean 'body'\? Its columns: id, title, body"):
        load(f"{file}?column=bodi")
    with pytest.raises(CorpusError, match=r"a\.\w+:1: the column 'id' holds int, not text"):
        load(f"{file}?column=id")
    with pytest.raises(CorpusError, match="has column='body', but column='title' is given"):
        load(f"{file}?column=body", column="title")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "colum=body",
            r"unknown option 'colum'\. Did you mean 'column'\? "
            "Known: column, join, max_documents$",
        ),
        ("column=body&split=test", r"unknown option 'split'\. Known: column, join"),
        ("column=", "the option 'column' takes one value"),
        ("column=a&column=b", "the option 'column' takes one value"),
        ("join=true", "join takes a whole number, as in join=100000"),
        ("join=-1", "join takes a whole number"),
        ("max_documents=few", "max_documents takes a whole number, as in max_documents=20"),
        ("max_documents=0", "max_documents must be at least 1, got 0"),
        ("join=0", "join must be at least 1 character, got 0"),
    ],
)
def test_options_that_are_none(tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(CorpusError, match=message):
        load(f"{tmp_path / 'a.jsonl'}?{options}")


def test_options_in_the_name_and_apart_are_the_same(tmp_path: Path) -> None:
    for name, size in (("a", 5), ("b", 50), ("c", 60), ("d", 70)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    assert load(f"{tmp_path}/*.txt?join=60") == load(f"{tmp_path}/*.txt", join=60)
    with pytest.raises(CorpusError, match="has join=1, but join=2 is given"):
        load(f"{tmp_path}?join=1", join=2)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_token_ids(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    from rope_ext_hf.reading.text.tokenizing import tokenize
    from rope_ext_hf.reference import path

    tokenizer = AutoTokenizer.from_pretrained(path())
    words = ["import os", "a", "Grüße"]
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    file = write_columns(tmp_path, kind, {"input_ids": ids, "title": ["t", "u", "v"]})
    documents = load(f"{file}?column=input_ids")
    assert [list(document.ids or ()) for document in documents] == ids
    again = tokenize(documents, tokenizer)
    assert [document.ids.tolist() for document in again] == ids
    assert [document.ends[-1] for document in again] == [9, 1, 7]
    with pytest.raises(CorpusError, match="holds token ids, which are not joined"):
        load(f"{file}?column=input_ids&join=10")
    broken = write_columns(tmp_path, kind, {"input_ids": [[1.5, 2.0]], "title": ["t"]})
    with pytest.raises(CorpusError, match="holds list, not text"):
        load(f"{broken}?column=input_ids")


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for data in ("stdlib", str(tmp_path / "a.txt"), str(tmp_path)):
        with pytest.raises(CorpusError, match="plain text, which has no column 'body'"):
            load(data, column="body")
    (tmp_path / "b.jsonl").write_text('{"body": "b", "title": "t"}')
    assert texts(tmp_path, column="body") == ["a", "b"]


# -- folders and patterns ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of texts, with other files among them that do not belong to its text."""
    outside = tmp_path / "outside.txt"
    outside.write_text("outside")
    root = tmp_path / "books"
    for name in ("b.txt", "a/z.md", "a/c.txt.gz", "a-b.py", "d.rst", ".hidden.txt", ".git/e.txt", "f.png", "g"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gz(name.encode()) if name.endswith("gz") else name.encode())
    (root / "h.jsonl").write_text('{"text": "h1"}\n{"text": "h2"}\n')
    (root / "leaves.txt").symlink_to(outside)
    (root / "stays.txt").symlink_to(root / "b.txt")
    (root / "broken.txt").symlink_to(root / "nothing.txt")
    (root / "loop").symlink_to(root, target_is_directory=True)
    return root


def test_a_folder_is_read_recursively_in_order(folder: Path) -> None:
    kept = ["a/c.txt.gz", "a/z.md", "a-b.py", "b.txt", "d.rst", "h.jsonl:1", "h.jsonl:2", "stays.txt"]
    with pytest.warns(
        UserWarning, match=r"links that lead out of it or nowhere.*: broken\.txt, leaves\.txt; a pattern"
    ):
        assert names(folder) == kept
    (folder / "leaves.txt").unlink()
    (folder / "broken.txt").unlink()
    assert texts(folder) == [*kept[:5], "h1", "h2", "b.txt"]


def test_a_pattern_is_what_matches_it_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(folder / "*.txt") == ["b.txt", "leaves.txt", "stays.txt"]
    assert names(folder / "*" / "*.txt*") == ["a/c.txt.gz", "loop/b.txt", "loop/leaves.txt", "loop/stays.txt"]
    assert names(folder / "[ab].t?t") == ["b.txt"]
    assert names(folder / "g*") == ["g"]
    monkeypatch.chdir(folder)
    assert names("*.txt") == ["b.txt", "leaves.txt", "stays.txt"]
    assert names("a/**/*.md") == ["z.md"]


def test_folders_and_patterns_without_text(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "a.png").write_bytes(b"\xff")
    with pytest.raises(CorpusError, match=r"the folder '.*empty' has no files of text; looked for \.txt, .*\.parquet"):
        load(str(folder / "empty"))
    for pattern in ("*.doc", "a*b*c", "no-such-folder", "h.jsonl?column"):
        with pytest.raises(CorpusError, match=r"no such text file, folder or pattern: .*hf:OWNER/NAME"):
            load(str(folder / pattern))


# -- joining -----------------------------------------------------------------------------------------------------------


def test_at_most_so_many_documents_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "c.jsonl").write_text("damaged")  # never opened
    assert [document.text for document in load(f"{tmp_path}?max_documents=2")] == ["first", "second"]
    assert [document.text for document in load(["x", "y", "z"], max_documents=1)] == ["x"]


def test_documents_are_joined_until_they_are_long_enough(tmp_path: Path) -> None:
    for name, size in zip("abcdef", (5, 6, 20, 1, 12, 3), strict=True):
        (tmp_path / f"{name}.txt").write_text(name * size)
    assert load(f"{tmp_path}/*.txt?join=10") == [
        Document("a.txt and 1 more", "aaaaa\n\nbbbbbb"),
        Document("c.txt", "c" * 20),
        Document("d.txt and 2 more", "d\n\n" + "e" * 12 + "\n\nfff"),  # the rest is too short for a document of its own
    ]
    assert [document.name for document in load(str(tmp_path), join=1)] == [f"{name}.txt" for name in "abcdef"]
    assert [len(document.text) for document in load(str(tmp_path), join=1000)] == [57]


# -- damage ------------------------------------------------------------------------------------------------------------

_INCOMPRESSIBLE = random.Random(0).randbytes(300_000).hex()
_LONG_LINES = "".join(
    json.dumps({"text": _INCOMPRESSIBLE[i : i + 200_000]}) + "\n" for i in range(0, 600_000, 200_000)
).encode()


DAMAGED: list[tuple[str, bytes | None, str]] = [
    ("a.txt", None, "no such text file"),
    ("a.txt", b"", "is empty"),
    ("a.txt", b" \n ", "is empty"),
    ("a.jsonl", b"\n\n", "is empty"),
    ("a.json", b"[]", "is empty"),
    ("a.jsonl", b'{"text": ""}', "is empty"),
    ("a.parquet", parquet({"text": ["", " "]}), "is empty"),
    ("a.txt", b"ab\xff\xfe", "a.txt' cannot be read: not UTF-8 text: invalid start byte at byte 2"),
    ("a.jsonl", LINES + b'{"text": "\xff"}\n', r"a\.jsonl:4: not UTF-8 text: invalid start byte at byte 10"),
    ("a.jsonl", LINES + b'{"text": \n', r"a\.jsonl:4: not JSON: Expecting value at character"),
    ("a.jsonl", LINES + b"[" * 200_000, r"a\.jsonl:4: .*recursion"),
    ("a.jsonl", LINES + b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:4: Exceeds the limit"),
    ("a.jsonl", LINES + b'["text"]\n', r"a\.jsonl:4: not an object with columns but list"),
    ("a.jsonl", LINES + b'{"body": "x"}\n', r"a\.jsonl:4: no column 'text'; its columns: body"),
    ("a.jsonl", LINES + b'{"text": null}\n', r"a\.jsonl:4: the column 'text' holds NoneType, not text"),
    ("a.jsonl", LINES + b'{"text": "\\ud800"}\n', r"a\.jsonl:4: not text: surrogates not allowed at character 0"),
    ("a.jsonl", b"{}\n", r"a\.jsonl:1: no column 'text', and 0 others.*columns: none"),
    ("a.json", b'{"text": "a"}', r"a\.json: not a list of objects; .* is named \.jsonl"),
    ("a.json", LINES, r"a\.json' cannot be read: not JSON: Extra data"),
    ("a.json", b"[" * 200_000, r"a\.json' cannot be read: .*recursion"),
    ("a.json", b'[{"text": "a"}, "b"]', r"a\.json:2: not an object with columns but str"),
    ("a.jsonl.gz", LINES, r"a\.jsonl\.gz' cannot be read: Not a gzipped file"),
    ("a.jsonl.gz", gz(_LONG_LINES)[:-50_000], r"cannot be read after .*a\.jsonl\.gz:2: Compressed file"),
    ("a.txt.gz", gz(LINES)[:-1], r"a\.txt\.gz' cannot be read: Compressed file ended"),
    ("a.txt.gz", gz(LINES)[:10] + b"\xff" * 40, r"a\.txt\.gz' cannot be read: Error -3"),
    ("a.jsonl.zst", LINES, r"a\.jsonl\.zst' cannot be read: ZSTD decompress failed"),
    ("a.jsonl.zst", zstd(_LONG_LINES)[:-50_000], r"cannot be read after .*a\.jsonl\.zst:[12]: Truncated"),
    ("a.parquet", LINES, r"a\.parquet' cannot be read: Parquet magic bytes not found"),
    ("a.parquet", parquet({"text": TEXTS})[:-20], r"a\.parquet' cannot be read"),
    ("a.parquet", b"", r"a\.parquet' cannot be read"),
    ("a.parquet", parquet({"text": ["a", None]}), r"a\.parquet:2: the column 'text' holds NoneType, not text"),
    ("b.parquet", parquet({"body": ["a"], "b": ["c"]}), "2 others are text"),
    ("a.jsonl", LINES + b'{"text": [1, -1]}\n', r"a\.jsonl:4: -1 is not a token id"),
    ("b.jsonl", LINES + b'{"text": [%d]}\n' % 2**63, r"b\.jsonl:4: 9223372036854775808 is not a token id"),
    ("c.jsonl", LINES + b'{"text": [%d]}\n' % 10**400, r"c\.jsonl:4: 1000.*\.\.\. is not a token id"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=[f"{name}: {why}" for name, _, why in DAMAGED])
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        load(str(file))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compressed_file_expands_so_far_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gz(b"x" * 200_000))
    monkeypatch.setattr(text_files, "_FREE_EXPANSION", 1000)
    with pytest.raises(CorpusError, match=r"a\.txt\.gz' expands to more than [\d,]+ bytes.* decompress it"):
        load(str(file))
    monkeypatch.setattr(text_files, "_FREE_EXPANSION", 200_000)
    assert texts(file) == ["x" * 200_000]


@pytest.mark.slow
def test_a_small_file_of_300_megabytes_is_refused_before_it_is_held_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.txt.gz"
    file.write_bytes(gz(b"x" * 2**20) * 300)  # members of a gzip file follow one another
    assert file.stat().st_size < 400_000
    with pytest.raises(CorpusError, match="expands to more than 67,108,864 bytes"):
        load(str(file))


def test_a_name_too_long_to_be_one() -> None:
    with pytest.raises(CorpusError, match=r"cannot be read: .*too long"):
        load("x" * 5000)


# -- the Hub -----------------------------------------------------------------------------------------------------------


class Hub:
    """A stand-in for `datasets.load_dataset` with splits in memory, which notes its arguments and the rows read."""

    def __init__(self, splits: dict[str, list[dict[str, Any]]]) -> None:
        self.splits = splits
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.read: list[int] = []

    def load_dataset(self, path: str, **options: Any) -> Any:
        from datasets import IterableDatasetDict

        self.asked.append((path, options))
        split = options["split"]
        if split is None:
            return IterableDatasetDict({name: self.stream(name) for name in self.splits})
        if split not in self.splits:
            raise ValueError(f"Bad split: {split}. Available splits: {list(self.splits)}\nmore lines")
        return self.stream(split)

    def stream(self, split: str) -> Any:
        from datasets import Dataset

        def read(row: dict[str, Any], index: int) -> dict[str, Any]:
            self.read.append(index)
            return row

        return Dataset.from_list(self.splits[split]).to_iterable_dataset().map(read, with_indices=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    import datasets

    stand_in = Hub(
        {
            "train": [{"title": "t", "text": f"train {i}"} for i in range(9)],
            "test": [{"title": "t", "text": f"test {i}"} for i in range(1000)],
        }
    )
    monkeypatch.setattr(datasets, "load_dataset", stand_in.load_dataset)
    return stand_in


def test_a_hub_dataset_is_asked_for_by_its_options(hub: Hub) -> None:
    documents = load("hf:some-one/books?config=en&split=train&column=title")
    assert documents == [Document(f"some-one/books:{i}", "t") for i in range(1, 10)]
    fixed = {"streaming": True, "trust_remote_code": False}
    assert hub.asked == [("some-one/books", {"name": "en", "split": "train"} | fixed)]
    assert texts("hf:some-one/books")[:2] == ["test 0", "test 1"]
    assert hub.asked[1] == ("some-one/books", {"name": None, "split": None} | fixed)


def test_the_only_split_is_the_one(hub: Hub) -> None:
    del hub.splits["test"]
    assert texts("hf:a/b") == [f"train {i}" for i in range(9)]
    hub.splits["validation"] = hub.splits["train"]
    with pytest.raises(CorpusError, match=r"no split 'test'; choose one with \?split=NAME: train, validation"):
        load("hf:a/b")


def test_hub_datasets_that_cannot_be_read(hub: Hub) -> None:
    with pytest.raises(CorpusError, match=r"dataset 'a/b' cannot be read: Bad split: nope\. Available.*'test'\]$"):
        load("hf:a/b?split=nope")
    with pytest.raises(CorpusError, match=r"hf:a/b:1: no column 'body'\. Its columns: title, text"):
        load("hf:a/b?column=body")
    with pytest.raises(
        CorpusError, match=r"unknown option 'spilt'\. Did you mean 'split'\? Known: column, join.* split"
    ):
        load("hf:a/b?spilt=test")
    hub.splits["test"][5]["text"] = None
    with pytest.raises(CorpusError, match="hf:a/b:6: the column 'text' holds NoneType"):
        load("hf:a/b")


def test_a_connection_lost_on_the_way_is_one_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("connection reset")

    monkeypatch.setattr(hub, "stream", lambda split: rows())
    with pytest.raises(CorpusError, match="the Hub dataset 'a/b' cannot be read: connection reset"):
        load("hf:a/b")


@pytest.mark.parametrize("name", ["", "json", "pandas", "../books", "a/b/c", "/etc", "a/b?split", "own/books"])
def test_only_the_hub_is_asked(hub: Hub, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "books").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match="is not a dataset of the Hub: write hf:OWNER/NAME"):
        load(f"hf:{name}")
    assert not hub.asked


@pytest.mark.parametrize(
    ("module", "data"), [("datasets", "hf:a/b"), ("pyarrow", "a.txt.zst"), ("pyarrow.parquet", "a.parquet")]
)
def test_a_missing_package_says_what_to_install(
    module: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt.zst").write_bytes(b"")
    Path("a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(CorpusError, match=rf"need the package {package}: pip install .*\[eval\]"):
        load(data)


# --- values in memory ----------------------------------------------------------------------------------------------


TEXT = "import os\n" * 40
IDS = [1, 2, 3, 1000]


@pytest.mark.parametrize(
    "given",
    [
        [TEXT],
        Document("own", TEXT),
        [Document("own", TEXT)],
        [{"text": TEXT, "pages": 3}],
        datasets.Dataset.from_dict({"text": [TEXT], "title": ["t"]}),
        datasets.Dataset.from_dict({"body": [TEXT], "title": ["t"]})["body"],
        datasets.Dataset.from_dict({"text": [TEXT]}).to_iterable_dataset(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_texts_in_memory(given: Any) -> None:
    documents = load(given)
    assert [(document.text, document.ids) for document in documents] == [(TEXT, None)]
    assert documents.source == "documents"


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        [IDS],
        torch.tensor(IDS),
        torch.tensor([IDS], dtype=torch.int32),
        [torch.tensor(IDS)],
        [np.int64(token) for token in IDS],
        np.array([IDS]),
        [{"text": IDS}],
    ],
    ids=lambda given: type(given).__name__,
)
def test_token_ids_in_memory(given: Any) -> None:
    (document,) = load(given, column="text") if isinstance(given, list) and isinstance(given[0], dict) else load(given)
    assert document.text == ""
    assert document.ids is not None
    assert list(document.ids) == IDS


def test_documents_in_memory_have_distinct_names_and_take_options() -> None:
    documents = load(["a", "bb"])
    assert [document.name for document in documents] == ["text 1", "text 2"]
    (joined,) = load(["a", "b"], join=100)
    assert joined.text == "a\n\nb"
    assert load(documents) is documents
    assert [each.text for each in load([{"a": "1", "b": "2"}, {"a": "3", "b": "4"}], column="b")] == ["2", "4"]


def test_paths_are_files_whatever_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/x.txt", "b/x.txt", "stdlib", "what?column=x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert [each.text for each in load(Path("stdlib"))] == ["stdlib"]
    assert [each.text for each in load(Path("what?column=x.txt"))] == ["what?column=x.txt"]
    assert [(each.name, each.text) for each in load([Path("a/x.txt"), Path("b")])] == [
        ("a/x.txt", "a/x.txt"),
        ("b/x.txt", "b/x.txt"),
    ]
    Path("rows.jsonl").write_text('{"body": "b", "title": "t"}', encoding="utf-8")
    assert [document.text for document in load(Path("rows.jsonl"), column="body")] == ["b"]
    with pytest.raises(CorpusError, match="plain text, which has no column 'body'"):
        load(Path("a"), column="body")
    with pytest.raises(CorpusError, match=r"strings in a list are texts.*give pathlib\.Path\('a/x.txt'\)"):
        load(["a/x.txt"])


@pytest.mark.parametrize(
    "text", ["A text. It is long enough.", "two\nlines", "x" * 400, "bokos/*.txt", "", " ", "a\0b"]
)
def test_a_string_that_names_nothing_is_never_a_text(text: str) -> None:
    with pytest.raises(CorpusError, match=r"a text itself is given in a list: \[text\]") as caught:
        load(text)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, "NoneType"),
        (3, "int"),
        (b"bytes", "bytes"),
        ({"text": TEXT}, "dict; give one of its entries: text"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": [TEXT]})}), "DatasetDict.* train"),
        ((each for each in [TEXT]), "generator"),
        ([1.5, 2.5], "float"),
        (torch.tensor([1.5]), "float"),
        ([True], "bool"),
        ([None], "NoneType"),
        ([TEXT, 3], "int"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_anything_else_is_refused_by_its_type(given: Any, kind: str) -> None:
    with pytest.raises(CorpusError, match=rf"a corpus is a name, a list of texts.* got {kind}"):
        load(given)


@pytest.mark.parametrize("ids", [[-1], [2**31], [1, "a"], [[1], 2]])
def test_wrong_token_ids_in_memory(ids: list[Any]) -> None:
    with pytest.raises(CorpusError, match=r"text 1: .* is not a token id"):
        load([ids])
    with pytest.raises(CorpusError, match="there is no column 'body'"):
        load([TEXT], column="body")

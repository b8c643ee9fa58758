"""Folders of texts: links, the Hub's cache and clones of data set repositories; CSV files are tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from rope_ext_hf import CorpusError
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reading.text.load import load
from tests.reading.text.test_load import names, texts, zstd


def write(folder: Path, name: str, content: list[str] | str) -> Path:
    """Write a file: a text, or a table of texts in the format of its suffix."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    elif file.suffix == ".parquet":
        datasets.Dataset.from_dict({"text": content}).to_parquet(str(file))
    elif file.suffix == ".csv":
        datasets.Dataset.from_dict({"id": [str(i) for i in range(len(content))], "text": content}).to_csv(str(file))
    else:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in content), encoding="utf-8")
    return file


CARD = "---\nlicense: mit\nsize_categories:\n- n<1K\n{configs}---\n# A data set\n"
CONFIGS = """configs:
- config_name: {name}
  data_files:
  - split: train
    path: {folder}/train-*
  - split: test
    path:
    - {folder}/held-out.jsonl
    - {folder}/more/*.jsonl
"""


# --- links ------------------------------------------------------------------------------------------------------------


def test_links_out_of_a_folder_are_named(tmp_path: Path) -> None:
    write(tmp_path, "store/b.txt", "b")
    write(tmp_path, "store/deep/c.txt", "c")
    write(tmp_path, "books/a.txt", "a")
    (tmp_path / "books" / "b.txt").symlink_to("../store/b.txt")
    with pytest.warns(
        UserWarning, match=r"books' has links.*which are not read: b\.txt; a pattern such as '.*books/\*\.txt'"
    ):
        assert names(tmp_path / "books") == ["a.txt"]
    assert names(tmp_path / "books" / "*.txt") == ["a.txt", "b.txt"]
    (tmp_path / "books" / "deep").symlink_to("../store/deep")
    with pytest.warns(UserWarning, match=r"^'books' has links .* not read: b\.txt, deep; "):
        assert [document.name for document in load(tmp_path / "books")] == ["a.txt"]
    (tmp_path / "books" / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"has no files of text; looked for .*which are not read: b\.txt, deep"):
        load(str(tmp_path / "books"))


def hub_cache(folder: Path) -> Path:
    """Return the folder of a data set as huggingface_hub stores it: snapshots full of links to blobs."""
    repository = folder / "datasets--owner--books"
    files = {
        "README.md": CARD.format(configs=""),
        "data/test-00000-of-00001.jsonl": '{"text": "test"}\n',
        "data/train-00000-of-00001.jsonl": '{"text": "train"}\n',
    }
    for revision in ("1" * 40, "2" * 40):
        for number, (name, content) in enumerate(files.items()):
            write(repository, f"blobs/{revision[0]}{number}", content.replace('"t', f'"{revision[0]} t'))
            link = repository / "snapshots" / revision / name
            link.parent.mkdir(parents=True, exist_ok=True)
            up = "../" * (len(Path(name).parts) + 1)
            link.symlink_to(f"{up}blobs/{revision[0]}{number}")
    write(repository, "refs/main", "2" * 40)
    return repository


@pytest.mark.filterwarnings("ignore:.*is a data set repository:UserWarning")
def test_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    repository = hub_cache(tmp_path)
    first = repository / "snapshots" / ("1" * 40)
    assert (first / "data/test-00000-of-00001.jsonl").read_text() == '{"1 text": "1 test"}\n'
    assert texts(first) == texts(first / "data") == ["1 test"]
    assert names(first) == ["data/test-00000-of-00001.jsonl:1"]
    assert texts(repository) == texts(repository / "snapshots") == ["2 test"]
    link = tmp_path / "books"
    link.symlink_to(first)
    assert texts(link) == ["1 test"]
    # a link of a snapshot that leads elsewhere is not followed
    write(tmp_path, "other.txt", "other")
    (first / "data" / "test.jsonl").symlink_to(tmp_path / "other.txt")
    with pytest.warns(UserWarning, match=r"not read: data/test\.jsonl; "):
        assert texts(first) == ["1 test"]
    (repository / "refs" / "main").unlink()
    with pytest.raises(CorpusError, match=r"holds 2 revisions of a data set; give one of the folders in .*: 1111"):
        load(str(repository))


# --- clones of repositories -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, list[str] | str]] = {
    "push_to_hub": {
        "README.md": "# Card\n" * 20,
        "data/test-00000-of-00001.parquet": ["test 1", "test 2"],
        "data/train-00000-of-00002.parquet": ["train"],
        "data/train-00001-of-00002.parquet": ["train"],
    },
    "files": {
        "README.md": "# Card\n",
        "LICENSE.md": "MIT",
        "train.jsonl": ["train"],
        "test.jsonl": ["test 1", "test 2"],
    },
    "words in names": {"a-train_v2.csv": ["train"], "a-test_v2.csv": ["test 1", "test 2"], "a-dev_v2.csv": ["dev"]},
    "folders": {
        "train/0.jsonl": ["train"],
        "test/0.jsonl": ["test 1"],
        "test/1.jsonl": ["test 2"],
        "books.py": "import os",
    },
    "texts": {"README.md": CARD.format(configs=""), "train.txt": "train", "valid.txt": "valid", "test.txt": "test 1"},
    "card with configurations": {
        "README.md": CARD.format(configs=CONFIGS.format(name="default", folder="en")),
        "en/train-0.jsonl": ["train"],
        "en/held-out.jsonl": ["test 1"],
        "en/more/1.jsonl": ["test 2"],
        "en/notes.jsonl": ["notes"],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given", [str, Path], ids=["name", "Path"])
def test_a_clone_of_a_data_set_is_its_test_split(tmp_path: Path, layout: str, given: Any) -> None:
    for name, content in LAYOUTS[layout].items():
        write(tmp_path, name, content)
    with pytest.warns(UserWarning, match="of which only the split 'test' is read, not ") as caught:
        documents = load(given(tmp_path))
    assert [document.text for document in documents] == ["test 1", "test 2"][: len(documents)]
    left_out = str(caught[0].message)
    assert "train" in left_out or "LICENSE" in left_out or "books.py" in left_out
    if given is str:
        with pytest.warns(UserWarning, match="only the split 'train' is read, not "):
            assert {*texts(f"{tmp_path}?split=train")} == {"train"}
        with pytest.raises(CorpusError, match=r"has no split 'tset'\. Did you mean 'test'\? Its splits: "):
            load(f"{tmp_path}?split=tset")


@pytest.mark.parametrize("layout", ["push_to_hub", "files", "folders"])
def test_the_split_has_the_rows_that_the_datasets_library_reads(tmp_path: Path, layout: str) -> None:
    for name, content in LAYOUTS[layout].items():
        if not name.endswith(".py"):
            write(tmp_path / "books", name, content)
    expected = datasets.load_dataset(str(tmp_path / "books"), split="test", cache_dir=str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="only the split 'test'"):
        assert texts(tmp_path / "books") == list(expected["text"])


@pytest.mark.filterwarnings("ignore:.*is a data set repository:UserWarning")
def test_a_data_set_that_was_saved_to_disk(tmp_path: Path) -> None:
    test = datasets.Dataset.from_dict({"title": ["t"] * 40, "text": [f"test {i}" for i in range(40)]})
    test.save_to_disk(str(tmp_path / "one"), num_shards=2)
    train = datasets.Dataset.from_dict({"title": ["t"], "text": ["train"]})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "several"))
    assert texts(tmp_path / "one") == texts(tmp_path / "several") == list(test["text"])
    assert texts(f"{tmp_path / 'several'}?split=train&column=title") == ["t"]
    assert texts(tmp_path / "several" / "train" / "*.arrow") == ["train"]
    ids = datasets.Dataset.from_dict({"input_ids": [[0, 7, 8]], "attention_mask": [[0, 1, 1]]})
    ids.save_to_disk(str(tmp_path / "ids"))
    assert [list(document.ids or ()) for document in load(str(tmp_path / "ids"))] == [[7, 8]]
    write(tmp_path, "damaged.arrow", "no table")
    with pytest.raises(CorpusError, match=r"damaged\.arrow' cannot be read"):
        load(str(tmp_path / "damaged.arrow"))


def test_a_split_or_configuration_in_doubt_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", ["train"])
    write(tmp_path, "dev.jsonl", ["dev"])
    with pytest.raises(CorpusError, match=r"has no split 'test'; choose one with \?split=NAME: validation, train"):
        load(str(tmp_path))
    german = CONFIGS.format(name="de", folder="de").removeprefix("configs:\n")
    write(tmp_path, "README.md", CARD.format(configs=CONFIGS.format(name="en", folder="en") + german))
    for language in ("en", "de"):
        write(tmp_path, f"{language}/held-out.jsonl", [language])
    with pytest.raises(CorpusError, match=r"several configurations; choose one with \?config=NAME: en, de"):
        load(str(tmp_path))
    with pytest.raises(CorpusError, match=r"has no configuration 'fr'\. Its configurations: en, de"):
        load(f"{tmp_path}?config=fr")
    with pytest.raises(CorpusError, match=r"files of the split 'train' .* are missing, or of a kind that is not read"):
        load(f"{tmp_path}?config=de&split=train")
    with pytest.warns(UserWarning, match="only the split 'test'"):
        assert texts(f"{tmp_path}?config=de") == ["de"]


@pytest.mark.parametrize(
    ("data_files", "expected"),
    [
        ("[{split: test, path: a.jsonl}, {split: train, path: '*.jsonl'}]", ["a"]),
        ("{test: [a.jsonl, deep], train: b.jsonl}", ["a", "c"]),
        ("a.jsonl", ["a"]),
        ("[a.jsonl, b.jsonl]", ["a", "b"]),
        ("[{split: test, path: 5}]", None),
        ("[{split: test, path: /etc/*}]", None),
        ("[{split: test, path: ../outside/*}]", None),
    ],
)
def test_files_that_a_card_names(tmp_path: Path, data_files: str, expected: list[str] | None) -> None:
    folder = tmp_path / "books"
    write(folder, "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {data_files}\n---\n")
    for name, text in (("a.jsonl", "a"), ("b.jsonl", "b"), ("deep/c.jsonl", "c"), ("../outside/d.jsonl", "d")):
        write(folder, name, [text])
    if expected is None:
        with pytest.raises(CorpusError, match=r"files of the split 'test' .* are missing"):
            load(str(folder))
    else:
        with pytest.warns(UserWarning, match="is a data set repository"):
            assert texts(folder) == expected


def test_a_repository_with_one_split_is_read_without_its_card(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "# Card")
    write(tmp_path, "data/train-00000-of-00001.parquet", ["train"])
    with pytest.warns(UserWarning, match=r"only the data is read, not README\.md$"):
        assert texts(tmp_path) == ["train"]


def test_a_folder_of_texts_is_no_data_set(tmp_path: Path) -> None:
    contents = {
        "README.md": "read",
        "night-train.txt": "night",
        "the-test.txt": "the",
        "train.py": "p",
        "tests/test.py": "q",
    }
    for name, content in contents.items():
        write(tmp_path, name, content)
    assert {*texts(tmp_path)} == {*contents.values()}
    with pytest.raises(CorpusError, match="has no split 'test'"):
        load(f"{tmp_path}?split=test")
    with pytest.raises(CorpusError, match="unknown option 'split'"):
        load(f"{tmp_path / 'README.md'}?split=test")


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv"])
def test_a_pointer_of_git_lfs_is_no_text(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(CorpusError, match=r"is a pointer of Git LFS without the text; run `git lfs pull` there"):
            load(str(source))


# --- CSV --------------------------------------------------------------------------------------------------------------

BOOK = "".join(random.Random(0).choices("abc ,;\t\"'\r\n", k=300_000))  # longer than the csv module's own limit
ROWS = ['He said: "no",\r\nand\tleft; Grüße', BOOK, "1984"]


def table(columns: dict[str, list[str]], **options: Any) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, **options)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue().encode()


@pytest.mark.parametrize("pack", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("a.csv", {}), ("A.CSV", {"delimiter": ";"}), ("a.csv", {"delimiter": "\t"}), ("a.tsv", {"delimiter": "\t"})],
)
def test_a_table_of_separated_values_is_its_text_column(
    tmp_path: Path, name: str, options: dict[str, str], pack: str
) -> None:
    content = table({"id": ["1", "2", "3"], "title": ["x, y", "", "z"], "text": ROWS}, **options)
    packers: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}
    packed = packers[pack](b"\xef\xbb\xbf" + content)
    file = tmp_path / f"{name}{pack}"
    file.write_bytes(packed)
    limit = csv.field_size_limit()
    for source in (file, tmp_path, tmp_path / "*"):
        assert texts(source) == ROWS
    assert csv.field_size_limit() == limit
    assert names(file) == [f"{file.name}:{number}" for number in (1, 2, 3)]
    assert texts(f"{file}?column=title&max_documents=1") == ["x, y"]
    with pytest.raises(CorpusError, match=r"no column 'titel'\. Did you mean 'title'\?"):
        load(f"{file}?column=titel")


@pytest.mark.parametrize("name", ["a.tsv", "A.TSV", "a.tsv.gz"])
def test_tabs_separate_the_columns_of_tsv_even_if_the_header_has_commas(tmp_path: Path, name: str) -> None:
    content = b"title, year\ttext\nx, 1984\ta, b\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts(tmp_path / name) == ["a, b"]


def test_rows_are_those_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": range(3), "body": ROWS})
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert texts(tmp_path / "a.csv") == pandas.read_csv(tmp_path / "a.csv", dtype=str)["body"].tolist() == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,title,body\n1,t,b\n", r"2 others are text; choose one with \?column=NAME"),
        ("a.csv", "id,text\n1,a,b\n", r"a\.csv:1: 3 values for 2 columns \(id, text\)"),
        ("a.csv", "id,text\n1\n", r"a\.csv:1: 1 values for 2 columns"),
        ("a.csv", 'id,text\n1,"a" b\n', "the quotes of a field are wrong near line 2"),
        ("a.tsv", 'id\ttext\n1\t"Hello\n2\tb\n', "the quotes of a field are wrong near line 3"),
        ("a.csv", "text,text\na,b\n", r"the first row must name the columns, each once; it begins with 'text'"),
        ("a.csv", "word " * 100 + "\nmore\n", "the first row must name the columns"),
        ("a.csv", '"one\ntwo"\nmore\n', "the first row must name the columns"),
        ("a.csv", 'input_ids\n"[1, 2, 3]"\n', "the column 'input_ids' holds lists, which are text in such a file"),
        ("a.csv", "text\n", "is empty"),
        ("a.csv", "", "is empty"),
    ],
)
def test_a_table_that_is_not_clear_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    write(tmp_path, name, content)
    with pytest.raises(CorpusError, match=message):
        load(str(tmp_path / name))


def test_measured_as_the_texts_themselves(tmp_path: Path) -> None:
    long = ["import os\n" * 20, "def f(): return 1\n" * 20]
    (tmp_path / "books.csv").write_bytes(table({"title": ["x", "y"], "text": long}))
    options: dict[str, Any] = {"lengths": [128], "protocol": "truncate"}
    (expected,) = perplexity("reference", long, **options)
    (found,) = perplexity("reference", str(tmp_path / "books.csv"), **options)
    assert [document[1:] for document in found.documents] == [document[1:] for document in expected.documents]

"""Folders of runs that are damaged, contradictory, hostile, or on a disk that refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.folder.folder import exclusive, read_run
from rope_ext_hf.runs.folder.journal import agree_on_chunks, open_journal, read_plain, read_records
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.measurement import Record, RunContents
from tests.support.texts import TWO_MODULES

CONTENTS = RunContents(("a", "b"), {(64,): 2, (128,): 2})
YARN = {"method": "yarn", "factor": 4.0}
SETTINGS: dict[str, Any] = {
    **{"model": "m", "parameters": 1, "dtype": "float32", "device": "cpu", "data": "d", "kind": "perplexity"},
    **{"context_length": 64, "tokens": 10, "versions": {"torch": "2"}, "over": "own", "loaded": None},
    "setting": {"protocol": "matched", "targets": 7, "stride": 256, "bos": False, "left_out": 0},
    **{"items": ["a", "b"], "cells": [[64], [128]], "per_cell": [2, 2]},
}


def record(item: int = 0, length: int = 64, nats: float = 1.0, method: dict[str, Any] | None = None) -> Record:
    name = CONTENTS.items[item] if item < 2 else "c"
    return Record(method, item, (length,), DocumentLoss(name, nats, 7, 7, 1), Cost(64, 0.5, 0))


def write(folder: Path, *records: Record, rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    with open_journal(folder, rank) as append:
        for each in records:
            append(each)
    return folder


def every(*methods: dict[str, Any] | None) -> list[Record]:
    return [record(i, n, 7.0 + i, method) for method in methods for i in (0, 1) for n in (64, 128)]


def read(folder: Path) -> list[Record]:
    return read_records(folder, CONTENTS, PerplexityRuns().parse)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [*every(None, YARN), record(0, 64, math.nan, {"method": "ntk"})]
    assert repr(read(write(tmp_path, *records))) == repr(records)
    assert [(r.method, r.length, r.loss) for r in read_run(tmp_path).results] == [
        (method, length, 15 / 14) for method in (None, YARN) for length in (64, 128)
    ]


BAD_LINES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no JSON": (lambda _: "{", "Expecting"),
    "no object": (lambda _: "[]", "not a JSON object"),
    "a key twice": (lambda _: '{"item": 0, "item": 1}', "twice"),
    "a key too many": (lambda line: line | {"more": 1}, "expected the keys"),
    "a key missing": (lambda line: {k: v for k, v in line.items() if k != "cost"}, "expected the keys"),
    "a method without a name": (lambda line: line | {"method": {"factor": 2}}, "expected a method"),
    "an item too far": (lambda line: line | {"item": 2}, "expected an item from 0 to 1"),
    "a negative item": (lambda line: line | {"item": -1}, "expected an item from 0 to 1"),
    "an item that is no number": (lambda line: line | {"item": True}, "expected an item"),
    "another length": (lambda line: line | {"cell": [32]}, r"no cell \[32\]"),
    "no length": (lambda line: line | {"cell": []}, "expected a cell"),
    "no tokens": (lambda line: line | {"value": [1.0, 0, 7, 1]}, "expected a loss"),
    "a loss of words": (lambda line: line | {"value": ["x", 7, 7, 1]}, "expected a loss"),
    "a short value": (lambda line: line | {"value": [1.0]}, "expected a loss"),
    "a huge number": (lambda line: line | {"value": [10**400, 7, 7, 1]}, "too large"),
    "another loss": (lambda line: line | {"value": [1.0, 7, 7, 1]}, "was changed after it was written"),
    "a negative cost": (lambda line: line | {"cost": [-1, 0.5, 0]}, "expected a cost"),
    "nesting": (lambda _: "[" * 100_000, "recursion|nesting|depth"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_damaged_record_is_one_error_with_file_and_line(tmp_path: Path, name: str) -> None:
    change, message = BAD_LINES[name]
    folder = write(tmp_path, *every(None))
    lines = (folder / "records.0.jsonl").read_text(encoding="utf-8").splitlines()
    changed = change(json.loads(lines[2]))
    lines[2] = changed if isinstance(changed, str) else json.dumps(changed)
    (folder / "records.0.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(rope.FileError, match=rf"records\.0\.jsonl:3: .*({message})") as refused:
        read_run(folder)
    assert len(str(refused.value)) < 700


def test_contradictions_are_refused_and_repetitions_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "same", record(nats=math.nan))
    write(folder, record(nats=math.nan), rank=1)
    assert len(read(folder)) == 1
    folder = write(tmp_path / "other", record(nats=1.0))
    write(folder, record(nats=1.5), rank=1)
    with pytest.raises(rope.FileError, match=r"records.1.jsonl:1 contradicts .*records.0.jsonl:1"):
        read(folder)


@pytest.mark.parametrize("key", sorted({*SETTINGS} - {"tokens"}))
@pytest.mark.parametrize("value", [-1, "x", [], {}, None, 1.5, [None]])
def test_odd_settings_are_one_error(tmp_path: Path, key: str, value: Any) -> None:
    if (key, value) in [
        ("loaded", None),
        ("loaded", {}),
        *((k, "x") for k in ("model", "dtype", "device", "data", "over")),
    ]:
        return
    if key == "versions" and value == {}:
        return
    folder = write(tmp_path, *every(None))
    (folder / "run.json").write_text(json.dumps(SETTINGS | {key: value}), encoding="utf-8")
    with pytest.raises(rope.FileError, match="does not describe a run"):
        read_run(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{" * 100_000, b'{"kind": "perplexity"}', b"null"])
def test_a_damaged_run_file_is_one_error(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, *every(None))
    (folder / "run.json").write_bytes(content)
    with pytest.raises(rope.FileError, match=r"run\.json"):
        read_run(folder)


@pytest.mark.slow
def test_mutated_folders_are_read_or_refused_with_one_error(tmp_path: Path) -> None:
    folder = write(tmp_path, *every(None, YARN))
    agree_on_chunks(folder, 64, 4096)
    originals = {name: (folder / name).read_bytes() for name in ("run.json", "records.0.jsonl", "chunks.json")}
    rng = random.Random(0)
    accepted = 0
    for _ in range(600):
        name = rng.choice(sorted(originals))
        data = bytearray(originals[name])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 9)]
                case _:
                    data[at:at] = rng.choice([b"null", b"-", b"9" * 30, b"\n", b'"', b"[", b"1e999", b"\\ud800"])
            data = data or bytearray(b" ")
        (folder / name).write_bytes(data)
        with suppress(rope.FileError):
            agree_on_chunks(folder, 64, 4096)
            read_run(folder)
            accepted += 1
        (folder / name).write_bytes(originals[name])
    assert 0 < accepted < 300


@pytest.mark.parametrize("content", ["", "[]", "[1]", '["a", 1]', "[0, 1]", "[1, -1]", "{}", "[1, 1e999]"])
def test_odd_chunks_are_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "chunks.json").write_text(content, encoding="utf-8")
    with pytest.raises(rope.FileError, match=r"chunks.json.*delete it"):
        agree_on_chunks(tmp_path, 64, 4096)


def test_the_first_process_sets_the_chunks(tmp_path: Path) -> None:
    assert agree_on_chunks(tmp_path, 64, 4096) == (64, 4096)
    assert agree_on_chunks(tmp_path, 128, 99) == (64, 4096)
    assert [path.name for path in tmp_path.iterdir()] == ["chunks.json"]


# --- links, FIFOs, devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "chunks.json"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_plain_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = write(tmp_path / "run", *every(None))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("[1, 2]" if name == "chunks.json" else json.dumps(SETTINGS), encoding="utf-8")
    (folder / name).unlink(missing_ok=True)
    match kind:
        case "link":
            (folder / name).symlink_to(elsewhere)
        case "fifo":
            os.mkfifo(folder / name)
        case _:
            (folder / name).mkdir()
    with pytest.raises(rope.FileError, match=name):
        agree_on_chunks(folder, 64, 4096) if name == "chunks.json" else read_run(folder)


def test_journals_that_are_links_or_fifos_are_passed_over_and_never_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", record())
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_bytes(b"untouched\n")
    (folder / "records.1.jsonl").symlink_to(elsewhere)
    os.mkfifo(folder / "records.2.jsonl")
    assert len(read(folder)) == 1
    for rank in (1, 2):
        with pytest.raises(rope.FileError, match=r"a link|not a plain file"), open_journal(folder, rank):
            pass
    assert elsewhere.read_bytes() == b"untouched\n"


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"untouched")
    (tmp_path / "run.0.lock").symlink_to(elsewhere)
    with pytest.raises(rope.FileError, match="not a plain file"), exclusive(tmp_path, 0):
        pass
    assert elsewhere.read_bytes() == b"untouched"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 101)
    with pytest.raises(rope.FileError, match="more than 100 bytes"):
        read_plain(tmp_path / "large", 100)


# --- a disk that refuses ------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, record(0))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_journal(folder, 0) as append:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(rope.FileError, match=r"is full \(.* free\); make room"):
            append(record(1))
    with pytest.raises(rope.FileError, match="is full"):
        write_files(read_run(folder))
    monkeypatch.undo()
    assert read(folder)[0] == record(0)
    assert not list(folder.glob("results*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def append_until_full(folder: Path, methods: list[dict[str, Any]]) -> None:
    with open_journal(folder, 0) as append:
        for number, method in enumerate(methods, len(read(folder)) + 1):
            append(record(0, 64, 1.0, method))
            assert len(read(folder)) == number


@pytest.mark.slow
def test_a_disk_that_is_really_full_is_one_error_wherever_it_fills(small_disk: Path) -> None:
    """Filled up to every few hundred bytes: what is on it is whole lines and at most half of one more."""
    folder = write(small_disk / "run", record(0))
    agree_on_chunks(folder, 64, 4096)
    stops = set()
    for left in (0, 1, 2):
        fill = small_disk / "fill"
        fill.write_bytes(b"")
        with fill.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        os.truncate(fill, fill.stat().st_size - 4096 * left)
        methods = [{"method": "yarn", "factor": float(1000 * left + number + 2)} for number in range(1000)]
        with pytest.raises(rope.FileError, match=r"is full \(.*free\); make room, and the same command") as error:
            append_until_full(folder, methods)
        kept = len(read(folder))
        stops.add(kept)
        assert "Errno" not in str(error.value)
        with pytest.raises(rope.FileError, match="is full"):
            write_files(read_run(folder))
        fill.unlink()
        with open_journal(folder, 0):  # half a line is cut off
            pass
        assert len(read(folder)) == kept
    assert len(stops) > 1


@pytest.mark.slow
def test_a_full_disk_under_a_command_is_called_that(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(b"x" * 14 * 4096)
    command = ["ppl", "reference", "--lengths", "128,256", "--max-spans", "2", "--data", TWO_MODULES]
    done = CliRunner().invoke(app, [*command, "--out", str(small_disk / "out")])
    assert done.exit_code == 2
    assert "could not be measured" not in done.output
    assert f"the disk of '{small_disk}" in done.output.replace("\n", " ")
    assert "is full (" in done.output


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for attempt in (lambda: open_journal(tmp_path / "file", 0), lambda: exclusive(tmp_path / "file", 0)):
        with pytest.raises(rope.FileError, match="could not be read or written"), attempt():
            pass
    with pytest.raises(rope.FileError, match="could not be read or written"):
        agree_on_chunks(tmp_path / "file", 64, 4096)

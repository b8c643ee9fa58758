"""A conversion is either whole or not there, after interruptions, full disks, other processes and changed sources."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rope_ext_hf as rope
from rope_ext_hf.bounds import limit
from rope_ext_hf.checkpoints import conversion
from rope_ext_hf.checkpoints.pairing.source_pairing import pairing_of_source
from rope_ext_hf.files import whole as files
from tests.support.checkpoint_folders import (
    FIRST,
    SECOND,
    all_tensors,
    by_hand,
    content,
    convert,
    same,
    untouched,
    write_source,
)
from tests.support.forks import run_forked


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


class StoppedError(Exception):
    """Run a conversion that its user interrupts."""


@pytest.fixture
def begun(source: Path, tmp_path: Path) -> Path:
    """Return the unfinished folder of a conversion that was interrupted in its second part."""
    first = sum(tensor.numel() * 4 for tensor in load_file(source / FIRST).values())

    def progress(done: int, total: int) -> None:
        if done > first:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert(source, tmp_path / "converted", "interleaved", progress=progress)
    unfinished = tmp_path / ".converted.unfinished"
    assert not (tmp_path / "converted").exists()
    assert sorted(path.name for path in unfinished.iterdir()) == [FIRST, "rope-ext-plan.json"]
    return unfinished


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "a bit": lambda path: flip(path, -1),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "other metadata": lambda path: path.write_bytes(path.read_bytes().replace(b"hand", b"foot")),
    "another file": lambda path: save_file({"a": torch.zeros(1)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_going_on_checks_what_is_there(damage: str, begun: Path, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "expected", "interleaved")
    DAMAGE[damage](begun / FIRST)
    (begun / "stray.json").write_text("{}", encoding="utf-8")
    (begun / "stray").mkdir()
    before = (begun / FIRST).stat().st_ino
    keep = (begun / FIRST).open("rb")  # so that the file that takes its place gets another inode number
    seen: list[int] = []
    convert(source, tmp_path / "converted", "interleaved", resume=True, progress=lambda done, total: seen.append(done))
    assert content(tmp_path / "converted") == content(tmp_path / "expected")
    assert ((tmp_path / "converted" / FIRST).stat().st_ino == before) == (damage == "none")
    assert seen[-1] == sum(t.numel() * 4 for t in all_tensors(source).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "expected", "source"]
    keep.close()


def test_without_resume_it_begins_anew(begun: Path, source: Path, tmp_path: Path) -> None:
    flip(begun / FIRST, -1)
    convert(source, tmp_path / "converted", "interleaved")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    assert not begun.exists()


@pytest.mark.parametrize("plan", [b"", b'{"to": "interl', None])
def test_a_plan_that_was_not_finished_begins_anew(
    plan: bytes | None, begun: Path, source: Path, tmp_path: Path
) -> None:
    if plan is None:
        (begun / "rope-ext-plan.json").unlink()
    else:
        (begun / "rope-ext-plan.json").write_bytes(plan)
    convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


def test_a_changed_source_is_not_gone_on_with(begun: Path, source: Path, tmp_path: Path) -> None:
    flip(source / SECOND, -1)
    with pytest.raises(rope.FileError, match="was begun with have changed; start anew without resume"):
        convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert begun.exists()
    with pytest.raises(rope.FileError, match="was begun with have changed"):
        convert(source, tmp_path / "converted", "half", source_pairing="interleaved", resume=True)
    convert(source, tmp_path / "converted", "interleaved")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


# --- the pairing is detected while the weights are copied ---------------------------------------------------------


REFUSALS = {
    "contradiction": rope.CheckpointError("the weights look interleaved"),
    "unknown family": rope.UnsupportedModelError("no such family"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("early", [True, False])
def test_weights_that_are_refused_while_they_are_copied_leave_nothing(
    refusal: str, early: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying stops at the next block; or the refusal comes when all is written, and nothing gets its name."""
    size = sum(tensor.numel() * 4 for tensor in all_tensors(source).values())
    copied = threading.Event()
    detections: list[Future[Any]] = []
    seen: list[int] = []

    class Threads(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Future[Any]:
            detections.append(super().submit(*args, **options))
            return detections[-1]

    def refuse(*args: Any, **options: Any) -> None:
        copied.wait()
        raise REFUSALS[refusal]

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if early or done == total:
            copied.set()
            wait(detections)

    before = content(source)
    monkeypatch.setattr(conversion, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(conversion, "pairing_of_source", refuse)
    with pytest.raises(type(REFUSALS[refusal]), match=str(REFUSALS[refusal])):
        convert(source, tmp_path / "converted", "interleaved", progress=progress)
    assert (seen[-1] < size) == early
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert content(source) == before


def test_an_unexpected_error_of_the_detection_gives_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(conversion, "pairing_of_source", fail)
    with pytest.raises(ZeroDivisionError, match="by chance"):
        convert(source, tmp_path / "converted", "interleaved")
    assert not (tmp_path / "converted").exists()


def test_an_interruption_waits_for_the_detection(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, ended = threading.Event(), threading.Event()

    def detect(*args: Any, **options: Any) -> None:
        interrupted.wait()
        ended.set()

    def progress(done: int, total: int) -> None:
        interrupted.set()
        raise StoppedError

    monkeypatch.setattr(conversion, "pairing_of_source", detect)
    with pytest.raises(StoppedError):
        convert(source, tmp_path / "converted", "interleaved", progress=progress)
    assert ended.is_set()
    assert not (tmp_path / "converted").exists()


def test_a_resumed_conversion_detects_the_pairing_first(
    begun: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a refusal does not remove what an earlier run has written."""

    def refuse(*args: Any, **options: Any) -> None:
        raise rope.CheckpointError("the weights look interleaved")

    before = content(begun)
    monkeypatch.setattr(conversion, "pairing_of_source", refuse)
    with pytest.raises(rope.CheckpointError, match="look interleaved"):
        convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert content(begun) == before


def test_raised_limits_hold_in_the_detection_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def detect(*args: Any, **options: Any) -> Any:
        seen.append(limit("layers"))
        return pairing_of_source(*args, **options)

    monkeypatch.setattr(conversion, "pairing_of_source", detect)
    with rope.limits(layers=5_000):
        convert(source, tmp_path / "converted", "interleaved")
    assert seen == [5_000]


def test_a_full_disk_is_one_clear_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, left = content(source), [50_000]

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def limited(function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any, **options: Any) -> int:
            left[0] -= 10_000
            return full() if left[0] < 0 else function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", limited(os.copy_file_range))
        patch.setattr(os, "write", limited(os.write))
        with pytest.raises(
            rope.FileError, match=r"the disk of .*converted' is full \(.* free\); make room and go on with resume"
        ):
            convert(source, tmp_path / "converted", "interleaved")
    assert not (tmp_path / "converted").exists()
    convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    assert content(source) == before
    for call in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(rope.FileError, match=r"is full \(.* free\); make room"):
                convert(source, tmp_path / call, "interleaved")
        assert not (tmp_path / call).exists()


def test_too_little_room_is_said_before(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        rope.FileError, match=r"[\d.]+ kB are to be written to .*converted', where 1.0 kB are free; make room"
    ):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


def test_a_place_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(rope.FileError, match=r"file' could not be read or written: (Not a directory|File exists)"):
        convert(source, tmp_path / "file" / "converted", "interleaved")


@pytest.mark.thorough
@pytest.mark.slow
def test_two_cannot_write_one_destination(source: Path, tmp_path: Path) -> None:
    """The second one fails at once, and does not disturb the first."""
    errors: list[str] = []

    def second(done: int, total: int) -> None:
        if not errors:
            command = [sys.executable, "-m", "rope_ext_hf", "convert", str(source), str(tmp_path / "converted")]
            run = subprocess.run([*command, "--to", "interleaved"], capture_output=True, text=True, check=False)
            errors.append(f"{run.returncode} {run.stderr}")

    convert(source, tmp_path / "converted", "interleaved", progress=second)
    assert errors[0].startswith("2 ")
    assert "another process is writing" in errors[0]
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


def kill_many(source: Path, parent: Path, kills: int) -> None:
    """Kill conversions at points spread over all their calls that touch the disk, and print what each of them left.

    For a process of its own, which has another size of blocks and counts its calls. Each conversion ends itself, at a
    call and not at a time.
    """
    torch.set_num_threads(1)
    files.COPY_BLOCK = 5_000  # so that files are cut in their middle too
    convert(source, parent / "expected", "interleaved")
    expected, before = content(parent / "expected"), content(source)

    def count_or_kill(limit: int) -> list[int]:
        """Count the calls that touch the disk, and end this process at the call with this number; return the count."""
        calls = [0]

        def count() -> None:
            calls[0] += 1
            if calls[0] == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                count()
                return function(*args, **options)

            return call

        def hook(event: str, args: Any) -> None:
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile"):
                count()

        sys.addaudithook(hook)
        for name in ("write", "copy_file_range", "fsync", "close"):
            setattr(os, name, counted(getattr(os, name)))
        return calls

    def attempt(limit: int, resume: bool) -> int:
        """Run in a child process, and return its calls if it came to its end."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                calls = count_or_kill(limit)
                convert(source, parent / "converted", "interleaved", resume=resume)
                os.write(writer, str(calls[0]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        output = os.read(reader, 100)
        os.close(reader)
        return int(output) if os.WIFEXITED(status) else 0

    total = attempt(-1, False)
    found = []
    for i in range(kills):
        shutil.rmtree(parent / "converted", ignore_errors=True)
        finished = attempt(1 + i * total // kills, resume=i % 3 == 1)
        whole = (parent / "converted").exists()
        found.append(
            {
                "killed": not finished,
                "there": whole,
                "right": not whole or content(parent / "converted") == expected,
                "source": content(source) == before,
            }
        )
    shutil.rmtree(parent / "converted", ignore_errors=True)
    convert(source, parent / "converted", "interleaved", resume=True)
    print(json.dumps({"calls": total, "end": content(parent / "converted") == expected, "kills": found}))


@pytest.mark.slow
def test_killed_at_any_point(source: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    output = run_forked(kill_many, source, tmp_path / "killed", 40, folder=tmp_path)
    found = json.loads(output.splitlines()[-1])
    assert found["calls"] > 100
    assert found["end"]
    assert sum(kill["killed"] for kill in found["kills"]) >= 30  # one that goes on has fewer calls to be killed at
    assert all(kill["right"] and kill["source"] for kill in found["kills"])
    assert sum(kill["there"] for kill in found["kills"]) <= 2  # killed after the folder got its name
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["converted", "expected"]


def test_a_source_that_is_replaced_meanwhile_gives_no_folder(source: Path, tmp_path: Path) -> None:
    """Otherwise the copy would be a mixture of old and new shards."""

    def replace(done: int, total: int) -> None:
        new = {name: tensor + 1 for name, tensor in load_file(source / SECOND).items()}
        save_file(new, tmp_path / "new", {"format": "pt"})
        (tmp_path / "new").replace(source / SECOND)

    with pytest.raises(rope.FileError, match=r"00002.safetensors' changed while it was being read"):
        convert(source, tmp_path / "converted", "interleaved", progress=replace)
    assert not (tmp_path / "converted").exists()


def test_files_keep_their_permissions(source: Path, tmp_path: Path) -> None:
    for name in (FIRST, SECOND, "config.json", "tokenizer.json"):
        (source / name).chmod(0o600)
    convert(source, tmp_path / "converted", "interleaved")
    for name in (FIRST, SECOND, "config.json", "tokenizer.json"):
        assert (tmp_path / "converted" / name).stat().st_mode & 0o777 == 0o600, name

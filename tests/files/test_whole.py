"""Atomic files and folders: complete or absent, written through to the disk, inside their folder, with one writer."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.files import whole as files
from rope_ext_hf.files.whole import (
    atomic_file,
    atomic_folder,
    copy_files,
    copy_range,
    file_stamps,
    list_files,
    read_json,
    resolve_inside,
)

# --- names ---------------------------------------------------------------------------------------------------------


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "deep/er/a.txt", ".git/config", "deep/__pycache__/x.pyc", ".cache/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to("b.txt")
    assert list_files(tmp_path) == ["b.txt", "deep/er/a.txt", "link"]
    assert resolve_inside(tmp_path, "link").read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("models--some--llama/snapshots/abc", True),
        ("llama/snapshots/abc", False),
        ("models--some--llama/snapshot/abc", False),
        ("snapshots/abc", False),
    ],
)
def test_only_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(folder: str, allowed: bool, tmp_path: Path) -> None:
    snapshot = tmp_path / folder
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}", encoding="utf-8")
    (snapshot / "config.json").symlink_to(blobs / "1")
    if allowed:
        assert read_json(resolve_inside(snapshot, "config.json")) == {}
    else:
        with pytest.raises(rope.FileError, match=r"'config.json' leads out of the folder"):
            resolve_inside(snapshot, "config.json")


def test_a_snapshots_folder_without_blobs_is_an_ordinary_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--llama" / "secret").write_text("{}", encoding="utf-8")
    (snapshot / "config.json").symlink_to("../../secret")
    with pytest.raises(rope.FileError, match="leads out of the folder"):
        list_files(snapshot)


def test_json_above_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"a": 1}', encoding="utf-8")
    assert read_json(tmp_path / "index.json") == {"a": 1}
    with rope.limits(json_bytes=7), pytest.raises(rope.FileError, match="cannot be read: more than 7 bytes; if that"):
        read_json(tmp_path / "index.json")
    with pytest.raises(rope.FileError, match=r"cannot be read: .*No such file"):
        read_json(tmp_path / "nothing.json")


# --- copies --------------------------------------------------------------------------------------------------------


def test_copies_keep_their_permissions(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    for name, mode in (("private", 0o600), ("deep/run.sh", 0o755), ("read-only", 0o444)):
        (source / name).write_text(name, encoding="utf-8")
        (source / name).chmod(mode)
    (source / "link").symlink_to("private")
    copy_files(source, list_files(source), target)
    modes = {name: stat.S_IMODE((target / name).lstat().st_mode) for name in list_files(target)}
    assert modes == {"private": 0o600, "link": 0o600, "deep/run.sh": 0o755, "read-only": 0o644}
    assert not (target / "link").is_symlink()
    (source / "out").symlink_to("/etc/passwd")
    with pytest.raises(rope.FileError, match="'out' leads out of the folder"):
        copy_files(source, ["out"], target)
    assert not (target / "out").exists()


@pytest.mark.parametrize("number", [None, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, "absent"])
def test_ranges_are_copied_without_the_kernels_help_too(
    number: int | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "source").write_bytes(data)

    def refuse(*args: Any, **options: Any) -> int:
        raise OSError(number, "no")

    if number == "absent":  # as on macOS
        monkeypatch.delattr(os, "copy_file_range")
    elif number is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(files, "COPY_BLOCK", 1000)
    seen: list[int] = []
    with (tmp_path / "source").open("rb") as source, (tmp_path / "copy").open("wb") as target:
        copy_range(source, target, 100, 5000, seen.append)
        copy_range(source, target, 7, 7, seen.append)
        copy_range(source, target, 9000, len(data), seen.append)
    assert (tmp_path / "copy").read_bytes() == data[100:5000] + data[9000:]
    assert sum(seen) == 4900 + len(data) - 9000


@pytest.mark.parametrize("advises", [True, False, None])
def test_a_copy_is_sent_to_the_disk_in_blocks(
    advises: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes are written where the system takes no such advice (False) or has no such call (None)."""
    data = bytes(range(256)) * 40
    (tmp_path / "source").write_bytes(data)
    sent: list[tuple[int, int]] = []

    def advise(file: int, begin: int, count: int, advice: int) -> None:
        if not advises:
            raise OSError(errno.EINVAL, "no")
        sent.append((begin, count))

    if advises is None:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(files, "COPY_BLOCK", 4000)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "copy").open("wb") as target:
        target.write(b"head")
        copy_range(source, target, 0, len(data), lambda count: None)
    assert (tmp_path / "copy").read_bytes() == b"head" + data
    assert sent == ([(4, 4000), (4004, 4000), (8004, 2240)] if advises else [])


def test_other_errors_of_the_kernel_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    (tmp_path / "source").write_bytes(b"data")
    with (
        (tmp_path / "source").open("rb") as source,
        (tmp_path / "copy").open("wb") as target,
        pytest.raises(OSError, match="broken"),
    ):
        copy_range(source, target, 0, 4, lambda count: None)


# --- files ---------------------------------------------------------------------------------------------------------


def write(path: Path, text: str, error: BaseException | None = None, **options: Any) -> None:
    with atomic_file(path, **options) as part:
        part.write_text(text, encoding="utf-8")
        if error is not None:
            raise error


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "first")
    path.chmod(0o600)
    with pytest.raises(KeyboardInterrupt):
        write(path, "second", KeyboardInterrupt())
    assert path.read_text(encoding="utf-8") == "first"
    write(path, "third")
    assert path.read_text(encoding="utf-8") == "third"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list_files(tmp_path) == ["file"]
    with pytest.raises(rope.FileError, match=r"disk of .*file' is full \(.* free\); make room"):
        write(path, "fourth", OSError(errno.ENOSPC, "No space left on device"))


@pytest.mark.parametrize("link", ["file", "file.part"])
def test_a_link_in_the_way_of_a_file_is_not_written_through(link: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine", encoding="utf-8")
    (tmp_path / link).symlink_to("elsewhere")
    write(tmp_path / "file", "new")
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_and_a_device_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(rope.FileError, match="is not a regular file but a device or a pipe"):
            write(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "null").is_symlink()


def test_two_writers_of_one_file_do_not_share_what_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)  # a temporary name has room, too
    with atomic_file(path) as first:
        first.write_text("first", encoding="utf-8")
        write(path, "second")
    assert path.read_text(encoding="utf-8") == "first"
    assert list_files(tmp_path) == [path.name]


def test_what_a_killed_writer_left_is_removed_later(tmp_path: Path) -> None:
    for name, age in (("file.0.part", 2 * files.PART_AGE), ("file.1.part", 0)):
        (tmp_path / name).write_text("x", encoding="utf-8")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write(tmp_path / "file", "x")
    assert list_files(tmp_path) == ["file", "file.1.part"]


@pytest.mark.parametrize("fsync", [True, False])
def test_a_file_is_on_disk_before_it_gets_its_name(
    fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        files, "fsync_path", lambda path: calls.append(f"{path.suffix or path.name} {(tmp_path / 'file').exists()}")
    )
    write(tmp_path / "file", "x", fsync=fsync)
    assert calls == ([".part False", f"{tmp_path.name} True"] if fsync else [])


# --- folders -------------------------------------------------------------------------------------------------------


def attempt(dst: Path, act: Callable[[Path], object], **options: Any) -> None:
    with atomic_folder(dst, **options) as staging:
        act(staging)


def nothing(staging: Path) -> None:
    pass


def test_a_new_folder_is_there_when_it_is_whole(tmp_path: Path) -> None:
    dst = tmp_path / "some" / "where"

    def act(staging: Path) -> None:
        (staging / "file").write_text("x", encoding="utf-8")
        assert not dst.exists()
        with (
            ThreadPoolExecutor(1) as pool,  # locks of one thread know each other
            pytest.raises(rope.FileError, match="another process is writing"),
        ):
            pool.submit(attempt, dst, nothing).result()

    attempt(dst, act)
    assert [path.name for path in dst.parent.iterdir()] == ["where"]
    assert [path.name for path in dst.iterdir()] == ["file"]
    with pytest.raises(rope.FileError, match="exists already"):
        attempt(dst, nothing)


def test_a_destination_that_came_meanwhile_is_kept(tmp_path: Path) -> None:
    dst = tmp_path / "dst"

    def interfere(staging: Path) -> None:
        dst.mkdir()
        (dst / "mine").write_text("x", encoding="utf-8")

    with pytest.raises(rope.FileError, match="could not be read or written"):
        attempt(dst, interfere)
    assert (dst / "mine").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("dst", ["source/out", "source/deep/out", "deep link/out"])
def test_a_destination_inside_the_source_is_refused(dst: str, tmp_path: Path) -> None:
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "deep link").symlink_to("source/deep")
    with pytest.raises(rope.FileError, match="lies inside the source"):
        attempt(tmp_path / dst, nothing, source=tmp_path / "source")
    assert list_files(tmp_path / "source") == []


def test_a_source_that_changes_meanwhile_gives_no_folder(tmp_path: Path) -> None:
    source = tmp_path / "shard"
    source.write_text("old", encoding="utf-8")
    inputs = file_stamps([source])

    def replace(staging: Path) -> None:
        (tmp_path / "new").write_text("new", encoding="utf-8")  # of the same size
        os.utime(tmp_path / "new", ns=(0, 0))
        (tmp_path / "new").replace(source)

    with pytest.raises(rope.FileError, match="shard' changed while it was being read"):
        attempt(tmp_path / "dst", replace, inputs=inputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard"]
    with pytest.raises(rope.FileError, match="No such file"):
        attempt(tmp_path / "dst", lambda staging: source.unlink(), inputs=file_stamps([source]))


def test_a_source_linked_to_another_file_meanwhile_gives_no_folder(tmp_path: Path) -> None:
    """A newer revision in the Hub's cache does this."""
    for name in ("old", "new"):
        (tmp_path / name).write_text(name, encoding="utf-8")
        os.utime(tmp_path / name, ns=(0, 0))
    (tmp_path / "shard").symlink_to("old")
    inputs = file_stamps([tmp_path / "shard"])
    (tmp_path / "shard").unlink()
    (tmp_path / "shard").symlink_to("new")
    with pytest.raises(rope.FileError, match="shard' changed while it was being read"):
        attempt(tmp_path / "dst", nothing, inputs=inputs)


def stop(staging: Path) -> None:
    (staging / "a.safetensors").write_text("x", encoding="utf-8")
    (staging / "b.json").write_text("x", encoding="utf-8")
    raise KeyboardInterrupt


def test_only_a_run_with_a_plan_leaves_something_to_resume(tmp_path: Path) -> None:
    for plan in ({"a": 1}, None):
        with pytest.raises(KeyboardInterrupt):
            attempt(tmp_path / "dst", stop, plan=plan)
        assert (tmp_path / ".dst.unfinished").exists() == (plan is not None)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_source_leaves_nothing_to_resume(tmp_path: Path) -> None:
    """A resumed run would meet it again; one of the disk may be gone by then."""

    for error, kept in ((rope.CheckpointError("damaged"), False), (rope.FileError("full"), True)):

        def fail(_: Path, error: rope.RopeExtError = error) -> None:
            raise error

        with pytest.raises(type(error)):
            attempt(tmp_path / "dst", fail, plan={"a": 1})
        assert (tmp_path / ".dst.unfinished").exists() == kept


def test_only_the_same_plan_and_inputs_are_resumed(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("x", encoding="utf-8")
    inputs = file_stamps([tmp_path / "input"])
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "dst", stop, plan={"size": (1, 2)}, inputs=inputs)
    for options in ({"plan": {"size": (1, 3)}, "inputs": inputs}, {"plan": {"size": (1, 2)}}):
        with pytest.raises(rope.FileError, match="have changed; start anew without resume"):
            attempt(tmp_path / "dst", nothing, resume=True, **options)
    attempt(tmp_path / "dst", nothing, plan={"size": (1, 2)}, inputs=inputs, resume=True)
    assert [path.name for path in (tmp_path / "dst").iterdir()] == ["a.safetensors"]


def test_a_staging_folder_of_another_process_is_left_alone(tmp_path: Path) -> None:
    def act(staging: Path) -> None:
        (staging / "half").write_text("x", encoding="utf-8")
        with ThreadPoolExecutor(1) as pool, pytest.raises(rope.FileError, match="another process"):
            pool.submit(attempt, tmp_path / "dst", nothing).result()
        assert (staging / "half").exists()

    attempt(tmp_path / "dst", act)


def test_a_link_in_the_place_of_the_staging_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("x", encoding="utf-8")
    (tmp_path / ".dst.unfinished").symlink_to("elsewhere")
    attempt(tmp_path / "dst", nothing, plan={}, resume=True)
    assert list_files(tmp_path / "elsewhere") == ["mine"]
    assert not (tmp_path / "dst").is_symlink()


def test_everything_is_on_disk_before_the_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst, synced = tmp_path / "dst", set[str]()
    monkeypatch.setattr(files, "fsync_path", lambda path: synced.add(f"{path.name} {dst.exists()}"))

    def act(staging: Path) -> None:
        (staging / "deep").mkdir()
        (staging / "deep" / "file").write_text("x", encoding="utf-8")

    attempt(dst, act)
    assert {"file False", "deep False", ".dst.unfinished False", f"{tmp_path.name} True"} <= synced

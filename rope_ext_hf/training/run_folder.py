"""The folder of a training or a search, and the text that it keeps for measuring."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, RopeExtError, one_line, size_text
from rope_ext_hf.eval.documents import Tokens
from rope_ext_hf.files import atomic_file, disk_errors, read_json, write_json

__all__ = ["cut", "open_run", "saving", "split", "write_whole"]


def open_run(folder: Path, settings: dict[str, Any], *, may_differ: Collection[str] = ()) -> None:
    """Make the folder of a run, or check that it is one of the same settings.

    Args:
        may_differ: settings with which a run may be continued in another value.

    Raises:
        FileError: the folder holds a run of other settings, or cannot be made.
    """
    file = folder / "settings.json"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        write_whole(file, settings)
        return
    before = read_json(file)
    now: dict[str, Any] = dict(settings)
    unlike = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if unlike := [key for key in unlike if key not in may_differ]:
        raise FileError(
            f"{str(folder)!r} holds a run with other settings: {', '.join(unlike)}; give another folder, or the same "
            "settings to continue it"
        )


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Inside, what torch, safetensors and transformers raise where a model cannot be written becomes a FileError.

    Args:
        folder: one that exists, of the run.
    """
    try:
        yield
    except RopeExtError:
        raise
    except Exception as error:  # on a full disk torch names a position in the file, and no disk
        free = size_text(shutil.disk_usage(folder).free)
        raise FileError(
            f"a model could not be written in {str(folder)!r}, where {free} are free ({one_line(error)}); make room, "
            "and the same command continues"
        ) from error


def write_whole(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object that is there as a whole or, after a kill at any moment, as it was before."""
    with atomic_file(file) as part:
        write_json(part, value)


def split(documents: Sequence[Tokens], one_in: int) -> tuple[list[Tokens], list[Tokens]]:
    """What a run works on, and what it measures: one document in so many by its name, else the last part of each."""
    held_out = [each for each in documents if zlib.crc32(each.name.encode()) % one_in == 0]
    if held_out and len(held_out) < len(documents):
        names = {each.name for each in held_out}
        return [each for each in documents if each.name not in names], held_out
    parts: tuple[list[Tokens], list[Tokens]] = ([], [])
    for each in documents:
        middle = len(each.ids) - len(each.ids) // one_in
        parts[0].append(cut(each, 0, middle))
        parts[1].append(cut(each, middle, len(each.ids)))
    return parts


def cut(document: Tokens, start: int, stop: int, name: str = "") -> Tokens:
    """The tokens start..stop of a document, under its name or another."""
    before = document.ends[start - 1] if start else 0
    ends = tuple(end - before for end in document.ends[start:stop])
    return Tokens(name or document.name, document.ids[start:stop], ends)

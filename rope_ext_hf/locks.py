"""The lock of a folder: held by one process, and released by the kernel however that process ends.

A second process does not wait: it is told which process holds the lock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rope_ext_hf.errors import FileError, printable, short

_SIGNED = "process "
"""How the text in a lock file begins; another beginning is that of filelock, where the disk has no locks."""


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold a lock file for a folder, which states the process that holds it; a FileError where another process does."""
    lock, holder = FileLock(path), _read(path)  # read before: an older filelock empties the file when it tries
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        who = f" ({holder})" if holder else ""
        raise FileError(
            f"another process is writing {str(folder)!r}{who}; wait for it, or choose another folder"
        ) from error
    try:
        _sign(path)
        yield
    finally:
        lock.release()


def _read(path: Path) -> str:
    """The process that a lock file states; empty: none."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(200).decode(errors="replace")
        return short(printable(text.strip())) if text.startswith(_SIGNED) else ""
    return ""


def _sign(path: Path) -> None:
    """State this process in a lock file that it holds; a disk that refuses costs the statement only."""
    with suppress(OSError):
        if not path.stat().st_size or _read(path):
            path.write_text(f"{_SIGNED}{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

"""A full disk, called that wherever it is met."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from rope_ext_hf.errors import FileError, size_text

__all__ = ["RETRY", "check_full"]

RETRY = "make room and try again, or choose another place"
"""What to do about a full disk, where nothing can be resumed."""


def check_full(error: OSError, path: Path | None, advice: str = RETRY) -> None:
    """Raise FileError where an error means a full disk.

    Args:
        path: what was written, on that disk; None: unknown.
        advice: what to do about it.
    """
    if path is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise FileError(f"a disk is full; {advice}") from error
    if error.errno == errno.EDQUOT:
        raise FileError(f"the disk quota for {str(path)!r} is used up; {advice}") from error
    if error.errno == errno.ENOSPC and path is not None:
        there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
        free = size_text(shutil.disk_usage(there).free)
        raise FileError(f"the disk of {str(path)!r} is full ({free} free); {advice}") from error

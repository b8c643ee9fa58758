"""Locks that another process holds, or that a killed process has left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.files.whole import locked

HOLD = """
import sys, time
from pathlib import Path
from rope_ext_hf.files.whole import locked
with locked(Path(sys.argv[1]), Path("folder")):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_who_holds_it_and_a_kill_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "run.0.lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):  # the first attempt leaves the name where it is
            with (
                pytest.raises(
                    rope.FileError, match=rf"writing 'folder' \(process {holder.pid} on {socket.gethostname()}\); wait"
                ),
                locked(path, Path("folder")),
            ):
                pass
        holder.send_signal(signal.SIGKILL)
    with locked(path, Path("folder")):
        assert path.read_text(encoding="utf-8") == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_what_another_library_wrote_into_a_lock_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("12\nhost\n", encoding="utf-8")
    with locked(path, tmp_path):
        assert "process" not in path.read_text(encoding="utf-8")

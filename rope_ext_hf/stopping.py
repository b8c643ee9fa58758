"""Ctrl-C (SIGINT) and SIGTERM, which job schedulers send: one line on standard error, and the exit code of shells.

    end_on_signals()    # while modules are imported there is nothing to clean up: a signal ends the process at once
    from rope_ext_hf.cli.app import app
    with raising():     # a signal raises Stopped, so that files that were begun are removed
        app()

The exit code is 130 after SIGINT and 143 after SIGTERM. `end_on_shortened_files` handles SIGBUS in the same way. The
module imports as little as it can, because a SIGINT that arrives before `end_on_signals` ends in a traceback of Python.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NAMES = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGTERM: "SIGTERM"}
_SHORTENED = b"""\
rope-ext: a file became shorter while it was read; it may be the model, or a data set, which something else writes. \
Wait until the file is complete, and type the command again
"""
_AGAIN = 1.0  # seconds in which a second signal is the same request: terminals and launchers both send one
_RETRY = 0.05  # seconds until a signal whose exception was lost raises another one


class Stopped(KeyboardInterrupt):
    """This process was asked to stop by a signal, whose number is `number`; shells expect `exit_code` then."""

    def __init__(self, number: int) -> None:
        super().__init__(f"it was stopped by {_NAMES[signal.Signals(number)]}")
        self.number, self.exit_code = number, 128 + number


class _Request:
    """The first signal that arrived: its number, and the time; `raises` is true inside `raising`."""

    number: int | None = None
    since = 0.0
    raises = False


def stopped() -> Stopped | None:
    """Return the request to stop that this process has had, whatever became of its exception; None: there was none."""
    return None if _Request.number is None else Stopped(_Request.number)


def end_on_signals() -> None:
    """End this process at once when a signal arrives, with one line and without a traceback.

    A signal that this process ignores, as under nohup, stays ignored.
    """
    for number in _NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    atexit.unregister(_keep_exit_code)
    atexit.register(_keep_exit_code)


def end_on_shortened_files() -> None:
    """End this process with one line and exit code 2 when a file that is mapped into memory becomes shorter.

    The system sends SIGBUS when such memory is read. Python cannot handle it by the module `signal`, whose handlers run
    after the instruction that was interrupted, and that one would never end. A callback of ctypes runs at once.
    """
    number = getattr(signal, "SIGBUS", None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL or faulthandler.is_enabled():
        return
    import ctypes

    global _handler
    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_shortened_file)
    handle = ctypes.CDLL(None).signal
    handle.restype, handle.argtypes = ctypes.c_void_p, (ctypes.c_int, type(_handler))
    handle(number, _handler)


_handler: Any = None
"""The callback of `end_on_shortened_files`, which has to live as long as the process."""


def _on_shortened_file(number: int) -> None:
    """Print the line and end the process; nothing else is safe at this moment."""
    try:
        os.write(2, _SHORTENED)
    finally:
        os._exit(2)


@contextmanager
def raising() -> Iterator[None]:
    """Raise Stopped in the `with` block when a signal arrives; a later signal ends the process at once.

    An exception in a finalizer is lost: Python prints it and goes on. Stopped is then raised again a moment later.
    """
    end_on_signals()
    _Request.number = None
    printed = sys.unraisablehook

    def again(lost: Any) -> None:
        if not isinstance(lost.exc_value, Stopped):
            printed(lost)
            return
        _Request.number = None
        threading.Timer(_RETRY, signal.raise_signal, [lost.exc_value.number]).start()

    _Request.raises, sys.unraisablehook = True, again
    try:
        yield
    finally:
        _Request.raises, sys.unraisablehook = False, printed


def _keep_exit_code() -> None:
    """After a first signal, ignore a second one while the interpreter is torn down; it would change the exit code."""
    if _Request.number is not None:
        for number in _NAMES:
            signal.signal(number, signal.SIG_IGN)


def _on_signal(number: int, _: FrameType | None) -> None:
    """Raise Stopped inside `raising`; else, and for a second signal, print the line and end the process."""
    now = time.monotonic()
    if _Request.number is None:
        _Request.number, _Request.since = number, now
        if _Request.raises:
            raise Stopped(number)
    elif now - _Request.since < _AGAIN:
        return
    try:
        os.write(2, b"rope-ext: stopped\n")  # not by print: it may be interrupted in the middle of a line
    finally:
        os._exit(128 + _Request.number)

"""Signals at every moment of a real process: one line, the exit code of shells, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from rope_ext_hf.errors import one_line
from rope_ext_hf.stopping import Stopped

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")

SIGNALS = [signal.SIGINT, signal.SIGTERM]
SENDING = """
    import os, sys
    from rope_ext_hf.__main__ import main

    class Sending:
        def find_spec(self, name, *_):
            if name == POINT:
                os.kill(os.getpid(), NUMBER)

    sys.meta_path.insert(0, Sending())
    sys.argv = WORDS
    main()
"""
"""A program that sends a signal to itself when the import of a module begins."""


def ended(code: str, **names: object) -> tuple[int, str, str]:
    """How a process ended that ran this code with some names: its exit code, and what it printed to the streams."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = subprocess.run([sys.executable, "-c", given + dedent(code)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("point", "command"),
    [
        ("typer", "methods"),
        ("rope_ext_hf.cli.run_files", "run reference"),
        ("rope_ext_hf.tools.serving.serving_commands", "--help"),
        pytest.param("rope_ext_hf.methods.registry", "methods", marks=pytest.mark.slow),
        pytest.param("numpy", "methods", marks=pytest.mark.slow),
        pytest.param("torch.nn", "methods", marks=pytest.mark.slow),
        pytest.param("transformers.models.auto", "describe reference", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_an_import_is_one_line(number: int, point: str, command: str) -> None:
    words = ["rope-ext", *command.split()]
    assert ended(SENDING, POINT=point, NUMBER=int(number), WORDS=words) == (128 + number, "", "rope-ext: stopped\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_finalizer_is_not_lost(number: int) -> None:
    """Python prints an exception of `__del__`, and goes on."""
    code, out, err = ended(
        """
        import os, time
        from rope_ext_hf.stopping import Stopped, raising

        class Ending:
            def __del__(self):
                os.kill(os.getpid(), NUMBER)

        try:
            with raising():
                Ending()
                time.sleep(1)
        except Stopped as stop:
            print(stop)
            raise SystemExit(stop.exit_code)
        """,
        NUMBER=int(number),
    )
    assert (code, err) == (128 + number, "")
    assert out.startswith("it was stopped by")


@pytest.mark.parametrize(("seconds", "finished"), [(0.0, "cleaned up\n"), (1.2, "")])
def test_a_second_signal_ends_a_clean_up_unless_it_is_the_same_request(seconds: float, finished: str) -> None:
    code, out, err = ended(
        """
        import os, signal, time
        from rope_ext_hf.stopping import raising

        with raising():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt as stop:
                time.sleep(SECONDS)
                os.kill(os.getpid(), signal.SIGINT)
                print("cleaned up")
                raise SystemExit(stop.exit_code)
        """,
        SECONDS=seconds,
    )
    assert (code, out, err) == (143, finished, "" if finished else "rope-ext: stopped\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """Shells start what runs behind `&` so, and nohup."""
    code, out, _ = ended(
        """
        import os, signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from rope_ext_hf.stopping import raising

        with raising():
            os.kill(os.getpid(), signal.SIGINT)
            print("goes on")
        """
    )
    assert (code, out) == (0, "goes on\n")


def test_an_error_without_a_message_is_told_in_words() -> None:
    class _LostConnectionError(Exception):
        pass

    assert one_line(Stopped(signal.SIGTERM)) == "it was stopped by SIGTERM"
    assert one_line(KeyboardInterrupt()) == "keyboard interrupt"
    assert one_line(_LostConnectionError()) == "lost connection error"
    assert one_line(KeyError("a\nb")) == "'a\\nb'"


@pytest.mark.parametrize("thread", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read_is_one_line(thread: bool) -> None:
    """The system sends SIGBUS to the thread that reads the memory, in the middle of one instruction."""
    code, out, err = ended(
        """
        import os, signal, threading
        from rope_ext_hf.stopping import end_on_shortened_files

        end_on_shortened_files()
        def read():
            signal.pthread_kill(threading.get_ident(), signal.SIGBUS)
        if THREAD:
            reader = threading.Thread(target=read)
            reader.start()
            reader.join()
        else:
            read()
        print("goes on")
        """,
        THREAD=thread,
    )
    assert (code, out) == (2, "")
    assert err.startswith("rope-ext: a file became shorter while it was read;")
    assert err.count("\n") == 1


def test_a_traceback_that_was_asked_for_stays() -> None:
    code, _, err = ended(
        """
        import faulthandler, os, signal
        faulthandler.enable()
        from rope_ext_hf.stopping import end_on_shortened_files

        end_on_shortened_files()
        os.kill(os.getpid(), signal.SIGBUS)
        """
    )
    assert code == -signal.SIGBUS
    assert "Bus error" in err

"""What the command line prints: text, JSON, tables, progress, warnings and errors, safe for any terminal.

Results go to standard output; progress, warnings and errors go to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import typer

from rope_ext_hf.errors import FileError, bounded, duration, printable
from rope_ext_hf.terminal import terminal_width, wrapped

if TYPE_CHECKING:
    from rich.table import Table

_results: list[TextIO] = []  # where results are printed; the last one counts


@contextmanager
def results_to(stream: TextIO | None = None) -> Iterator[None]:
    """Inside, results go to this stream, by default where they go already; what libraries print, to standard error."""
    _results.append(stream or (_results[-1] if _results else sys.stdout))
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


@contextmanager
def _results_stream() -> Iterator[TextIO | None]:
    """Where results go, None: nowhere; a full disk there is one error, and what was not written is given up."""
    stream: TextIO | None = _results[-1] if _results else sys.stdout  # None where it was closed before the start
    try:
        yield stream
        if stream is not None:
            stream.flush()
    except OSError as error:
        if stream is not None:
            _give_up(stream)
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, which ends quietly
            raise
        raise FileError(f"the results could not be printed: {error.strerror or error}") from error


def _give_up(stream: TextIO) -> None:
    """Let a stream that cannot be written end in nothing, so that what it holds is no error at the end either."""
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def all_results() -> Iterator[None]:
    """Inside, results may be printed without the functions of this module, as the help of a command is."""
    try:
        yield
    finally:
        with _results_stream():
            pass


def print_text(text: str) -> None:
    """Print results, control characters escaped."""
    with _results_stream() as stream:
        typer.echo(printable(text), file=stream)


def print_note(name: str, text: str) -> None:
    """Print one line of information, under a name, on standard error."""
    _print_aside(f"{name:<9}{text}")


def print_error(text: str) -> None:
    """Print an error as one line on standard error, long values in it cut short."""
    _print_aside(f"rope-ext: {bounded(text)}")


def _print_aside(line: str) -> None:
    """Print a line on standard error, where that takes any; on a terminal lines end between words."""
    try:
        if sys.stderr is not None:
            text = wrapped(line, then=" " * 9) if sys.stderr.isatty() else line
            print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, its title and caption as lines of text; in a pipe up to 160 columns."""
    from rich.console import Console
    from rich.text import Text

    with _results_stream() as stream:
        console = Console(file=stream, width=terminal_width())
        title, caption = table.title, table.caption
        table.title = table.caption = None
        if title:
            console.print(Text(printable(str(title)), style="bold"))
        console.print(table)
        if caption:
            console.print(Text(printable(str(caption)), style="dim"))


@contextmanager
def short_warnings() -> Iterator[None]:
    """Inside, a warning is one line on standard error; what transformers and PEFT will change some day is left out."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_note("warning", bounded(str(message)))

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
        yield


def quiet_transformers() -> None:
    """Switch off transformers' progress bars, advice and its log of errors, which it also raises: one line says it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)


class _ProgressBar:
    """A progress bar with the name of what is being done; beside it, the time that is left is said."""

    def __init__(self, bar: Any, task: Any, show: bool, passes: tuple[str, str]) -> None:
        self._bar, self._task = bar, task
        self.left = TimeLeft(0.0, partial(print_note, "time") if show else lambda line: None, passes=passes)

    def set_total(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def advance(self, name: str, count: int, work: float = 0.0) -> None:
        """So many more are done, of what has this name, with so much of the work in `left`."""
        self._bar.update(self._task, advance=count, description=name)
        if work:
            self.left.passed(work)

    def set(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if not self.left.total:
            self.left.total = total
            self.left.begin()
        elif done > self.left.done:
            self.left.passed(done - self.left.done)


# what is timed, one and several of it, by what is counted
_PASSES = {"tokens": ("pass", "passes"), "bytes": ("part", "parts"), "pictures": ("picture", "pictures")}


@contextmanager
def progress_bar(name: str, *, show: bool = True, unit: str = "tokens") -> Iterator[_ProgressBar]:
    """A progress bar on standard error, where that is a terminal, and everywhere the time that is left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    counts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description:<18}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as bar:
        yield _ProgressBar(bar, bar.add_task(name, total=None), show, _PASSES[unit])


_LONG = 5.0  # seconds; beside them, what only a first pass does (loading kernels, allocating) is little
_ENOUGH = 2.0  # seconds of further passes
_CORRECTED = 30.0  # seconds by which an estimate is off at least before it is corrected, and a quarter of what is left


class TimeLeft:
    """Say how much time is left, and again whenever that turns out wrong.

    A pass of a few seconds is enough; shorter ones are taken together. The first pass counts only until there is a
    second one, because loading kernels and allocating belong to it. Nothing is said before a pass with at least half
    of the work of the largest one was timed, because short passes say little about long ones.

    Attributes:
        total: all work, in any unit; the clock counts seconds.
        largest: the work of the largest pass; 0: all passes are alike.
        count: the number of passes, each of which takes some time besides that of its work; 0: not known.
    """

    def __init__(
        self,
        total: float,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
        passes: tuple[str, str] = ("pass", "passes"),
    ) -> None:
        self.total, self.say, self.clock, self.counted = total, say, clock, passes
        self.largest = self.count = 0.0
        self.passes = 0
        self.done = self.began = 0.0
        self.timed: list[tuple[float, float]] = []  # work and seconds of each pass
        self.ends: float | None = None  # when, by what was said last

    def begin(self) -> None:
        self.began = self.clock()

    def passed(self, work: float) -> None:
        now = self.clock()
        seconds_of_it = now - self.began
        self.timed.append((work, seconds_of_it))
        self.began = now
        self.passes += 1
        self.done += work
        if (self.passes == 1 and seconds_of_it < _LONG) or (self.passes == 2 and len(self.timed) == 2):
            del self.timed[0]  # the first pass
        seconds = sum([each for _, each in self.timed])
        if self.ends is None and (
            seconds < _ENOUGH or max(self.timed)[0] < self.largest / 2 or self.done >= self.total
        ):
            return
        left = self._left()
        counted = f"1 {self.counted[0]}" if self.passes == 1 else f"{self.passes} {self.counted[1]}"
        if self.ends is None:
            if left >= 1:
                self.say(f"about {duration(left)} left ({counted} timed)")
        elif abs(now + left - self.ends) > max(_CORRECTED, left / 4):
            self.say(f"about {duration(left)} left ({counted} timed)")
        else:
            return
        self.ends = now + left

    def _left(self) -> float:
        """Return the seconds that are left, by a line through the passes: a time of each pass, and one of its work."""
        count, work, seconds = len(self.timed), sum(w for w, _ in self.timed), sum(s for _, s in self.timed)
        slope = seconds / work
        if self.count and (spread := sum((w - work / count) ** 2 for w, _ in self.timed)):
            joint = sum((w - work / count) * (s - seconds / count) for w, s in self.timed)
            slope = min(max(joint / spread, 0.0), slope)
        of_each = (seconds - slope * work) / count
        return of_each * max(0.0, self.count - self.passes) + slope * (self.total - self.done)

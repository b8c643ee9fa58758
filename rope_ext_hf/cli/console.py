"""The output of the command line: text, JSON, tables, progress, warnings and errors, safe for any terminal.

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
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.terminal import terminal_width, wrapped

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_note", "print_result", "print_text", "progress_bar", "results_to"]

_results: list[TextIO] = []  # streams for results; the last one counts


@contextmanager
def results_to(stream: TextIO | None = None) -> Iterator[None]:
    """Inside the `with` block, send results to a stream, and everything else that is printed to standard error.

    Without a stream, results go where they went before.
    """
    _results.append(stream or (_results[-1] if _results else sys.stdout))
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


@contextmanager
def _results_stream() -> Iterator[TextIO | None]:
    """Yield the stream for results, or None if standard output was closed before the program started.

    If the stream cannot be written, for example on a full disk, one FileError is raised, and the exit raises no other.
    """
    stream: TextIO | None = _results[-1] if _results else sys.stdout
    try:
        yield stream
        if stream is not None:
            stream.flush()
    except OSError as error:
        if stream is not None:
            _give_up(stream)
        if isinstance(error, BrokenPipeError):  # the reader has seen enough: the program ends quietly
            raise
        raise FileError(f"the results could not be printed: {error.strerror or error}") from error


def _give_up(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device, so that flushing it at the exit raises no error."""
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def all_results() -> Iterator[None]:
    """Make sure that everything printed in the `with` block is written out at its end, or report an error.

    This covers text that was not printed through this module, such as the help that typer prints.
    """
    try:
        yield
    finally:
        with _results_stream():
            pass


def print_text(text: str) -> None:
    """Print text as a result on standard output, with control characters escaped."""
    with _results_stream() as stream:
        typer.echo(printable(text), file=stream)


def print_result(result: Any, as_json: bool) -> None:
    """Print a result as text, or, for --json, what its `to_dict` returns."""
    print_text(json_text(result.to_dict()) if as_json else str(result))


def print_note(name: str, text: str) -> None:
    """Print a line of information on standard error, with `name` in front."""
    _print_to_stderr(f"{name:<9}{text}")


def print_error(text: str) -> None:
    """Print an error as one line on standard error, with long values in it cut short."""
    _print_to_stderr(f"rope-ext: {bounded(text)}")


def _print_to_stderr(line: str) -> None:
    """Print a line on standard error, wrapped between words on a terminal; do nothing if it cannot be written."""
    try:
        if sys.stderr is not None:
            text = wrapped(line, then=" " * 9) if sys.stderr.isatty() else line
            print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or 160 columns in a pipe, with its title and caption as lines of text."""
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
    """Print warnings as one line on standard error inside the `with` block.

    FutureWarnings of transformers and PEFT are left out, because a user of the command line can do nothing about them.
    """

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_note("warning", bounded(str(message)))

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
        yield


def quiet_transformers(*, imports: bool = True) -> None:
    """Switch off the progress bars, advice and logged errors of transformers, which raises its errors as well.

    `imports`: whether to import transformers for that; else it is quiet from the moment when it is imported.
    """
    if not imports and "transformers" not in sys.modules:
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_PROGRESS_BARS = True  # transformers shows bars where the library of the Hub does
        os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
        return
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)


class _ProgressBar:
    """A progress bar with the name of the present step, and lines with the time that is left."""

    def __init__(self, bar: Any, task: Any, show: bool, passes: tuple[str, str]) -> None:
        self._bar, self._task = bar, task
        self.left = TimeLeft(0.0, partial(print_note, "time") if show else lambda text: None, passes=passes)

    def set_total(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def advance(self, name: str, count: int, work: float = 0.0) -> None:
        """Advance the bar by `count`, and by `work` for the time left; `name` is the name of the present step."""
        self._bar.update(self._task, advance=count, description=name)
        if work:
            self.left.passed(work)

    def set(self, done: int, total: int) -> None:
        """Set the progress bar to `done` of `total`; both also count as work for the time left."""
        self._bar.update(self._task, completed=done, total=total)
        if not self.left.total:
            self.left.total = total
            self.left.begin()
        elif done > self.left.done:
            self.left.passed(done - self.left.done)


# the words for one and several timed steps, by the unit of the bar
_PASSES = {"tokens": ("pass", "passes"), "bytes": ("part", "parts"), "pictures": ("picture", "pictures")}


@contextmanager
def progress_bar(name: str, *, show: bool = True, unit: str = "tokens") -> Iterator[_ProgressBar]:
    """Show a progress bar on standard error if that is a terminal, and print the time that is left in any case."""
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


_LONG_FIRST_PASS = 5.0  # seconds; in so long a first pass, loading kernels and allocating take a small part
_ENOUGH = 2.0  # seconds of timed passes that are enough for an estimate
_CORRECTION = 30.0  # seconds; an estimate is corrected if it is off by more, and by more than a quarter of the rest


class TimeLeft:
    """An estimate of the time that is left, which is printed once, and again if it turns out wrong.

    A pass is one call of the model. The estimate needs timed passes that took some seconds together. A short first pass
    does not count once there is a second one, because it includes loading kernels and allocating. Short passes say
    little about long ones, so one pass with at least half of the work of the largest must have been timed.

    Attributes:
        total: all work, in any unit.
        largest: the work of the largest pass; 0: all passes are alike.
        count: the number of passes, each of which takes some fixed time besides that for its work; 0: not known.
    """

    def __init__(
        self,
        total: float,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
        passes: tuple[str, str] = ("pass", "passes"),
    ) -> None:
        self.total, self.say, self.clock, self.words = total, say, clock, passes
        self.largest = self.count = 0.0
        self.passes = 0
        self.done = self.began = 0.0
        self.timed: list[tuple[float, float]] = []  # work and seconds of each pass
        self.ends: float | None = None  # the time of the end by the last estimate that was printed

    def begin(self) -> None:
        """Start the clock for the first pass."""
        self.began = self.clock()

    def passed(self, work: float) -> None:
        """Record the time of a pass that has just ended; print the time left if it is known now, or known better."""
        now = self.clock()
        seconds = now - self.began
        self.timed.append((work, seconds))
        self.began = now
        self.passes += 1
        self.done += work
        short_first_pass = self.passes == 1 and seconds < _LONG_FIRST_PASS
        long_first_pass_has_successor = self.passes == 2 and len(self.timed) == 2
        if short_first_pass or long_first_pass_has_successor:
            del self.timed[0]
        if self.ends is None and not self._is_known():
            return
        left = self._left()
        first_estimate = self.ends is None
        if self.ends is not None and abs(now + left - self.ends) <= max(_CORRECTION, left / 4):
            return
        self.ends = now + left
        if first_estimate and left < 1:
            return
        count = f"1 {self.words[0]}" if self.passes == 1 else f"{self.passes} {self.words[1]}"
        self.say(f"about {duration(left)} left ({count} timed)")

    def _is_known(self) -> bool:
        """Return whether enough passes were timed for a first estimate, and there is work left."""
        seconds = sum([seconds for _, seconds in self.timed])
        return seconds >= _ENOUGH and max(self.timed)[0] >= self.largest / 2 and self.done < self.total

    def _left(self) -> float:
        """Return the seconds that are left, by a least-squares line through the timed passes.

        The line gives the time of a pass by its work: its slope is the time per unit of work, and its intercept the
        fixed time per pass.
        """
        count = len(self.timed)
        work = sum(work for work, _ in self.timed)
        seconds = sum(seconds for _, seconds in self.timed)
        slope = seconds / work
        variance = sum((w - work / count) ** 2 for w, _ in self.timed)
        if self.count and variance:
            covariance = sum((w - work / count) * (s - seconds / count) for w, s in self.timed)
            slope = min(max(covariance / variance, 0.0), slope)
        intercept = (seconds - slope * work) / count
        return intercept * max(0.0, self.count - self.passes) + slope * (self.total - self.done)

"""The time that is left, by the first passes that a model really made."""

from __future__ import annotations

import time
from collections.abc import Callable

from rope_ext_hf.errors import duration

_LONG = 5.0  # seconds; beside them, what only a first pass does (loading kernels, allocating) is little
_ENOUGH = 2.0  # seconds of further passes


class TimeLeft:
    """Say once how much time is left.

    A pass of a few seconds is enough; shorter ones are taken together, without the first of them.

    Args:
        work: the work of a pass of so many tokens, in any unit.
        total: all work, in that unit.
        say: called once, with a line.
        clock: seconds.
    """

    def __init__(
        self,
        work: Callable[[int], float],
        total: float,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.work, self.total, self.say, self.clock = work, total, say, clock
        self.passes = 0
        self.done = self.timed = self.began = 0.0
        self.said = False

    def begin(self) -> None:
        """The first pass begins."""
        self.began = self.clock()

    def passed(self, tokens: int) -> None:
        """A pass of so many tokens has ended."""
        if self.said:
            return
        work, seconds = self.work(tokens), self.clock() - self.began
        self.passes += 1
        self.done += work
        self.timed += work
        if seconds >= (_LONG if self.passes == 1 else _ENOUGH):
            self.said = True
            if (left := seconds * (self.total - self.done) / self.timed) >= 1:
                counted = f"{self.passes} passes" if self.passes > 1 else "pass"
                self.say(f"about {duration(left)} more, by the first {counted}")
        elif self.passes == 1:
            self.timed = 0.0
            self.begin()

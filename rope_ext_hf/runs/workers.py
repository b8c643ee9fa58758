"""The processes that share a run: they check that they measure the same, wait for each other, and end if one fails.

They exchange messages through the store of torch.distributed, which process 0 or the launcher keeps. In each process, a
thread writes signs of life to the store and reads those of the others. So a process may wait for another one without a
time limit, but never for one that has ended.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from rope_ext_hf.errors import MethodError, RopeExtError, one_line, printable, short

_MEETING = timedelta(minutes=5)  # the time in which all processes must have started
BEAT = 2.0  # seconds between two signs of life
SILENCE = 40.0  # seconds without a sign of life after which a process counts as ended
GRACE = 10.0  # seconds that a process has to end by itself once another has failed; a collective may block it for ever
_LEFT = b"left"
_CONTINUE = "the same command continues where it stopped"


class _Meeting:
    """The connection of one process to the others of a run, and the thread that watches whether each is alive.

    Args:
        rank: the number of this process, from 0.
        count: the number of processes.

    Raises:
        MethodError: not all processes started in time.
    """

    met = False  # true once this process has tried to connect

    def __init__(self, rank: int, count: int) -> None:
        _Meeting.met = True
        self.rank, self.count = rank, count
        self._others = [other for other in range(count) if other != rank]
        self._rounds = 0  # of `exchange`
        self.fault: str | None = None  # the message about another process that has ended
        self._fault_known, self._left = threading.Event(), threading.Event()
        try:
            self._store = _connect()
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise MethodError(
                f"{count} processes share this run, and not all of them connected to {where} within "
                f"{_MEETING.seconds // 60} minutes; end those that are left, and launch all of them again"
            ) from error
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self._leave_at_exit)

    def exchange(self, values: Mapping[str, str]) -> None:
        """Wait for all processes, and check that all of them have the same values.

        Args:
            values: the values to compare, by the names that messages use for them.

        Raises:
            MethodError: the processes have different values.
            RopeExtError: a process has ended.
        """
        self._rounds += 1
        try:
            self._store.set(f"values/{self._rounds}/{self.rank}", json.dumps(dict(values)))
            every = [json.loads(self._wait_for(f"values/{self._rounds}/{rank}")) for rank in range(self.count)]
        except RuntimeError as error:
            raise RopeExtError(self.fault_behind(error) or one_line(error)) from error
        for rank, other in enumerate(every):
            names = [name for name in every[0] | other if every[0].get(name) != other.get(name)]
            if names:
                unlike = ", ".join(_unlike(name, every[0], other) for name in names)
                raise MethodError(
                    f"the processes of this run differ in {unlike} (process 0 / process {rank}); launch all of them "
                    "with the same command, text and model"
                )

    def fault_behind(self, error: BaseException) -> str | None:
        """Return the message about another process that has ended, if that may be the cause of `error`; else None.

        If `error` is about a lost connection, wait until the process that closed it is known.
        """
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        if any(isinstance(cause, distributed.DistError) or "gloo" in str(cause) for cause in causes):
            # A closed connection is noticed at once, the end of the process that closed it only later.
            self._fault_known.wait(SILENCE + 2 * BEAT)
        return self.fault

    def leave(self, reason: str | None) -> None:
        """Tell the other processes that they need not wait for this one any more.

        Args:
            reason: why this process ends, and then the others; None: it has finished its work.
        """
        atexit.unregister(self._leave_at_exit)
        self._left.set()
        self._thread.join()
        with suppress(RuntimeError):
            if reason is not None and self.fault is None:
                text = f"process {self.rank} of {self.count} ended: {reason}"
                self._store.compare_set("failed", "", f"{text.removesuffix('.')}; {_CONTINUE}")
            self._store.set(f"alive/{self.rank}", _LEFT)
            deadline = time.monotonic() + GRACE + 3 * BEAT
            while self.rank == 0 and time.monotonic() < deadline:  # the store may end with this process
                if all(self._last_sign(other) == _LEFT for other in self._others):
                    return
                time.sleep(0.1)

    def _leave_at_exit(self) -> None:
        """Leave when Python ends and nothing else has told the others why: a killed process is silent instead."""
        self.leave("its program came to an end before it had measured its part")

    def _wait_for(self, key: str) -> bytes:
        """Wait until the shared store has the key, and return its value; raise RopeExtError if a process ends first."""
        while True:
            fault = self.fault  # read before the store, because a value counts that a process wrote before it failed
            if self._store.check([key]):
                return bytes(self._store.get(key))
            if fault is not None:
                raise RopeExtError(fault)
            self._fault_known.wait(0.1)

    def _last_sign(self, rank: int) -> bytes:
        """Return the last sign of life from a process: `_LEFT` after it has left, empty before its first sign."""
        key = f"alive/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _watch(self) -> None:
        """Write signs of life and read those of the others, until this process leaves or another one has ended.

        If another process has ended and this one does not leave in time, the thread ends this process.
        """
        seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        beat, fault = 0, None
        while fault is None:
            if self._left.wait(BEAT):
                return
            beat += 1
            try:
                self._store.set(f"alive/{self.rank}", str(beat))
                fault = self._ended(seen)
            except RuntimeError:
                if seen.get(0, (b"",))[0] == _LEFT:  # process 0 ended after it had finished, and the store with it
                    return
                fault = f"process 0 of {self.count}, which connects the others, has ended; {_CONTINUE}"
        self.fault = fault
        self._fault_known.set()
        if not self._left.wait(GRACE):
            print(f"rope-ext: {printable(fault)}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):
                self._store.set(f"alive/{self.rank}", _LEFT)
            os._exit(2)

    def _ended(self, seen: dict[int, tuple[bytes, float]]) -> str | None:
        """Return the message about a process that has ended; None if all are alive.

        Args:
            seen: for each process, its last sign of life and the time at which this process first read it; updated
                here.
        """
        if self._store.check(["failed"]):
            return bytes(self._store.get("failed")).decode()
        now = time.monotonic()
        for other, (last, since) in seen.items():
            sign = self._last_sign(other)
            if sign != last:
                seen[other] = sign, now
            elif sign != _LEFT and now - since > SILENCE:
                self._others.remove(other)
                return (
                    f"process {other} of {self.count} has given no sign of life for {SILENCE:.0f} seconds: it was "
                    f"killed, or its machine cannot be reached; {_CONTINUE}"
                )
        return None


def tell_others(reason: str, *, failed: bool) -> None:
    """Make the other processes of a run end because this one ends, if it has not connected to them yet.

    Without this they would wait for it. Nothing is done if no launcher started this process, or if it has connected: it
    then tells the others itself.

    Args:
        reason: why this process ends.
        failed: whether it has failed. If not, nothing is done unless torchrun connects the processes: without torchrun,
            process 0 would wait for the others, and a command such as `describe` might wait for processes that do not
            exist.
    """
    connects = failed or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if connects and not _Meeting.met and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        with suppress(RopeExtError, ValueError):
            _Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).leave(reason)


def _connect() -> Any:
    """Return a connection to the store of the processes that a launcher started."""
    public: Any = distributed  # it lists none of its names for type checkers
    store, _, _ = next(iter(public.rendezvous("env://", timeout=_MEETING)))
    return public.PrefixStore("rope_ext_hf", store)


def _unlike(name: str, first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the name of a value in which two processes differ, with both values in parentheses if they are short."""
    values = first.get(name, "none"), other.get(name, "none")
    if max(map(len, values)) >= 40:  # digests, which nobody can read
        return name
    return f"{name} ({short(values[0])} / {short(values[1])})"


@dataclass(frozen=True)
class Workers:
    """The processes that share a run, each of which measures a part of the items.

    Attributes:
        rank: the number of this process, from 0.
        count: the number of processes.
        meeting: the connection to the others; None: there are no others.
    """

    rank: int = 0
    count: int = 1
    meeting: _Meeting | None = None

    @classmethod
    def from_launcher(cls, expected: int | None = None) -> Workers:
        """Return the processes that torchrun or accelerate launched; without a launcher, this process alone.

        Args:
            expected: the number of processes that there should be; default: any.

        Raises:
            MethodError: there are more or fewer processes, or the launcher's variables are not complete.
        """
        workers = cls()
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count > 1:
            missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise MethodError(
                    f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set; launch the "
                    "processes with torchrun or accelerate, or unset WORLD_SIZE"
                )
            rank = int(os.environ["RANK"])
            workers = cls(rank, count, _Meeting(rank, count))
        with workers.in_step(leave=False):
            if expected is not None and workers.count != expected:
                raise MethodError(
                    f"{expected} processes were asked for, {workers.count} are running; launch with "
                    f"torchrun --nproc-per-node {expected} -m rope_ext_hf sweep ..."
                )
        return workers

    @contextmanager
    def in_step(self, *, leave: bool = True) -> Iterator[None]:
        """Inside the `with` block, end all other processes if this one fails, and this one if another fails.

        Args:
            leave: at the end, tell the others that this process needs them no more.

        Raises:
            RopeExtError: another process has failed.
        """
        if self.meeting is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            fault = self.meeting.fault_behind(error)
            self.meeting.leave(one_line(error))
            if fault is not None and not isinstance(error, KeyboardInterrupt):
                raise RopeExtError(fault) from error
            raise
        if leave:
            self.meeting.leave(None)

    def agree(self, values: Mapping[str, str] | None = None) -> None:
        """Wait for all processes, and raise MethodError unless all have the same `values` by name."""
        if self.meeting is not None:
            self.meeting.exchange(values or {})

    def check(self) -> None:
        """Raise RopeExtError if another process has ended; the message says which one, and why."""
        if self.meeting is not None and self.meeting.fault is not None:
            raise RopeExtError(self.meeting.fault)

    def share(self, items: int) -> range:
        """Return the indices of the items that this process measures; `items` is the number of all items."""
        return range(self.rank, items, self.count)

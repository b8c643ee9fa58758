"""The processes that share a run: they agree on what is measured, wait for each other, and end where one of them fails.

They reach each other through the store of torch.distributed, which process 0 or the launcher keeps. In each a thread
posts that its process is alive and looks at what the others posted: a wait has no limit of time, but no process waits
for one that has ended.
"""

from __future__ import annotations

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

_MEETING = timedelta(minutes=5)  # how long the first process waits for the last one to start
BEAT = 2.0  # seconds between two signs of life
SILENCE = 40.0  # seconds without a sign of life after which a process counts as ended
GRACE = 10.0  # seconds for a process to end by itself once another one failed; a collective may hold it for ever
_LEFT = b"left"
_CONTINUE = "the same command continues where it stopped"


class _Meeting:
    """The meeting of several processes, where they tell each other how they are; MethodError: not all of them came."""

    met = False  # whether this process has tried to meet the others

    def __init__(self, rank: int, count: int) -> None:
        _Meeting.met = True
        self.rank, self.count = rank, count
        self._others = [other for other in range(count) if other != rank]
        self._rounds = 0
        self._fault: str | None = None
        self._found, self._left = threading.Event(), threading.Event()
        try:
            # Two connections: one that waits, as for a collective, does not answer another call.
            self._store, self._watched = _connect(), _connect()
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise MethodError(
                f"{count} processes share this run, and they did not all come to {where} within "
                f"{_MEETING.seconds // 60} minutes; end those that are left, and launch all of them again"
            ) from error
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def exchange(self, basis: Mapping[str, str]) -> None:
        """Wait for all, and compare what each has by name; MethodError: they differ, RopeExtError: one has ended."""
        self._rounds += 1
        try:
            self._store.set(f"basis/{self._rounds}/{self.rank}", json.dumps(dict(basis)))
            every = [json.loads(self._wait_for(f"basis/{self._rounds}/{rank}")) for rank in range(self.count)]
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

    def check(self) -> None:
        """Raise RopeExtError where another process has ended; the message says which, and why."""
        if self._fault is not None:
            raise RopeExtError(self._fault)

    def fault_behind(self, error: BaseException) -> str | None:
        """The fault of another process, where that may be the reason of an error; None: nothing did."""
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        if any(isinstance(each, distributed.DistError) or "gloo" in str(each) for each in causes):
            self._found.wait(SILENCE + 2 * BEAT)  # a closed connection is seen at once, what closed it is not
        return self._fault

    def leave(self, error: BaseException | None) -> None:
        self._left.set()
        self._thread.join()
        with suppress(RuntimeError):
            if error is not None and self._fault is None:
                text = f"process {self.rank} of {self.count} ended: {one_line(error)}"
                self._store.compare_set("failed", "", f"{text.removesuffix('.')}; {_CONTINUE}")
            self._store.set(f"alive/{self.rank}", _LEFT)
            until = time.monotonic() + GRACE + 3 * BEAT
            while self.rank == 0 and time.monotonic() < until:  # the store may end with this process
                if all(self._last_sign(self._store, other) == _LEFT for other in self._others):
                    return
                time.sleep(0.1)

    def _wait_for(self, key: str) -> bytes:
        while True:
            fault = self._fault  # of before the look: what a process posts, and then fails, counts
            if self._store.check([key]):
                return bytes(self._store.get(key))
            if fault is not None:
                raise RopeExtError(fault)
            self._found.wait(0.1)

    @staticmethod
    def _last_sign(store: Any, rank: int) -> bytes:
        key = f"alive/{rank}"
        return bytes(store.get(key)) if store.check([key]) else b""

    def _watch(self) -> None:
        """Post signs of life and look for those of the others, until this process leaves or another one has ended."""
        seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        beat, fault = 0, None
        while fault is None:
            if self._left.wait(BEAT):
                return
            beat += 1
            try:
                self._watched.set(f"alive/{self.rank}", str(beat))
                fault = self._ended(seen)
            except RuntimeError:
                if seen.get(0, (b"",))[0] == _LEFT:  # with all that it had to say
                    return
                fault = f"process 0 of {self.count}, through which the others reach each other, has ended; {_CONTINUE}"
        self._fault = fault
        self._found.set()
        if not self._left.wait(GRACE):
            print(f"rope-ext: {printable(fault)}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):
                self._watched.set(f"alive/{self.rank}", _LEFT)
            os._exit(2)

    def _ended(self, seen: dict[int, tuple[bytes, float]]) -> str | None:
        """The process that has ended, and why; None: none has. `seen`: the last sign of life of each, and its time."""
        if self._watched.check(["failed"]):
            return bytes(self._watched.get("failed")).decode()
        now = time.monotonic()
        for other, (last, since) in seen.items():
            sign = self._last_sign(self._watched, other)
            if sign != last:
                seen[other] = sign, now
            elif sign != _LEFT and now - since > SILENCE:
                self._others.remove(other)
                return (
                    f"process {other} of {self.count} has shown no sign of life for {SILENCE:.0f} seconds: it was "
                    f"killed, or its machine is out of reach; {_CONTINUE}"
                )
        return None


def tell_others(error: BaseException) -> None:
    """Have the processes that a launcher started beside this one end, where it failed before it met them."""
    if not _Meeting.met and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        with suppress(RopeExtError, ValueError):
            _Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).leave(error)


def _connect() -> Any:
    """A connection to the store of the processes that a launcher started."""
    public: Any = distributed  # which lists none of its names
    store, _, _ = next(iter(public.rendezvous("env://", timeout=_MEETING)))
    return public.PrefixStore("rope_ext_hf", store)


def _unlike(name: str, first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The name of a difference, with both values where people can read these."""
    values = [each.get(name, "none") for each in (first, other)]
    return f"{name} ({short(values[0])} / {short(values[1])})" if max(map(len, values)) < 40 else name


@dataclass(frozen=True)
class Workers:
    """The processes that share a run; items are dealt out among them."""

    rank: int = 0
    count: int = 1
    meeting: _Meeting | None = None  # how they reach each other; None: they do not

    @classmethod
    def from_launcher(cls, expected: int | None = None) -> Workers:
        """The processes that torchrun or accelerate launched, as many as `expected`; one without a launcher."""
        workers = cls()
        if (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
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
        """Inside, an error in one process ends all of them; `leave`: at the end this one needs the others no more."""
        if self.meeting is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            fault = self.meeting.fault_behind(error)
            self.meeting.leave(error)
            if fault is not None and not isinstance(error, KeyboardInterrupt):
                raise RopeExtError(fault) from error
            raise
        if leave:
            self.meeting.leave(None)

    def agree(self, basis: Mapping[str, str] | None = None) -> None:
        """Wait for the other processes, and check that all of them have the same under each name; see `exchange`."""
        if self.meeting is not None:
            self.meeting.exchange(basis or {})

    def check(self) -> None:
        if self.meeting is not None:
            self.meeting.check()

    def share(self, items: int) -> range:
        return range(self.rank, items, self.count)

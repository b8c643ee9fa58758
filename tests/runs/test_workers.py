"""Processes that share a run, each a real one: they agree before they read, and none waits for one that ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.methods.static import NTK, Yarn
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.runs import workers as module
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.measurement import Listener
from rope_ext_hf.runs.runner import carry_out
from rope_ext_hf.runs.workers import Workers
from rope_ext_hf.stopping import raising
from tests.support.forks import run_forked
from tests.support.models import build
from tests.support.texts import TWO_MODULES

SILENCE = 10.0
"""Seconds here, in place of the forty of a run."""


def run_a_part(out: Path, given: Mapping[str, Any]) -> None:
    """What one process does; an error of this package ends it as in the command line."""
    try:
        measure_a_part(out, given)
    except rope.RopeExtError as error:
        print(f"rope-ext: {error}", flush=True)
        sys.exit(2)


def measure_a_part(out: Path, given: Mapping[str, Any]) -> None:
    """Measure a small model, with what is given in place of what all have."""
    module.SILENCE, module.GRACE, module.BEAT = SILENCE, 2.0, 0.2
    torch.set_num_threads(1)
    workers = Workers.from_launcher()
    with raising(), workers.in_step():
        if given.get("plans") == "badly":
            raise FileNotFoundError("texts.txt")
        model = build("llama", seed=given.get("seed", 0)).to(given.get("dtype", torch.float32))
        draws = torch.Generator().manual_seed(given.get("text", 0))
        texts = [Tokens(f"d{i}", torch.randint(3, 90, (200,), generator=draws), tuple(range(1, 201))) for i in range(3)]
        question = Perplexity(
            data=texts[: given.get("documents", 3)],
            lengths=given.get("lengths", [64, 128]),
            protocol=given.get("protocol", "matched"),
            bos=False,
        )
        methods = MethodChoice(method=given.get("method", Yarn(factor=2.0)))
        plan = question.plan(model, methods, chunk=given.get("chunk", 64))

        class Ending(Listener):
            """The process ends after some passes, as it is told."""

            passes = 0

            def passed(self, method: str, tokens: int) -> None:
                self.passes += 1
                if self.passes == 3 and given.get("ends") == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.passes == 3 and given.get("ends") == "stopped":
                    os.kill(os.getpid(), signal.SIGTERM)
                if self.passes == 3 and given.get("ends") == "failed":
                    raise RuntimeError("the device is lost")

        carry_out(model, plan, out=given.get("out", out), workers=workers, progress=Ending())
    print("measured")


def launch(out: Path, *given: Mapping[str, Any], status: tuple[int, ...]) -> list[str]:
    """What processes print that measure with what each is given, and end with these exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    with ThreadPoolExecutor(len(given)) as pool:
        each = [
            pool.submit(
                run_forked,
                run_a_part,
                out,
                mine,
                folder=out,
                environment=meet | {"RANK": str(rank), "WORLD_SIZE": str(len(given))},
                status=status[rank],
                seconds=150,
            )
            for rank, mine in enumerate(given)
        ]
        return [process.result() for process in each]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"text": 1}, "the text"),
        *(
            pytest.param(changed, named, marks=pytest.mark.thorough)
            for changed, named in (
                ({"method": NTK(factor=2.0)}, "the methods"),
                ({"seed": 1}, "the model"),
                ({"protocol": "truncate"}, "the protocol"),
                ({"dtype": torch.bfloat16}, "dtype (float32 / bfloat16)"),
                ({"lengths": [64, 100]}, "the lengths"),
                ({"chunk": 32}, "--chunk (64 / 32)"),
            )
        ),
    ],
)
def test_what_differs_is_named_by_all_before_anything_is_read(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    for said in launch(tmp_path, {}, changed, status=(2, 2)):
        assert "the processes of this run differ in " in said
        assert named in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_another_folder_is_named(tmp_path: Path) -> None:
    for said in launch(tmp_path, {}, {"out": tmp_path / "other"}, status=(2, 2)):
        assert "differ in the folder of --out" in said


@pytest.mark.slow
def test_fewer_documents_than_processes(tmp_path: Path) -> None:
    given = {"documents": 1}
    assert all("measured" in said for said in launch(tmp_path, given, given, status=(0, 0)))
    (folder,) = tmp_path.iterdir()
    assert len(read_run(folder).results) == 4


@pytest.mark.slow
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        pytest.param({"ends": "killed"}, -9, "", marks=pytest.mark.thorough),
        ({"ends": "stopped"}, 1, "ended: it was stopped by SIGTERM; the same command continues"),
        ({"ends": "failed"}, 1, "ended: the device is lost; the same command continues"),
        pytest.param({"plans": "badly"}, 1, "ended: texts.txt; the same command continues", marks=pytest.mark.thorough),
    ],
)
def test_one_that_ends_ends_the_others(
    tmp_path: Path, how: dict[str, Any], status: int, reason: str, which: int
) -> None:
    given: list[dict[str, Any]] = [{}, {}]
    ends = [2, 2]
    given[which], ends[which] = how, status
    said = launch(tmp_path, *given, status=tuple(ends))
    if reason:
        assert f"rope-ext: process {which} of 2 {reason}" in said[1 - which]
    elif which == 0:
        assert "rope-ext: process 0 of 2, which connects the others, has ended" in said[1]
    else:
        assert "rope-ext: process 1 of 2 has given no sign of life for" in said[0]


def _typed(out: Path, words: list[str]) -> None:
    """The command line of one process."""
    app(
        [
            "ppl",
            "reference",
            "--lengths",
            "64,128",
            "--max-spans",
            "2",
            "--data",
            TWO_MODULES,
            "--out",
            str(out),
            *words,
        ]
    )


def typed_by_two(out: Path, words: list[list[str]], status: list[int], seconds: float = 150) -> list[str]:
    """What two processes print whose command lines end with these words; the launcher has the store, as torchrun."""
    public: Any = distributed  # it lists none of its names for type checkers
    store = public.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}

    def run_one(rank: int) -> str:
        environment = common | {"RANK": str(rank)}
        how: dict[str, Any] = {"environment": environment, "status": status[rank], "seconds": seconds}
        return run_forked(_typed, out, words[rank], folder=out, **how)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_one, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["--no-such-option"], 2, "process {} of 2 ended: no such option: --no-such-option"),
        (["--dry-run"], 2, "the processes of this run differ in --dry-run"),
        (["--help"], 0, "process {} of 2 ended: its command does not measure"),
    ],
)
def test_one_that_ends_before_the_others_measure_is_named(
    tmp_path: Path, words: list[str], status: int, reason: str, which: int
) -> None:
    typed: list[list[str]] = [[], []]
    ends = [2, 2]
    typed[which], ends[which] = words, status
    # in less than the silence after which a process counts as killed
    said = typed_by_two(tmp_path, typed, ends, seconds=35)
    assert reason.format(which) in said[1 - which]


@pytest.mark.slow
def test_a_dry_run_of_all_prints_once(tmp_path: Path) -> None:
    said = typed_by_two(tmp_path, [["--dry-run"], ["--dry-run"]], [0, 0])
    assert ["Nothing was run" in text for text in said] == [True, False]


@pytest.mark.thorough
def test_after_a_kill_the_same_command_continues(tmp_path: Path) -> None:
    launch(tmp_path, {}, {"ends": "killed"}, status=(2, -9))
    launch(tmp_path, {}, {}, status=(0, 0))
    (folder,) = tmp_path.iterdir()
    assert len(read_run(folder).results) == 4


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rope.MethodError, match="3 processes were asked for, 1 are running"):
        Workers.from_launcher(3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rope.MethodError, match="MASTER_PORT is not set; launch"):
        Workers.from_launcher()

from __future__ import annotations

import csv
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.eval import measure, passkey, perplexity, sweep
from rope_ext_hf.eval.measurement_options import Perplexity, Sweep
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns, Result, difference, loss_increase
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.cost import memory as reading_memory
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.runs import recorded_run
from rope_ext_hf.runs.chosen_methods import over_rotary
from rope_ext_hf.runs.comparison import Comparison
from rope_ext_hf.runs.conclusions.labels import label, method_key
from rope_ext_hf.runs.conclusions.measures import perplexity_text
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.runner import carry_out
from rope_ext_hf.runs.workers import Workers
from tests.support.forks import kill_when, run_command
from tests.support.models import build

LENGTHS = [64, 128, 256]
METHODS = ["ntk", "yarn", "dynamic-yarn"]


def corpus(count: int = 3) -> list[Tokens]:
    draws = torch.Generator().manual_seed(0)
    return [
        Tokens(f"d{i}", torch.randint(3, 90, (300 + 20 * i,), generator=draws), tuple(range(1, 301 + 20 * i)))
        for i in range(count)
    ]


def run(out: Path, **changed: Any) -> Run[Result]:
    model = build("llama")
    options: dict[str, Any] = {"lengths": LENGTHS, "methods": METHODS, "factors": [2.0, 4.0], "bos": False} | changed
    return sweep(model, options.pop("corpus", corpus()), out=out, **options)


def plan_sweep(model: Any, methods: list[str], factors: list[float], **settings: Any) -> RunPlan[Any]:
    """What `sweep` measures, with further settings of the plan."""
    question = Sweep(data=corpus(), lengths=LENGTHS, bos=False)
    return question.plan(model, MethodChoice(method=methods, factor=factors), **settings)


def lines(run: Run[Result]) -> list[dict[str, Any]]:
    return [json.loads(x) for path in sorted(run.folder.glob("records.*.jsonl")) for x in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_sweep_equals_one_measurement_after_the_other(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert [(label(r.method), r.length) for r in found.results] == [
        (name, length)
        for name in ("unpatched", "ntk x2", "ntk x4", "yarn x2", "yarn x4", "dynamic-yarn")
        for length in LENGTHS
    ]
    model = rope.patch(build("llama"), "yarn", factor=4)
    expected = perplexity(model, corpus(), lengths=LENGTHS, bos=False)
    assert [r for r in found.results if r.method == Yarn(factor=4.0).to_dict()] == expected
    plain = perplexity(build("llama"), corpus(), lengths=LENGTHS, bos=False)
    cost = loss_increase(found, method_key(Yarn(factor=4.0).to_dict()))
    assert cost is not None
    assert cost.value == pytest.approx(expected[0].loss - plain[0].loss)  # 64 is the trained length
    assert cost.low is not None
    assert cost.high is not None
    assert cost.low <= cost.value <= cost.high
    assert loss_increase(found, method_key(None)) is None


def test_runs_in_memory_are_compared_where_they_read_the_same_text() -> None:
    model = build("llama")

    def in_memory(method: str, documents: list[Tokens]) -> Run[Result]:
        return measure(model, Perplexity(data=documents, lengths=[64, 128], bos=False), methods=[method], factors=2)

    yarn, ntk, other = in_memory("yarn", corpus()), in_memory("ntk", corpus()), in_memory("ntk", corpus()[:2])
    assert [each.name for each in Comparison([yarn, ntk]).measures] == ["perplexity"]
    assert len(Comparison([yarn, other]).measures) == 2


@pytest.mark.slow
def test_the_trained_length_is_added(tmp_path: Path) -> None:
    found = run(tmp_path, lengths=[128], methods=["yarn"])
    assert {r.length for r in found.results} == {64, 128}


@pytest.mark.slow
def test_a_second_call_reads_nothing_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    before = lines(first)
    read: list[int] = []
    second = run(tmp_path, progress=lambda _name, tokens: read.append(tokens))
    assert read == []
    assert lines(second) == before
    assert second == first
    more = run(tmp_path, methods=[*METHODS, "linear"])  # another method goes on in the same folder
    assert more.folder == first.folder
    assert len(lines(more)) == len(before) + 2 * len(LENGTHS) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"targets": 7},
        {"corpus": corpus(2)},
        *(
            pytest.param(changed, marks=pytest.mark.thorough)
            for changed in ({"protocol": "truncate"}, {"lengths": [64, 128]}, {"data": "other"})
        ),
    ],
)
def test_a_changed_setting_is_another_run(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert run(tmp_path, **changed).folder != run(tmp_path).folder


@pytest.mark.slow
def test_other_weights_are_another_run(tmp_path: Path) -> None:
    one = sweep(build("llama", seed=0), corpus(), lengths=LENGTHS, methods=["ntk"], out=tmp_path, bos=False)
    two = sweep(build("llama", seed=1), corpus(), lengths=LENGTHS, methods=["ntk"], out=tmp_path, bos=False)
    assert one.folder != two.folder


@pytest.mark.slow
def test_taken_up_again_with_other_memory_it_reads_in_the_same_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    chunks = (whole.folder / "chunks.json").read_text(encoding="utf-8")
    half = run(tmp_path / "cut", methods=METHODS[:1])
    monkeypatch.setattr(reading_memory, "available", lambda device: 1_000_000)
    again = run(tmp_path / "cut")
    assert again.folder == half.folder
    assert (again.folder / "chunks.json").read_text(encoding="utf-8") == chunks
    assert again.results == whole.results
    assert run(tmp_path / "scarce").folder.joinpath("chunks.json").read_text(encoding="utf-8") != chunks


@pytest.mark.slow
def test_what_it_took_is_recorded(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert all(r.tokens_per_second and r.tokens_per_second > 0 for r in found.results)
    assert all(r.gpu_bytes is None for r in found.results) or torch.cuda.is_available()
    costs = [record["cost"] for record in lines(found)]
    assert sum(tokens for tokens, _, _ in costs) == 6 * found.settings["tokens"]  # of 5 methods and none
    write_files(found)
    assert "tokens per second" in (found.folder / "report.html").read_text(encoding="utf-8")
    with (found.folder / "results.csv").open(encoding="utf-8") as file:
        assert all(float(row["tokens_per_second"]) > 0 for row in csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 7, *(pytest.param(keep, marks=pytest.mark.thorough) for keep in (1, 20))])
def test_half_a_line_is_measured_again(tmp_path: Path, keep: int) -> None:
    whole = run(tmp_path / "whole")
    found = run(tmp_path / "cut")
    journal = found.folder / "records.0.jsonl"
    content = journal.read_bytes().split(b"\n")
    journal.write_bytes(
        b"\n".join(content[:keep]) + (b"\n" if keep else b"") + content[keep][: len(content[keep]) // 2]
    )
    assert len(read_run(found.folder).results) < len(whole.results)  # what is not complete is not shown
    again = run(tmp_path / "cut")
    assert again.results == whole.results
    assert len(lines(again)) == len(lines(whole))


@pytest.mark.slow
def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    from filelock import FileLock

    found = run(tmp_path)
    with FileLock(found.folder / "run.0.lock"), pytest.raises(rope.FileError, match="another process is writing"):
        run(tmp_path)
    assert run(tmp_path) == found


@pytest.mark.slow
def test_the_pages_are_written_before_the_lock_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def write_while_another_comes(found: Run[Result]) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(rope.FileError) as error:
            pool.submit(run, tmp_path, methods=["ntk"]).result()
        refused.append(str(error.value))
        write_files(found)

    monkeypatch.setattr(recorded_run, "write_files", write_while_another_comes)
    found = run(tmp_path, methods=["ntk"])
    assert len(refused) == 1
    assert f"(process {os.getpid()} on" in refused[0]
    assert (found.folder / "perplexity.png").is_file()


@pytest.mark.slow
def test_processes_share_the_documents_to_the_same_last_digit(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone")
    model = build("llama")
    plan = plan_sweep(model, METHODS, [2.0, 4.0])
    for rank in (1, 0):
        shared = carry_out(model, plan, out=tmp_path / "shared", workers=Workers(rank, 2))
    assert shared.results == alone.results
    assert sorted(p.name for p in shared.folder.glob("records.*")) == ["records.0.jsonl", "records.1.jsonl"]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """SIGKILL after some lines, several times; nothing is lost and nothing measured twice."""
    command = ["sweep", "reference", "--method", "ntk,yarn", "--factor", "4"]
    command += ["--lengths", "128,256", "--max-spans", "8", "--dtype", "float32"]
    command += ["--data", "stdlib", "--out"]
    whole = tmp_path / "whole"
    assert CliRunner().invoke(app, [*command, str(whole)]).exit_code == 0
    (expected,) = whole.iterdir()
    total = len((expected / "records.0.jsonl").read_text().splitlines())
    out = tmp_path / "killed"

    def written(lines: int) -> bool:
        return sum(journal.read_bytes().count(b"\n") for journal in out.glob("*/records.0.jsonl")) >= lines

    kill_when(partial(written, total // 2), run_command, [*command, str(out)], folder=tmp_path)
    assert CliRunner().invoke(app, [*command, str(out)]).exit_code == 0
    (folder,) = out.iterdir()
    assert folder.name == expected.name
    assert read_run(folder).results == read_run(expected).results
    records = [json.loads(line) for line in (folder / "records.0.jsonl").read_text().splitlines()]
    keys = [(json.dumps(r["method"]), r["item"], *r["cell"]) for r in records]
    assert len(keys) == len(set(keys)) == total


SHARED = ["sweep", "reference", "--method", "ntk", "--factor", "4", "--lengths", "256,512", "--max-spans", "8"]
SHARED += ["--dtype", "float32", "--data", "stdlib", "--out"]
ASKED = ["passkey", "reference", "--lengths", "256", "--depths", "0,1", "--trials", "3", "--dtype", "float32", "--out"]


def launch(out: Path, *options: str, measured: Sequence[str] = SHARED) -> subprocess.Popen[str]:
    """A launcher of two processes, or of one of two, that share one run; the number of threads is part of the run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "rope_ext_hf"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "GLOO_SOCKET_IFNAME": "lo"}
    command = [*torchrun, *measured, str(out), "--processes", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def check_shared(tmp_path: Path, *launchers: subprocess.Popen[str], measured: Sequence[str] = SHARED) -> None:
    """Two processes have half of the documents each, one table is printed, and the results are those of one."""
    outputs = [launcher.communicate(timeout=500) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), outputs
    assert CliRunner().invoke(app, [*measured, str(tmp_path / "one")]).exit_code == 0
    (one,), (two,) = (list((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert read_run(two).results == read_run(one).results
    assert all((two / f"records.{rank}.jsonl").stat().st_size for rank in (0, 1))
    assert "".join(out for out, _ in outputs).count("report ") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("measured", [SHARED, ASKED])
def test_two_processes_under_torchrun(tmp_path: Path, measured: Sequence[str]) -> None:
    launcher = launch(tmp_path / "two", "--standalone", "--nproc-per-node", "2", measured=measured)
    check_shared(tmp_path, launcher, measured=measured)


@pytest.mark.thorough
def test_two_nodes_with_a_launcher_each(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    check_shared(tmp_path, *(launch(tmp_path / "two", *meet, "--node-rank", str(rank)) for rank in (0, 1)))


class TestOutOfMemory:
    """A device on which more than some tokens per pass do not fit."""

    def scarce(self, model: Any, most: int) -> Any:
        decoder = model.model

        def refuse(_: Any, __: Any, given: dict[str, Any]) -> None:
            if given["input_ids"].shape[1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        decoder.register_forward_pre_hook(refuse, with_kwargs=True)
        return model

    def run(self, model: Any, out: Path, **changed: Any) -> Run[Result]:
        return carry_out(model, plan_sweep(model, ["yarn"], [4.0], **changed), out=out)

    @pytest.mark.slow
    def test_it_goes_on_with_half_as_many_tokens_and_pins_what_fits(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="out of memory with [0-9,]+ tokens per pass; going on with") as warned:
            found = self.run(self.scarce(build("llama"), 40), tmp_path / "scarce")
        assert str(warned[-1].message) == "out of memory with 64 tokens per pass; going on with 32"
        assert json.loads((found.folder / "chunks.json").read_text(encoding="utf-8"))[0] == 32
        assert found.results == self.run(build("llama"), tmp_path / "given", chunk=32).results
        again = self.run(self.scarce(build("llama"), 40), tmp_path / "scarce")  # without a warning
        assert again == found

    @pytest.mark.slow
    def test_a_retrieval_prompt_is_read_again(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"lengths": [256], "depths": [0, 1], "keys": 2, "trials": 2, "distractors": 3}
        options |= {"task": "key-value", "tokenizer": ByT5Tokenizer(extra_ids=0), "out": tmp_path}
        options |= {"haystack": [Document("hay", "some text " * 50)]}
        with pytest.warns(UserWarning, match="out of memory"):
            found = passkey(self.scarce(build("llama", vocab_size=259), 40), **options)
        assert found == passkey(build("llama", vocab_size=259), **options | {"out": None, "chunk": 32})

    @pytest.mark.filterwarnings("ignore:out of memory")
    def test_it_gives_up_where_a_few_tokens_do_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            self.run(self.scarce(build("llama"), 12), tmp_path)


def test_a_choice_of_methods() -> None:
    rotary = Rotary(64, 10000.0, 256)

    def expand(methods: list[Any], factors: list[float]) -> list[RopeMethod]:
        choice = MethodChoice(method=methods, factor=factors)
        return list(dict.fromkeys(method for method, _ in over_rotary(choice, rotary, 1024)))

    found = expand(["yarn", "dynamic-ntk", "dynamic", Yarn(factor=2.0)], [2.0, 4.0])
    assert [label(m.to_dict()) for m in found] == [
        *("yarn x2", "yarn x4", "dynamic-ntk paper", "dynamic-ntk hf x2", "dynamic-ntk hf x4")
    ]
    with pytest.raises(rope.MethodError, match="Did you mean 'yarn'"):
        expand(["yran"], [2.0])
    with pytest.raises(rope.MethodError, match="longrope needs"):
        expand(["longrope"], [2.0])


def test_without_a_factor_each_length_gets_the_one_it_needs() -> None:
    """The model is for 64 tokens."""
    question, methods = run_kind("perplexity").fit(
        Sweep(lengths=[128, 256]), build("llama"), MethodChoice(method=METHODS)
    )
    assert question.lengths == (64, 128, 256)
    assert [m.label() for m in methods] == ["ntk x2", "ntk x4", "yarn x2", "yarn x4", "dynamic-yarn"]
    _, given = run_kind("perplexity").fit(
        Sweep(lengths=[64, 256]), build("llama"), MethodChoice(method="yarn", factor=8)
    )
    assert [m.label() for m in given] == ["yarn x8"]


def losses(*nats: float) -> list[DocumentLoss]:
    return [DocumentLoss(str(i), n, 10, 10, 1) for i, n in enumerate(nats)]


def test_difference_is_paired() -> None:
    setting = Setting("matched", 5, 256, False, 0)
    one = PerplexityRuns().result(None, setting, (64,), losses(*(10 + 5 * i + 1 for i in range(9))))
    two = PerplexityRuns().result(None, setting, (64,), losses(*(10 + 5 * i for i in range(9))))
    assert difference(one, two)[:3] == pytest.approx((0.1, 0.1, 0.1))  # however far the documents are apart
    assert one.high is not None
    assert one.low is not None
    assert one.high - one.low > 0.5
    with pytest.raises(ValueError, match="same scored tokens"):
        difference(one, PerplexityRuns().result(None, setting, (64,), losses(1.0)))


def test_results_do_not_depend_on_the_order_of_documents() -> None:
    setting = Setting("matched", 5, 256, False, 0)
    found = losses(*(math.pi * 10**i for i in range(-8, 8)))
    one, other = (PerplexityRuns().result(None, setting, (64,), each) for each in (found, found[::-1]))
    assert one == other


@pytest.mark.slow
def test_the_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    found = run(tmp_path)
    write_files(found)
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "data:image" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert 'name="viewport"' in page
    for result in found.results:
        assert label(result.method) in page
        assert perplexity_text(result.perplexity) in page
    assert found.settings["weights"] in page
    write_files(found)
    with (found.folder / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_nats"]) for row in rows] == [r.loss for r in found.results]
    assert json.loads(rows[-1]["parameters"])["method"] == "dynamic-yarn"


@pytest.mark.slow
def test_names_are_escaped_in_the_report(tmp_path: Path) -> None:
    found = run(tmp_path, data="<script>alert(1)</script>")
    write_files(found)
    assert "<script" not in (found.folder / "report.html").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rope.FileError, match="is not the folder of a run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(rope.FileError, match="does not describe a run"):
        read_run(tmp_path)


@pytest.mark.slow
def test_perplexity_from_python_continues_the_run_of_a_sweep(tmp_path: Path) -> None:
    swept = run(tmp_path, methods=["ntk"], factors=[2.0])
    read: list[int] = []
    model = rope.patch(build("llama"), "yarn", factor=2.0)
    options: dict[str, Any] = {"lengths": LENGTHS, "bos": False, "out": tmp_path, "progress": read.append}
    results = perplexity(model, corpus(), **options)
    assert results == perplexity(model, corpus(), lengths=LENGTHS, bos=False)
    assert [folder.name for folder in tmp_path.iterdir()] == [swept.folder.name]
    assert {label(r.method) for r in read_run(swept.folder).results} == {"unpatched", "ntk x2", "yarn x2"}
    assert "yarn x2" in (swept.folder / "report.html").read_text(encoding="utf-8")
    once = len(read)
    assert perplexity(model, corpus(), **options) == results
    assert len(read) == once > 0


@pytest.mark.slow
def test_passkey_from_python_writes_and_continues_a_run(tmp_path: Path) -> None:
    model = build("llama", vocab_size=259)
    read: list[int] = []
    options: dict[str, Any] = {
        **{"lengths": [128], "depths": [0, 1], "trials": 2, "distractors": 3, "task": "key-value"},
        **{"tokenizer": ByT5Tokenizer(extra_ids=0), "haystack": [Document("hay", "some text " * 50)]},
    }
    results = passkey(model, **options, out=tmp_path, progress=read.append)
    assert results == passkey(model, **options)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} >= {
        *("run.json", "records.0.jsonl", "results.json", "results.csv", "report.html", "passkey.png")
    }
    assert read == [128] * 4
    assert passkey(model, **options, out=tmp_path, progress=read.append) == results
    assert read == [128] * 4


@pytest.mark.slow
def test_progress_is_a_bar_of_tqdm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = build("llama")
    text = [Tokens("d", torch.arange(200) % 80 + 3, tuple(range(1, 201)))]
    options: dict[str, Any] = {"lengths": [64, 128], "bos": False, "progress": True}
    perplexity(model, text, **options)
    assert "192/192" in capsys.readouterr().err
    for _ in range(2):  # the second time everything is there
        sweep(model, text, methods=["ntk", "dynamic-yarn"], factors=[2.0], out=tmp_path, **options)
        assert "576/576" in capsys.readouterr().err
    passkey(
        build("llama", vocab_size=259), lengths=[128], depths=[0], trials=2, distractors=3, task="key-value",
        tokenizer=ByT5Tokenizer(extra_ids=0), haystack=[Document("hay", "some text " * 50)], progress=True,
    )  # fmt: skip
    assert "256/256" in capsys.readouterr().err

"""`run`: every kind of run again from the file that it left, bit for bit; what options override; mistakes in files."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rope_ext_hf.cli.app import app
from rope_ext_hf.cli.dataclass_options import options_of
from rope_ext_hf.plug_ins import plug_in_names
from rope_ext_hf.runs.folder.run_file import read_run_files
from tests.support.commands import run
from tests.support.inputs import write_inputs

TEXT = ("--data", "texts/*.txt", "--device", "cpu")
HAY = ("--haystack", "texts/*.txt", "--device", "cpu")
KINDS: dict[str, tuple[str, ...]] = {
    "ppl": (*TEXT, "--lengths", "32,64,128", "--method", "yarn", "--factor", "2", "--beta-fast", "16"),
    "sweep": (*TEXT, "--lengths", "64,128", "--method", "linear,ntk", "--max-spans", "4", "--dtype", "bfloat16"),
    "passkey": (*HAY, "--lengths", "128,256", "--task", "key-value", "--depths", "0,1", "--trials", "2"),
}
"""A small run of each kind, of the model in the folder "model"."""
PASSING = {"seconds", "cpu_seconds", "tokens_per_second", "cost", "crc", "checksum"}
"""Keys of what differs from run to run: clocks, and the digest of a file that has them."""


def asking() -> dict[str, Callable[..., Any]]:
    """The commands that ask a question of their own name."""
    functions = {command.name: command.callback for command in app.registered_commands}
    plain = {name: inspect.unwrap(each) for name, each in functions.items() if name and each}
    return {name: each for name, each in plain.items() if name in (one.command for one in options_of(each))}


def test_every_kind_has_a_case() -> None:
    assert asking().keys() - {*plug_in_names("commands")} == KINDS.keys()


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in PASSING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def measured(folder: Path) -> dict[str, Any]:
    """What the runs below a folder found, by file: JSON without clocks, and digests of weights."""
    found: dict[str, Any] = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix in (".json", ".jsonl") and not name.startswith("model") and "chunk" not in name:
            found[name] = [lasting(json.loads(line)) for line in json_lines(file)]
        elif file.suffix == ".safetensors":
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def json_lines(file: Path) -> list[str]:
    text = file.read_text()
    return text.splitlines() if file.suffix == ".jsonl" else [text]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*would load .* and run another model:UserWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.thorough] * (each == "sweep")) for each in KINDS]
)
def test_the_file_of_a_run_repeats_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_repeated(kind, KINDS[kind], tmp_path, monkeypatch)


def check_repeated(
    kind: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *again_with: str
) -> None:
    """A run from the file that a run left must give the same results, bit for bit."""
    (once := tmp_path / "once").mkdir()
    write_inputs(once)
    shutil.copytree(once, again := tmp_path / "again")
    monkeypatch.chdir(once)
    code, _, err = run(kind, "model", *options)
    assert code == 0, err
    files = sorted(once.rglob("run.yaml"), key=lambda path: len(path.parts))
    file = next(each for each in files if read_run_files(each)[0].command == kind)
    monkeypatch.chdir(again)
    code, _, err = run("run", file, *again_with)
    assert code == 0, err
    first, second = measured(once), measured(again)
    assert len(first) > 3, first
    assert second == first
    assert read_run_files(again / file.relative_to(once)) == read_run_files(file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_text_or_model_is_not_measured_unasked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_changes_are_refused(kind, KINDS[kind], tmp_path, monkeypatch)


def check_changes_are_refused(
    kind: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *again_with: str
) -> None:
    """A run file must not be repeated in silence once its model, or its text if it names one, has changed."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, err = run(kind, "model", *options)
    assert code == 0, err
    files = sorted(tmp_path.rglob("run.yaml"), key=lambda path: len(path.parts))
    file = next(each for each in files if read_run_files(each)[0].command == kind)
    file = Path(shutil.copy(file, tmp_path / "repeated.yaml"))
    out = ["--out", "again"]
    if kind == "extend":  # it refuses a folder of its own that another model was patched into
        out = []
        shutil.rmtree(tmp_path / "model-128")
    runs = {each.parent for each in tmp_path.rglob("run.yaml")}

    def refused(name: str) -> None:
        code, _, err = run("run", file, *again_with, *out)
        assert code == 2, err
        assert f"{name} changed since this run file was written" in err.replace(" (weights, config or adapter)", "")
        assert {each.parent for each in tmp_path.rglob("run.yaml")} == runs

    if {"--data", "--haystack"} & {*options}:
        before = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "texts").iterdir()}
        for path, text in before.items():
            path.write_text(text.replace("return", "yield"), encoding="utf-8")
        refused("the text")
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")
    weights = tmp_path / "model" / "model.safetensors"
    changed = load_file(weights)
    changed["model.norm.weight"] = changed["model.norm.weight"] * 1.01
    save_file(changed, weights, metadata={"format": "pt"})
    refused("the model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the same command was run before", UserWarning)
        code, _, err = run("run", file, *again_with, *out, "--accept-changes")
    assert code == 0, err


@pytest.mark.slow
def test_inputs_that_options_override_are_said_not_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("ppl", "model", *KINDS["ppl"])[0] == 0
    (file,) = tmp_path.rglob("run.yaml")
    (tmp_path / "texts" / "0.txt").write_text("x" * 1000, encoding="utf-8")
    code, _, err = run("run", file, "--max-spans", "2")
    assert code == 0, err
    assert "the text is not compared with that of the run file, because of --max-spans" in err
    assert "the model is not compared" not in err
    code, _, err = run("run", file, "--method", "ntk", "--out", "again")
    assert code == 2
    assert "the text changed" in err
    code, _, err = run("run", file, "--max-spans", "2", "--dtype", "bfloat16", "--out", "again")
    assert code == 0, err
    assert "the model is not compared with that of the run file, because of --dtype" in err


BY_HAND = """\
run: ppl
model: nowhere

lengths: 32
data: texts/*.txt
max_spans: 2
method: yarn
target-length: 128
beta_fast: 16
device: cpu
"""


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and texts, and a run file written by hand, in the folder that commands run in."""
    write_inputs(tmp_path)
    (tmp_path / "by-hand.yaml").write_text(BY_HAND)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_options_override_a_file(inputs: Path) -> None:
    code, out, err = run("run", "by-hand.yaml", "--model", "model", "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [(each["method"] or {}).get("beta_fast") for each in results] == [None, 16]
    code, out, err = run(
        "run", "by-hand.yaml", "--model=model", "--json", "-m", "linear", "--factor", "4", "--lengths", "16"
    )
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [each["length"] for each in results] == [16, 16]
    assert results[1]["method"] == {"method": "linear", "factor": 4.0}
    (inputs / "unnamed.yaml").write_text(BY_HAND.replace("texts/*.txt", "{in_memory: documents}"))
    assert run("run", "unnamed.yaml", "--model", "model", "--data", "texts/*.txt")[0] == 0
    code, out, err = run("run", "by-hand.yaml", "--model", "model", "--json", "--beta-fast", "8")
    assert json.loads(out)["results"][1]["method"]["beta_fast"] == 8


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lenghts: 64", "line 4: a run file for ppl has no key 'lenghts'. Did you mean 'lengths'?"),
        ("beta_fats: 64", "line 4: a run file for ppl has no key 'beta_fats'. Did you mean 'beta_fast'?"),
        ("lengths: 4x", "line 4: not a length in tokens: '4x'; write 4096, 4k or 1M"),
        ("lengths: 64\nstride: 0", "line 5: stride must be a whole number of at least 1, got 0"),
        ("lengths: 64\nstride: many", "line 5: stride must be a whole number of at least 1, got 'many'"),
        ("lengths: 64\nbos: 3", "line 5: bos must be true or false, got 3"),
        ("lengths: 64\nrun: ppl", "line 5: 'run' is given twice, first in line 1"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence_with_its_line(inputs: Path, line: str, said: str) -> None:
    (inputs / "by-hand.yaml").write_text(BY_HAND.replace("lengths: 32", line))
    code, out, err = run("run", "by-hand.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("rope-ext: 'by-hand.yaml', ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "typed", "said"),
    [
        ("run: pppl\nmodel: model", (), "line 1: no such run: 'pppl'. Did you mean 'ppl'? Known runs: ppl, sweep"),
        ("run: patch\nmodel: model", (), "line 1: no such run: 'patch'"),
        ("run: ppl\nmodel: {in_memory: a model}\nlengths: 8", (), "line 2: the model was a model; save it"),
        ("run: ppl\nmodel: null\nlengths: 8", (), "line 2: the model has no name; save it"),
        (
            "run: ppl\nmodel: a\ndata: {in_memory: documents}",
            (),
            "line 3: data was in memory, under the name 'documents'; give it again: --data",
        ),
        ("", (), "describes no run"),
        (BY_HAND, ("--lenghts", "8"), "no such option: --lenghts. Did you mean '--lengths'?"),
        (BY_HAND, ("--model",), "--model takes a folder"),
        (BY_HAND, (), "'nowhere' is neither a folder here nor a model"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(inputs: Path, text: str, typed: tuple[str, ...], said: str) -> None:
    (inputs / "given.yaml").write_text(text)
    code, out, err = run("run", "given.yaml", *typed)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_no_file_is_one_line(tmp_path: Path) -> None:
    code, _, err = run("run", tmp_path / "none.yaml")
    assert code == 2
    assert "none.yaml" in err
    assert err.count("\n") == 1
    assert run("run")[0] == 2


@pytest.mark.parametrize("typed", [("--help",), ("by-hand.yaml", "--lengths", "4k", "--help")])
def test_help_is_that_of_run(typed: tuple[str, ...]) -> None:
    assert "Repeat a run" in run("run", *typed)[1]

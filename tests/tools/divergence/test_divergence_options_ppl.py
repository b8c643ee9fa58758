"""`ppl --store-states` and `ppl --against`, on the bundled model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.errors import size_text
from tests.support.commands import run, run_json

STORED = ("ppl", "reference", "--lengths", "128,256", "--max-spans", "3", "--dtype", "float32")


def stored(out: Path, *options: str) -> Path:
    """The folder of a run with stored states."""
    run_json(*STORED, *options, "--store-states", "model", "--out", out)
    (folder,) = out.glob("*-perplexity-*")
    return folder


@pytest.mark.slow
def test_a_model_is_compared_shown_and_repeated(tmp_path: Path) -> None:
    folder = stored(tmp_path / "stored", "--method", "yarn", "--factor", "4")
    against: tuple[Any, ...] = ("ppl", "reference", "--against", folder, "--out", tmp_path / "runs")
    same = run_json(*against, "--dtype", "float32", "--lengths", "256")
    (result,) = same["results"]
    assert result["length"] == 256
    assert result["kl"] == pytest.approx(0, abs=1e-6)
    assert result["same_likeliest"] == 1.0
    narrow = run_json(*against, "--dtype", "bfloat16")
    assert all(1e-6 < each["kl"] < 1e-2 for each in narrow["results"])
    yarn = run_json(*against, "--against-method", "yarn x4", "--dtype", "float32", "--method", "yarn", "--factor", "4")
    by_method = {(each["method"] or {}).get("method"): each["kl"] for each in yarn["results"] if each["length"] == 256}
    assert by_method["yarn"] == pytest.approx(0, abs=1e-6)
    assert by_method[None] > 1e-3

    (found,) = [path for path in (tmp_path / "runs").iterdir() if "bfloat16" in (path / "run.yaml").read_text()]
    assert run_json("run", found)["results"] == narrow["results"]
    assert run_json("report", found)["results"] == narrow["results"]
    code, out, _ = run("report", found)
    assert not code
    assert "same likeliest token" in out
    assert "KL divergence of the unpatched model from reference in float32 (unpatched)" in " ".join(out.split())


@pytest.mark.slow
def test_the_size_of_states_is_told_before(tmp_path: Path) -> None:
    plain = run_json(*STORED, "--out", tmp_path, "--dry-run")
    assert plain["disk"] == 0
    code, _, err = run(*STORED, "--store-states", "model", "--out", tmp_path / "stored")
    assert code == 0, err
    (folder,) = (tmp_path / "stored").iterdir()
    size = sum(path.stat().st_size for path in (folder / "states").iterdir())
    told = run_json(*STORED, "--store-states", "model", "--out", tmp_path, "--dry-run")["disk"]
    assert told == pytest.approx(size, rel=0.05)
    assert f"writes   {size_text(told)} of hidden states into {tmp_path / 'stored'}" in " ".join(err.split("\n"))


REFUSED = {
    ("--against", "F", "--data", "stdlib"): "--data: text, protocol and targets are those of the run that --against",
    ("--against", "F", "--max-spans", "64"): "leave out --max-spans",
    ("--against", "F", "--store-states", "model"): "leave out --store-states",
    ("--against-method", "yarn x4", "--lengths", "1k"): "give --against, too",
    ("--max-spans", "2"): "--lengths is missing: give the context lengths in tokens, e.g. --lengths 4k,8k",
    ("--lengths", "1k", "--store-states", "int8"): "--store-states must be 'model' or 'float16' or 'float32'",
}


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...]) -> None:
    code, out, err = run("ppl", "reference", *options)
    assert code == 2
    assert out == ""
    assert REFUSED[options] in " ".join(err.split())


@pytest.mark.slow
def test_a_run_that_stores_and_compares_nothing_imports_none_of_it(tmp_path: Path) -> None:
    command = ["ppl", "reference", "--lengths", "64", "--max-spans", "1", "--out", str(tmp_path)]
    code = (
        f"import sys; from rope_ext_hf.cli.app import main; sys.argv[1:] = {command!r}\n"
        "try: main()\n"
        "finally: assert not [name for name in sys.modules if name.startswith('rope_ext_hf.tools.divergence')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("*-perplexity-*"))) == 1


def test_an_engine_gives_no_states(tmp_path: Path) -> None:
    code, _, err = run(*STORED, "--store-states", "model", "--engine", "vllm", "--out", tmp_path)
    assert code == 2
    assert "need last hidden states, which an engine does not give; leave out --engine" in " ".join(err.split())
    assert not list(tmp_path.iterdir())

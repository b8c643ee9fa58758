"""A command that was run before and begins anew says so, with the reason; a command that continues says nothing."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rope_ext_hf.eval import perplexity
from rope_ext_hf.files.whole import with_tilde
from tests.support.inputs import write_inputs


def measure() -> Path:
    results = perplexity("model", "texts/*.txt", lengths=[64, 128], max_spans=2, out="runs")
    return results.run.folder


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, beside the model and texts that it read."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return measure()


def test_another_number_of_threads_is_said_with_the_way_back(first: Path) -> None:
    threads = torch.get_num_threads()
    other = 1 if threads > 1 else 2
    torch.set_num_threads(other)
    try:
        said = re.escape(f"({threads} there, {other} now) changed. OMP_NUM_THREADS={threads} continues that run")
        with pytest.warns(UserWarning, match=f"in '{first}'.*the number of threads {said}"):
            second = measure()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert measure() == second  # continued, so nothing to say
    finally:
        torch.set_num_threads(threads)
    assert measure() == first


def test_what_changed_is_named(first: Path, tmp_path: Path) -> None:
    (tmp_path / "texts" / "0.txt").write_text("another text. " * 90, encoding="utf-8")
    with pytest.warns(UserWarning, match="begins anew, because the text changed$"):
        measure()
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="because the model changed$"):  # of two runs, the one that differs less
        measure()


def test_another_release_of_a_package_is_named(first: Path) -> None:
    path = first / "run.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["versions"]["transformers"] = "4.0"
    path.write_text(json.dumps(settings), encoding="utf-8")
    moved = first.rename(first.with_name(first.name[:-10] + "0123456789"))  # where that release would have written
    with pytest.warns(UserWarning, match=f"in '{moved}'.*because the version of transformers changed$"):
        measure()


def test_other_options_texts_in_memory_and_damaged_runs_are_no_reason_to_warn(first: Path) -> None:
    (first / "run.json").write_text("[", encoding="utf-8")
    for texts in ("one text. ", "another text. "):
        perplexity("model", [texts * 90], lengths=64, max_spans=2, out="runs")
    perplexity("model", "texts/*.txt", lengths=64, max_spans=2, out="runs")


def test_files_of_a_run_have_a_tilde_for_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model, texts, out = (str(tmp_path / name) for name in ("model", "texts/*.txt", "runs"))
    folder = perplexity(model, texts, lengths=64, max_spans=2, out=out).run.folder
    written = [path for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".html", ".csv", ".jsonl")]
    assert len(written) >= 5
    for path in written:
        assert str(tmp_path) not in path.read_text(encoding="utf-8"), path.name
    assert "model: ~/model" in (folder / "run.yaml").read_text(encoding="utf-8")
    monkeypatch.setenv("HOME", "/")
    assert with_tilde("/srv/model") == "/srv/model"

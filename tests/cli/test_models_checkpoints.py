"""`convert` and `detect` on the bundled model, against the order of rows worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rope_ext_hf.reference import path
from tests.support.commands import run, run_json

HEADS = {"q_proj": 4, "k_proj": 2}


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("converted") / "interleaved"
    said = run_json("convert", "reference", folder, "--to", "interleaved", "--verify")
    assert (said["source"], said["to"], said["converted"]) == ("half", "interleaved", 10)  # of 5 layers
    assert "logits of both folders: identical" in said["verified"]
    return folder


def test_rows_of_queries_and_keys_alternate_and_all_else_stays(interleaved: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (path(), interleaved))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        heads = next((count for part, count in HEADS.items() if f"{part}.weight" in name), 0)
        if heads:
            first, second = tensor.reshape(heads, 2, -1, tensor.shape[-1]).unbind(1)
            tensor = torch.stack([first, second], dim=2).reshape(tensor.shape)
        assert torch.equal(after[name], tensor), name


def test_there_and_back_is_the_same_file(interleaved: Path, tmp_path: Path) -> None:
    assert run("convert", interleaved, tmp_path / "back", "--to", "half")[0] == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (path() / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_pairing_is_found_by_the_weights_and_by_a_text(interleaved: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 20)
    for model, pairing, other in (("reference", "half", "interleaved"), (interleaved, "interleaved", "half")):
        said = run_json("detect", model, "--text", tmp_path / "text.txt")
        assert (said["pairing"], said["text"]["pairing"]) == (pairing, pairing)
        assert said["text"][pairing] < said["text"][other]
        assert all(layer[pairing] > layer[other] for layer in said["layers"])
        assert run("detect", model)[1].splitlines()[0].split()[1] == f"{pairing},"


def test_weights_that_are_in_that_pairing_already_are_converted_by_force_alone(tmp_path: Path) -> None:
    code, _, err = run("convert", "reference", tmp_path / "new", "--to", "half")
    assert (code, "half pairing already" in err, "--from interleaved" in err) == (2, True, True)
    assert not (tmp_path / "new").exists()
    said = run_json("convert", "reference", tmp_path / "new", "--to", "half", "--force")
    assert said["source"] == "interleaved"
    assert (tmp_path / "new" / "model.safetensors").read_bytes() != (path() / "model.safetensors").read_bytes()


def test_a_folder_that_exists_is_left_alone(interleaved: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in interleaved.iterdir()}
    code, _, err = run("convert", "reference", interleaved, "--to", "interleaved")
    assert (code, "exists already" in err) == (2, True)
    assert before == {file.name: file.stat().st_mtime_ns for file in interleaved.iterdir()}

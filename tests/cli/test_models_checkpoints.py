"""`convert` and `detect` on the bundled model, against the order of rows worked out by hand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rope_ext_hf as rope
from rope_ext_hf.reference import path
from tests.support.checkpoint_folders import watch_reads
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


# --- folders whose config contradicts their weights -----------------------------------------------------------------


@pytest.fixture(params=[None, "half"], ids=["the family says half", "the config says half"])
def mislabelled(interleaved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with interleaved rows under a config that says half."""
    folder = shutil.copytree(interleaved, tmp_path / "mislabelled folder")
    config = json.loads((path() / "config.json").read_text())
    stated = {} if request.param is None else {"rope_pairing": request.param}
    (folder / "config.json").write_text(json.dumps(config | stated))
    return folder


def printed_call(text: str) -> list[str]:
    """Return the words after `rope-ext` of the first call of a conversion in an output."""
    [line] = re.findall(r"`rope-ext (convert .*?)`", " ".join(text.split()))
    return shlex.split(line)


def test_detect_prints_the_command_that_mends_a_mislabelled_folder(mislabelled: Path, tmp_path: Path) -> None:
    code, out, _ = run("detect", mislabelled)
    assert (code, "contradiction" in out) == (1, True)
    new = tmp_path / "mended"
    assert run(*(new if word == "NEW" else word for word in printed_call(out)))[0] == 0
    assert (new / "model.safetensors").read_bytes() == (path() / "model.safetensors").read_bytes()
    assert run("detect", new)[0] == 0
    assert printed_call(run_json("detect", mislabelled, code=1)["remedy"]) == printed_call(out)


def test_folders_that_say_what_they_are_need_no_remedy(interleaved: Path) -> None:
    for folder in (interleaved, path()):
        assert run_json("detect", folder)["remedy"] is None


def test_a_wrong_statement_is_mended_in_the_config(tmp_path: Path) -> None:
    folder = shutil.copytree(path(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_pairing": "interleaved"}))
    remedy = run_json("detect", folder, code=1)["remedy"]
    assert 'write "rope_pairing": "half" into their config.json' in remedy
    (folder / "config.json").write_text(json.dumps(config | {"rope_pairing": "half"}))
    assert run("detect", folder)[0] == 0


def test_a_folder_in_metas_format_with_half_paired_rows(tmp_path: Path) -> None:
    made = run("convert", "reference", tmp_path / "meta", "--to", "meta", "--from", "interleaved")  # leaves the rows
    code, out, _ = run("detect", tmp_path / "meta")
    assert (made[0], code) == (0, 1)
    refused, _, err = run("convert", tmp_path / "meta", tmp_path / "no", "--to", "half")
    assert (refused, printed_call(err.partition("If they")[0])[3:]) == (2, ["--to", "half", "--from", "half"])
    new = tmp_path / "mended"
    assert run(*(new if word == "NEW" else word for word in printed_call(out)))[0] == 0
    mended, expected = (load_file(folder / "model.safetensors") for folder in (new, path()))
    assert mended
    assert all(torch.equal(mended[name], expected[name]) for name in mended)


def test_a_live_model_is_mended_by_a_call(mislabelled: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(mislabelled)
    remedy = rope.detect_pairing(model).remedy
    assert "`rope.convert(model, to='half', source_pairing='interleaved')`" in str(remedy)
    assert rope.detect_pairing(rope.convert(model, to="half", source_pairing="interleaved")).remedy is None


@pytest.mark.parametrize(
    "command",
    [
        ("patch", "--method", "yarn", "--factor", "2", "--out"),
        ("extend", "--target-length", "512", "--no-measure", "--yes", "--out"),
    ],
    ids=["patch", "extend"],
)
def test_a_mislabelled_folder_is_not_patched(command: tuple[str, ...], mislabelled: Path, tmp_path: Path) -> None:
    name, *options = command
    code, _, err = run(name, mislabelled, *options, tmp_path / "out")
    assert (code, "look interleaved" in err, "says half" in err) == (2, True, True)
    assert printed_call(err) == ["convert", str(mislabelled), "NEW", "--to", "half", "--from", "interleaved"]
    assert not (tmp_path / "out").exists()


def test_a_mislabelled_folder_is_patched_by_force(mislabelled: Path, tmp_path: Path) -> None:
    assert run("patch", mislabelled, tmp_path / "out", "--method", "yarn", "--factor", "2", "--force")[0] == 0
    copied, before = (folder / "model.safetensors" for folder in (tmp_path / "out", mislabelled))
    assert copied.read_bytes() == before.read_bytes()


def test_patch_reads_a_few_layers_of_queries_and_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = watch_reads(monkeypatch)
    assert run("patch", "reference", tmp_path / "out", "--method", "yarn", "--factor", "2")[0] == 0
    assert {name.rsplit(".", 2)[1] for name in names} == {"q_proj", "k_proj", "input_layernorm"}


# --- Meta's format is converted, and nothing else -------------------------------------------------------------------


def test_commands_that_do_not_read_metas_format_name_convert(tmp_path: Path) -> None:
    assert run("convert", "reference", tmp_path / "meta", "--to", "meta")[0] == 0
    (tmp_path / "text.txt").write_text("some words " * 100)
    for typed in (
        ("describe", tmp_path / "meta"),
        ("patch", tmp_path / "meta", tmp_path / "out", "--method", "yarn", "--factor", "2"),
        ("ppl", tmp_path / "meta", "--lengths", "16", "--data", tmp_path / "text.txt", "--out", tmp_path / "results"),
        ("extend", tmp_path / "meta", "--target-length", "512", "--no-measure", "--yes", "--out", tmp_path / "out"),
    ):
        code, _, err = run(*typed)
        assert (code, "Meta's own format" in err) == (2, True), err
        assert printed_call(err) == ["convert", str(tmp_path / "meta"), "NEW", "--to", "hf"]
    assert run("convert", tmp_path / "meta", tmp_path / "new", "--to", "hf")[0] == 0
    assert run("describe", tmp_path / "new")[0] == 0

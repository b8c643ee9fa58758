"""The folder of a training, and the split of its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import FileError
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reference import path as reference
from rope_ext_hf.runs.folder.identity import digest_inputs
from rope_ext_hf.tools.training.run_folder import open_run, read_checked, save_model, saving, write_checked
from rope_ext_hf.tools.training.texts import cut, split
from tests.support.models import build


def document(name: str, length: int) -> Tokens:
    return Tokens(name, torch.arange(length), tuple(range(2, 2 * length + 2, 2)))


def test_what_is_measured_is_not_worked_on() -> None:
    many = [document(str(index), 5) for index in range(200)]
    training, held_out = split(many, 10)
    assert {each.name for each in training} | {each.name for each in held_out} == {each.name for each in many}
    assert not {each.name for each in training} & {each.name for each in held_out}
    assert 8 <= len(held_out) <= 40
    (first,), (last,) = split([document("one", 95)], 10)
    assert torch.equal(torch.cat((first.ids, last.ids)), torch.arange(95))
    assert (len(last.ids), last.ends[0], last.bytes_between(0, 9)) == (9, 2, 18)


def test_a_cut_counts_its_bytes_from_its_own_start() -> None:
    part = cut(document("one", 10), 4, 7)
    assert (part.name, part.ids.tolist(), part.ends) == ("one", [4, 5, 6], (2, 4, 6))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_model_that_the_disk_does_not_take_is_one_error(tmp_path: Path) -> None:
    """torch raises a RuntimeError about positions in the file."""
    with pytest.raises(FileError, match=r"a model could not be written in .*, where .* are free"), saving(tmp_path):
        torch.save({"weight": torch.zeros(100_000)}, "/dev/full")


INPUTS = {"the model": "0", "the text": "1"}


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {"seed": 0, "minutes": 1.0, "lengths": (1, 2)}, INPUTS)
    open_run(tmp_path / "run", {"seed": 0, "minutes": 1.0, "lengths": (1, 2)}, INPUTS)
    with pytest.raises(FileError, match="holds a run with other settings: seed;"):
        open_run(tmp_path / "run", {"seed": 1, "minutes": 1.0, "lengths": (1, 2)}, INPUTS)
    with pytest.raises(FileError, match="the model and the text changed since the run in"):
        open_run(tmp_path / "run", {"seed": 0, "minutes": 1.0, "lengths": (1, 2)}, {"the model": "2", "the text": "2"})


@pytest.mark.parametrize("content", ["", "{}", '{"settings": {}, "inputs": {}}', '{"settings": 3, "checksum": "0"}'])
def test_settings_that_changed_or_are_lost_are_refused(content: str, tmp_path: Path) -> None:
    open_run(tmp_path, {"seed": 0}, INPUTS)
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(FileError, match=r"settings\.json"):
        open_run(tmp_path, {"seed": 0}, INPUTS)
    (tmp_path / "settings.json").unlink()
    (tmp_path / "checkpoints of trained").mkdir()
    with pytest.raises(FileError, match=r"settings\.json is lost"):
        open_run(tmp_path, {"seed": 0}, INPUTS)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(FileError, match="could not be read or written"):
        open_run(tmp_path / "run", {}, INPUTS)


def test_inputs_are_told_apart(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference())
    texts = [document("one", 5)], [document("two", 6)]
    before = digest_inputs(build("llama"), tokenizer, *texts)

    def changed(*given: Any) -> list[str]:
        now = digest_inputs(*given)
        return [name.partition(" (")[0] for name in before if now[name] != before[name]]

    assert changed(build("llama"), AutoTokenizer.from_pretrained(reference()), *texts) == []
    other = build("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert changed(other, tokenizer, *texts) == ["the model"]
    assert changed(build("llama", rms_norm_eps=0.1), tokenizer, *texts) == ["the model"]
    assert changed(build("llama"), tokenizer, [], [*texts[0], *texts[1]]) == ["the text"]
    tokenizer.add_tokens(["<more>"])
    assert changed(build("llama"), tokenizer, *texts) == ["the tokenizer"]


def test_what_is_read_again_is_what_was_written(tmp_path: Path) -> None:
    write_checked(tmp_path / "a.json", {"loss": 1.5, "names": ("a", "b")})
    assert read_checked(tmp_path / "a.json") == {"loss": 1.5, "names": ["a", "b"]}
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("1.5", "1.4"))
    with pytest.raises(FileError, match="is damaged: it changed since it was written"):
        read_checked(tmp_path / "a.json")


def test_a_saved_model_replaces_one_of_before_and_warnings_name_its_folder(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "half of another").write_text("")
    model = rope.patch(build("llama"), "longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=4.0)
    with pytest.warns(UserWarning, match="would load '.*/model' without an error and run another model"):
        save_model(model, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "half of another").exists()
    assert rope.fingerprint(tmp_path / "model").differences(rope.fingerprint(model)) == []

"""The folder of a training or a search, and which text is kept for measuring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rope_ext_hf.errors import FileError
from rope_ext_hf.eval.documents import Tokens
from rope_ext_hf.training.run_folder import cut, open_run, saving, split


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
    part = cut(document("one", 10), 4, 7, "its middle")
    assert (part.name, part.ids.tolist(), part.ends) == ("its middle", [4, 5, 6], (2, 4, 6))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_model_that_the_disk_does_not_take_is_one_error(tmp_path: Path) -> None:
    """torch raises a RuntimeError about positions in the file."""
    with pytest.raises(FileError, match=r"a model could not be written in .*, where .* are free"), saving(tmp_path):
        torch.save({"weight": torch.zeros(100_000)}, "/dev/full")


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    open_run(tmp_path / "run", {"seed": 0, "minutes": 1.0})
    open_run(tmp_path / "run", {"seed": 0, "minutes": 2.0}, may_differ=("minutes",))
    with pytest.raises(FileError, match="could not be read or written"):
        open_run(tmp_path / "run" / "settings.json", {"seed": 0})
    with pytest.raises(FileError, match="holds a run with other settings: seed;"):
        open_run(tmp_path / "run", {"seed": 1, "minutes": 2.0}, may_differ=("minutes",))

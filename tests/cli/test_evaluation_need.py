"""`need` and `advise --need` through the command line: the bundled model from the first question to the advice."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf import hub
from rope_ext_hf.cli.app import app
from rope_ext_hf.cli.evaluation import reach_in
from rope_ext_hf.errors import FileError, MethodError
from rope_ext_hf.eval import needs
from rope_ext_hf.hub import model_folder, source_digest


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return shutil.copytree(model_folder("reference"), tmp_path / "mine", ignore=shutil.ignore_patterns("*.py*"))


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.stdout, result.stderr


def leave(folder: Path, digest: str, **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    found = {"digest": digest, "lengths": [256, 384, 512], "reads_to": 512}
    (folder / "need.json").write_text(json.dumps(found | values))
    return folder


@pytest.mark.thorough
def test_the_bundled_model_from_the_question_to_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/choosing.md: as loaded it loses 2 bits per byte at twice the length."""
    monkeypatch.setattr(needs, "_PROMPTS", (8, 8))
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        lines = (f"value_{name}{i} = compute_{name}({i}, {i * 37 % 101})" for i in range(40))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    out, err = run("need", "reference", "--target-length", "384", "--data", "*.txt")
    assert "reading the same tokens at every length" in err
    assert err.count("\nrun      ") > 1, "each part says where it is kept"
    assert "\nread     " in err
    assert re.search(r"key-value, answered +\d+% +\d+%", out)
    assert "As it is, it reads to 256 tokens. At 384 tokens the loss is higher by" in out
    assert "For 384 tokens it needs extending." in out
    assert out.endswith("\n  rope-ext advise reference --target-length 384\n")
    folder = f"rope-ext-results/need-reference-{source_digest('reference')[:10]}"
    found = json.loads((tmp_path / folder / "need.json").read_text())
    assert (found["reads_to"], found["outcome"], found["lengths"]) == (256, "worse", [256, 384])
    assert reach_in(Path(folder), "reference") == 256
    advice, _ = run(*shlex.split(out.splitlines()[-1])[1:], "--need", folder)
    assert "384" in advice
    assert "what `rope-ext need` measured" not in advice  # no more than its context length


@pytest.mark.slow
def test_advice_takes_what_was_measured_of_the_same_model(reference: Path, tmp_path: Path) -> None:
    folder = leave(tmp_path / "need", source_digest(reference))
    asked = ("advise", str(reference), "--target-length", "512", "--need", str(folder))
    out, _ = run(*asked)
    assert "No method is needed" in out
    assert "what `rope-ext need` measured" in out
    (reference / "config.json").write_text((reference / "config.json").read_text().replace("10000.0", "20000.0"))
    out, err = run(*asked)
    assert out == ""
    assert "was not measured of" in err


@pytest.mark.parametrize("reads_to", ["512", 0, True, 10**30, 300, -1, 0.5, [512]])
def test_impossible_lengths_are_refused(tmp_path: Path, reads_to: object) -> None:
    folder = leave(tmp_path / "need", source_digest("reference"), reads_to=reads_to)
    with pytest.raises(FileError, match="run rope-ext need reference again"):
        reach_in(folder, "reference")
    folder = leave(tmp_path / "need", source_digest("reference"), reads_to=reads_to, lengths=[reads_to])
    if reads_to not in (300, True):
        with pytest.raises(FileError, match="run rope-ext need reference again"):
            reach_in(folder, "reference")


@pytest.mark.parametrize("reads_to", [0, 10**30])
def test_advice_refuses_impossible_lengths(reads_to: int) -> None:
    with pytest.raises(MethodError, match="reads_to must be a whole number from 1 to"):
        rope.advise("reference", 512, reads_to=reads_to)


def test_a_result_of_another_model_is_refused(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError):
        reach_in(tmp_path / "nothing", "reference")
    assert reach_in(leave(tmp_path / "need", source_digest(reference), reads_to=None), str(reference)) is None
    for digest in ("", None, source_digest("reference")[:-1], 1):
        with pytest.raises(FileError, match="was not measured of 'reference' as it is now"):
            reach_in(leave(tmp_path / "need", digest), "reference")  # type: ignore[arg-type]


def test_a_digest_is_of_configs_and_weights(reference: Path) -> None:
    before = source_digest(reference)
    assert before == source_digest(str(reference)) == source_digest(reference)
    (reference / "notes.md").write_text("another text")
    assert source_digest(reference) == before
    [weights] = reference.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[::64] = bytes(byte ^ 1 for byte in data[::64])  # as another training changes weights everywhere
    weights.write_bytes(data)
    assert source_digest(reference) != before


def test_the_digest_of_a_hub_id_is_that_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda _, revision, **__: tmp_path / (revision or "c0ffee"))
    assert source_digest("owner/name") == source_digest("owner/name", revision="c0ffee")
    assert (
        len({source_digest("owner/name"), source_digest("owner/other"), source_digest("owner/name", revision="1")}) == 3
    )

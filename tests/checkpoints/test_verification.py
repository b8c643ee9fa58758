"""The comparisons of --verify, and the mistakes that they find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rope_ext_hf as rope
from tests.support.checkpoint_folders import (
    INDEX,
    convert,
    llama_tensors,
    write_folder,
    write_source,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def test_verify_compares_logits_where_there_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    with pytest.warns(UserWarning, match="does not run"):
        there = rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert "logits of both folders: identical" in (there.verified or "")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    back = rope.convert_checkpoint(tmp_path / "there", tmp_path / "back", "half", verify=True)
    assert "q.k of 3 of 5 layers" in (back.verified or "")
    assert "logits not compared: that takes 18.8 MB of memory" in (back.verified or "")


def test_verify_catches_wrong_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rope_ext_hf.checkpoints import verification as verifying

    monkeypatch.setattr(verifying, "_LOGIT_TOLERANCE", -1.0)
    with pytest.raises(rope.CheckpointError, match="logits of the copy differ"):
        rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_verified(value: float, tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 5] = value
    folder = write_folder(tmp_path / "odd", tensors)
    report = convert(folder, tmp_path / "converted", "interleaved", verify=True)
    assert "q.k of 2 of 2 layers" in str(report.verified)
    assert "those of the source are not finite" in str(report.verified)


def test_an_index_without_metadata_is_verified(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text(encoding="utf-8"))
    (source / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}), encoding="utf-8")
    report = convert(source, tmp_path / "converted", "interleaved", verify=True)
    assert "q.k of 2 of 2 layers" in str(report.verified)

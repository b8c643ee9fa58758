"""What --verify compares, and what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

import rope_ext_hf as rope
from tests.checkpoint_folders import (
    write_source,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def test_verify_compares_logits_where_there_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    with pytest.warns(UserWarning, match="does not run"):
        there = rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert "logits of both folders: equal to 0e+00" in (there.verified or "")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    back = rope.convert_checkpoint(tmp_path / "there", tmp_path / "back", "half", verify=True)
    assert "q.k of 3 of 5 layers" in (back.verified or "")
    assert "logits not compared: that takes 0.0 GB of memory" in (back.verified or "")


def test_verify_catches_wrong_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rope_ext_hf.checkpoints import verification as verifying

    monkeypatch.setattr(verifying, "LOGIT_TOLERANCE", -1.0)
    with pytest.raises(rope.CheckpointError, match="logits of the copy differ"):
        rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert not (tmp_path / "there").exists()

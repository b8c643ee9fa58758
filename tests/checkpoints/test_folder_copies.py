"""Patched copies of model folders: whole or not at all, the source untouched, nothing copied from outside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from rope_ext_hf.errors import FileError
from rope_ext_hf.hub import load_empty, load_tokenizer
from tests.support.models import build


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    build("llama").save_pretrained(folder)
    (folder / "README.md").write_text("a card", encoding="utf-8")
    (folder / "curve.png").write_bytes(b"picture")
    (folder / "code").mkdir()
    (folder / "code" / "extra.txt").write_text("kept", encoding="utf-8")
    return folder


def patched(source: Path) -> Any:
    return rope.patch(load_empty(source), "yarn", factor=4)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_everything_but_the_card_is_copied(source: Path, tmp_path: Path) -> None:
    before, out = content(source), tmp_path / "out"
    (source / "model.safetensors").chmod(0o600)
    save_patched_folder(patched(source), source, out)
    after = content(out)
    assert content(source) == before
    assert set(after) == set(before) - {"README.md"}
    assert {name for name in after if after[name] != before[name]} == {"config.json"}
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert rope.describe(rope.from_pretrained(out)).method == "yarn"


@pytest.mark.parametrize("where", ["out", "sub/out", "code/out"])
def test_nothing_is_written_into_the_source(where: str, source: Path) -> None:
    before = content(source)
    with pytest.raises(FileError, match="inside the source"):
        save_patched_folder(patched(source), source, source / where)
    assert content(source) == before


def test_a_link_out_of_the_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(FileError, match=r"notes\.txt"):
        save_patched_folder(patched(source), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(FileError, match="exists already"):
        save_patched_folder(patched(source), source, tmp_path / "out")
    assert content(tmp_path / "out") == {"mine": b"mine"}


def test_a_source_that_changes_while_it_is_copied_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rope_ext_hf.checkpoints import folder_copies

    copy = folder_copies.copy_files  # type: ignore[attr-defined]

    def changed(*arguments: Any) -> None:
        copy(*arguments)
        (source / "code" / "extra.txt").write_text("changed meanwhile", encoding="utf-8")

    monkeypatch.setattr(folder_copies, "copy_files", changed)
    with pytest.raises(FileError, match="changed"):
        save_patched_folder(patched(source), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_a_longer_model_does_not_warn_of_its_old_length(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer("reference")
    tokenizer.model_max_length = 64  # the context length of the model
    tokenizer.save_pretrained(source)
    before = (source / "tokenizer_config.json").read_bytes()
    save_patched_folder(patched(source), source, tmp_path / "out")
    assert (source / "tokenizer_config.json").read_bytes() == before
    text, lengths = "x" * 200, {}
    for folder in (source, tmp_path / "out"):
        loaded = AutoTokenizer.from_pretrained(folder)
        lengths[folder.name] = loaded.model_max_length
        caplog.clear()
        with caplog.at_level(logging.WARNING, "transformers"):
            assert len(loaded(text).input_ids) >= 200
        assert ("longer than the specified maximum" in caplog.text) == (folder is source)
    assert lengths == {"source": 64, "out": 256}


def test_a_tokenizer_for_longer_texts_keeps_its_length(source: Path, tmp_path: Path) -> None:
    load_tokenizer("reference").save_pretrained(source)  # with no length but a very large number
    save_patched_folder(patched(source), source, tmp_path / "out")
    assert content(tmp_path / "out")["tokenizer_config.json"] == content(source)["tokenizer_config.json"]

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reference import path
from tests.support.models import build


def test_lines_with_a_text_are_left_out_and_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("somebody.else")
    with left_out_of_log("somebody.else", "of ours"):
        with left_out_of_log("somebody.else", "of ours"):
            pass
        logger.warning("one %s", "of ours")
        logger.warning("one of theirs")
    assert caplog.messages == ["one of theirs"]
    logger.warning("one of ours")
    assert caplog.messages[1:] == ["one of ours"]
    assert not logger.filters


@pytest.mark.slow
def test_a_patched_model_is_saved_and_loaded_without_a_line_about_its_rope_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")  # the command line, in tests before, asks for errors alone
    AutoTokenizer.from_pretrained(path()).save_pretrained(tmp_path)
    model = rope.patch(build("llama", vocab_size=259), "rerope")
    model.save_pretrained(tmp_path)
    rope.from_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    assert "Missing validation" not in caplog.text
    AutoConfig.from_pretrained(tmp_path)  # transformers alone still says it
    assert "Missing validation" in caplog.text

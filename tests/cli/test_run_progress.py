"""Notes on the memory that a run needs after all, if the model is read in another way than was planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rope_ext_hf.cli.run_progress import shown_progress
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reading.cost import memory
from rope_ext_hf.reading.scorer import TokenScorer
from tests.support.every_model import tiny


def noted(model: Any, scorer: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed before the first pass of a measurement of perplexity."""
    question = Perplexity(lengths=[32], max_spans=1, data="stdlib")
    plan = question.plan(model, tokenizer=load_tokenizer("reference"))
    progress = shown_progress()
    progress.planned(model, plan, ModelRope.of_model(model))
    try:
        progress.reading(scorer)
    finally:
        progress.close()
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("model_type", "because"),
    [
        ("llama", ""),
        ("zaya", "because this model is not read layer by layer"),
        ("deepseek_v32", "because texts are read whole"),
    ],
)
def test_memory_is_said_again_where_a_model_is_read_otherwise(
    model_type: str, because: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(model_type, vocab_size=512)
    scorer = TokenScorer(model, chunk=16, longest=32)
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    said = noted(model, scorer, capsys)
    assert scorer.reading in said
    assert because in said
    assert ("needs" in said) == bool(because), said


def test_nothing_is_said_of_the_memory_of_transformers_where_an_engine_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    engine = SimpleNamespace(reading="by an engine in steps of 64 tokens")
    said = noted(tiny("llama", vocab_size=512), engine, capsys)
    assert "by an engine" in said
    assert "needs" not in said

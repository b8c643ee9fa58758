"""Forecasts have the passes of the run, and tokenise only as much text as they need."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.cli import planned_runs as forecasting
from rope_ext_hf.eval.measurement_options import Passkey, Perplexity
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.protocols import PROTOCOLS
from rope_ext_hf.reading.text import token_bytes, tokenizing
from rope_ext_hf.reading.text.documents import Document
from tests.reading.text.test_token_bytes import byte_level
from tests.support.models import build

BOOKS = [Document(f"book {index}", f"{index} hello world, some longer words. " * 2000) for index in range(8)]
MODEL = build("llama", vocab_size=300)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of each text that is tokenised."""
    sizes: list[int] = []

    def counting(tokenizer: Any, texts: Any) -> Any:
        sizes.extend(map(len, texts))
        return token_bytes.tokenize_texts(tokenizer, texts)

    monkeypatch.setattr(tokenizing, "tokenize_texts", counting)
    return sizes


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_passes_are_those_of_the_run(protocol: str, tokenized: list[int]) -> None:
    question = Perplexity(lengths=[64, 128], max_spans=4, data=BOOKS, protocol=protocol)
    tokenizer, methods = byte_level(), MethodChoice(method="linear", factor=2)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    forecast = forecasting.forecast_plan(question, MODEL, methods, tokenizer=tokenizer)
    read, tokenized[:] = sum(tokenized), []
    plan = question.plan(MODEL, methods, tokenizer=tokenizer)
    assert sum(tokenized) == sum(len(book.text) for book in BOOKS)
    assert read < sum(tokenized) / 20
    assert sum(forecast.measurement.passes) == pytest.approx(sum(plan.measurement.passes), rel=0.01)
    assert forecast.measurement.scored == pytest.approx(plan.measurement.scored, rel=0.1)
    assert (forecast.methods, forecast.data) == (plan.methods, plan.data)


def test_many_short_documents_before_a_long_one_are_passed_over() -> None:
    texts = [Document(f"note {index}", "hello world " * 3) for index in range(500)]
    question = Perplexity(lengths=[256], max_spans=2, data=[*texts, BOOKS[0]])
    forecast = forecasting.forecast_plan(question, MODEL, None, tokenizer=byte_level())
    assert forecast.measurement.passes == [256, 256]


def test_the_text_around_statements_is_shortened(tokenized: list[int]) -> None:
    question = Passkey(lengths=[300], trials=1, task="key-value", haystack=BOOKS, distractors=2)
    tokenizer = byte_level()
    forecast = forecasting.forecast_plan(question, MODEL, None, tokenizer=tokenizer)
    assert sum(tokenized) < len(BOOKS[0].text) / 10
    assert forecast.measurement.passes == question.plan(MODEL, tokenizer=tokenizer).measurement.passes

"""Prompts of tasks and of gains begin as `tokenizer(text)` begins."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.tools.suites import Gain, Tasks
from tests.reading.test_spans_leading_tokens import TEXT, check_prompts
from tests.support.byte_tokenizers import TEMPLATES

ROWS = [
    {"context": f"{i}. Say {i}. {TEXT[i : 90 + i]}", "evidence": f"Say {i}. ", "question": " So?", "answer": f" {i}"}
    for i in range(3)
]
QUESTIONS: dict[str, Any] = {
    "tasks": Tasks(lengths=[768], suite="json-kv", samples=2, score="rank"),
    "gain": Gain(lengths=[256], distances=[64], data=ROWS, samples=2),
}


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_measurement(template: str, name: str) -> None:
    check_prompts(template, QUESTIONS[name])

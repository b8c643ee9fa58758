"""The suite of short inputs, over lm-eval's own tasks with local questions in place of the Hub's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval import compare_runs
from rope_ext_hf.reference import path
from rope_ext_hf.tools.suites import tasks
from rope_ext_hf.tools.suites.base import suite
from rope_ext_hf.tools.suites.benchmarks import short

QUESTIONS = [
    {"text": "import os\nimport", "choices": ["sys", "qqz", "0zz"], "label": 0},
    {"text": "for i in", "choices": ["zzzz(", "range("], "label": 1},
    {"text": "def f(x):\n    return", "choices": ["x", "Qq", "zj"], "label": 0},
    {"text": "x" * 300, "choices": ["x", "y"], "label": 0},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide questions of a local file as arc_easy, and another task whose data do not exist."""
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "local.yaml").write_text(
        f"task: local\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'questions.jsonl'}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(short.DATA_SETS, "arc_easy", (str(tmp_path / "local.yaml"), "questions", None))


@pytest.mark.usefixtures("local")
def test_questions_keep_their_own_choices(tokenizer: Any) -> None:
    samples = suite("short").samples("arc_easy", tokenizer, length=256, count=3, seed=0, haystack="")
    assert {(s.prompt, s.references, s.others) for s in samples} == {
        (str(q["text"]), (q["choices"][q["label"]],), tuple(c for c in q["choices"] if c != q["choices"][q["label"]]))
        for q in QUESTIONS[:3]
        if isinstance(q["choices"], list) and isinstance(q["label"], int)
    }
    with pytest.raises(MethodError, match="only 3 of 4 questions"):
        suite("short").samples("arc_easy", tokenizer, length=256, count=4, seed=0, haystack="")


@pytest.mark.slow
@pytest.mark.usefixtures("local")
def test_what_a_method_loses_is_in_the_comparison(tokenizer: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path(), dtype="float32")
    run = tasks(model, lengths=[256], suite="short", tasks=["arc_easy"], samples=3, tokenizer=tokenizer, out=tmp_path)
    assert run[0].score == 1.0  # a model of Python code knows these
    assert run.run.settings["setting"]["score"] == "rank"
    assert run.run.settings["setting"]["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3)
    (measure,) = compare_runs([run.run.folder]).measures
    assert measure.name == "score of short"


def test_data_that_are_not_at_hand_are_named_with_the_command(tokenizer: Any) -> None:
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(CorpusError, match=r"load_dataset\('allenai/ai2_arc', 'ARC-Challenge'\)"):
        suite("short").samples("arc_challenge", tokenizer, length=256, count=3, seed=0, haystack="")
    assert before == datasets.config.HF_HUB_OFFLINE

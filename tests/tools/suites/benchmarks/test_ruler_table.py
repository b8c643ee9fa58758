"""benchmarks/ruler_table.py: RULER's tasks of question answering, and the table on the bundled model."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import ruler_qa
import ruler_table
import torch
from transformers import AutoModelForCausalLM

from docs.figures.real_models import ruler_section
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.reference import path
from rope_ext_hf.tools.suites.base import suite
from tests.support.texts import ONE_MODULE
from tests.tools.support.ruler import hotpotqa, make_tokenizer, squad

RECORDED = {
    "1024 qa_1": "936a5fe3ead8198c6011001ec77954ee",
    "2048 qa_1": "8a1aa1627ddeda698002c5276156590d",
    "16384 qa_1": "198c774e81441308c289d288fea6fc98",
    "2048 qa_2": "15a4ee375fb1b8c5fa229c45144a5f2c",
    "4096 qa_2": "fbb0211b788d90e83699b87b4d538e3b",
    "16384 qa_2": "a2285deda0265e1ff726ed9edf985632",
}
"""Hashes of the prompts, answer prefixes, answers and lengths that NVIDIA/RULER at c3f5e3b makes of these questions:
3 each, seed 42, the tokenizer `pieces`."""


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("questions")
    with pytest.MonkeyPatch.context() as patched:
        for name, content in {"RULER_SQUAD": squad(), "RULER_HOTPOTQA": hotpotqa()}.items():
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
            patched.setenv(name, str(folder / f"{name}.json"))
        yield


@pytest.mark.parametrize("case", RECORDED)
def test_questions_about_documents_are_those_of_upstream(case: str) -> None:
    length, task = case.split()
    samples = suite("ruler-qa").samples(
        task, make_tokenizer("pieces"), length=int(length), count=3, seed=42, haystack=""
    )
    fields = [[s.prompt, s.prefix, list(s.references), s.length] for s in samples]
    assert hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32] == RECORDED[case]


def test_the_hub_has_the_same_articles() -> None:
    rows = [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": each["question"],
            "answers": {"text": [answer["text"] for answer in each["answers"]]},
        }
        for article in squad()["data"]
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
    ]
    assert ruler_qa.squad_articles(rows) == [{"paragraphs": article["paragraphs"]} for article in squad()["data"]]


def test_one_right_answer_is_enough() -> None:
    assert ruler_qa.RulerQA.score("It was Paris.", ("Lyon", "paris")) == 1.0
    assert ruler_qa.RulerQA.score("It was Rome.", ("Lyon", "paris")) == 0.0


def test_the_table_names_methods_that_there_are() -> None:
    for name in ruler_table.METHODS.split(","):
        assert resolve_method(name, Rotary(64, 10000.0, 256), target_length=2048).name in list_methods()
    tasks = [task for name in ruler_table.SUITES for task in suite(name).tasks]
    assert len(tasks) == 13


@pytest.mark.thorough
def test_the_table_of_the_bundled_model(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval()
    lengths, tasks, typed_methods = [1536, 1792], ("niah_multikey_3", "qa_1"), "yarn,dynamic,dca"
    given = {"tasks": ",".join(tasks), "samples": 3, "haystack": ONE_MODULE, "score": "rank"}
    arguments = Namespace(methods=typed_methods, runs=tmp_path / "runs", **given)
    scores, names = ruler_table.measured(model, lengths, arguments)
    methods = ["unpatched", *typed_methods.replace("dynamic", "dynamic-ntk").split(",")]
    assert list(names.values()) == methods

    rows = ruler_table.rows_of(scores, names)
    assert [(row["method"], row["length"]) for row in rows] == [(m, n) for m in methods for n in (*lengths, None)]
    for row in rows:
        values = scores[row["label"]]
        expected = [fmean(values[n][task]) for n in ([row["length"]] if row["length"] else lengths) for task in tasks]
        assert row["score"] == pytest.approx(100 * fmean(expected), abs=0.01)
        change, low, high = row["over_as_loaded"]
        base = next(each for each in rows if (each["method"], each["length"]) == ("unpatched", row["length"]))
        assert change == pytest.approx(row["score"] - base["score"], abs=0.02)
        assert low <= change <= high

    forward, longest = model.forward, [0]

    def watched(ids: Any, *more: Any, **options: Any) -> Any:
        longest[0] = max(longest[0], ids.shape[1])
        return forward(ids, *more, **options)

    model.forward = watched  # an interrupted table goes on: no prompt is read twice
    assert ruler_table.measured(model, lengths, arguments) == (scores, names)
    assert longest[0] < 100

    line = {"model": "Qwen/Qwen3-1.7B-Base", "context_length": 256, "dtype": "float32", "samples": 3, "rows": rows}
    page = ruler_section(line | {"tasks": tasks, "versions": {}, "device": "cpu"})
    cells = {cell[0]: cell for cell in ([*map(str.strip, text.split("|"))][1:-1] for text in page.splitlines()) if cell}
    assert cells["RULER, %"][-1] == "reported (Jet-Long, 4k to 128k, mean)"
    assert [cells[f"`{name}`"][-1] for name in ("unpatched", "dynamic-ntk hf x7")] == ["60.93", "69.14"]
    assert next(cell[-1] for name, cell in cells.items() if name.startswith("`yarn")) == "52.99"

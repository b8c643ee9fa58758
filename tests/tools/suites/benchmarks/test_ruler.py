"""RULER's prompts against those of upstream's own scripts, by stored hashes, and its scores."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.tools.suites.base import Sample, suite
from rope_ext_hf.tools.suites.benchmarks import ruler
from tests.tools.support.ruler import haystack, make_tokenizer

pytest.importorskip("nltk")
pytest.importorskip("wonderwords")

pytestmark = pytest.mark.filterwarnings("ignore:nltk's model of English")  # the haystack is cut the same without one

RECORDED = json.loads((Path(__file__).parent / "recorded" / "ruler.json").read_text(encoding="utf-8"))
"""Hashes of upstream's prompts, answer prefixes, answers and lengths, by tokenizer, length and task; seed 42.

3 prompts each, from NVIDIA/RULER at c3f5e3b: its scripts run with `haystack()` as the essays, nltk's punkt_tab and
wonderwords 3.0.1.
"""
QUICK = {"vt", "cwe", "fwe", "niah_multikey_3"}
"""Tasks that need no list of six million pairs of words."""


def digest(samples: list[Sample]) -> str:
    fields = [[s.prompt, s.prefix, list(s.references), s.length] for s in samples]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]


def samples(task: str, name: str, length: int, **changed: int) -> list[Sample]:
    options = {"length": length, "count": 3, "seed": 42} | changed
    return suite("ruler").samples(task, make_tokenizer(name), haystack=haystack(), **options)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.thorough] * (case.split()[2] not in QUICK or case[:11] != "pieces 2048"))
        for case in RECORDED
    ],
)
def test_the_prompts_are_those_of_upstream(case: str) -> None:
    name, length, task = case.split()
    prompts = samples(task, name, int(length))
    assert digest(prompts) == RECORDED[case]
    assert all(sample.length <= int(length) for sample in prompts)


def test_another_seed_and_another_length_make_other_prompts() -> None:
    """So the hashes above do not hold by chance of a generator that ignores them."""
    one = samples("vt", "pieces", 2048)
    assert digest(samples("vt", "pieces", 2048, seed=43)) != digest(one)
    assert digest(samples("vt", "pieces", 2048, reserved=200)) != digest(one)
    assert max(s.length for s in samples("vt", "pieces", 2048, reserved=200)) <= 1848


@pytest.mark.parametrize(
    ("task", "name", "length"), [("vt", "bytes", 8192), ("fwe", "pieces", 200), ("cwe", "pieces", 300)]
)
def test_a_length_that_takes_no_prompt_is_refused(task: str, name: str, length: int) -> None:
    """Upstream draws prompts for ever there."""
    with pytest.raises(rope.MethodError, match=f"too short for task '{task}'"):
        samples(task, name, length)


def test_a_list_longer_than_wonderwords_needs_the_words_of_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler, "_words", lambda kind: [f"{kind}{index}" for index in range(30)])
    with pytest.raises(rope.MethodError, match="RULER_WORDS"):
        samples("cwe", "pieces", 2048)
    words = tmp_path / "words.json"
    words.write_text(json.dumps({str(index): f"w{index}" for index in range(9000)}))
    monkeypatch.setenv("RULER_WORDS", str(words))
    assert "w" in samples("cwe", "pieces", 2048)[0].references[0]


def test_wrong_answers_stand_in_the_prompt_and_are_none_of_the_right_ones() -> None:
    for task in ("niah_multikey_3", "cwe", "fwe", "vt"):
        for sample in samples(task, "pieces", 2048):
            assert sample.others
            assert all(other in sample.prompt for other in sample.others)
            assert not set(sample.others) & set(sample.references)


ANSWERS = [
    ("The numbers are 123, 456 and 789.", ["123", "456"], 1.0),
    ("it is ABC-def", ["abc-DEF", "ghi"], 0.5),
    ("none", ["1", "2", "3", "4"], 0.0),
    ("1 and 22 and 3333", ["2", "33", "5", "1"], 0.75),
]


def test_scores_are_those_of_upstream_on_stored_answers() -> None:
    """Its `string_match_all` of these answers gave 56.25, and of each alone 100, 50, 0 and 75."""
    scores = [suite("ruler").score(answer, references) for answer, references, _ in ANSWERS]
    assert scores == [score for *_, score in ANSWERS]
    assert round(sum(scores) / len(scores) * 100, 2) == 56.25

"""BABILong's stories against an independent solver of bAbI's tasks, and its score against upstream's code."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from rope_ext_hf.errors import MethodError
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.tools.suites.base import Sample, count_tokens, suite
from rope_ext_hf.tools.suites.benchmarks.babilong import STORIES, Story

HAYSTACK = "".join(f"This is the sentence with the number {i} of a long text. " for i in range(2000))
GONE = r"(\w+) (?:moved|went|journeyed|travelled|went back) to the (\w+)\."
TAKEN = r"(\w+) (?:got|grabbed|picked up|took) the (\w+) there\."
DROPPED = r"(\w+) (?:dropped|discarded|left|put down) the (\w+)\."
GIVEN = r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\."


def read(story: Story) -> str:
    """Return the answer to a story, which is read from its end backwards."""
    back = list(reversed(story.facts))

    def last(pattern: str, facts: list[str], **wanted: Any) -> tuple[int, tuple[str, ...]] | None:
        for i, fact in enumerate(facts):
            match = re.fullmatch(pattern, fact)
            if match and all(match[int(group[1:])] == value for group, value in wanted.items()):
                return i, match.groups()
        return None

    def room_of(who: str, facts: list[str]) -> str:
        event = last(GONE, facts, g1=who)
        assert event is not None
        return event[1][1]

    def rooms_of(thing: str, facts: list[str]) -> list[str]:
        """Return the rooms that a thing was in, the latest first."""
        rooms = []
        while (taken := last(TAKEN, facts, g2=thing)) is not None:
            dropped = last(DROPPED, facts, g2=thing)
            by, start, stop = taken[1][0], taken[0], 0 if dropped is None or dropped[0] > taken[0] else dropped[0]
            rooms += [m[2] for fact in facts[stop:start] if (m := re.fullmatch(GONE, fact)) and m[1] == by]
            rooms.append(room_of(by, facts[start:]))
            facts = facts[start + 1 :]
        return [room for i, room in enumerate(rooms) if i == 0 or room != rooms[i - 1]]

    question = story.question
    if m := re.fullmatch(r"Where is the (\w+)\?", question):
        return rooms_of(m[1], back)[0]
    if m := re.fullmatch(r"Where is (\w+)\?", question):
        return room_of(m[1], back)
    if m := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
        rooms = rooms_of(m[1], back)
        return rooms[rooms.index(m[2]) + 1]
    if m := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        (room,) = {one for one, way, other in lies(story) if (way, other) == (m[1], m[2])}
        return room
    if m := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
        (room,) = {other for one, way, other in lies(story) if (one, way) == (m[1], m[2])}
        return room
    groups = {
        r"What did (\w+) give to (\w+)\?": ("g1", "g3", 1),
        r"Who gave the (\w+) to (\w+)\?": ("g2", "g3", 0),
        r"Who did (\w+) give the (\w+) to\?": ("g1", "g2", 2),
        r"Who gave the (\w+)\?": ("g2", None, 0),
        r"Who received the (\w+)\?": ("g2", None, 2),
    }
    for pattern, (first, second, answer) in groups.items():
        if m := re.fullmatch(pattern, question):
            wanted = {first: m[1]} | ({second: m[2]} if second else {})
            gift = last(GIVEN, back, **wanted)
            assert gift is not None
            return gift[1][answer]
    raise AssertionError(question)


def lies(story: Story) -> set[tuple[str, str, str]]:
    """Return the relations of a story's rooms, stated or inverted."""
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    matches = [re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", fact) for fact in story.facts]
    stated = {(m[1], m[2], m[3]) for m in matches if m}
    return stated | {(other, opposite[way], one) for one, way, other in stated}


@pytest.mark.parametrize("task", list(STORIES))
def test_answers_follow_from_the_facts(task: str) -> None:
    questions = set()
    for seed in range(400):
        story = STORIES[task](random.Random(seed))
        assert read(story) == story.answer, story
        assert story.answer in story.labels
        questions.add(re.sub(r"\b(the \w+|[A-Z]\w+(?= )|north|south|east|west)\b", "", story.question))
    assert len(questions) > (1 if task in ("qa4", "qa5") else 0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("reference")


def make_samples(task: str, tokenizer: Any, **options: Any) -> list[Sample]:
    given: dict[str, Any] = {"length": 4096, "count": 4, "seed": 0, "haystack": HAYSTACK} | options
    return suite("babilong").samples(task, tokenizer, **given)


@pytest.mark.slow
@pytest.mark.parametrize("task", list(STORIES))
def test_facts_stand_in_order_among_the_sentences(task: str, tokenizer: Any) -> None:
    samples = make_samples(task, tokenizer)
    for index, sample in enumerate(samples):
        story = STORIES[task](random.Random(f"{task} 0 {index}"))
        context = sample.prompt.partition("<context>\n")[2].partition("\n</context>")[0]
        place = 0
        for fact in story.facts:
            place = context.index(fact, place) + len(fact)
        assert "sentence with the number" in context
        assert sample.prompt.endswith(f"Question: {story.question}")
        assert sample.references == (story.answer,)
        assert story.answer not in sample.others
        assert 4096 - 80 < sample.length <= 4096
        assert sample.length == count_tokens(tokenizer, sample.prompt + sample.prefix) + sample.budget
    assert samples == make_samples(task, tokenizer)
    assert samples != make_samples(task, tokenizer, seed=1)
    with pytest.raises(MethodError, match="too short for task"):
        make_samples(task, tokenizer, length=200)


def test_a_haystack_without_sentences_is_refused(tokenizer: Any) -> None:
    with pytest.raises(MethodError, match="no sentence of at least 10 characters"):
        make_samples("qa1", tokenizer, haystack="a b c\n")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The most recent location of Mary is kitchen.", 1.0),
        (" kitchen. Then she went to the garden.", 1.0),  # the first sentence counts
        ("KITCHEN", 1.0),
        ("kitchen or garden", 0.0),
        ("The garden", 0.0),
        ("", 0.0),
        ("It is not stated. kitchen", 0.0),
        ("the kitchen<context>garden", 1.0),
        ("the kitchen <example> garden", 1.0),
    ],
)
def test_the_score_is_that_of_upstream(answer: str, expected: float) -> None:
    """These are results of `compare_answers` in babilong/metrics.py (7a6efee), for the question where Mary is."""
    others = ["bathroom", "bedroom", "garden", "hallway", "office"]
    assert suite("babilong").score(answer, ["kitchen"], others) == expected

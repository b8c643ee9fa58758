from __future__ import annotations

import hashlib
import itertools
import random
import re
from dataclasses import astuple
from functools import partial

import pytest
from training_prompts import WORDINGS, Part, ask_in_training, training_prompt
from training_text import stdlib_training

from rope_ext_hf.eval.retrieval.statements import (
    HELD_OUT_VERBS,
    HELD_OUT_WORDS,
    RETRIEVALS,
    TRAINING_VERBS,
    TRAINING_WORDS,
    Task,
    Wording,
    ask,
    insert,
    other_answers,
)
from rope_ext_hf.reading.text.load import stdlib_held_out

FILLER = b"\0" * 1000  # occurs in no statement


def named(task: Task) -> bool:
    return all("{name}" in wording.question.lower() for wording in task.held_out)


def drawn(task: Task, count: int, held_out: bool) -> tuple[set[str], set[str]]:
    """Many names and values of a task."""
    rng = random.Random(0)
    return {task.name(rng, held_out) for _ in range(count)}, {task.value(rng, held_out) for _ in range(count)}


@pytest.mark.parametrize("name", WORDINGS)
def test_names_values_and_wordings_of_measurements_are_never_trained_on(name: str) -> None:
    task = RETRIEVALS[name]
    trained_names, trained_values = drawn(task, 3000, held_out=False)
    names, values = drawn(task, 3000, held_out=True)
    assert min(map(len, (trained_names, names, trained_values, values))) > 300
    assert not trained_names & names
    assert not trained_values & values
    for part in ("statement", "question"):
        assert not {getattr(w, part) for w in WORDINGS[name]} & {getattr(w, part) for w in task.held_out}


def test_word_lists_are_disjoint_and_without_repeats() -> None:
    for trained, held_out in ((TRAINING_WORDS, HELD_OUT_WORDS), (TRAINING_VERBS, HELD_OUT_VERBS)):
        assert len({*trained, *held_out}) == len(trained) + len(held_out)
    # made-up names may happen to be words, but not those of measurements: the parts of all names of training are here
    trained_names, _ = drawn(RETRIEVALS["key-value"], 20_000, held_out=False)
    assert not {part for name in trained_names for part in name.split("_")} & set(HELD_OUT_WORDS)


@pytest.mark.slow
def test_held_out_words_do_not_occur_in_the_training_text() -> None:
    words = set(HELD_OUT_WORDS)
    for document in stdlib_training():
        assert not words & set(re.findall(r"[a-z]+", document.text.lower())), document.name


@pytest.mark.slow
def test_filler_of_measurements_is_no_training_text() -> None:
    trained = {document.name for document in stdlib_training()}
    assert not trained & {document.name for document in stdlib_held_out()}


@pytest.mark.parametrize(("name", "keys"), [*itertools.product(WORDINGS, (1, 2, 4)), ("needle", 3), ("passkey", 1)])
def test_questions_have_one_answer(name: str, keys: int) -> None:
    task = RETRIEVALS[name]
    for index in range(20):
        question = ask(task, random.Random(index), keys=keys, wording=index)
        assert len(question.statements) == len(question.questions) == len(question.answers) == keys
        assert len(set(question.statements)) == len(set(question.questions)) == len(set(question.answers)) == keys
        value = question.answer.strip()
        assert value in question.statements[0]
        assert not any(value in statement for statement in question.statements[1:])
        assert value not in question.question
        # the same again from the same seed, and another from another
        assert ask(task, random.Random(index), keys=keys, wording=index) == question
        assert ask(task, random.Random(index + 1), keys=keys, wording=index) != question


@pytest.mark.parametrize("name", RETRIEVALS)
def test_wordings_take_turns_and_answers_follow_from_statements(name: str) -> None:
    task = RETRIEVALS[name]
    in_training = partial(ask_in_training, name)
    for wordings, draw in ((WORDINGS.get(name, ()), in_training), (task.held_out, partial(ask, task))):
        for index, wording in enumerate(wordings):
            question = draw(random.Random(1), wording=index + len(wordings))
            pattern = re.escape(wording.statement)
            pattern = re.sub(r"\\{(name|NAME|value)\\}", "(.+)", pattern)
            assert re.fullmatch(pattern, question.statements[0])


def test_other_answers_begin_with_those_of_the_other_keys() -> None:
    task = RETRIEVALS["assignment"]
    question = ask(task, random.Random(0), keys=3, wording=0)
    others = list(itertools.islice(other_answers(task, question, random.Random(1), wording=0), 10))
    assert others[:2] == list(question.answers[1:])
    assert all(len(other) == 5 and other.isdigit() for other in others)


def test_insert_gives_places_in_the_order_of_the_text() -> None:
    assert insert(10, [0.5]) == [(0, 0, 5)]
    assert insert(10, [1.0, 0.0, 0.25]) == [(1, 0, 0), (2, 0, 2), (0, 2, 10)]
    assert insert(0, [0.3, 0.2]) == [(1, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(("name", "keys", "asked"), [*itertools.product(WORDINGS, (1, 4), (1, 2))])
@pytest.mark.parametrize("held_out", [False, True])
def test_training_prompts_have_their_length_and_their_answers_at_the_end(
    name: str, keys: int, asked: int, held_out: bool
) -> None:
    for seed in range(10):
        prompt = training_prompt(name, random.Random(seed), length=257, keys=keys, asked=asked, held_out=held_out)
        text, parts = prompt.fill(FILLER)
        assert len(text) == len(parts) == 257
        assert [byte == 0 for byte in text] == [part == Part.FILLER for part in parts]
        assert parts.count(Part.FILLER) == prompt.filler_length
        statements = [statement for _, statement in prompt.statements]
        if asked == 1 and held_out:  # more questions, and long made-up words, may leave less room
            assert len(statements) == keys
        answers = [answer for _, answer in prompt.tail]
        assert len(answers) == min(asked, len(statements))
        assert bytes(byte for byte, part in zip(text, parts, strict=True) if part == Part.ANSWER) == b"".join(answers)
        assert text.endswith(b"".join(itertools.chain(*prompt.tail)))
        before = text[: len(text) - sum(map(len, itertools.chain(*prompt.tail)))]
        assert all(before.count(statement) == 1 for statement in statements)
        for answer in answers:
            whole = re.escape(answer.strip()) + rb"(?![0-9]| \w)"  # a value may begin as a longer one does
            assert sum(bool(re.search(whole, statement)) for statement in statements) == 1


def test_statements_stand_at_all_depths() -> None:
    shares = []
    for seed in range(200):
        prompt = training_prompt("key-value", random.Random(seed), length=257, keys=1)
        ((before, _),) = prompt.statements
        shares.append(before / prompt.filler_length)
    assert min(shares) < 0.02
    assert max(shares) > 0.98
    assert 0.4 < sum(shares) / len(shares) < 0.6


def test_statements_that_do_not_fit_are_left_out() -> None:
    prompt = training_prompt("quote", random.Random(0), length=150, keys=4)
    assert 1 <= len(prompt.statements) < 4
    with pytest.raises(ValueError, match="too few"):
        training_prompt("quote", random.Random(0), length=30, keys=4)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no names by which 2 keys could differ"):
        ask(RETRIEVALS["passkey"], random.Random(0), keys=2)
    few = Task(
        name=lambda rng, held_out: rng.choice("ab"),
        value=RETRIEVALS["copy"].value,
        held_out=(Wording("{name} {value}", "{name}"),),
    )
    with pytest.raises(ValueError, match="only 2 different names"):
        ask(few, random.Random(0), keys=3)


def test_prompts_are_those_of_earlier_measurements() -> None:
    """Another word, wording or order of draws changes this digest, and with it every published figure of retrieval."""
    digest = hashlib.sha256()
    for name, task in RETRIEVALS.items():
        for seed, held_out in itertools.product(range(300), (True, False)):
            keys = 1 if name == "passkey" else 1 + seed % 4
            if held_out:
                digest.update(repr(astuple(ask(task, random.Random(seed), keys=keys))).encode())
            elif name in WORDINGS:
                digest.update(repr(astuple(ask_in_training(name, random.Random(seed), keys=keys))).encode())
    assert digest.hexdigest() == "3b7bdfe88be91d218f96326a9fd916b887988874a0ba5c39738e04d041c7d1af"

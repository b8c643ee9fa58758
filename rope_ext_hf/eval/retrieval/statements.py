"""The statements hidden in retrieval prompts, and the questions about them at the end of the prompts.

A task is a kind of statement and question, with its wordings. All tasks are entries in retrievals.toml, so that a new
one needs no code. The bundled model was trained on the same tasks (benchmarks/training_prompts.py), but in other
wordings and with other names and values: words come from two lists without a common word, and every eighth number or
code, chosen by a checksum, is held out from training.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.files.whole import package_table

_SAVED = package_table("rope_ext_hf.eval.retrieval", "retrievals.toml")

TRAINING_WORDS: tuple[str, ...] = tuple(_SAVED["training"]["words"].split())
TRAINING_VERBS: tuple[str, ...] = tuple(_SAVED["training"]["verbs"].split())
HELD_OUT_WORDS: tuple[str, ...] = tuple(_SAVED["held_out"]["words"].split())
HELD_OUT_VERBS: tuple[str, ...] = tuple(_SAVED["held_out"]["verbs"].split())
# the parts of made-up words
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "y")
_CLUSTERS = ("bl", "br", "ch", "cr", "dr", "fl", "gr", "pl", "qu", "sh", "st", "th", "tr", "wh")
_CONSONANTS = (*"bcdfghjklmnprstvwz", *_CLUSTERS)
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # of codes, without letters and digits that look alike
_Draw = Callable[[random.Random, bool], str]
"""A function that draws a name or a value: a held-out one if its second argument is true, else one of training."""


def _draw_split(make: Callable[[], str], held_out: bool) -> str:
    """Return the first text from `make` that is held out from training, or the first that is not.

    One in eight texts is held out, chosen by its checksum.
    """
    while True:
        text = make()
        if (zlib.crc32(text.encode()) % 8 == 0) == held_out:
            return text


def _number(rng: random.Random, held_out: bool) -> str:
    """Draw a number of five digits that is held out from training, or, if not `held_out`, one for training.

    Numbers for training have three to seven digits, so that no length is learnt as the end.
    """
    digits = 5 if held_out else rng.choice((3, 4, 5, 5, 5, 5, 6, 7))
    return _draw_split(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)), held_out)


def _word(rng: random.Random, held_out: bool) -> str:
    """Draw a word; in training mostly an invented one, because words from a list would be memorised, not copied."""
    if held_out:
        return rng.choice(HELD_OUT_WORDS)
    if rng.random() < 0.35:
        return rng.choice(TRAINING_WORDS)
    while True:
        syllables = range(rng.choice((1, 2, 2, 3)))
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice("  lnrst") for _ in syllables)
        word = word.replace(" ", "")
        if len(word) > 2 and word not in HELD_OUT_WORDS:
            return word


def _words(rng: random.Random, held_out: bool) -> list[str]:
    """Draw two different words."""
    return draw_distinct(lambda: _word(rng, held_out), 2)


def _identifier(rng: random.Random, held_out: bool) -> str:
    """Draw a name of one or two words, joined by an underscore."""
    return "_".join(_words(rng, held_out)[: rng.choice((1, 2))])


def _subject(rng: random.Random, held_out: bool) -> str:
    """Draw the beginning of a sentence; in training sometimes a short one, so that more sentences fit into a prompt."""
    words = _words(rng, held_out)
    count = 2 if held_out else rng.choice((1, 2, 2))
    return " ".join(["The", *words[:count]])


def _predicate(rng: random.Random, held_out: bool) -> str:
    """Draw the rest of a sentence: a verb and a noun; in training the noun is sometimes left out."""
    if held_out:
        return f"{rng.choice(HELD_OUT_VERBS)} {_word(rng, True)}"
    verb = rng.choice(TRAINING_VERBS) if rng.random() < 0.35 else _word(rng, False) + "s"
    return verb if rng.random() < 0.25 else f"{verb} {_word(rng, False)}"


def _code(rng: random.Random, held_out: bool) -> str:
    """Draw a code of eight letters and digits; in training, codes have six to ten."""
    length = 8 if held_out else rng.randint(6, 10)
    return _draw_split(lambda: "".join(rng.choices(_LETTERS, k=length)), held_out)


def _code_prefix(rng: random.Random, held_out: bool) -> str:
    """Draw the four letters and digits with which a code begins."""
    return _draw_split(lambda: "".join(rng.choices(_LETTERS, k=4)), held_out)


@dataclass(frozen=True)
class Wording:
    """One wording of a task: format strings with {name}, {NAME} for the name in capitals, and {value}.

    Attributes:
        statement: the sentence that states the value of a name.
        question: the question about the value; it does not contain {value}.
        answer: the right answer.
    """

    statement: str
    question: str
    answer: str = " {value}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of retrieval: how names and values are drawn, and how they are worded.

    Attributes:
        name, value: functions that draw a name and a value.
        held_out: wordings for measurements, used in turn; the bundled model was not trained on them.
        head: instructions before the haystack.
        filler: the text that is repeated around the statements (as the haystack) if no other text is given; None: the
            modules of Python's library that the bundled model was not trained on.
    """

    name: _Draw
    value: _Draw
    held_out: tuple[Wording, ...]
    head: str = ""
    filler: str | None = None


_DRAWS: dict[str, _Draw] = {
    "number": _number,
    "identifier": _identifier,
    "subject": _subject,
    "predicate": _predicate,
    "code": _code,
    "code prefix": _code_prefix,
}
"""The functions that retrievals.toml names."""


def _task(entry: dict[str, Any]) -> Task:
    """Return the task that an entry of retrievals.toml describes."""
    wordings = tuple(Wording(*texts) for texts in entry["held_out"])
    functions = {"name": _DRAWS[entry["name"]], "value": _DRAWS[entry["value"]]}
    return Task(**entry | functions | {"held_out": wordings})


RETRIEVALS = {name: _task(entry) for name, entry in _SAVED["tasks"].items()}
"""All tasks by name. A task whose wordings have no {name} can have one key only."""


@dataclass(frozen=True)
class RetrievalQuestion:
    """Statements to put into a text, each with a question and its answer; the first one is asked for.

    Attributes:
        head: instructions before the text.
        statements, questions, answers: the statements, and the question and answer for each, in the same order.
    """

    head: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    @classmethod
    def from_values(
        cls, task: Task, wording: Wording, names: Sequence[str], values: Sequence[str]
    ) -> RetrievalQuestion:
        """Return the statements, questions and answers for names and their values, in one wording of a task."""
        pairs = [
            {"name": name, "NAME": name.upper(), "value": value} for name, value in zip(names, values, strict=True)
        ]
        return cls(
            task.head,
            statements=tuple(wording.statement.format(**pair) for pair in pairs),
            questions=tuple(wording.question.format(**pair) for pair in pairs),
            answers=tuple(wording.answer.format(**pair) for pair in pairs),
        )

    @property
    def question(self) -> str:
        """The question with which the prompt ends."""
        return self.questions[0]

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.answers[0]

    def about(self, index: int) -> RetrievalQuestion:
        """Return the same statements, with the one at this index moved to the front, so that it is asked for."""

        def moved(texts: tuple[str, ...]) -> tuple[str, ...]:
            return (texts[index], *texts[:index], *texts[index + 1 :])

        return RetrievalQuestion(self.head, moved(self.statements), moved(self.questions), moved(self.answers))


def ask(task: Task, rng: random.Random, *, keys: int = 1, wording: int | None = None) -> RetrievalQuestion:
    """Draw names with their values, and make statements and questions of them; the first is asked for.

    Args:
        task: the kind of statement and question.
        rng: the random numbers for drawing names and values.
        keys: number of names.
        wording: number of the wording; after the last one, the first follows. Default: a random one.

    Raises:
        MethodError: there are several keys, and the task has no names; or the task has too few different names or
            values.
    """
    wordings = task.held_out
    texts = rng.choice(wordings) if wording is None else wordings[wording % len(wordings)]
    if keys > 1 and "{name}" not in texts.question.lower():
        raise MethodError(f"this task has no names by which {keys} keys could differ; give keys=1, or another task")
    names = draw_distinct(lambda: task.name(rng, True), keys)
    values = draw_distinct(lambda: task.value(rng, True), keys)
    return RetrievalQuestion.from_values(task, texts, names, values)


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Return `count` different texts, in the order in which `draw` returns them; MethodError if it returns too few.

    It gives up after 100 draws per text.
    """
    drawn: dict[str, None] = {}
    for _ in range(100 * count):
        drawn[draw()] = None
        if len(drawn) == count:
            return list(drawn)
    raise MethodError(f"there are only {len(drawn)} different names or values for {count} keys; give fewer keys")


def other_answers(task: Task, question: RetrievalQuestion, rng: random.Random, *, wording: int) -> Iterator[str]:
    """Yield wrong answers without end: the answers to the other statements, then random ones of the same task."""
    yield from question.answers[1:]
    answer = task.held_out[wording % len(task.held_out)].answer
    for drawn in itertools.count():
        # After 1,000 held-out values, those of training: few long held-out values have the same number of tokens.
        held_out = drawn < 1000
        yield answer.format(value=task.value(rng, held_out))


def insert(length: int, depths: Sequence[float]) -> list[tuple[int, int, int]]:
    """Return the places at which statements are inserted into a text of `length` tokens.

    Args:
        length: the number of tokens in the text around the statements.
        depths: for each statement, the share of this text that stands before it.

    Returns:
        A triple for each statement, in their order in the text: the index of the statement, and the start and the stop
        of the tokens between the previous statement and this one.
    """
    order = sorted(range(len(depths)), key=depths.__getitem__)
    stops = [round(depths[index] * length) for index in order]
    return list(zip(order, [0, *stops], stops, strict=False))

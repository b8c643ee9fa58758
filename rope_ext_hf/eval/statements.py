"""Prompts that ask at their end for what was stated earlier in a long text.

A task is what is asked and in which words; all tasks are data in retrievals.toml, so a new one is a new entry. The
bundled model was trained on other wordings (benchmarks/training_prompts.py), and on other names and values: words come
from two disjoint lists, and of numbers and codes one in eight, by a checksum, is held out. Only the task is the same.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rope_ext_hf.errors import MethodError
from rope_ext_hf.files import package_table

_SAVED = package_table("rope_ext_hf.eval", "retrievals.toml")


TRAINING_WORDS, TRAINING_VERBS = (tuple(str.split(_SAVED["training"][kind])) for kind in ("words", "verbs"))
HELD_OUT_WORDS, HELD_OUT_VERBS = (tuple(str.split(_SAVED["held_out"][kind])) for kind in ("words", "verbs"))
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "y")
_CLUSTERS = ("bl", "br", "ch", "cr", "dr", "fl", "gr", "pl", "qu", "sh", "st", "th", "tr", "wh")
_CONSONANTS = (*"bcdfghjklmnprstvwz", *_CLUSTERS)  # the parts of made-up words
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # of codes; none that look alike
_Draw = Callable[[random.Random, bool], str]
"""A random name or value, from what is held out if the second argument is true, else from what is trained on."""


def _draw_split(make: Callable[[], str], held_out: bool) -> str:
    """The first made text on the wanted side of the split; an eighth of all texts is held out."""
    while True:
        text = make()
        if (zlib.crc32(text.encode()) % 8 == 0) == held_out:
            return text


def _number(rng: random.Random, held_out: bool) -> str:
    """Five digits; in training also other numbers of digits, so that none is learnt as the end of an answer."""
    digits = 5 if held_out else rng.choice((3, 4, 5, 5, 5, 5, 6, 7))
    return _draw_split(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)), held_out)


def _word(rng: random.Random, held_out: bool) -> str:
    """A word; in training mostly a made-up one, since words of a list would be learnt by heart and not copied."""
    if held_out:
        return rng.choice(HELD_OUT_WORDS)
    if rng.random() < 0.35:
        return rng.choice(TRAINING_WORDS)
    while True:
        syllables = range(rng.choice((1, 2, 2, 3)))
        made = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice("  lnrst") for _ in syllables)
        if len(made := made.replace(" ", "")) > 2 and made not in HELD_OUT_WORDS:
            return made


def _words(rng: random.Random, held_out: bool) -> list[str]:
    return draw_distinct(lambda: _word(rng, held_out), 2)


def _identifier(rng: random.Random, held_out: bool) -> str:
    return "_".join(_words(rng, held_out)[: rng.choice((1, 2))])


def _subject(rng: random.Random, held_out: bool) -> str:
    """The beginning of a sentence; in training sometimes shorter, so that more sentences fit into a prompt."""
    return " ".join(["The", *_words(rng, held_out)[: 2 if held_out else rng.choice((1, 2, 2))]])


def _predicate(rng: random.Random, held_out: bool) -> str:
    """The rest of a sentence: a verb and, in training not always, a noun."""
    if held_out:
        return f"{rng.choice(HELD_OUT_VERBS)} {_word(rng, True)}"
    verb = rng.choice(TRAINING_VERBS) if rng.random() < 0.35 else _word(rng, False) + "s"
    return verb if rng.random() < 0.25 else f"{verb} {_word(rng, False)}"


def _code(rng: random.Random, held_out: bool) -> str:
    """Eight letters and digits; in training six to ten."""
    length = 8 if held_out else rng.randint(6, 10)
    return _draw_split(lambda: "".join(rng.choices(_LETTERS, k=length)), held_out)


def _code_prefix(rng: random.Random, held_out: bool) -> str:
    return _draw_split(lambda: "".join(rng.choices(_LETTERS, k=4)), held_out)


@dataclass(frozen=True)
class Wording:
    """How a name and its value are stated, how they are asked for, and the answer: each a format string.

    It has {name}, {NAME} in capitals, and {value}; the question has no {value}.
    """

    statement: str
    question: str
    answer: str = " {value}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of retrieval."""

    # name, value: how they are drawn
    name: _Draw
    value: _Draw
    held_out: tuple[Wording, ...]  # wordings for measurements, used in turn; the bundled model is not trained on them
    head: str = ""  # instructions before the filler
    # text that is repeated around the statements where none is given; None: the held-out modules of Python's library
    filler: str | None = None


_DRAWS: dict[str, _Draw] = {
    **{"number": _number, "identifier": _identifier, "subject": _subject, "predicate": _predicate},
    **{"code": _code, "code prefix": _code_prefix},
}
RETRIEVALS = {
    task: Task(
        **saved
        | {"name": _DRAWS[saved["name"]], "value": _DRAWS[saved["value"]]}
        | {"held_out": tuple(Wording(*texts) for texts in saved["held_out"])}
    )
    for task, saved in _SAVED["tasks"].items()
}
"""All tasks by name. A task whose wordings have no {name} has one key only."""


@dataclass(frozen=True)
class RetrievalQuestion:
    """Statements, with a question and an answer to each; the first is asked for, and all are put into other text."""

    head: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    @classmethod
    def from_values(
        cls, task: Task, wording: Wording, names: Sequence[str], values: Sequence[str]
    ) -> RetrievalQuestion:
        pairs = [
            {"name": name, "NAME": name.upper(), "value": value} for name, value in zip(names, values, strict=True)
        ]
        texts = (wording.statement, wording.question, wording.answer)
        return cls(task.head, *(tuple(text.format(**pair) for pair in pairs) for text in texts))

    @property
    def question(self) -> str:
        return self.questions[0]

    @property
    def answer(self) -> str:
        return self.answers[0]

    def about(self, index: int) -> RetrievalQuestion:
        """The same statements, asked for the one of this index, which comes first."""
        every = (self.statements, self.questions, self.answers)
        return RetrievalQuestion(self.head, *((of[index], *of[:index], *of[index + 1 :]) for of in every))


def ask(task: Task, rng: random.Random, *, keys: int = 1, wording: int | None = None) -> RetrievalQuestion:
    """Draw names with their values, and ask for the first; MethodError: more keys than the task can tell apart.

    `wording` is its number, counted on from 0 after the last; default: a random one.
    """
    wordings = task.held_out
    chosen = rng.choice(wordings) if wording is None else wordings[wording % len(wordings)]
    if keys > 1 and "{name}" not in chosen.question.lower():
        raise MethodError(f"this task has no names that tell {keys} keys apart; ask for one key or another task")
    names = draw_distinct(lambda: task.name(rng, True), keys)
    return RetrievalQuestion.from_values(task, chosen, names, draw_distinct(lambda: task.value(rng, True), keys))


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    drawn: dict[str, None] = {}
    for _ in range(100 * count):
        drawn[draw()] = None
        if len(drawn) == count:
            return list(drawn)
    raise MethodError(f"there are only {len(drawn)} different names or values, asked for {count} keys")


def other_answers(task: Task, question: RetrievalQuestion, rng: random.Random, *, wording: int) -> Iterator[str]:
    """Wrong answers without end: first those to the question's other statements, then random ones of the same task."""
    yield from question.answers[1:]
    answer = task.held_out[wording % len(task.held_out)].answer
    for drawn in itertools.count():
        # at last values that training draws: of long held-out ones there are few of one length
        yield answer.format(value=task.value(rng, drawn < 1000))


def insert(length: int, depths: Sequence[float]) -> list[tuple[int, int, int]]:
    """Where statements stand in `length` tokens of filler, `depths` being the shares of it that stand before each.

    Returns a triple per statement in the order of the text: its index, and from where to where filler stands before it.
    """
    order = sorted(range(len(depths)), key=depths.__getitem__)
    stops = [round(depths[index] * length) for index in order]
    return list(zip(order, [0, *stops], stops, strict=False))

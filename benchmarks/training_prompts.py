"""Retrieval prompts that the bundled model is trained on: the tasks of measurements, in other words.

    prompt = training_prompt("key-value", random.Random(0), length=257, keys=4)
    text, parts = prompt.fill(filler)           # what each byte belongs to: filler, statement or question, answer

No wording, name or value of a measurement is ever trained on.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from dataclasses import dataclass
from enum import IntEnum

from rope_ext_hf.eval.retrieval.statements import RETRIEVALS, RetrievalQuestion, Wording, ask, draw_distinct, insert

OPENING_CHARACTERS = (string.ascii_letters + string.digits + string.punctuation).translate({ord(c): None for c in "{}"})
"""What may stand before a number in training, so that no opening of a measurement is new to it."""


def with_opening(wording: Wording, opening: str) -> Wording:
    """The same with characters before the value, which the question ends with."""
    question = wording.question + wording.answer.removesuffix("{value}") + opening
    return Wording(wording.statement.replace("{value}", opening + "{value}"), question, "{value}")


WORDINGS: dict[str, tuple[Wording, ...]] = {
    "key-value": tuple(
        Wording(f"\n{opening}{{name}}{sign}{{value}}\n", f"\n{opening}{{name}}{sign.rstrip()}", f"{space}{{value}}")
        for opening in ("", "# ", "; ", "* ", "// ", "- ", ":")
        for sign, space in ((": ", " "), (" = ", " "), ("=", ""), (" -> ", " "), (" ~ ", " "), ("@", ""))
        if (opening, sign) != ("# ", " = ")
    ),
    "assignment": tuple(
        with_opening(
            Wording(f"\n{statement}\n".replace("{name}", name), f"\n{use}".replace("{name}", name), "{value}"), opening
        )
        for statement in (
            "{name} = {value}",
            "    {name} = {value}",
            "self.{name} = {value}",
            "let {name} = {value};",
            "{name}: int = {value}",
            "set {name} {value}",
            "#define {name} {value}",
        )
        for use in (
            "assert {name} == ",
            "if {name} == ",
            "    print({name})  # ",
            ">>> {name}\n",
            "while {name} < ",
            "echo ${name}  # ",
            "check({name}, ",
        )
        for name in ("{name}", "{NAME}")
        for opening in ("", "", "-", "int(", '"', "1e")
    ),
    "quote": tuple(
        Wording(f"\n{opening}{{name}} {{value}}{closing}\n", f"\n{opening}{{name}}")
        for opening, closing in (
            ('"', '."'),
            ("> ", "."),
            ("# ", "."),
            ("``", ".''"),
            ("", "."),
            ("* ", ";"),
            ("<p>", ".</p>"),
            ("(", ".)"),
            ("/* ", ". */"),
        )
    ),
    "copy": tuple(
        Wording(f"\n{opening}{{name}}{{value}}{closing}\n", f"\n{opening}{{name}}", "{value}")
        for opening, closing in (
            ("<", ">"),
            ("[", "]"),
            ("id ", ""),
            ("# ", ""),
            ("", ""),
            ('"', '"'),
            ("* ", ""),
            ("/", "/"),
            ("sha-", ";"),
            ("$", "$"),
        )
    ),
}
"""The wordings of each task that is trained."""


def ask_in_training(name: str, rng: random.Random, *, keys: int = 1, wording: int | None = None) -> RetrievalQuestion:
    """Draw `keys` names with their values, and ask for the first, as `ask` does for measurements.

    Names and values share words, so that only the whole name tells the statements apart, and often all numbers of a
    prompt have the same characters before them.
    """
    task, wordings = RETRIEVALS[name], WORDINGS[name]
    chosen = rng.choice(wordings) if wording is None else wordings[wording % len(wordings)]
    names = draw_distinct(lambda: task.name(rng, False), keys)
    values = draw_distinct(lambda: task.value(rng, False), keys)
    names, values = _share_words(rng, names), _share_words(rng, values)
    if values[0].isdigit() and rng.random() < 0.5:
        chosen = with_opening(chosen, _any_opening(rng))
    return RetrievalQuestion.from_values(task, chosen, names, values)


def _any_opening(rng: random.Random) -> str:
    """One to three characters, never those of a held-out wording."""
    while True:
        opening = "".join(rng.choices(OPENING_CHARACTERS, k=rng.randint(1, 3)))
        if "0x" not in opening:
            return opening


def _share_words(rng: random.Random, texts: list[str]) -> list[str]:
    """Texts of several words, some words of each replaced by the one at the same place of another text."""
    split = [re.split("([ _])", text) for text in texts]
    shared = []
    for words in split:
        at = rng.randrange(0, len(words), 2)
        other = rng.choice(split)
        if rng.random() < 0.6 and len(other) == len(words) > 1:
            words = [*words[:at], other[at], *words[at + 1 :]]
        shared.append("".join(words))
    return shared if len(set(shared)) == len(texts) else texts


class Part(IntEnum):
    """Part of a training prompt that a byte belongs to."""

    FILLER = 0
    STATEMENT_OR_QUESTION = 1
    ANSWER = 2


@dataclass(frozen=True)
class Prompt:
    """A training prompt in bytes, less its filler.

    Attributes:
        statements: in the order of the text, with how many bytes of filler stand before each.
        tail: what stands after all filler: questions, each with its answer.
        filler_length: bytes of filler in all.
    """

    statements: tuple[tuple[int, bytes], ...]
    tail: tuple[tuple[bytes, bytes], ...]
    filler_length: int

    def fill(self, filler: bytes) -> tuple[bytes, list[Part]]:
        """The whole prompt, and what each of its bytes belongs to."""
        pieces, at = [], 0
        for before, statement in self.statements:
            pieces += [(filler[at:before], Part.FILLER), (statement, Part.STATEMENT_OR_QUESTION)]
            at = before
        pieces.append((filler[at : self.filler_length], Part.FILLER))
        for question, answer in self.tail:
            pieces += [(question, Part.STATEMENT_OR_QUESTION), (answer, Part.ANSWER)]
        return b"".join(text for text, _ in pieces), [part for text, part in pieces for _ in text]


def training_prompt(
    name: str,
    rng: random.Random,
    *,
    length: int,
    keys: int,
    asked: int = 1,
    held_out: bool = False,
    wording: int | None = None,
) -> Prompt:
    """A prompt of `length` bytes with statements at random depths, of fewer keys where so many do not fit.

    Args:
        asked: questions at the end, each with its answer, about different statements.
        held_out: with what measurements use, to see during the training how well the model retrieves.
        wording: as `ask` takes it.
    """
    for count in range(keys, 0, -1):
        if held_out:
            question = ask(RETRIEVALS[name], rng, keys=count, wording=wording)
        else:
            question = ask_in_training(name, rng, keys=count, wording=wording)
        pairs = zip(question.questions, question.answers, strict=True)
        tail = tuple((asks.encode(), answer.encode()) for asks, answer in itertools.islice(pairs, asked))
        statements = [(question.head + statement).encode() for statement in question.statements]
        room = length - sum(map(len, statements)) - sum(map(len, itertools.chain(*tail)))
        if room >= 0:
            places = insert(room, [rng.random() for _ in statements])
            return Prompt(tuple((stop, statements[index]) for index, _, stop in places), tail, room)
    raise ValueError(f"{length} bytes are too few for a statement and its question")

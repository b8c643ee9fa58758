"""RULER (Hsieh et al. 2024, arXiv 2404.06654): the 11 of its 13 tasks that need no data set.

Prompts, answers and answer prefixes are equal, byte for byte, to those of `main` of https://github.com/NVIDIA/RULER
(Apache License 2.0, from which templates and generators are adapted) for the same seed, tokenizer, length and text. The
order in which random numbers are drawn is therefore upstream's, and so is what follows from it:

- Prompts are as long as a binary search finds. A prompt that turns out too long is drawn again with less text, by
  steps of 5, 10, 25 or 500 units, so that prompts may be far below the length.
- Where the smallest text does not fit either, upstream tries for ever; here that is an error. The example of `vt` must
  fit into 500 tokens, which it does not with a token per byte.
- The prompt ends where the first 10 characters of the answer prefix stand last. The BOS token is not counted.
- `cwe` takes words from upstream's large list once it needs more than `wonderwords` has, from about 100,000 tokens on.
  That list is no part of a package: give its file in `RULER_WORDS`.
- `niah_single_2`, `niah_single_3`, `niah_multikey_1`, `niah_multivalue` and `niah_multiquery` hide sentences in a text.
  Upstream's is Paul Graham's essays, which may not be passed on: give a text of your own. It is cut into sentences by
  nltk with its English model `punkt_tab`, and where that was not downloaded by nltk without a model, which cuts after
  abbreviations too. Needles may then stand elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import string
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy

from rope_ext_hf.errors import CorpusError, MethodError, RopeExtError
from rope_ext_hf.installing import install_command
from rope_ext_hf.tools.suites.base import (
    PromptSettings,
    Sample,
    Suite,
    TooShortError,
    largest_fitting,
    register_suite,
    wordings,
)

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_TRIES = 100  # draws with the least text before a task counts as too long; some names are shorter than others
_FEW = 8  # draws that are enough where the shortest is too long by twice the difference between them
_OF_EXAMPLE = 500  # tokens that the example of `vt` may have
_WORDS = "RULER_WORDS"
_DEPTHS = [int(depth) for depth in numpy.round(numpy.linspace(0, 100, num=40))]  # percentages of a text
_Made = tuple[str, Sequence[str], Sequence[str]]
"""A prompt with its answer prefix, the right answers, and wrong ones that stand in it."""


@dataclass(frozen=True)
class _Template:
    """The wording of a task, and the tokens to generate."""

    text: str
    prefix: str
    budget: int


_TEMPLATES = {name: _Template(**saved) for name, saved in wordings("ruler").items()}


@dataclass
class _Generator:
    """The generator of the prompts of one task, at one length."""

    task: str
    template: _Template
    wanted: PromptSettings
    room: int  # tokens of prompt and generation together

    def __post_init__(self) -> None:  # upstream seeds both streams
        self.random, self.numbers = random.Random(self.wanted.seed), numpy.random.RandomState(self.wanted.seed)

    def shuffle(self, items: list[Any]) -> list[Any]:
        """Shuffle in place, each time from the seed."""
        random.Random(self.wanted.seed).shuffle(items)
        return items

    def size(self, make: Callable[[int], _Made], size: int) -> int:
        """The tokens of a prompt, without its budget."""
        for _ in range(_TRIES):
            if (made := self.attempt(make, size)) is not None:
                return self.wanted.tokens(made[0])
        raise self.too_short(None, "its prompts cannot be drawn")

    def too_short(self, need: int | None, reason: str = "") -> TooShortError:
        return TooShortError(self.task, self.wanted.length, need, reason)

    def check(self, make: Callable[[int], _Made], smallest: int) -> None:
        """Raise TooShortError where no draw of the smallest size fits; the random numbers to come stay the same."""
        shortest = self.shortest(make, smallest, self.room)
        if shortest > self.room:
            raise self.too_short(shortest + self.wanted.reserved)

    def shortest(self, make: Callable[[int], _Made], size: int, room: int) -> int:
        """Return the tokens of the first prompt of this size that fits into `room`, or of the shortest; with budget."""
        kept, numbers = self.random.getstate(), self.numbers.get_state()
        lengths = list[int]()
        for _ in range(_TRIES):
            if (made := self.attempt(make, size)) is not None:
                lengths.append(self.wanted.tokens(made[0]) + self.template.budget)
                spread = max(lengths) - min(lengths)
                if min(lengths) <= room or (len(lengths) >= _FEW and min(lengths) - 2 * spread > room):
                    break
        self.random.setstate(kept)
        self.numbers.set_state(numbers)
        if not lengths:
            raise self.too_short(None, "its prompts cannot be drawn")
        return min(lengths)

    def attempt(self, make: Callable[[int], _Made], size: int) -> _Made | None:
        """A prompt of this size; None where two variables got one name, or the needles are more than the places."""
        try:
            return make(size)
        except RopeExtError:
            raise
        except (IndexError, ValueError):
            return None

    def search(self, make: Callable[[int], _Made], low: int, high: int, beside: int = 0) -> int:
        """The largest size whose prompt fits, with `beside` tokens besides; `low` where none does."""

        def fits(size: int) -> bool:
            return self.size(make, size) + beside + self.template.budget <= self.room

        return largest_fitting(low, max(high, 2 * low), fits) or low

    def draw(self, make: Callable[[int], _Made], size: int, step: int) -> Sample:
        """A prompt of this size, or of less by steps until it fits."""
        for _ in range(_TRIES + size // step):
            if (made := self.attempt(make, size)) is not None:
                length = self.wanted.tokens(made[0]) + self.template.budget
                if length <= self.room:
                    return self.sample(*made, length)
            if size > step:
                size -= step
        raise self.too_short(self.shortest(make, size, 0) + self.wanted.reserved)

    def sample(self, text: str, right: Sequence[str], wrong: Sequence[str], length: int) -> Sample:
        at = text.rfind(self.template.prefix[:10])
        others = tuple(word for word in dict.fromkeys(wrong) if word not in right and word in text)
        return Sample(text[:at], text[at:], tuple(right), self.template.budget, length, others)


def _niah(
    g: _Generator, count: int, *, hay: str, key: str, value: str, keys: int = 1, values: int = 1, queries: int = 1
) -> list[Sample]:
    """Needles in a haystack of noise, of other needles, or of a text."""
    keys, words = max(keys, queries), _split_words(g.wanted.haystack)

    def any_pair() -> str:  # the six million pairs take many seconds
        return f"{g.random.choice(_words('adjective'))}-{g.random.choice(_words('noun'))}"

    # a text has the same tokens cut between words, which needs no model of sentences
    split: Callable[[str], list[str]] = str.split if g.wanted.check_only or hay != "essay" else _splitter()
    draws: dict[str, Callable[[], str]] = {
        "words": any_pair if g.wanted.check_only else lambda: g.random.choice(_pairs()),
        "numbers": lambda: str(g.random.randint(10**6, 10**7 - 1)),
        "uuids": lambda: str(uuid.UUID(int=g.random.getrandbits(128), version=4)),
    }
    template, kind = g.template.text + g.template.prefix, value
    if queries * values == 1:
        kind = value[:-1]
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            template = template.replace(plural, singular)

    def make(size: int) -> _Made:
        names, needles, wrong = list[str](), list[str](), list[str]()
        held: list[list[str]] = []
        for _ in range(keys):
            names.append(draws[key]())
            held.append([])
            for _ in range(values):
                held[-1].append(draws[value]())
                needles.append(_NEEDLE.format(kind=value, key=names[-1], value=held[-1][-1]))
        g.shuffle(needles)
        if hay == "essay":
            text = " ".join((words * -(-size // len(words)))[:size])
            context = _hide(needles, split(text.strip()), g.random.sample(_DEPTHS, len(needles)))
        else:
            lines = [_NOISE] * size
            if hay == "needle":
                pairs = [(draws[key](), draws[value]()) for _ in range(size)]
                lines = [_NEEDLE.format(kind=value, key=name, value=it) for name, it in pairs]
                wrong = [it for _, it in pairs]
            places = sorted(g.random.sample(range(size), len(needles)), reverse=True)
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)
        asked = g.random.sample(range(keys), queries)
        of = [names[index] for index in asked]
        query = f"{', '.join(of[:-1])}, and {of[-1]}" if len(of) > 1 else of[0]
        right = [it for index in asked for it in held[index]]
        wrong += [it for some in held for it in some]
        return template.format(kind=kind, context=context, query=query), right, wrong

    step = 500 if hay == "essay" else 5 if g.wanted.length < 4096 else 25
    g.check(make, step)
    if g.wanted.check_only:
        return []
    per_unit = g.size(make, step) / step
    size = g.search(make, step, int(g.room / per_unit * 3))
    return [g.draw(make, size, step) for _ in range(count)]


def _variable_tracking(g: _Generator, count: int, *, hops: int = 4) -> list[Sample]:
    """A chain of assignments in noise; before it, an example with its answer."""
    names_in_chain = hops + 1

    def name(letters: int) -> str:
        return "".join(g.random.choices(string.ascii_uppercase, k=letters))

    def make(size: int, example: bool = False) -> _Made:
        letters = 3 if example else 5
        names = [name(letters) for _ in range(names_in_chain)]
        while len(set(names)) < names_in_chain:  # upstream then fails and draws again, and so does this
            names.append(name(letters))
        value, chain = "", list[str]()
        for start in range(0, len(names), names_in_chain):
            some = names[start : start + names_in_chain]
            number = "12345" if example else str(g.numbers.randint(10000, 99999))
            links = [f"VAR {some[0]} = {number}"]
            links += [f"VAR {some[hop + 1]} = VAR {some[hop]} " for hop in range(hops)]
            value, chain = value or number, chain or links
        lines = [_NOISE] * size
        for index, place in enumerate(sorted(g.random.sample(range(size), len(chain)))):
            lines.insert(place + index, chain[index])
        context = "\n".join(lines).replace(". \n", ".\n")
        template = g.template.text + g.template.prefix
        return template.format(context=context, query=value, count=names_in_chain), names[:names_in_chain], ()

    def other_names(text: str) -> str:
        for old in text.strip().split()[-names_in_chain:]:
            text = text.replace(old, name(len(old)))
        return text.replace("12345", str(g.numbers.randint(10000, 99999)))

    room = _OF_EXAMPLE - g.wanted.reserved
    of_example = replace(g, template=replace(g.template, budget=0), room=room)
    budget = g.template.budget
    shortest = g.shortest(lambda size: make(size, True), 5, room + budget) - budget
    if shortest > room:
        raise g.too_short(None, f"its example has {shortest:,} tokens, and {room} are allowed")
    per_unit = g.size(lambda size: make(size, True), 5) / 5
    size = of_example.search(lambda size: make(size, True), 5, int(room / per_unit * 3))
    example = of_example.draw(lambda size: make(size, True), size, 5)
    shown = f"{example.prompt}{example.prefix} {' '.join(example.references)}\n"
    step = 5 if g.wanted.length < 4096 else 10

    def with_example(size: int) -> _Made:
        text, right, _ = make(size)
        before = other_names(shown)
        return f"{before}\n{text}", right, before.split()[-names_in_chain:]

    g.check(with_example, step)
    if g.wanted.check_only:
        return []
    per_unit = g.size(make, step) / step
    size = g.search(make, step, int(g.room / per_unit * 3), beside=g.wanted.tokens(shown))
    return [g.draw(with_example, size, step) for _ in range(count)]


def _common_words(g: _Generator, count: int, *, common: int = 10) -> list[Sample]:
    """A numbered list in which ten words stand more often than the others; before it, an example."""
    words = g.shuffle(sorted({*_words("noun"), *_words("adjective"), *_words("verb")}))
    template = g.template.text + g.template.prefix

    def listed(size: int, often: int, seldom: int) -> tuple[str, list[str], list[str]]:
        known = words if size <= len(words) else _many_words(g.wanted.length, os.environ.get(_WORDS))
        chosen = g.random.sample(known, size)
        every = g.shuffle(chosen[:common] * often + chosen[common:] * seldom)
        return " ".join(f"{i + 1}. {word}" for i, word in enumerate(every)), chosen[:common], chosen[common:]

    def make(size: int) -> _Made:
        example, answer, _ = listed(20, 3, 1) if g.wanted.length < 4096 else listed(40, 10, 3)
        context, right, wrong = listed(size, 6, 1) if g.wanted.length < 4096 else listed(size, 30, 3)
        answers = " ".join(f"{i + 1}. {word}" for i, word in enumerate(answer))
        return f"{template.format(context=example)} {answers}\n{template.format(context=context)}", right, wrong

    g.check(make, 10)
    if g.wanted.check_only:
        return []
    per_word = g.size(make, 4096) / 4096
    size = g.search(make, 10, int(g.room // per_word) * 2)
    return [g.draw(make, size, 10) for _ in range(count)]


def _frequent_words(g: _Generator, count: int, *, letters: int = 6) -> list[Sample]:
    """Coded words, drawn by Zipf's law; the three most frequent are asked for."""
    room = g.room - g.template.budget
    kinds, step = room // 50, room // 32
    empty = g.wanted.tokens((g.template.text + g.template.prefix).format(context=""))
    if kinds < 4 or empty >= room:
        raise g.too_short(max(200, empty + 1) + g.template.budget + g.wanted.reserved)
    if g.wanted.check_only:
        return []

    def make(size: int) -> tuple[_Made, int]:
        def word() -> str:
            return "".join(g.random.choices(string.ascii_lowercase, k=letters))

        drawn = [word() for _ in range(kinds)]
        while len(set(drawn)) < kinds:
            drawn.append(word())
        coded = g.shuffle(sorted(set(drawn)))
        coded[0] = "..."  # the most frequent one is noise

        def text(size: int) -> str:
            zeta = math.pi**2 / 6  # of 2, the exponent of the law
            counts = (size * numpy.arange(1, len(coded) + 1) ** -2.0 / zeta).astype(int)
            every = g.shuffle([word for word, often in zip(coded, counts, strict=True) for _ in range(often)])
            return (g.template.text + g.template.prefix).format(context=" ".join(every))

        if size > 0:
            while g.wanted.tokens(text(size)) > room:
                size -= step
        else:
            size = room // letters
            while g.wanted.tokens(text(size)) < room:
                size += step
            size -= step
        return (text(size), coded[1:4], coded[4:]), size

    size, samples = make(0)[1], []
    for _ in range(count):
        text, right, wrong = make(size)[0]
        samples.append(g.sample(text, right, wrong, g.wanted.tokens(text) + g.template.budget))
    return samples


_RULER_TASKS: dict[str, tuple[str, Callable[..., list[Sample]], dict[str, Any]]] = {
    "niah_single_1": ("niah", _niah, {"hay": "noise", "key": "words", "value": "numbers"}),
    "niah_single_2": ("niah", _niah, {"hay": "essay", "key": "words", "value": "numbers"}),
    "niah_single_3": ("niah", _niah, {"hay": "essay", "key": "words", "value": "uuids"}),
    "niah_multikey_1": ("niah", _niah, {"hay": "essay", "key": "words", "value": "numbers", "keys": 4}),
    "niah_multikey_2": ("niah", _niah, {"hay": "needle", "key": "words", "value": "numbers"}),
    "niah_multikey_3": ("niah", _niah, {"hay": "needle", "key": "uuids", "value": "uuids"}),
    "niah_multivalue": ("niah", _niah, {"hay": "essay", "key": "words", "value": "numbers", "values": 4}),
    "niah_multiquery": ("niah", _niah, {"hay": "essay", "key": "words", "value": "numbers", "queries": 4}),
    "vt": ("vt", _variable_tracking, {}),
    "cwe": ("cwe", _common_words, {}),
    "fwe": ("fwe", _frequent_words, {}),
}


@register_suite
class Ruler(Suite):
    """RULER without its two tasks of question answering, which need SQuAD and HotpotQA."""

    name = "ruler"
    tasks = tuple(_RULER_TASKS)
    seed = 42

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        template, make, parameters = _RULER_TASKS[task]
        if not wanted.haystack.split():
            raise CorpusError("the haystack is empty")
        return make(_Generator(task, _TEMPLATES[template], wanted, wanted.room), wanted.count, **parameters)


@lru_cache(maxsize=1)
def _split_words(text: str) -> list[str]:
    return re.sub(r"\s+", " ", text).split(" ")


def _hide(needles: Sequence[str], sentences: Sequence[str], depths: Sequence[int]) -> str:
    """Sentences with needles after these percentages of them."""
    places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    pieces = []
    for index, start in enumerate(places[:-1]):
        pieces.append(" ".join(sentences[start : places[index + 1]]))
        pieces += needles[index : index + 1]
    return " ".join(pieces)


@cache
def _words(kind: str) -> list[str]:
    try:
        text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    except ImportError as error:
        raise ImportError(f"this task draws words from wonderwords: {install_command('tasks')}") from error
    return [word.rstrip() for word in text.removesuffix("\n").split("\n")]


@cache
def _pairs() -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in _words("adjective") for noun in _words("noun")})


@cache
def _many_words(length: int, path: str | None) -> list[str]:
    """The words of a file; `length` is that of a prompt that needs them."""
    if not path:
        raise MethodError(
            f"task 'cwe' at length {length:,} needs more words than wonderwords has; set {_WORDS} to the file "
            "scripts/data/synthetic/json/english_words.json of https://github.com/NVIDIA/RULER, or leave the task out "
            "with --tasks"
        )
    try:
        return list(json.loads(Path(path).read_text(encoding="utf-8")).values())
    except (OSError, ValueError, AttributeError) as error:
        raise CorpusError(f"{_WORDS} is {path!r}, which is no JSON file of words by number: {error}") from error


@cache
def _splitter() -> Callable[[str], list[str]]:
    try:
        from nltk.tokenize import PunktSentenceTokenizer, sent_tokenize
    except ImportError as error:
        raise ImportError(f"this task cuts sentences with nltk: {install_command('tasks')}") from error
    try:
        sent_tokenize("One. Two.")
    except LookupError:
        warnings.warn(
            "nltk has no model of English sentences here, so that needles may stand elsewhere than in RULER's prompts; "
            "download it once: python -m nltk.downloader punkt_tab",
            stacklevel=2,
        )
        return PunktSentenceTokenizer().tokenize  # type: ignore[no-any-return]
    return sent_tokenize  # type: ignore[no-any-return]

"""RULER (Hsieh et al. 2024, arXiv 2404.06654): 11 of its 13 tasks. The other two need data sets.

Prompts, answers and answer prefixes are equal, byte for byte, to those of `main` of https://github.com/NVIDIA/RULER
(Apache License 2.0, from which templates and generators are adapted) for the same seed, tokenizer, length and text.
Random numbers are therefore drawn in upstream's order, and what follows from that order is upstream's too:

- A binary search finds how much text a prompt has. A prompt that turns out too long is drawn again with less text, in
  steps of 5, 10, 25 or 500 units, so that some prompts are far shorter than the length.
- Where not even the smallest text fits, upstream tries forever; here that is an error. The example of `vt` must fit
  into 500 tokens, which it does not where a token is a byte.
- A prompt ends at the last place where the first 10 characters of the answer prefix stand. The BOS token is not
  counted.
- `cwe` takes words from upstream's large list once it needs more than the package `wonderwords` has, from about
  100,000 tokens on. No package has that list: set the environment variable `RULER_WORDS` to its file.
- `niah_single_2`, `niah_single_3`, `niah_multikey_1`, `niah_multivalue` and `niah_multiquery` hide sentences in a text.
  Upstream's text is Paul Graham's essays, which may not be redistributed; give a text of your own. It is cut into
  sentences by nltk with its English model `punkt_tab`. Where that model was not downloaded, nltk cuts without a model,
  after abbreviations too, so that needles may stand in other places than upstream's.
"""

from __future__ import annotations

import json
import math
import os
import re
import string
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

import numpy

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.installing import install_command
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, register_suite
from rope_ext_hf.tools.suites.benchmarks.ruler_generator import TEMPLATES, Draw, Generator

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_EXAMPLE_TOKENS = 500  # that the example of `vt` may have
_WORDS_VARIABLE = "RULER_WORDS"
_DEPTHS = [int(depth) for depth in numpy.round(numpy.linspace(0, 100, num=40))]  # percentages of a text
_SHORT_LENGTH = 4096  # upstream takes smaller steps, and shorter examples, below this length


@dataclass(frozen=True)
class _Needles:
    """A task in which values must be found by their keys: sentences with keys and values are hidden in a long text."""

    haystack: str  # "noise", "needle" (other needles) or "essay" (the given text)
    key_kind: str  # "words", "numbers" or "uuids"
    value_kind: str
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys that are asked for


def _niah(generator: Generator, count: int, task: _Needles) -> list[Sample]:
    """Make `count` prompts of a needle-in-a-haystack task."""
    settings, rng = generator.settings, generator.random
    keys, words = max(task.keys, task.queries), _split_words(settings.haystack)
    template, kind = _niah_template(generator.template.whole, task)

    def adjective_and_noun() -> str:
        if settings.check_only:  # any pair will do, and listing all six million takes many seconds
            return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"
        return rng.choice(_pairs())

    draw_kind: dict[str, Callable[[], str]] = {
        "words": adjective_and_noun,
        "numbers": lambda: str(rng.randint(10**6, 10**7 - 1)),
        "uuids": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    }
    draw_key, draw_value = draw_kind[task.key_kind], draw_kind[task.value_kind]
    # Cut between words, a text has as many tokens as cut between sentences, and needs no model of sentences.
    split: Callable[[str], list[str]] = str.split
    if task.haystack == "essay" and not settings.check_only:
        split = _splitter()

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=task.value_kind, key=key, value=value)

    def lines_of_noise(size: int, needles: list[str]) -> tuple[str, list[str]]:
        """Return `size` lines of filling text with the needles between them, and values that would be wrong answers."""
        lines, wrong = [_NOISE] * size, list[str]()
        if task.haystack == "needle":
            pairs = [(draw_key(), draw_value()) for _ in range(size)]
            lines = [needle(key, value) for key, value in pairs]
            wrong = [value for _, value in pairs]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, text in zip(places, needles, strict=True):
            lines.insert(place, text)
        return "\n".join(lines), wrong

    def make(size: int) -> Draw:
        names, needles, wrong = list[str](), list[str](), list[str]()
        values_of_keys: list[list[str]] = []
        for _ in range(keys):
            names.append(draw_key())
            values_of_keys.append([])
            for _ in range(task.values):
                values_of_keys[-1].append(draw_value())
                needles.append(needle(names[-1], values_of_keys[-1][-1]))
        generator.shuffle(needles)
        if task.haystack == "essay":
            text = " ".join((words * -(-size // len(words)))[:size])
            context = _hide(needles, split(text.strip()), rng.sample(_DEPTHS, len(needles)))
        else:
            context, wrong = lines_of_noise(size, needles)
        queried = rng.sample(range(keys), task.queries)
        queried_names = [names[index] for index in queried]
        query = queried_names[-1]
        if len(queried_names) > 1:
            query = f"{', '.join(queried_names[:-1])}, and {query}"
        right = [value for index in queried for value in values_of_keys[index]]
        wrong += [value for values in values_of_keys for value in values]
        return Draw(template.format(kind=kind, context=context, query=query), right, wrong)

    step = 5 if settings.length < _SHORT_LENGTH else 25
    if task.haystack == "essay":
        step = 500  # words of the text, not lines
    generator.check(make, step)
    if settings.check_only:
        return []
    tokens_per_unit = generator.tokens(make, step) / step
    size = generator.search(make, step, int(generator.room / tokens_per_unit * 3))
    return [generator.draw(make, size, step) for _ in range(count)]


def _niah_template(text: str, task: _Needles) -> tuple[str, str]:
    """Return the wording of a task's prompts, and the word for its values, such as "numbers".

    Both are put into the singular if one value is asked for.
    """
    if task.queries * task.values > 1:
        return text, task.value_kind
    for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
        text = text.replace(plural, singular)
    return text, task.value_kind[:-1]


def _variable_tracking(generator: Generator, count: int, hops: int = 4) -> list[Sample]:
    """Make `count` prompts that assign variables to each other in a chain, hidden in noise, after an example."""
    settings, rng = generator.settings, generator.random
    names_in_chain = hops + 1

    def draw_name(letters: int) -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=letters))

    def make(size: int, example: bool = False) -> Draw:
        letters = 3 if example else 5
        names = [draw_name(letters) for _ in range(names_in_chain)]
        while len(set(names)) < names_in_chain:  # two equal names make upstream fail and draw again, and so it is here
            names.append(draw_name(letters))
        value, chain = "", list[str]()
        for start in range(0, len(names), names_in_chain):
            chain_names = names[start : start + names_in_chain]
            number = "12345" if example else str(generator.numbers.randint(10000, 99999))
            links = [f"VAR {chain_names[0]} = {number}"]
            links += [f"VAR {chain_names[hop + 1]} = VAR {chain_names[hop]} " for hop in range(hops)]
            value, chain = value or number, chain or links
        lines = [_NOISE] * size
        for index, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
            lines.insert(place + index, chain[index])
        context = "\n".join(lines).replace(". \n", ".\n")
        text = generator.template.whole.format(context=context, query=value, count=names_in_chain)
        return Draw(text, names[:names_in_chain], ())

    def make_example(size: int) -> Draw:
        return make(size, example=True)

    def with_other_names(example: str) -> str:
        """Return the example with its variable names and its number replaced by new ones."""
        for old in example.strip().split()[-names_in_chain:]:
            example = example.replace(old, draw_name(len(old)))
        return example.replace("12345", str(generator.numbers.randint(10000, 99999)))

    room = _EXAMPLE_TOKENS - settings.reserved
    budget = generator.template.budget
    example_generator = replace(generator, template=replace(generator.template, budget=0), room=room)
    shortest = generator.shortest(make_example, 5, room + budget) - budget
    if shortest > room:
        raise generator.too_short(None, f"its example has {shortest:,} tokens, and {room} are allowed")
    tokens_per_line = generator.tokens(make_example, 5) / 5
    size = example_generator.search(make_example, 5, int(room / tokens_per_line * 3))
    sample = example_generator.draw(make_example, size, 5)
    example = f"{sample.prompt}{sample.prefix} {' '.join(sample.references)}\n"
    step = 5 if settings.length < _SHORT_LENGTH else 10

    def with_example(size: int) -> Draw:
        text, right, _ = make(size)
        before = with_other_names(example)
        return Draw(f"{before}\n{text}", right, before.split()[-names_in_chain:])

    generator.check(with_example, step)
    if settings.check_only:
        return []
    tokens_per_line = generator.tokens(make, step) / step
    size = generator.search(make, step, int(generator.room / tokens_per_line * 3), beside=settings.tokens(example))
    return [generator.draw(with_example, size, step) for _ in range(count)]


def _common_words(generator: Generator, count: int, common: int = 10) -> list[Sample]:
    """Make `count` prompts, each with a numbered list of words after an example with its answer.

    The `common` most frequent words of the list are the answers.
    """
    settings, template = generator.settings, generator.template.whole
    words = generator.shuffle(sorted({*_words("noun"), *_words("adjective"), *_words("verb")}))

    def draw_list(size: int, often: int, seldom: int) -> tuple[str, list[str], list[str]]:
        """Draw `size` different words, and return a numbered list of them, the frequent words and the others.

        Frequent words stand `often` times in the list, the others `seldom` times.
        """
        vocabulary = words
        if size > len(words):
            vocabulary = _many_words(settings.length, os.environ.get(_WORDS_VARIABLE))
        chosen = generator.random.sample(vocabulary, size)
        items = generator.shuffle(chosen[:common] * often + chosen[common:] * seldom)
        return _numbered(items), chosen[:common], chosen[common:]

    def make(size: int) -> Draw:
        if settings.length < _SHORT_LENGTH:
            example, answer, _ = draw_list(20, 3, 1)
            context, right, wrong = draw_list(size, 6, 1)
        else:
            example, answer, _ = draw_list(40, 10, 3)
            context, right, wrong = draw_list(size, 30, 3)
        example_text = f"{template.format(context=example)} {_numbered(answer)}"
        return Draw(f"{example_text}\n{template.format(context=context)}", right, wrong)

    generator.check(make, 10)
    if settings.check_only:
        return []
    tokens_per_word = generator.tokens(make, 4096) / 4096
    size = generator.search(make, 10, int(generator.room // tokens_per_word) * 2)
    return [generator.draw(make, size, 10) for _ in range(count)]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{index + 1}. {word}" for index, word in enumerate(words))


def _frequent_words(generator: Generator, count: int, letters: int = 6) -> list[Sample]:
    """Make `count` prompts of random words with frequencies by Zipf's law; the three most frequent are the answers."""
    settings, template = generator.settings, generator.template.whole
    budget = generator.template.budget
    room = generator.room - budget
    kinds, step = room // 50, room // 32
    empty = settings.tokens(template.format(context=""))
    if kinds < 4 or empty >= room:
        raise generator.too_short(max(200, empty + 1) + budget + settings.reserved)
    if settings.check_only:
        return []

    def draw_word() -> str:
        return "".join(generator.random.choices(string.ascii_lowercase, k=letters))

    def make(size: int) -> tuple[Draw, int]:
        """Draw a prompt with a text of this size, and return it with its size.

        Where `size` is 0, the text is as large as fits.
        """
        words = [draw_word() for _ in range(kinds)]
        while len(set(words)) < kinds:
            words.append(draw_word())
        coded = generator.shuffle(sorted(set(words)))
        coded[0] = "..."  # the most frequent one is noise

        def text(size: int) -> str:
            zeta_of_2 = math.pi**2 / 6  # normalises Zipf's law with the exponent 2
            counts = (size * numpy.arange(1, len(coded) + 1) ** -2.0 / zeta_of_2).astype(int)
            items = [word for word, times in zip(coded, counts, strict=True) for _ in range(times)]
            return template.format(context=" ".join(generator.shuffle(items)))

        if size > 0:
            while settings.tokens(text(size)) > room:
                size -= step
        else:
            size = room // letters
            while settings.tokens(text(size)) < room:
                size += step
            size -= step
        return Draw(text(size), coded[1:4], coded[4:]), size

    _, size = make(0)
    samples = []
    for _ in range(count):
        draw, _ = make(size)
        samples.append(generator.sample(draw, settings.tokens(draw.text) + budget))
    return samples


_NIAH_TASKS = {
    "niah_single_1": _Needles("noise", "words", "numbers"),
    "niah_single_2": _Needles("essay", "words", "numbers"),
    "niah_single_3": _Needles("essay", "words", "uuids"),
    "niah_multikey_1": _Needles("essay", "words", "numbers", keys=4),
    "niah_multikey_2": _Needles("needle", "words", "numbers"),
    "niah_multikey_3": _Needles("needle", "uuids", "uuids"),
    "niah_multivalue": _Needles("essay", "words", "numbers", values=4),
    "niah_multiquery": _Needles("essay", "words", "numbers", queries=4),
}
_OTHER_TASKS: dict[str, Callable[[Generator, int], list[Sample]]] = {
    "vt": _variable_tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
}


@register_suite
class Ruler(Suite):
    """The suite RULER without its two tasks of question answering, which need the data sets SQuAD and HotpotQA."""

    name = "ruler"
    tasks = (*_NIAH_TASKS, *_OTHER_TASKS)
    seed = 42

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        if not settings.haystack.split():
            raise CorpusError("the haystack is empty; give a text with --haystack")
        if task in _NIAH_TASKS:
            generator = Generator(task, TEMPLATES["niah"], settings, settings.room)
            return _niah(generator, settings.count, _NIAH_TASKS[task])
        generator = Generator(task, TEMPLATES[task], settings, settings.room)
        return _OTHER_TASKS[task](generator, settings.count)


@lru_cache(maxsize=1)
def _split_words(text: str) -> list[str]:
    return re.sub(r"\s+", " ", text).split(" ")


def _hide(needles: Sequence[str], sentences: Sequence[str], depths: Sequence[int]) -> str:
    """Return the sentences as one text with needles in it, each after a percentage of the sentences (`depths`)."""
    places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    pieces = []
    for index, start in enumerate(places[:-1]):
        pieces.append(" ".join(sentences[start : places[index + 1]]))
        pieces += needles[index : index + 1]
    return " ".join(pieces)


@cache
def _words(kind: str) -> list[str]:
    """Return the words of one kind, "noun", "adjective" or "verb", from the package wonderwords."""
    try:
        text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    except ImportError as error:
        raise ImportError(f"this task draws words from wonderwords: {install_command('tasks')}") from error
    return [word.rstrip() for word in text.removesuffix("\n").split("\n")]


@cache
def _pairs() -> list[str]:
    """Return every adjective joined to every noun, six million pairs, in alphabetical order."""
    return sorted({f"{adjective}-{noun}" for adjective in _words("adjective") for noun in _words("noun")})


@cache
def _many_words(length: int, path: str | None) -> list[str]:
    """Return the words in the file `path`, RULER's large list; `length` is the context length that needs them."""
    if not path:
        raise MethodError(
            f"task 'cwe' at length {length:,} needs more words than wonderwords has; set the environment variable "
            f"{_WORDS_VARIABLE} to the file scripts/data/synthetic/json/english_words.json of "
            "https://github.com/NVIDIA/RULER, or leave the task out with --tasks"
        )
    try:
        return list(json.loads(Path(path).read_text(encoding="utf-8")).values())
    except (OSError, ValueError, AttributeError) as error:
        raise CorpusError(
            f"{_WORDS_VARIABLE} is {path!r}, which is not a JSON file of words by number: {error}"
        ) from error


@cache
def _splitter() -> Callable[[str], list[str]]:
    """Return the function that cuts a text into sentences; warn where nltk has no model for it."""
    try:
        from nltk.tokenize import PunktSentenceTokenizer, sent_tokenize
    except ImportError as error:
        raise ImportError(f"this task cuts sentences with nltk: {install_command('tasks')}") from error
    try:
        sent_tokenize("One. Two.")
    except LookupError:
        warnings.warn(
            "nltk's model of English sentences is not installed, so that needles may stand in other places than in "
            "RULER's prompts; download it once: python -m nltk.downloader punkt_tab",
            stacklevel=2,
        )
        return PunktSentenceTokenizer().tokenize  # type: ignore[no-any-return]
    return sent_tokenize  # type: ignore[no-any-return]

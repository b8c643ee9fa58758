"""`Suite`, the base class of task suites: it makes prompts of a given length, with right answers, and scores answers.

To add a suite called json-kv, write a file json_kv.py in this folder, with a subclass of `Suite` decorated by
`register_suite`. No other file needs a change. A suite makes its prompts from a seed and a text; nothing is downloaded.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rope_ext_hf.errors import MethodError, entry
from rope_ext_hf.files.whole import package_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", bound="type[Suite]")
_LENGTH_TRIES = 8  # lengths to try when searching for one that a task fits into


@dataclass(frozen=True)
class Sample:
    """One prompt of a task, with its right answers."""

    prompt: str  # the text that the model reads; with a chat template, the user's message
    prefix: str  # the beginning of the answer, given to the model after the prompt
    references: tuple[str, ...]  # strings that a right answer contains
    budget: int  # tokens to generate at most
    length: int  # tokens of prompt, prefix and budget together
    # Wrong answers that the first reference is ranked against, such as other values that stand in the prompt.
    others: tuple[str, ...] = ()
    closed: bool = False  # True: the answer is ranked against `others` alone, never against answers of other prompts


@dataclass(frozen=True)
class PromptSettings:
    """The settings that determine the prompts of a task: tokenizer, length, seed and others."""

    tokenizer: PreTrainedTokenizerBase  # counts the tokens of prompts, without special tokens
    length: int  # tokens of prompt and generation together, at most
    count: int  # number of prompts
    seed: int  # for names, values and places in the prompts
    haystack: str  # the text that facts are hidden in; some tasks use none
    reserved: int = 0  # tokens of `length` that are kept free, for a chat template or a longer answer
    check_only: bool = False  # make no prompts, only raise TooShortError where the smallest does not fit

    @property
    def room(self) -> int:
        """Tokens that prompt and generated answer may have together: the length without the reserved tokens."""
        return self.length - self.reserved

    def tokens(self, text: str) -> int:
        """Return the number of tokens in a text, without special tokens."""
        return count_tokens(self.tokenizer, text)


class Suite(ABC):
    """A set of tasks whose scores are averaged; a subclass makes the prompts and scores the answers.

    Attributes:
        name: the suite's name on the command line and in results.
        tasks: names of its tasks, in the order in which they are shown.
        seed: the default seed of its prompts.
        score_by: the default way to score: "generate" an answer, or "rank" the right answer among wrong ones by
            likelihood.
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    seed: ClassVar[int] = 0
    score_by: ClassVar[str] = "generate"

    def samples(self, task: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Sample]:
        """Make the prompts for one task, with their right answers.

        `task` is one of `tasks`. The tokenizer and the settings are fields of `PromptSettings`.

        Raises:
            ImportError: a package that the suite draws words from is not installed.
            MethodError: the task does not fit into the length (the message names a length that it fits into, where
                there is one), or the tokenizer returns no tokens, so that no prompt would ever fill its length.
        """
        prompt_settings = PromptSettings(tokenizer, **settings)
        _check_tokenizer(task, prompt_settings)
        try:
            return self.make(task, prompt_settings)
        except TooShortError as error:
            least = self.least_length(task, prompt_settings)
            advice = "leave the task out with --tasks"
            if least:
                advice = f"give a length of at least {least:,} tokens, or {advice}"
            raise MethodError(f"{error}; {advice}") from error

    def check(self, task: str, settings: PromptSettings) -> None:
        """Raise TooShortError if a task does not fit into the length; only the smallest prompt is made."""
        _check_tokenizer(task, settings)
        self.make(task, replace(settings, check_only=True))

    def least_length(self, task: str, settings: PromptSettings) -> int | None:
        """Return the shortest length that a task fits into, not shorter than `settings.length`; None: there is none."""
        length = settings.length
        for _ in range(_LENGTH_TRIES):  # a suite may need more room for the prompts of a longer length
            try:
                self.check(task, replace(settings, length=length))
            except TooShortError as error:
                if error.need is None:
                    break
                length = error.need
            else:
                return length
        return None

    @abstractmethod
    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        """Make the prompts for a task; `samples` calls this.

        If `settings.check_only` is set, stop once the smallest prompt is known to fit, and return none.
        """

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """Return the share of the right answers, `references`, that an answer contains, ignoring case.

        This is RULER's `string_match_all`.
        """
        return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def _check_tokenizer(task: str, settings: PromptSettings) -> None:
    if not settings.tokens(task):
        raise MethodError("the tokenizer returns no tokens for a text; give the one that the model was trained with")


def wordings(suite: str) -> dict[str, Any]:
    """Return the texts from which a suite's prompts are made, as read from wordings.toml."""
    return dict(package_table("rope_ext_hf.tools.suites", "benchmarks/wordings.toml")[suite])


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the number of tokens in a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that a binary search from `low` to `high` finds to fit; None: it finds none."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def fill(
    task: str, settings: PromptSettings, sample: Callable[[int, int], Sample], smallest: int, step: int
) -> list[Sample]:
    """Make prompts as long as the length allows when only whole parts (facts, nodes, sentences) can be added.

    Args:
        task: the name of the task.
        settings: the number of prompts, their length and more.
        sample: a function that makes a prompt from its index and its size in parts; a larger size gives a longer
            prompt.
        smallest: the smallest size of a prompt.
        step: parts by which a second prompt is larger than the smallest, to estimate the tokens of one part.

    Raises:
        TooShortError: the smallest prompts do not fit.
    """
    need = settings.reserved + max(sample(index, smallest).length for index in range(settings.count))
    if need > settings.length:
        raise TooShortError(task, settings.length, need)
    if settings.check_only:
        return []
    return [_filled(cache(partial(sample, index)), settings.room, smallest, step) for index in range(settings.count)]


def _filled(of_size: Callable[[int], Sample], room: int, smallest: int, step: int) -> Sample:
    """Make the largest prompt that has at most `room` tokens; `of_size` makes a prompt of a size in parts."""
    tokens_per_part = max(1, of_size(smallest + step).length - of_size(smallest).length) / step
    most = max(smallest, int(2 * room / tokens_per_part) + 1)
    size = largest_fitting(smallest, most, lambda size: of_size(size).length <= room)
    # A binary search may miss the smallest size where lengths do not always rise with sizes.
    return of_size(smallest if size is None else size)


class TooShortError(MethodError):
    """An error for a length into which not even the smallest prompt of a task fits.

    Attributes:
        task: the task.
        need: the length in tokens that the smallest prompt needs; None: no length is long enough.
        reason: the text behind the task's name in a message.
    """

    def __init__(self, task: str, length: int, need: int | None, reason: str = "") -> None:
        self.task, self.need = task, need
        self.reason = reason or "its smallest prompt and its generation budget do not fit"
        super().__init__(f"length {length:,} is too short for task {task!r} with this tokenizer: {self.reason}")


_SUITES: dict[str, Suite] = {}


def register_suite(cls: S) -> S:
    """Register a suite under its name, as a class decorator.

    Raises:
        ValueError: the name is taken.
    """
    if cls.name in _SUITES:
        raise ValueError(f"there is a suite called {cls.name!r} already")
    _SUITES[cls.name] = cls()
    return cls


def suite_names() -> list[str]:
    """Return the names of all suites, from the names of the files that register one; no file is imported."""
    files = (Path(__file__).parent / "benchmarks").glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if "\n@register_suite\n" in file.read_text("utf-8"))


def check_suite(name: str) -> None:
    """Raise MethodError if no suite has this name; no suite is imported."""
    entry("suite", name, dict.fromkeys(sorted({*suite_names(), *_SUITES})))


def list_suites() -> dict[str, Suite]:
    """Return all suites by name, in alphabetical order."""
    for name in suite_names():
        importlib.import_module(f"{__package__}.benchmarks.{name.replace('-', '_')}")
    return dict(sorted(_SUITES.items()))


def suite(name: str) -> Suite:
    """Return the suite with this name.

    Raises:
        MethodError: there is none; the message has the nearest name.
    """
    return entry("suite", name, list_suites())

"""Task suites: what a long prompt asks for, how much may be generated, and which answers are right.

A suite called json-kv is one file of this folder, json_kv.py, with a `Suite` under `register_suite`. Nothing
outside that file names it. A suite makes its prompts from its seed and a text: no file is downloaded.
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
from rope_ext_hf.files import package_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", bound="type[Suite]")
_STEPS = 8  # lengths that are tried to find one that is long enough


@dataclass(frozen=True)
class Sample:
    """One prompt and its right answers."""

    prompt: str  # the text that the model reads; with a chat template, the user's message
    prefix: str  # how the answer begins, given to the model after the prompt
    references: tuple[str, ...]  # strings that a right answer holds
    budget: int  # tokens to generate at most
    length: int  # tokens of prompt, prefix and budget together
    # wrong answers, such as those that stand in the prompt, against which the first reference is ranked
    others: tuple[str, ...] = ()
    closed: bool = False  # whether it is ranked against no other answers


@dataclass(frozen=True)
class PromptSettings:
    """The settings that the prompts of a task are made with."""

    tokenizer: PreTrainedTokenizerBase  # counts the tokens of prompts, without special tokens
    length: int  # tokens of prompt and generation together, at most
    count: int  # how many prompts
    seed: int  # of names, values and places
    haystack: str  # the text that facts are hidden in, of tasks that use one
    reserved: int = 0  # so many tokens of `length` are a chat template's
    check_only: bool = False  # raise TooShortError where the smallest prompts do not fit, and make none

    @property
    def room(self) -> int:
        """Tokens of prompt and generation without the chat template."""
        return self.length - self.reserved

    def tokens(self, text: str) -> int:
        return count_tokens(self.tokenizer, text)


class Suite(ABC):
    """Tasks that are measured and averaged together.

    Attributes:
        name: on the command line and in results.
        tasks: their names, in the order in which they are shown.
        seed: the default seed of its prompts.
        score_by: the default way to score answers, "generate" or "rank".
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    seed: ClassVar[int] = 0
    score_by: ClassVar[str] = "generate"

    def samples(self, task: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Sample]:
        """Make the prompts of one of the `tasks`; tokenizer and settings are fields of `PromptSettings`.

        Raises:
            ImportError: a package that the suite draws words from is not installed.
            MethodError: the task does not fit into the length; the message has one that it fits into. Or the tokenizer
                gives no tokens of a text, so that no prompt would ever fill its length.
        """
        wanted = PromptSettings(tokenizer, **settings)
        _check_tokens(task, wanted)
        try:
            return self.make(task, wanted)
        except TooShortError as error:
            least = self.least_length(task, wanted)
            longer = f"ask for {least:,} tokens, or " if least else ""
            raise MethodError(f"{error}; {longer}leave the task out with --tasks") from error

    def check(self, task: str, wanted: PromptSettings) -> None:
        """Raise TooShortError where a task does not fit into a length; make no prompt larger than the smallest."""
        _check_tokens(task, wanted)
        self.make(task, replace(wanted, check_only=True))

    def least_length(self, task: str, wanted: PromptSettings) -> int | None:
        """Return the least length from that of `wanted` on that its smallest prompts fit into; None: no length."""
        length = wanted.length
        for _ in range(_STEPS):  # a suite may ask more of longer prompts
            try:
                self.check(task, replace(wanted, length=length))
            except TooShortError as error:
                if error.need is None:
                    break
                length = error.need
            else:
                return length
        return None

    @abstractmethod
    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        """Make the prompts that `samples` returns; with `check_only` none, as soon as the smallest are known to fit."""

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """The share of references that a generated answer holds, in any case: RULER's `string_match_all`."""
        return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def _check_tokens(task: str, wanted: PromptSettings) -> None:
    if not wanted.tokens(task):
        raise MethodError("the tokenizer gives no tokens of a text: take the one that the model was trained with")


def wordings(suite: str) -> dict[str, Any]:
    """The wording of a suite as wordings.toml has it."""
    return dict(package_table("rope_ext_hf.tools.suites", "wordings.toml")[suite])


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest size that a binary search from `low` to `high` tries and that fits; None where none does."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def fill(
    task: str, wanted: PromptSettings, sample: Callable[[int, int], Sample], smallest: int, step: int
) -> list[Sample]:
    """Prompts that fill their length; MethodError where the smallest does not fit.

    Args:
        sample: the prompt of an index and a size; a larger size is a longer prompt.
        smallest: the least size of a prompt.
        step: by how much larger a prompt is that tells how long one more of its parts is.
    """

    need = wanted.reserved + max(sample(index, smallest).length for index in range(wanted.count))
    if need > wanted.length:
        raise TooShortError(task, wanted.length, need)
    if wanted.check_only:
        return []

    def filled(of_size: Callable[[int], Sample]) -> Sample:
        each = max(1, of_size(smallest + step).length - of_size(smallest).length) / step
        most = max(smallest, int(2 * wanted.room / each) + 1)
        size = largest_fitting(smallest, most, lambda size: of_size(size).length <= wanted.room)
        # A search by halves may miss the smallest one where lengths do not rise with sizes.
        return of_size(smallest if size is None else size)

    return [filled(cache(partial(sample, index))) for index in range(wanted.count)]


class TooShortError(MethodError):
    """A length that the smallest prompt of a task does not fit into.

    Attributes:
        task: the task.
        need: the length in tokens that the smallest prompt takes; None: no length is long enough.
        reason: the text behind the task's name in a message.
    """

    def __init__(self, task: str, length: int, need: int | None, reason: str = "") -> None:
        self.task, self.need = task, need
        self.reason = reason or "its smallest prompt and its generation budget do not fit"
        super().__init__(f"length {length:,} is too short for task {task!r} with this tokenizer: {self.reason}")


_SUITES: dict[str, Suite] = {}


def register_suite(cls: S) -> S:
    """Make a suite known by its name, a decorator; ValueError where the name is taken."""
    if cls.name in _SUITES:
        raise ValueError(f"there is a suite called {cls.name!r} already")
    _SUITES[cls.name] = cls()
    return cls


def suite_names() -> list[str]:
    """Return the names of all suites: of the files beside this one that register one, without loading them."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if "\n@register_suite\n" in file.read_text("utf-8"))


def check_suite(name: str) -> None:
    """Raise MethodError where no suite has this name; suites are not loaded."""
    entry("suite", name, dict.fromkeys(sorted({*suite_names(), *_SUITES})))


def list_suites() -> dict[str, Suite]:
    for name in suite_names():
        importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
    return dict(sorted(_SUITES.items()))


def suite(name: str) -> Suite:
    """The suite of this name; MethodError with the nearest name where there is none."""
    return entry("suite", name, list_suites())

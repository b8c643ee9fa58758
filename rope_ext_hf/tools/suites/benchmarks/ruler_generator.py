"""The generator of RULER's prompts: it draws random prompts, and searches for the size that fills a context length.

It draws the same random numbers in the same order as RULER's own code: see `ruler`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, TooShortError, largest_fitting, wordings

_TRIES = 100  # draws of the smallest size before a task counts as too long; some names are shorter than others
_ENOUGH_TRIES = 8  # draws after which the search ends early if all are far too long


class Draw(NamedTuple):
    """One prompt as it was drawn at random, with right and wrong answers; it may be too long."""

    text: str  # the prompt with its answer prefix
    right: Sequence[str]  # the right answers
    wrong: Sequence[str]  # wrong answers that may stand in the prompt


_MakeDraw = Callable[[int], Draw]  # draws a prompt of a size


@dataclass(frozen=True)
class _Template:
    """The wording of a task's prompts, with the beginning of the answer."""

    text: str
    prefix: str  # the beginning of the answer
    budget: int  # tokens to generate

    @property
    def whole(self) -> str:
        """The wording of the prompt, followed by the beginning of the answer."""
        return self.text + self.prefix


TEMPLATES = {name: _Template(**fields) for name, fields in wordings("ruler").items()}


@dataclass
class Generator:
    """A generator of random prompts for one RULER task at one context length."""

    task: str
    template: _Template
    settings: PromptSettings
    room: int  # tokens that prompt and generation may have together

    def __post_init__(self) -> None:  # upstream seeds both streams of random numbers
        self.random = random.Random(self.settings.seed)
        self.numbers = numpy.random.RandomState(self.settings.seed)

    def shuffle(self, items: list[Any]) -> list[Any]:
        """Shuffle a list in place and return it; the random numbers start from the seed at every call."""
        random.Random(self.settings.seed).shuffle(items)
        return items

    def attempt(self, make: _MakeDraw, size: int) -> Draw | None:
        """Draw a prompt of this size, or return None if the draw failed, as it may in RULER's own code.

        A draw fails if two variables get the same name, or if there are more needles than places for them.
        """
        try:
            return make(size)
        except RopeExtError:
            raise
        except (IndexError, ValueError):
            return None

    def tokens(self, make: _MakeDraw, size: int) -> int:
        """Draw a prompt of this size and return its number of tokens, without those to generate."""
        for _ in range(_TRIES):
            draw = self.attempt(make, size)
            if draw is not None:
                return self.settings.tokens(draw.text)
        raise self.too_short(None, "its prompts cannot be drawn")

    def too_short(self, need: int | None, reason: str = "") -> TooShortError:
        """Return the error to raise for a context length that is too short.

        The arguments are those of `TooShortError`.
        """
        return TooShortError(self.task, self.settings.length, need, reason)

    def check(self, make: _MakeDraw, smallest: int) -> None:
        """Raise TooShortError if no prompt of the smallest size fits; later draws are not affected."""
        shortest = self.shortest(make, smallest, self.room)
        if shortest > self.room:
            raise self.too_short(shortest + self.settings.reserved)

    def shortest(self, make: _MakeDraw, size: int, room: int) -> int:
        """Draw prompts of this size until one fits into `room` tokens, and return the tokens of the shortest.

        Tokens to generate are counted, too. The state of the random numbers is restored, so that later draws are not
        affected.
        """
        random_state, numbers_state = self.random.getstate(), self.numbers.get_state()
        lengths = list[int]()
        for _ in range(_TRIES):
            draw = self.attempt(make, size)
            if draw is None:
                continue
            lengths.append(self.settings.tokens(draw.text) + self.template.budget)
            if min(lengths) <= room:
                break
            spread = max(lengths) - min(lengths)
            if len(lengths) >= _ENOUGH_TRIES and min(lengths) - 2 * spread > room:
                break
        self.random.setstate(random_state)
        self.numbers.set_state(numbers_state)
        if not lengths:
            raise self.too_short(None, "its prompts cannot be drawn")
        return min(lengths)

    def search(self, make: _MakeDraw, low: int, high: int, beside: int = 0) -> int:
        """Return the largest size, from `low` to `high`, at which a prompt fits; `low` if none fits.

        `beside` further tokens must fit, too.
        """

        def fits(size: int) -> bool:
            return self.tokens(make, size) + beside + self.template.budget <= self.room

        return largest_fitting(low, max(high, 2 * low), fits) or low

    def draw(self, make: _MakeDraw, size: int, step: int) -> Sample:
        """Draw a prompt of this size; while it is too long, draw again with a size that is smaller by `step`."""
        for _ in range(_TRIES + size // step):
            draw = self.attempt(make, size)
            if draw is not None:
                length = self.settings.tokens(draw.text) + self.template.budget
                if length <= self.room:
                    return self.sample(draw, length)
            if size > step:
                size -= step
        raise self.too_short(self.shortest(make, size, 0) + self.settings.reserved)

    def sample(self, draw: Draw, length: int) -> Sample:
        """Return a drawn prompt as a `Sample`, with its text cut where the beginning of the answer stands."""
        cut = draw.text.rfind(self.template.prefix[:10])
        others = tuple(word for word in dict.fromkeys(draw.wrong) if word not in draw.right and word in draw.text)
        return Sample(draw.text[:cut], draw.text[cut:], tuple(draw.right), self.template.budget, length, others)

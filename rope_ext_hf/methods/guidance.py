"""When a method is the right one, in the words and numbers that docs/choosing.md and `rope-ext advise` show.

Each method states its own, as the class variable `guidance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "FINE_TUNING",
    "PURPOSES",
    "PYTHON",
    "ROTATED_AGAIN",
    "SEARCHED",
    "SERVING",
    "SHORT_INPUTS",
    "ZONES",
    "Guidance",
]

SERVING = "to serve it without training"
PYTHON = "no training, in your own Python process"
SHORT_INPUTS = "most inputs are short, and their output must not change"
FINE_TUNING = "to fine-tune it at the longer length"
SEARCHED = "divisors from a search or from training exist"
PURPOSES = (SERVING, PYTHON, SHORT_INPUTS, FINE_TUNING, SEARCHED)
"""What people want, in the order in which it is advised on."""

ROTATED_AGAIN = "keys are rotated again when frequencies change"
ZONES = "attention in several zones, little at long contexts"


@dataclass(frozen=True)
class Guidance:
    """When to use a method.

    Attributes:
        untrained: how well a model reads with it without training, in words.
        reach: how many times the context length it is worth trying at without training; 1: not at all.
        short_inputs: what it does to the output for inputs within the context length, in words.
        purposes: what it is the first choice for; names of `PURPOSES`.
        when: when to take it and not its neighbours, in words; empty: nothing sets it apart.
        share: how much of the extended length it works for without training.
        decode: what it adds to the time of a generated token, in words.
    """

    untrained: str
    reach: float
    short_inputs: str
    purposes: tuple[str, ...] = ()
    when: str = ""
    share: float = 1.0
    decode: str = "nothing"

    @property
    def reach_text(self) -> str:
        """The reach in words."""
        if self.reach <= 1:
            return "none"
        return "any length" if math.isinf(self.reach) else f"{self.reach:g} times"

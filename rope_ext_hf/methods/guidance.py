"""Guidance of each method: when it is the right one, in words of docs/choosing.md and `rope-ext extend --dry-run`.

How well a model reads with it, and what short inputs lose, is measured: `rope_ext_hf.methods.measurements`.
"""

from __future__ import annotations

from dataclasses import dataclass

SERVING = "to serve it without training"
PYTHON = "no training, in your own Python process"
SHORT_INPUTS = "most inputs are short, and their output must not change"
FINE_TUNING = "to fine-tune it at the longer length"
SEARCHED = "divisors from a search or from training exist"
PURPOSES = (SERVING, PYTHON, SHORT_INPUTS, FINE_TUNING, SEARCHED)
"""Goals of users, in the order in which they are advised on."""
GOALS = {"serve": SERVING, "python": PYTHON, "train": FINE_TUNING}
"""The purposes that advice can be asked for alone, by the word that names each."""
NOTHING = "nothing"
ROTATED_AGAIN = "keys are rotated again when frequencies change"
ZONES = "attention in several zones, little at long contexts"
TURNED_WHEN_READ = "attention in several zones; beyond the context length keys are rotated when they are read"


@dataclass(frozen=True)
class Guidance:
    """When to use a method."""

    purposes: tuple[str, ...] = ()  # the goals that it is a candidate for, of `PURPOSES`
    when: str = ""  # when to take it and not its neighbours; empty: nothing sets it apart
    decode: str = NOTHING  # the reason why a generated token takes more time; `NOTHING`: it takes none
    unmeasured: str = ""  # why no measurement shows how a model reads with it; empty: one does, or none was made

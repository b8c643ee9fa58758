"""Guidance on when to take which method, read from guidance.toml; for docs/choosing.md and `rope-ext extend`.

It does not say how well a model reads with a method: that is measured (`rope_ext_hf.tools.advice.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rope_ext_hf.files.whole import package_table

SERVING = "to serve it without training"
PYTHON = "no training, in your own Python process"
SHORT_INPUTS = "most inputs are short, and their output must not change"
FINE_TUNING = "to fine-tune it at the longer length"
_SEARCHED = "divisors from a search or from training exist"
PURPOSES = (SERVING, PYTHON, SHORT_INPUTS, FINE_TUNING, _SEARCHED)
"""The purposes of a longer context, in the order in which advice lists them."""
GOALS = {"serve": SERVING, "python": PYTHON, "train": FINE_TUNING}
"""The purposes that one method is recommended for, by the word of `--purpose`."""
NOTHING = "nothing"
ROTATED_AGAIN = "keys are rotated again when frequencies change"
ZONES = "attention in several zones, little at long contexts"
TURNED_WHEN_READ = "attention in several zones; beyond the context length keys are rotated when they are read"
_BIASED = "slower scores beyond the context length"
_PURPOSES = {
    "serving": SERVING,
    "python": PYTHON,
    "short inputs": SHORT_INPUTS,
    "fine-tuning": FINE_TUNING,
    "searched": _SEARCHED,
}
_DECODE = {
    "nothing": NOTHING,
    "rotated again": ROTATED_AGAIN,
    "zones": ZONES,
    "turned when read": TURNED_WHEN_READ,
    "biased": _BIASED,
}
"""The words of guidance.toml, and the clauses above that they stand for."""


@dataclass(frozen=True)
class Guidance:
    """Guidance on one method, in clauses: its purposes, when to take it, and why decoding takes longer."""

    purposes: tuple[str, ...] = ()  # the purposes that it is a candidate for, of `PURPOSES`
    when: str = ""  # the condition under which to take it instead of similar methods; empty: there is none
    decode: str = NOTHING  # the reason why each generated token takes more time; `NOTHING`: it does not
    unmeasured: str = ""  # the reason why measuring it says nothing; empty: it can be measured
    unrotated: bool = False  # whether it is for models whose full-attention layers do not rotate, and for no others


def guidance_of(method: str) -> Guidance | None:
    """Return the guidance on a method, by its registered name; None: there is no advice on it."""
    return _guidance().get(method)


def guided_methods() -> tuple[str, ...]:
    """Return the methods that there is guidance on, by name; of several for one purpose, the recommended one first."""
    return tuple(_guidance())


def recommended_methods() -> dict[str, tuple[str, ...]]:
    """Return the methods to choose from for each purpose, the recommended one first; not those for unrotated layers."""
    rotated = [(name, guidance.purposes) for name, guidance in _guidance().items() if not guidance.unrotated]
    return {purpose: tuple([name for name, purposes in rotated if purpose in purposes]) for purpose in PURPOSES}


@cache
def _guidance() -> dict[str, Guidance]:
    return {
        name: Guidance(
            purposes=tuple([_PURPOSES[purpose] for purpose in entry.get("purposes", ())]),
            when=entry["when"],
            decode=_DECODE[entry.get("decode", "nothing")],
            unmeasured=entry.get("unmeasured", ""),
            unrotated=entry.get("unrotated", False),
        )
        for name, entry in package_table(__package__, "guidance.toml").items()
    }

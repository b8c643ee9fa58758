"""When a method is the right one, in words of docs/choosing.md and of `rope-ext extend --dry-run`, from guidance.toml.

How well a model reads with it, and what short inputs lose, is measured: `rope_ext_hf.tools.advice.measurements`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rope_ext_hf.files import package_table

SERVING = "to serve it without training"
PYTHON = "no training, in your own Python process"
SHORT_INPUTS = "most inputs are short, and their output must not change"
FINE_TUNING = "to fine-tune it at the longer length"
_SEARCHED = "divisors from a search or from training exist"
PURPOSES = (SERVING, PYTHON, SHORT_INPUTS, FINE_TUNING, _SEARCHED)
"""Goals of users, in the order in which they are advised on."""
GOALS = {"serve": SERVING, "python": PYTHON, "train": FINE_TUNING}
"""The purposes that advice can be asked for alone, by the word that names each."""
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
"""The words of guidance.toml, and the sentences above that they stand for."""


@dataclass(frozen=True)
class Guidance:
    """When to use a method."""

    purposes: tuple[str, ...] = ()  # the goals that it is a candidate for, of `PURPOSES`
    when: str = ""  # when to take it and not its neighbours; empty: nothing sets it apart
    decode: str = NOTHING  # the reason why a generated token takes more time; `NOTHING`: it takes none
    unmeasured: str = ""  # why no measurement shows how a model reads with it; empty: one does, or none was made


def guidance_of(method: str) -> Guidance | None:
    """Return when to use a method, by its registered name; None: it is not advised on."""
    return _guidance().get(method)


@cache
def _guidance() -> dict[str, Guidance]:
    return {
        name: Guidance(
            purposes=tuple([_PURPOSES[purpose] for purpose in entry.get("purposes", ())]),
            when=entry["when"],
            decode=_DECODE[entry.get("decode", "nothing")],
            unmeasured=entry.get("unmeasured", ""),
        )
        for name, entry in package_table(__package__, "guidance.toml").items()
    }

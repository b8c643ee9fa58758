"""What a method costs, what was measured of it here, what papers report of it: for its section of methods.md."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from docs.figures.reference_model import retrieval_cells
from docs.figures.registry import FIGURES, ROOT, rows_of
from rope_ext_hf.advice.reported import reported

if TYPE_CHECKING:
    from rope_ext_hf.methods.guidance import Guidance

__all__ = ["evidence"]


def evidence(name: str) -> str:
    """What is known of a method, as a list that leads to the tables."""
    from rope_ext_hf import list_methods

    guidance = list_methods()[name].guidance
    assert guidance is not None
    items = [f"**Cost:** {_cost(name, guidance)}."]
    known = [] if guidance.unmeasured else ["[losses](choosing.md#without-training)"]
    if any(key[0] == name for key in retrieval_cells()[0]):
        known.append("[answers](retrieval.md)")
    if any(name in table.values for table in reported()):
        known.append("[what papers report](choosing.md#what-papers-report)")
    if known:
        items.append(f"**Known:** {', '.join(known)}.")
    return "\n\n" + "\n".join(f"- {item}" for item in items) + "\n\n"


def _cost(name: str, guidance: Guidance) -> str:
    from rope_ext_hf.methods.guidance import NOTHING

    if guidance.decode == NOTHING:
        return "a token takes as long as before"
    measured = rows_of("attention", "what", way=name)
    return guidance.decode + " ([measured](remapping.md#cost))" * bool(measured)


def _in_page() -> list[str]:
    """The methods whose section in the page somebody wrote."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- figure: evidence-([a-z0-9-]+) -->", page)


FIGURES |= {f"evidence-{name}": partial(evidence, name) for name in _in_page()}

"""What a method costs, for its section of methods.md."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from docs.figures.registry import FIGURES, ROOT, rows_of

if TYPE_CHECKING:
    from rope_ext_hf.methods.guidance import Guidance

__all__ = ["evidence"]


def evidence(name: str) -> str:
    """What a method costs, and why it was not measured."""
    from rope_ext_hf import list_methods

    guidance = list_methods()[name].guidance
    assert guidance is not None
    text = f"- **Cost:** {_cost(name, guidance)}."
    if guidance.unmeasured:
        text += f"\n- **Measured here:** not by itself; {guidance.unmeasured}."
    return f"\n\n{text}\n\n"


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

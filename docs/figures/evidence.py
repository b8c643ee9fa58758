"""What a method costs, what was measured of it here, who reports of it: for its section of methods.md."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from docs.figures.measurements import NAMES, factor_lines, rows_by_setting
from docs.figures.reference_model import retrieval_cells
from docs.figures.registry import FIGURES, ROOT, rows_of

if TYPE_CHECKING:
    from rope_ext_hf.methods.guidance import Guidance

__all__ = ["evidence"]

LONG = 16_384
"""Tokens at which the cost of attention is stated."""


def evidence(name: str) -> str:
    """What a method costs, what was measured of it here, and where papers report of it."""
    from rope_ext_hf import list_methods

    guidance = list_methods()[name].guidance
    assert guidance is not None
    measured = [f"not by itself; {guidance.unmeasured}"] if guidance.unmeasured else _measured(name)
    items = [f"**Cost:** {_cost(name, guidance)}."]
    items += [f"**Measured here:** {'; '.join(measured)}."] if measured else []
    items += (
        [f"**Reported:** [by {', '.join(papers)}](choosing.md#what-papers-report)."]
        if (papers := _papers(name))
        else []
    )
    return "\n\n" + "\n".join(f"- {item}" for item in items) + "\n\n"


def _cost(name: str, guidance: Guidance) -> str:
    from rope_ext_hf.methods.guidance import NOTHING

    if guidance.decode == NOTHING:
        return "a token takes as long as before"
    rows = {what: row for (what,), row in rows_of("attention", "what", way=name, tokens=LONG).items()}
    if not rows:
        return guidance.decode
    times = f"{rows['prefill']['time']:.2f} for a prompt, {rows['decode']['time']:.2f} for a decoding step"
    plain = f"a layer's attention to {LONG:,} tokens in [times of plain attention](remapping.md#cost)"
    return f"{guidance.decode}; {plain}: {times}"


def _measured(name: str) -> list[str]:
    """The rise of the loss on every model, and the bundled model's answers, by length."""
    rises = []
    for model, line in factor_lines().items():
        rows = rows_by_setting(line).items()
        by_scale = {
            scale: f"{row['increase']:+.2f}"
            for (method, factor, scale), row in rows
            if method == name and factor in (None, scale) and scale > 1
        }
        rises += [f"{NAMES[model]} {_by_scale(by_scale)}"] if by_scale else []
    cells, _, line = retrieval_cells()
    answers = {
        length // line["context_length"]: f"{row['exact']:.0%}"
        for (method, keys, length), row in cells.items()
        if (method, keys) == (name, 1)
    }
    texts = [f"rise of the loss, [bits per byte](choosing.md#without-training): {', '.join(rises)}"] if rises else []
    return texts + ([f"[one key](retrieval.md) of the bundled model: {_by_scale(answers)}"] if answers else [])


def _by_scale(values: dict[int, str]) -> str:
    return f"{' / '.join(values[scale] for scale in sorted(values))} at {' / '.join(f'{s}x' for s in sorted(values))}"


def _papers(name: str) -> list[str]:
    from rope_ext_hf.advice.advice import reported

    return list(dict.fromkeys(table.source for table in reported() if name in table.values))


def _in_page() -> list[str]:
    """The methods whose section in the page somebody wrote."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- figure: evidence-([a-z0-9-]+) -->", page)


FIGURES |= {f"evidence-{name}": partial(evidence, name) for name in _in_page()}

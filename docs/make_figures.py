"""Fill every figure of README.md and the pages in, from the files that hold the measurements and from the code.

    python -m docs.make_figures                # rewrite README.md and docs/*.md
    python -m docs.make_figures --check        # exit with 1 if a page is out of date

A figure stands between two comments, `<!-- figure: NAME -->` and `<!-- /figure -->`, in a line or as a block. NAME is a
function of docs/figures, see docs/figures/registry.py. Three files are written from the measurements before the pages:
rope_ext_hf/tools/advice/measured.json, which `rope-ext extend --dry-run` and some tables read, and the charts of
README.md and docs/choosing.md.

cog does such a job as well, but for whole lines only, and a quarter of the figures stand inside a sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from unittest import mock

from docs.figures import (  # noqa: F401, each registers its figures
    code_tables,
    conformance,
    correctness,
    cost,
    dropped,
    engine_runs,
    gpu,
    interface,
    measurements,
    measures,
    models,
    programs,
    published_models,
    real_models,
    recipes,
    reference_model,
    serving,
)
from docs.figures.measurements import MEASURED, measured_file
from docs.figures.real_model_chart import CHART as REAL_MODEL_CHART
from docs.figures.real_model_chart import real_model_chart
from docs.figures.registry import FIGURE, FIGURES, ROOT
from docs.figures.rise_chart import CHART, rise_chart

__all__ = ["FIGURES", "FILES", "fill", "pages"]

FILES = {MEASURED: measured_file, CHART: rise_chart, REAL_MODEL_CHART: real_model_chart}
"""The files that are made whole, and the functions that return their text."""

_COLUMNS = "120"
"""Of what commands print on a page."""


def pages() -> list[Path]:
    """README.md and every page."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(page: str) -> str:
    """Return the text of a page with its figures made anew.

    Raises:
        KeyError: a figure of a name that is not in FIGURES.
    """
    with mock.patch.dict(os.environ, COLUMNS=_COLUMNS):  # what is printed is as wide as the terminal
        return FIGURE.sub(lambda match: match[1] + FIGURES[match[2]]() + match[4], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for file, make in FILES.items():
        made = make()
        if not file.exists() or made != file.read_text(encoding="utf-8"):
            stale.append(file.relative_to(ROOT).as_posix())
            if not arguments.check:
                file.write_text(made, encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (made := fill(text)) != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not arguments.check:
                page.write_text(made, encoding="utf-8")
    if arguments.check and stale:
        sys.exit(f"out of date, run `make figures`: {', '.join(stale)}")


if __name__ == "__main__":
    main()

"""The list of results that a function such as `perplexity` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from rope_ext_hf.runs.conclusions.labels import MethodResult
from rope_ext_hf.runs.run import Run

R = TypeVar("R", bound=MethodResult)


class Results(list[R]):
    """The results of one measurement, as a list. Printed, or shown in a notebook, it shows the run with its table.

    Attributes:
        run: the run that the results belong to.
    """

    def __init__(self, run: Run[R]) -> None:
        super().__init__(run.results)
        self.run = run

    def to_dataframe(self) -> Any:
        """Return the results as a pandas DataFrame, one row per result, see `Run.to_dataframe`."""
        return self.run.to_dataframe()

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the results with matplotlib, see `Run.plot`."""
        return self.run.plot(path)

    def __repr__(self) -> str:
        return repr(self.run)

    def __str__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> str:
        return self.run._repr_html_()

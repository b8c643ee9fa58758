"""The list of results that a function such as `perplexity` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from rope_ext_hf.runs.labels import MethodResult
from rope_ext_hf.runs.run import Run

R = TypeVar("R", bound=MethodResult)


class Results(list[R]):
    """The results of one call, as a list. Printing it, or showing it in a notebook, shows the run.

    Attributes:
        run: the run that these are the results of.
    """

    def __init__(self, run: Run[R]) -> None:
        super().__init__(run.results)
        self.run = run

    def to_dataframe(self) -> Any:
        """Return the results as a pandas DataFrame, see `Run.to_dataframe`."""
        return self.run.to_dataframe()

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the results, see `Run.plot`."""
        return self.run.plot(path)

    def __repr__(self) -> str:
        return repr(self.run)

    def __str__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> str:
        return self.run._repr_html_()

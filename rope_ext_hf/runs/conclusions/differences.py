"""The paired differences between methods that stars and verdicts rest on, as the rows of differences.csv.

At each length, every method is compared with the unpatched model and with the method that has the best value there,
document by document (or prompt by prompt). docs/evaluation.md describes the columns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.measures import Measure
from rope_ext_hf.runs.conclusions.verdicts import Outcome, outcome_of_change


@dataclass(frozen=True)
class _Difference:
    """One method compared with another at one length, by one measure.

    Attributes:
        measure: the name of the measure, such as "perplexity".
        length: the context length in tokens.
        label: the short label of the method.
        compared_with: the short label of the other method.
        unit: "ratio" for a perplexity, divided by that of the other method; else the unit of the measure, of which the
            value of the other method is subtracted. Shares are from 0 to 1, and have the unit "share".
        difference: the ratio or difference.
        low, high: its 95% confidence interval over documents or prompts; None with fewer than three.
        items: the number of documents or prompts.
        outcome: whether the method is better, worse, or not significantly different.
    """

    measure: str
    length: int
    label: str
    compared_with: str
    unit: str
    difference: float
    low: float | None
    high: float | None
    items: int
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values; a number that is not finite stays one."""
        return asdict(self) | {"outcome": str(self.outcome)}


COLUMNS = tuple(field.name for field in fields(_Difference))
"""The columns of differences.csv."""


def differences(findings: Findings) -> list[_Difference]:
    """Return the differences of all methods from the unpatched model and from the best value, at every length."""
    return [
        difference
        for measure in findings.measures
        for length in measure.all_lengths
        for other in dict.fromkeys((findings.loaded, findings.best(measure, length)[0]))
        for key in measure.measured(length)
        if key != other and (difference := _difference(findings, measure, length, key, other)) is not None
    ]


def _difference(findings: Findings, measure: Measure, length: int, key: str, other: str) -> _Difference | None:
    """Return the difference between two methods; None if the other one was not measured on the same items."""
    change = measure.change((key, length), (other, length))
    if change is None:
        return None
    shown = measure.as_read(change)
    unit = "ratio" if measure.exponential else "share" if measure.shares else measure.unit
    outcome = outcome_of_change(change, higher_is_better=measure.higher_is_better)
    names = findings.names
    return _Difference(
        measure.name, length, names[key], names[other], unit, shown.value, shown.low, shown.high, shown.items, outcome
    )

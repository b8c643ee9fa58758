"""A run's folder read back: settings, results, what is complete.

    run = read_run("rope-ext-results/reference-perplexity-1a2b3c4d5e")
    for result in run.results:
        print(result.length, result.perplexity)

A run measures methods on items (documents, or prompts). Each item has a value per cell: a context length, or a context
length and a depth. A result is made of the values of all items of its cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rope_ext_hf.errors import FileError, did_you_mean, one_line, short
from rope_ext_hf.eval.journal import Cell, Layout, Record, Value, read_plain, read_records
from rope_ext_hf.eval.results import (
    Cost,
    DocumentLoss,
    Result,
    Retrieval,
    RetrievalSetting,
    Setting,
    TrialScore,
    difference,
    method_key,
)
from rope_ext_hf.files import parse_json_object

__all__ = ["KINDS", "SETTINGS", "Run", "check_settings", "read_run", "results_from_records"]

SETTINGS = "run.json"

R_co = TypeVar("R_co", bound=Result | Retrieval, covariant=True)


@dataclass(frozen=True)
class RunKind:
    """What a run measures.

    Attributes:
        setting: dataclass of plain values that says how.
        parse: (item's name, JSON value of a record) -> value; raises ValueError.
        result: (method, setting, cell, values of all items, cost) -> Result or Retrieval.
    """

    setting: type[Setting] | type[RetrievalSetting]
    parse: Callable[[str, Any], Value]
    result: Callable[[dict[str, Any] | None, Any, Cell, Any, Cost], Result | Retrieval]


def _perplexity(
    method: dict[str, Any] | None, setting: Setting, cell: Cell, values: Sequence[DocumentLoss], cost: Cost
) -> Result:
    return Result.from_documents(method, setting, int(cell[0]), values, cost)


def _retrieval(
    method: dict[str, Any] | None, setting: RetrievalSetting, cell: Cell, values: Sequence[TrialScore], cost: Cost
) -> Retrieval:
    return Retrieval.from_trials(method, setting, int(cell[0]), cell[1], values)


KINDS: dict[str, RunKind] = {
    "perplexity": RunKind(Setting, DocumentLoss.from_record, _perplexity),
    "passkey": RunKind(RetrievalSetting, lambda _, value: TrialScore.from_record(value), _retrieval),
}
"""Every kind of run by name."""


_OF_WHAT = {"original": "without its own scaling", "patched": "with its present patch"}
"""What methods extend, as a phrase, by `over`."""


@dataclass(frozen=True)
class Run(Generic[R_co]):
    """What a run's folder holds.

    Attributes:
        folder: where it is.
        settings: everything the numbers depend on, provenance among it.
        results: per method and cell that is complete.
    """

    folder: Path
    settings: dict[str, Any]
    results: Sequence[R_co]

    @property
    def kind(self) -> str:
        """ "perplexity" or "passkey"."""
        kind: str = self.settings["kind"]
        return kind

    @property
    def context_length(self) -> int:
        """The length in tokens that what the methods extend is for: by default the model as loaded."""
        length: int = self.settings["context_length"]
        return length

    @property
    def meant_for(self) -> str:
        """`context_length` as a phrase, with whose length it is: of the model without its own scaling, for example."""
        return f"{self.context_length:,} tokens {_OF_WHAT.get(self.settings['over'], 'as loaded')}"

    def select(self, methods: Sequence[Mapping[str, Any] | None]) -> Run[R_co]:
        """The same run with the results of these methods alone, in this order."""
        by_method: dict[str, list[R_co]] = {method_key(method): [] for method in methods}
        for result in self.results:
            by_method.get(method_key(result.method), []).append(result)
        return replace(self, results=[result for results in by_method.values() for result in results])

    def to_dict(self) -> dict[str, Any]:
        """Settings and results, as results.json has them."""
        return {"provenance": self.settings, "results": [result.to_dict() for result in self.results]}

    def loss_increase(self, method: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
        """The loss of a method at the context length of the model as loaded, minus that of the model as loaded.

        Nats per token with a 95% interval, paired by document; None where either was not measured.
        """
        at = {
            method_key(result.method): result
            for result in self.results
            if isinstance(result, Result) and result.length == self.context_length
        }
        loaded = self.settings["loaded"]
        plain, changed = at.get(method_key(loaded)), at.get(method_key(method))
        return difference(changed, plain) if plain and changed and changed is not plain else None


def read_run(folder: str | Path) -> Run[Any]:
    """Read a run from its folder.

    Args:
        folder: a folder that `sweep`, `perplexity` or `passkey` wrote; it may be unfinished.

    Returns:
        The run with the results of all methods, in the order in which they were first finished.

    Raises:
        FileError: not the folder of a run, or a damaged one; the message names file and line.
    """
    folder = Path(folder)
    settings = _read_settings(folder)
    layout = Layout.from_settings(settings)
    kind = KINDS[settings["kind"]]
    records = read_records(folder, layout, kind.parse)
    setting = kind.setting(**settings["setting"])
    return Run(folder, settings, results_from_records(kind, setting, layout, records))


def results_from_records(kind: RunKind, setting: Any, layout: Layout, records: Sequence[Record]) -> list[Any]:
    """One result per method and cell that has the values of all its items."""
    values: dict[tuple[str, Cell], dict[int, Any]] = {}
    costs: dict[tuple[str, Cell], Cost] = {}
    for record in records:
        key = (method_key(record.method), record.cell)
        values.setdefault(key, {})[record.item] = record.value
        costs[key] = costs.get(key, Cost()).plus(record.cost)
    return [
        kind.result(method, setting, cell, [complete[item] for item in sorted(complete)], costs[key, cell])
        for key, method in {method_key(record.method): record.method for record in records}.items()
        for cell, count in sorted(layout.counts.items())
        if len(complete := values.get((key, cell), {})) == count
    ]


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        return check_settings(parse_json_object(read_plain(path)))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} does not describe a run: {one_line(error)}") from error
    except FileError as error:
        raise FileError(f"{str(folder)!r} is not the folder of a run: {one_line(error)}") from error


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "dtype", "device", "data", "kind", "over"), (str,)),
    **dict.fromkeys(("parameters", "context_length", "tokens"), (int,)),
    **dict.fromkeys(("versions", "setting"), (dict,)),
    "loaded": (dict, type(None)),
}


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that hold everything results, tables and pages need.

    Raises:
        ValueError: a missing value, or one of another type; the message names it.
    """
    for key, types in _TYPES.items():
        value = settings.get(key)
        if key not in settings or not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{key!r} must be {' or '.join(t.__name__ for t in types)}, got {short(repr(value))}")
    if settings["kind"] not in KINDS:
        raise ValueError(f"unknown kind {short(settings['kind'])!r}.{did_you_mean(settings['kind'], KINDS)}")
    for key in ("parameters", "context_length", "tokens"):
        if not 1 <= settings[key] < 2**63:
            raise ValueError(f"{key!r} must be at least 1, got {short(str(settings[key]))}")
    if not all(isinstance(number, str) for number in settings["versions"].values()):
        raise ValueError("'versions' must map names to strings")
    _check_setting(KINDS[settings["kind"]].setting, settings["setting"])
    Layout.from_settings(settings)
    return settings


def _check_setting(cls: type, setting: Mapping[str, Any]) -> None:
    expected = {item.name: item.type for item in fields(cls)}
    if set(setting) != set(expected):
        raise ValueError(f"'setting' must have the keys {', '.join(expected)}, got {short(json.dumps(setting))}")
    for name, kind in expected.items():
        if type(setting[name]).__name__ != kind:
            raise ValueError(f"'setting': {name} must be {kind}, got {short(repr(setting[name]))}")

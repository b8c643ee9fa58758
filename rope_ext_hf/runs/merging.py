"""Merging the runs of one model into one set of findings; runs that read the same text in the same way become one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rope_ext_hf.errors import printable
from rope_ext_hf.runs.conclusions.findings import Findings, collect_findings
from rope_ext_hf.runs.run import Run


def findings_of_runs(runs: Sequence[Run[Any]]) -> Findings:
    """Return the findings from several runs of one model; the order of the runs does not matter.

    Runs of one kind that read the same items in the same way are merged, so that their methods are compared.
    """
    runs = sorted(runs, key=lambda run: (json.dumps(run.settings, sort_keys=True), str(run.path)))
    measures = []
    for run in _merged(runs):
        text = printable(run.settings["data"])
        measures += [(measure, text) for measure in run.kind.measures(run)]
    return collect_findings(
        measures,
        methods=[result.method for run in runs for result in run.results],
        loaded=runs[0].settings["loaded"],
        context_length=runs[0].context_length,
        extended={key: length for run in runs for key, length in run.extended_lengths.items()},
    )


def _merged(runs: Sequence[Run[Any]]) -> list[Run[Any]]:
    """Merge those runs of one kind that read the same items, and leave the others as they are.

    Two runs are merged if the digests of at least one cell (a context length, alone or with a depth or task) are equal
    in both, and no cell that both have differs.
    """
    groups: list[list[Run[Any]]] = []
    for run in runs:
        for group in groups:
            if run.settings["kind"] == group[0].settings["kind"] and _read_alike(run, group):
                group.append(run)
                break
        else:
            groups.append([run])
    return [replace(group[0], results=_merged_results(group)) for group in groups]


def _read_alike(run: Run[Any], group: Sequence[Run[Any]]) -> bool:
    """Return whether a run shares a cell with a group of runs, and no cell that both have was read differently."""
    digests = _cell_digests(run)
    shared = False
    for other in group:
        for cell, digest in _cell_digests(other).items():
            if cell not in digests:
                continue
            if digests[cell] != digest:
                return False
            shared = True
    return shared


def _cell_digests(run: Run[Any]) -> dict[str, str]:
    """Return a digest for each cell (a context length, maybe with a depth); older runs have one for all cells."""
    return run.settings.get("cell_texts") or {"": run.settings.get("text", str(id(run)))}


def _merged_results(runs: Sequence[Run[Any]]) -> list[Any]:
    """Return the results from several runs; if two runs have one for the same method and cell, the first counts.

    A result that lacks a value, as those of earlier versions may, counts only if no run has a complete one.
    """
    results: dict[Any, Any] = {}
    for run in runs:
        earlier = set(results)
        for result in run.results:
            # a cell is a length, alone or with a depth, a distance or a task
            rest_of_cell = [getattr(result, name, None) for name in ("depth", "distance", "task")]
            place = (result.key, result.length, *rest_of_cell)
            if place not in earlier or (result.complete and not results[place].complete):
                results[place] = result
    return list(results.values())

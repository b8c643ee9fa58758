"""Programs that people go on with after they patch a model, and what they compute from its config."""

from __future__ import annotations

import json
import tomllib
from functools import cache

from docs.figures.registry import ROOT, Row, figure, markdown_table, read_result

KINDS = {
    "convert": "Convert and export",
    "serve": "Serve and run",
    "train": "Train",
    "write": "Modules for models that you write",
}
_BASE = "theta alone"


@cache
def _entries() -> dict[str, Row]:
    text = (ROOT / "checks" / "programs" / "programs.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _scaling(name: str) -> str:
    """The kind of scaling of a configuration, as configs call it."""
    config = json.loads((ROOT / "conformance" / "configurations" / f"{name}.json").read_text(encoding="utf-8"))["config"]
    scaling = config.get("rope_scaling") or {}
    return str(scaling.get("rope_type", scaling.get("type", _BASE)))


def _states(cells: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """The states of a program by scaling, of every configuration that it was asked about."""
    by_scaling: dict[str, set[str]] = {}
    for name, rows in cells.items():
        states = {state.partition(":")[0] for state in rows.values()} - {"-"}
        if states:
            by_scaling.setdefault(_scaling(name), set()).update(states)
    return by_scaling


def _row(name: str, entry: Row, record: Row) -> tuple[str, ...]:
    by_scaling = _states(record["states"]["rope_parameters"])
    right = [scaling for scaling, states in by_scaling.items() if states == {"right"}]
    refused = [scaling for scaling, states in by_scaling.items() if "refused" in states]
    silent = [scaling for scaling, states in by_scaling.items() if states - {"right", "refused"}]
    # Of a scaling that is right in one family and not in another, both columns speak.
    right += [f"{scaling} in part" for scaling, states in by_scaling.items() if len(states) > 1 and "right" in states]
    version = record["version"].partition(",")[0]
    return version, *(", ".join(each) or "–" for each in (right, refused, silent)), entry.get("advice", "")


@figure
def programs_by_kind() -> str:
    """A table for each kind of program."""
    records, parts = read_result("programs")["programs"], []
    head = ("program", "computes right", "refuses", "**loses or changes in silence**", "what to do")
    for kind, title in KINDS.items():
        entries = {name: entry for name, entry in _entries().items() if entry["kind"] == kind}
        rows = [_row(name, entry, records[name]) for name, entry in entries.items() if name in records]
        rows += [(entry["title"], "–", "–", "–", entry["missing"]) for entry in entries.values() if "missing" in entry]
        if rows:
            parts.append(f"### {title}\n{markdown_table(head, rows)}")
    return "\n\n" + "\n".join(parts).strip() + "\n\n"


@figure
def programs_changes() -> str:
    """Everything that is lost or changed in silence, program by program."""
    lines = []
    for name, record in read_result("programs")["programs"].items():
        said: dict[str, list[str]] = {}
        for case, rows in record["states"]["rope_parameters"].items():
            for row, state in rows.items():
                if state not in ("right", "-") and not state.startswith("refused"):
                    said.setdefault(state, []).append(f"{case}{f' ({row})' if row else ''}")
        title = _entries()[name]["title"]
        lines += [f"- **{title}**, {', '.join(cases)}: {state}" for state, cases in said.items()]
    return "\n\n" + "\n".join(lines) + "\n\n"


@figure
def programs_date() -> str:
    """The first and the last day on which a program was asked."""
    days = sorted({record["date"] for record in read_result("programs")["programs"].values()})
    return " to ".join(dict.fromkeys((days[0], days[-1])))

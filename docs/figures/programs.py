"""Programs that people go on with after they patch a model, and what they compute from its config."""

from __future__ import annotations

import json
import tomllib
from functools import cache

from docs.figures.registry import ROOT, Row, figure, markdown_table, read_result
from rope_ext_hf.tools.engines.other_programs import other_programs

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
    known = other_programs()
    shipped = {name: {"title": program.title, "advice": program.advice} for name, program in known.items()}
    return {name: shipped.get(name, {}) | entry for name, entry in tomllib.loads(text).items()}


@cache
def _config(name: str) -> Row:
    path = ROOT / "conformance" / "configurations" / f"{name}.json"
    config: Row = json.loads(path.read_text(encoding="utf-8"))["config"]
    return config


def _scaling(name: str) -> str:
    """The kind of scaling of a configuration, as configs call it."""
    scaling = _config(name).get("rope_scaling") or {}
    return str(scaling.get("rope_type", scaling.get("type", _BASE)))


_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "gemma3_text": "Gemma 3",
    "internlm2": "InternLM2",
    "internlm3": "InternLM3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gpt_oss": "gpt-oss",
    "olmo3": "OLMo 3",
    "deepseek_v3": "DeepSeek-V3",
    "phi3": "Phi-3",
}


def _family(name: str) -> str:
    """The family of a configuration, as people write it."""
    return _FAMILIES[_config(name)["model_type"]]


def _outcome(rows: dict[str, str]) -> str | None:
    """The worst state of a configuration: "silent", "refused", "right", or None: the program was not asked."""
    states = {state.partition(":")[0] for state in rows.values()} - {"-"}
    if states - {"right", "refused"}:
        return "silent"
    return "refused" if "refused" in states else "right" if states else None


def _cases(outcomes: dict[str, list[str]], outcome: str) -> dict[str, None]:
    """The families of the configurations with an outcome; the configuration where its family has others, too."""
    others = {_family(name) for other, names in outcomes.items() if other != outcome for name in names}
    families = {name: _family(name) for name in outcomes[outcome]}
    return dict.fromkeys(name if family in others else family for name, family in families.items())


def _row(entry: Row, record: Row) -> tuple[str, ...]:
    scalings: dict[str, dict[str, list[str]]] = {}  # scaling -> outcome -> configurations
    for name, rows in record["states"]["rope_parameters"].items():
        if (outcome := _outcome(rows)) is not None:
            scalings.setdefault(_scaling(name), {}).setdefault(outcome, []).append(name)
    cells = []
    for outcome in ("right", "refused", "silent"):
        named = [
            scaling if len(outcomes) == 1 else f"{scaling} ({', '.join(_cases(outcomes, outcome))})"
            for scaling, outcomes in scalings.items()
            if outcome in outcomes
        ]
        cells.append(", ".join(named) or "–")
    number = record["version"].partition(",")[0].split()[-1]
    program, comma, part = entry["title"].partition(",")
    return f"{program} {number}{comma}{part}", *cells, entry.get("advice", "")


@figure
def programs_by_kind() -> str:
    """A table for each kind of program."""
    records, parts = read_result("programs")["programs"], []
    head = ("program", "computes right", "refuses", "**loses or changes in silence**", "what to do")
    for kind, title in KINDS.items():
        entries = {name: entry for name, entry in _entries().items() if entry["kind"] == kind}
        rows = [_row(entry, records[name]) for name, entry in entries.items() if name in records]
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
                    state = state.replace("unscaled", "computed without the scaling")
                    said.setdefault(state, []).append(f"{case}{f' ({row})' if row else ''}")
        title = _entries()[name]["title"]
        lines += [f"- **{title}**, {', '.join(cases)}: {state}" for state, cases in said.items()]
    return "\n\n" + "\n".join(lines) + "\n\n"


@figure
def programs_folders() -> str:
    """How many of the folders that this package saved each program computes right, and what becomes of the others."""
    rows = []
    for name, record in read_result("programs")["programs"].items():
        outcomes: dict[str, list[str]] = {}
        for folder, states in record["folders"]["saved"].items():
            if (outcome := _outcome(states)) is not None:
                outcomes.setdefault(outcome, []).append(folder)
        if not outcomes:
            continue
        asked = sum(map(len, outcomes.values()))
        cells = [f"{len(outcomes.get('right', []))} of {asked}"]
        cells += [_folders(outcomes.get(outcome, []), record) for outcome in ("refused", "silent")]
        rows.append((_entries()[name]["title"], *cells))
    head = ("program", "computes right", "refuses", "**changes in silence**")
    return f"\n\n{markdown_table(head, rows).strip()}\n\n"


def _folders(names: list[str], record: Row) -> str:
    """Folders as "yarn (Llama, Qwen2)", by method; a method alone where that is all of its families that were asked."""
    methods: dict[str, list[str]] = {}
    asked: dict[str, int] = {}
    for folder, states in record["folders"]["saved"].items():
        family, method = folder.split(", ")
        asked[method] = asked.get(method, 0) + (_outcome(states) is not None)
        if folder in names:
            methods.setdefault(method, []).append(family)
    said = [
        method if len(families) == asked[method] else f"{method} ({', '.join(families)})"
        for method, families in methods.items()
    ]
    return ", ".join(said) or "–"


@figure
def programs_date() -> str:
    """The first and the last day on which a program was asked."""
    days = sorted({record["date"] for record in read_result("programs")["programs"].values()})
    return " to ".join(dict.fromkeys((days[0], days[-1])))

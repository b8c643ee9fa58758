"""Coverage of intervals, and agreement of loss, LongPPL, the gain from evidence and retrieval about methods."""

from __future__ import annotations

import math

from docs.figures.registry import NARROW, NOW, Row, figure, last_line, lines_of, markdown_table, stamp

MODELS = {
    "reference": "bundled",
    "docstring-model": "docstrings",
    "wide-heads-model": "wide heads",
    "reader": "trained to read further",
}


def _compared(benchmark: str) -> list[Row]:
    """Return the comparisons of each model, as they were measured last."""
    rows = {row["model"]: row for line in lines_of(benchmark) for row in line["rows"]}
    return [rows[model] for model in MODELS if model in rows]


def _note(benchmark: str) -> str:
    """Return the command that measured this, and the models in the table whose intervals are of an older kind."""
    made = {row["model"]: line.get("intervals") == NOW for line in lines_of(benchmark) for row in line["rows"]}
    shown = {row["model"] for row in _compared(benchmark) if any(map(_has_interval, row["agreements"]))}
    older = ", ".join(f'"{name}"' for model, name in MODELS.items() if model in shown and made[model] is False)
    note = stamp(last_line(benchmark), f"benchmarks/{benchmark}.py")
    return note + (f" The intervals of {older} {NARROW}" if older else "")


def _has_interval(found: Row) -> bool:
    return not math.isnan(found["low"])


def _model(row: Row) -> str:
    return MODELS[row["model"]]


@figure
def interval_coverage() -> str:
    """Return a table of how often an interval covers the true mean, by the kind and the number of items."""
    line = last_line("intervals")
    sizes = [key for key in line["rows"][0] if key != "items"]
    table = ([row["items"], *(f"{row[size]:.0%}" for size in sizes)] for row in line["rows"])
    return markdown_table(("", *(f"{size} items" for size in sizes)), table, stamp(line, "benchmarks/intervals.py"))


@figure
def measures_agreement() -> str:
    return _agreement("measures")


@figure
def gain_agreement() -> str:
    return _agreement("gain")


def _agreement(benchmark: str) -> str:
    """Kendall's tau of each pair of measures, by model and length."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in _compared(benchmark):
        for found in row["agreements"]:
            tau = f"{found['tau']:.2f}"
            if _has_interval(found):
                tau += f" [{found['low']:.2f}, {found['high']:.2f}]"
            cell = f"{found['length'] // row['context_length']}x: {tau}"
            cells.setdefault((_model(row), f"{found['one']} and {found['other']}"), []).append(cell)
    table = [(*key, ", ".join(values)) for key, values in cells.items()]
    return markdown_table(("model", "measures", "Kendall's tau"), table, _note(benchmark))


@figure
def measures_ranking() -> str:
    """Every method's value of every measure at the longest length, a column for each model and measure."""
    heads: list[str] = []
    reached: list[str] = []
    cells: dict[str, dict[str, str]] = {}
    for row in _compared("measures"):
        measures = [measure for measure in row["measures"] if not measure["flaw"]]
        if len(measures) < 2:
            continue  # nothing to agree with
        longest = max(value["length"] for measure in measures for value in measure["values"])
        for measure in measures:
            scale, digits = (100, 0) if measure["unit"] == "%" else (1, 2)
            unit = "%" if measure["unit"] == "%" else "nats"
            heads.append(f"{_model(row)}, {longest:,} tokens: {measure['name']}, {unit}")
            values = [value for value in measure["values"] if value["length"] == longest]
            for value in values:
                cells.setdefault(value["method"], {})[heads[-1]] = f"{scale * value['value']:.{digits}f}"
            most = max(max(v["high"] - v["value"], v["value"] - v["low"]) for v in values)
            reached.append(f"{scale * most:.{digits}f}")
    table = [[f"`{name}`", *(values.get(head, "–") for head in heads)] for name, values in cells.items()]
    note = f"95% confidence intervals reach up to {' / '.join(reached)} to either side, by column."
    return markdown_table(("", *heads), table, note)

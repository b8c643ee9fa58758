"""How far intervals hold, and whether loss, LongPPL and retrieval rank methods alike."""

from __future__ import annotations

from .registry import Row, figure, last_line, markdown_table, stamp

MODELS = {"reference": "bundled", "docstring-model": "docstrings", "reader": "trained to read further"}


def _model(row: Row) -> str:
    return MODELS[row["model"]]


@figure
def interval_coverage() -> str:
    """How often each interval holds the mean, by distribution and number of documents."""
    line = last_line("intervals")
    methods = [name for name in line["rows"][0] if name not in ("losses", "documents")]
    table = [
        [row["losses"], str(row["documents"]), *(f"{row[name]['held']:.1%}" for name in methods)]
        for row in line["rows"]
    ]
    return markdown_table(("losses", "documents", *methods), table, stamp(line, "benchmarks/intervals.py"))


@figure
def measures_agreement() -> str:
    """Kendall's tau of each pair of measures, by model and length."""
    line = last_line("measures")
    table = [
        [
            _model(row),
            f"{found['length']:,} ({found['length'] // row['context_length']}x)",
            f"{found['one']} and {found['other']}",
            f"{found['tau']:.2f} [{found['low']:.2f}, {found['high']:.2f}]",
        ]
        for row in line["rows"]
        for found in row["agreements"]
    ]
    return markdown_table(
        ("model", "tokens", "measures", "Kendall's tau"), table, stamp(line, "benchmarks/measures.py")
    )


@figure
def measures_ranking() -> str:
    """Every method's value of every measure at eight times the context length, by model."""
    line, tables = last_line("measures"), []
    for row in line["rows"]:
        measures = [measure for measure in row["measures"] if not measure["flaw"]]
        longest = max(value["length"] for measure in measures for value in measure["values"])
        cells: dict[str, list[str]] = {}
        for measure in measures:
            scale, digits = (100, 0) if measure["unit"] == "%" else (1, 2)
            for v in measure["values"]:
                if v["length"] == longest:
                    low, value, high = (f"{scale * v[key]:.{digits}f}" for key in ("low", "value", "high"))
                    cells.setdefault(v["method"], []).append(f"{value} [{low}, {high}]")
        heads = [f"{m['name']}, {'%' if m['unit'] == '%' else 'nats'}" for m in measures]
        table = [[f"`{name}`", *values] for name, values in cells.items()]
        tables.append(markdown_table((f"{_model(row)}, {longest:,} tokens", *heads), table))
    return "".join(tables)

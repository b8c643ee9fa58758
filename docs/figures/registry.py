"""Tools that every figure is made with: the register, the files of measurements, Markdown tables.

A figure is a function without arguments that returns Markdown, decorated with `figure`; its name, with dashes, is
the name that a page calls. A measurement is a line of benchmarks/results.jsonl: `make bench` appends to it, and the
last line of a kind counts. docs/results/*.json holds measurements that `make bench` does not repeat.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rope_ext_hf.runs.conclusions.statistics import Estimate

ROOT = Path(__file__).parent.parent.parent
PROCESSORS = ("x86_64", "aarch64", "arm64", "AMD64")
"""What `device` is in a line that was measured on a CPU."""

FIGURE = re.compile(r"(<!-- figure: ([a-z0-9-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
"""A figure in a page: its opening comment, its name, what stands there, its closing comment."""

FIGURES: dict[str, Callable[[], str]] = {}
"""Every figure by name."""

Row = dict[str, Any]


def figure(make: Callable[[], str]) -> Callable[[], str]:
    """Register a function as the figure of its name, with dashes."""
    FIGURES[make.__name__.replace("_", "-")] = make
    return make


@cache
def read_lines() -> tuple[Row, ...]:
    text = (ROOT / "benchmarks" / "results.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@cache
def read_result(name: str) -> Row:
    """A measurement that `make bench` does not repeat."""
    result: Row = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return result


def in_bits(change: Estimate) -> list[float | None]:
    """Return a change of the loss in nats, and the ends of its interval, in bits, as measured.json has them."""
    return [None if nats is None else round(nats / math.log(2), 6) for nats in change[:3]]


def lines_of(*benchmarks: str) -> list[Row]:
    """The lines of a benchmark, under any of its names, on a CPU, oldest first."""
    return [line for line in read_lines() if line["benchmark"] in benchmarks and line["device"] in PROCESSORS]


def last_line(*benchmarks: str) -> Row:
    """The line that counts of a benchmark."""
    return lines_of(*benchmarks)[-1]


def rows_of(benchmark: str, *keys: str, **values: Any) -> dict[tuple[Any, ...], Row]:
    """All rows of a benchmark with these values, by their keys; the row measured last counts."""
    return {
        tuple(row[key] for key in keys): row
        for line in lines_of(benchmark)
        for row in line["rows"]
        if all(row.get(key) == value for key, value in values.items())
    }


NARROW = "were computed by an earlier method, not by Student's t."
"""The note on intervals that were measured before the present ones."""
NOW = "Student, Wilson, Newcombe"
"""The name of the present intervals in `benchmarks/record.py`."""


def stamp(line: Row, command: str) -> str:
    setting = "" if _setting(line) == usual_setting() else f" with {_setting(line)}"
    count = line.get("threads", 1)
    threads = f", {count} threads" if count > 1 else ""
    over_documents = any("low" in row and "ratio" not in row for row in line.get("rows", ()))
    narrow = f" The intervals {NARROW}" if over_documents and line.get("intervals") != NOW else ""
    return f"*Measured by `{command}`{setting}{threads}.*{narrow}"


def _setting(line: Row) -> str:
    return f"{_listed(line['versions'])}, on {line['device']}"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def made_by(result: Row) -> str:
    """The command that a result came from, with the versions that are not those of most measurements."""
    usual = _usual_line()["versions"]
    others = {package: version for package, version in result["versions"].items() if version != usual.get(package)}
    return f"Measured by `{result['command']}`" + f" with {_listed(others)}" * bool(others) + "."


@figure
def usual_setting() -> str:
    """The versions and the processor of most measurements, which `stamp` and `made_by` do not repeat."""
    return _setting(_usual_line())


@cache
def _usual_line() -> Row:
    lines = [line for line in read_lines() if line["device"] in PROCESSORS]
    usual = Counter(map(_setting, lines)).most_common(1)[0][0]
    return next(line for line in lines if _setting(line) == usual)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], after: str = "") -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n\n" + "\n".join(lines) + "\n\n" + (f"{after}\n\n" if after else "")


def length_heads(lengths: Iterable[int], context_length: int) -> list[str]:
    """Heads of the columns of a table by length: in tokens, and in context lengths."""
    return [f"{length:,} ({length / context_length:g}x)" for length in lengths]


def length_table(title: str, line: Row, cell: str, *, name: str = "{method}", after: str = "") -> str:
    """The rows of a measurement by method, one column per length; `cell` and `name` are formats of a row's values."""
    cells = {(name.format(**row), row["length"]): cell.format(**row) for row in line["rows"]}
    lengths = list(dict.fromkeys(length for _, length in cells))
    rows = ([each, *(cells[each, length] for length in lengths)] for each in dict.fromkeys(each for each, _ in cells))
    return markdown_table([title, *length_heads(lengths, line["context_length"])], rows, after)


def anchor(heading: str) -> str:
    """The part of an address behind the # that leads to a heading."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def names_in_lines(names: Iterable[str]) -> str:
    """Names as code, with commas, in lines of the pages' width."""
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 118, break_long_words=False, break_on_hyphens=False)


def ratio_with_interval(row: Row) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"

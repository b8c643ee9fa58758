"""Gain and cost of methods without training, on every model they were measured on; and the file that advice reads."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from docs.figures import gpu, real_models
from docs.figures.registry import ROOT, Row, figure, lines_of, markdown_table, stamp

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod, Rotary

__all__ = ["MEASURED", "NAMES", "factor_lines", "measured_file", "rows_by_setting", "unchanged_share"]

MEASURED = ROOT / "rope_ext_hf" / "tools" / "advice" / "measured.json"
NAMES = {"reference": "bundled model", "docstring-model": "docstring model", "wide-heads-model": "wide-heads model"}
"""The models of benchmarks/factors.py, in the order of their tables."""
SAME = 1e-3
"""Bits per byte by which a measurement on another machine may differ."""
OPTIONS = {
    "reference": "",
    "docstring-model": "--model build/bench/docstring-model",
    "wide-heads-model": "--model build/bench/wide-heads-model --longest 8 --spans 8",
}
"""Of benchmarks/factors.py, by model."""


def factor_lines() -> dict[str, Row]:
    """The last measurement of every model, with the rows that only earlier ones have, and those of longer lengths.

    Measurements with the same longest length score the same text. From those that go further only the lengths beyond
    are taken: a rise is over the model as loaded on its own text. Their lines are in `longer`.

    Raises:
        ValueError: measurements of the model as loaded that differ, so that their rows cannot stand in one table.
    """
    last: dict[tuple[str, int], Row] = {}
    for line in lines_of("factors"):
        key = line["model"], max(row["length"] for row in line["rows"])
        kept = last.get(key, {"rows": []})["rows"]
        measured = {row["method"] for row in line["rows"]}
        loaded = [
            [row["bits_per_byte"] for row in rows if row["method"] == "unpatched"] for rows in (kept, line["rows"])
        ]
        others = [row for row in kept if row["method"] not in measured]
        if others and any(abs(old - new) > SAME for old, new in zip(*loaded, strict=True)):
            raise ValueError(f"{line['model']} was measured on other text before: measure all methods anew")
        last[key] = line | {"rows": line["rows"] + others}
    merged: dict[str, Row] = {}
    for (model, _), line in sorted(last.items(), key=lambda each: each[0][1]):
        known = merged.get(model, line | {"rows": [], "longer": []})
        reached = max((row["length"] for row in known["rows"]), default=0)
        longer = [row for row in line["rows"] if row["length"] > reached]
        merged[model] = known | {"rows": known["rows"] + longer, "longer": known["longer"] + [line] * bool(reached)}
    return {model: merged[model] for model in NAMES if model in merged}


def measured_file() -> str:
    """The text of measured.json: real models first, then the small ones.

    A row is method, factor, length in context lengths, increase, low, high; the increase is in bits per token of a real
    model, and per byte of a small one.
    """
    # Advice compares methods at the same lengths, so that a model measured at others is shown in the pages alone.
    entries = [entry for entry in real_models.merged_entries() if real_models.first_multiple(entry) == 2]
    models = [_about(entry, entry["model"], "token", _rows_of_real_model(entry)) for entry in entries]
    for model, line in factor_lines().items():
        rows = [
            [
                row["method"],
                row["factor"],
                row["length"] / line["context_length"],
                row["increase"],
                row["low"],
                row["high"],
            ]
            for row in line["rows"]
        ]
        models.append(_about(line, NAMES[model], "byte", rows))
    parts = []
    for each in models:
        head = json.dumps({key: value for key, value in each.items() if key != "rises"})[:-1]
        parts.append(head + ', "rises": [\n' + ",\n".join(map(json.dumps, each["rises"])) + "\n]}")
    return "[\n" + ",\n".join(parts) + "\n]\n"


def _rows_of_real_model(entry: Row) -> list[list[Any]]:
    """Return what was measured with most texts; settings and lengths that a GPU alone has measured follow."""
    rows = real_models.measured_rows(entry)
    known = {tuple(row[:3]) for row in rows}
    if entry["model"] == gpu.real_model_name():
        rows += [row for row in gpu.measured_rows() if tuple(row[:3]) not in known]
    return rows


def _about(measured: Row, name: str, unit: str, rows: list[list[Any]]) -> Row:
    """Return the entry of a model in measured.json."""
    about = {key: measured[key] for key in ("rotated_dims", "theta", "context_length", "parameters")}
    return about | {"name": name, "unit": unit, "rises": rows}


def rows_by_setting(line: Row) -> dict[tuple[str, float | None, int], Row]:
    """The rows of a measurement by method, factor and length in context lengths."""
    return {(row["method"], row["factor"], row["length"] // line["context_length"]): row for row in line["rows"]}


def _note() -> str:
    lines = factor_lines()
    stamps = {stamp(line, "benchmarks/factors.py"): None for line in lines.values()}
    scored = []
    for model, line in lines.items():
        options = [OPTIONS[model]] if OPTIONS[model] else []
        text = f"{NAMES[model]} {line['scored_bytes']:,} bytes"
        if line["longer"]:
            further = (f"{o['scored_bytes']:,} of other text" for o in line["longer"])
            text += f" ({', '.join(further)} at the longest lengths)"
            options += [f"--longest {_longest(o)} --spans {o['spans']}" for o in line["longer"]]
        scored.append(text + "".join(f", `{option}`" for option in options))
    return f"Scored at every length: {'; '.join(scored)}. {' '.join(stamps)}"


def _longest(line: Row) -> int:
    """The longest length of a measurement, in context lengths."""
    longest: int = max(row["length"] for row in line["rows"]) // line["context_length"]
    return longest


@figure
def measured_models() -> str:
    from rope_ext_hf.tools.advice.measured import measured_models

    return "; ".join(str(model) for model in measured_models() if model.is_small)


@figure
def recovered() -> str:
    from rope_ext_hf.tools.advice.measured import RECOVERED

    return f"{RECOVERED:.0%}"


@figure
def rises_note() -> str:
    """Return how much text the numbers of the chart rest on, and the command that measured them."""
    return _note()


@figure
def bands() -> str:
    """MrRoPE and YaRN with other bands against YaRN with its own, on every model, by factor."""
    tables = []
    for line in {line["model"]: line for line in lines_of("bands")}.values():
        cells: dict[str, dict[int, list[str]]] = {}
        for row in line["rows"]:
            label = " ".join(word for word in row["method"].split() if word != f"x{row['factor']}")
            words = set(re.split("[ =]", label))
            if label != "yarn" and "beta_slow" not in words and not {"uniform", "beta_fast"} <= words:
                text = "{over_yarn:+.2f} [{over_low:+.2f}, {over_high:+.2f}]".format(**row)
                cells.setdefault(label, {}).setdefault(row["factor"], []).append(text)
        factors = sorted({row["factor"] for row in line["rows"]})
        name = NAMES.get(line["model"]) or str(line["model"])
        rows = ([f"`{label}`", *(" / ".join(of[each]) for each in factors)] for label, of in cells.items())
        options = f"--model {line['model']} --factors {','.join(map(str, factors))} --spans {line['spans']}"
        command = f"benchmarks/bands.py {options}"
        note = f"{line['scored_tokens']:,} scored tokens of {line['documents']} documents. {stamp(line, command)}"
        tables.append(markdown_table([name, *(f"x{factor}" for factor in factors)], rows, note))
    return "\n".join(tables) or "\n\nNot measured yet.\n\n"


@figure
def yarn_cost() -> str:
    """Return what a factor of 4 costs inputs within the context length."""
    from rope_ext_hf.tools.advice.measured import price

    return f"inputs within the context length {price('yarn', 4)}"


def unchanged_share(method: RopeMethod, rotary: Rotary) -> str:
    """Up to which share of the context length a method leaves the output as it is; "" for none."""
    share = Fraction(method.unchanged_length(rotary), rotary.context_length).limit_denominator(8)
    words = {Fraction(1, 4): "a quarter", Fraction(1, 2): "half", Fraction(3, 4): "three quarters", Fraction(1): "all"}
    return "" if not share else words.get(share, str(share))


@figure
def unchanged_lengths() -> str:
    """Up to which share of the context length the remapping methods leave the output as it is, as bound by default."""
    from rope_ext_hf import Rotary, list_methods
    from rope_ext_hf.methods.remapping import RemappingMethod
    from rope_ext_hf.tools.advice.guidance import PYTHON, guidance_of

    rotary = Rotary(dim=128, theta=10000.0, trained_length=4096)
    names: dict[str, list[str]] = {}
    for name, cls in list_methods().items():
        if not (issubclass(cls, RemappingMethod) and cls.moves_keys):
            continue
        if (known := guidance_of(name)) and PYTHON in known.purposes:
            names.setdefault(unchanged_share(cls().bind(rotary, None), rotary), []).append(f"`{name}`")
    return " and ".join(f"{share} of the context length ({', '.join(listed)})" for share, listed in names.items())

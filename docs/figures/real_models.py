"""Measurements on models larger than those that this package can bring along."""

from __future__ import annotations

from docs.figures.registry import Row, figure, length_heads, length_table, markdown_table, read_lines, stamp


@figure
def real_models() -> str:
    """Three tables for each model and device that was measured last."""
    lines = {(line["model"], line["device"]): line for line in read_lines() if line["benchmark"] == "real model"}
    return "\n\n" + "".join(map(section, lines.values())) if lines else "\n\n**No model has been measured yet.**\n\n"


def section(line: Row) -> str:
    """Loss, retrieval and cost of one model, by method and length."""
    line = line | {"rows": [row | {"gap": _gap(*row["increase"])} for row in line["rows"]]}
    loss = "{loss:.3f} ({gap})"
    cost = (
        "{tokens_per_second:,}"
        if line["rows"][0]["gpu_gigabytes"] is None
        else "{tokens_per_second:,}, {gpu_gigabytes} GB"
    )
    return (
        f"### {line['model']}\n\n{line['parameters'] / 1e9:.3g} billion parameters, context length "
        f"{line['context_length']:,}, {line['dtype']}; {line['scored_tokens']:,} tokens of {line['documents']} texts "
        f"in `{line['data']}` scored at every length, {line['questions']} questions of the task `{line['task']}`.\n"
        + length_table("loss, nats per token", line, loss)
        + length_table("answered exactly", line, "{found:.0%}")
        + length_table("tokens read per second", line, cost)
        + stamp(line, f"benchmarks/real_models.py --model {line['model']}")
        + "\n\n"
    )


@figure
def ruler_tables() -> str:
    """RULER of each model and device that was measured last, beside what papers report of the model."""
    lines = {(line["model"], line["device"]): line for line in read_lines() if line["benchmark"] == "ruler table"}
    return (
        "\n\n" + "".join(map(ruler_section, lines.values())) if lines else "\n\n**No model has been measured yet.**\n\n"
    )


def ruler_section(line: Row) -> str:
    """The scores of one model by method and length, their mean, and the mean that a paper reports."""
    from rope_ext_hf.tools.advice.reported import reported

    tables = [each for each in reported() if each.model == line["model"].rpartition("/")[2] and len(each.lengths) == 1]
    lengths = list(dict.fromkeys(row["length"] for row in line["rows"] if row["length"]))
    cells = {(row["label"], row["length"]): row for row in line["rows"]}
    rows = []
    for label, method in dict.fromkeys((row["label"], row["method"]) for row in line["rows"]):
        mean = cells[label, None]
        published = [each.numbers(method) for each in tables if method in each.values]
        scores = [f"{cells[label, length]['score']:.1f}" for length in lengths]
        value, low, high = mean["over_as_loaded"]
        gap = "" if label == "unpatched" else f" ({_gap(value, low, high, digits=1)})"
        rows.append([f"`{label}`", *scores, f"{mean['score']:.1f}{gap}", ", ".join(published) or "–"])
    of = f" ({', '.join(f'{each.source}, {each.lengths[0]}' for each in tables)})" if tables else ""
    head = ["RULER, %", *length_heads(lengths, line["context_length"]), "mean, measured here", f"reported{of}"]
    note = (
        f"{len(line['tasks'])} tasks, {line['samples']} prompts each, {line['dtype']}; in brackets the difference to "
        "the model as loaded with its 95% interval. "
    )
    note += stamp(line, f"benchmarks/ruler_table.py --model {line['model']}")
    return f"### RULER: {line['model']}\n\n{markdown_table(head, rows, note)}\n\n"


def _gap(value: float, low: float | None, high: float | None, digits: int = 3) -> str:
    """A difference with its interval, where there are items enough for one."""
    middle, *ends = ("" if each is None else f"{each:+.{digits}f}" for each in (value, low, high))
    return middle if low is None or high is None else f"{middle} [{', '.join(ends)}]"

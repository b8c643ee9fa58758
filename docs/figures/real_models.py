"""What was measured on models larger than those that this package can bring along."""

from __future__ import annotations

from docs.figures.registry import Row, figure, length_table, read_lines, stamp


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


def _gap(value: float, low: float | None, high: float | None) -> str:
    """A difference with its interval, where there are documents enough for one."""
    return f"{value:+.3f}" if low is None or high is None else f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"

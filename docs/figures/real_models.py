"""What was measured on models larger than those that this package can bring along."""

from __future__ import annotations

from .registry import Row, figure, markdown_table, read_lines, stamp


@figure
def real_models() -> str:
    """Three tables for each model and device that was measured last."""
    lines = {(line["model"], line["device"]): line for line in read_lines() if line["benchmark"] == "real model"}
    return "\n\n" + "".join(map(section, lines.values())) if lines else "\n\n**No model has been measured yet.**\n\n"


def section(line: Row) -> str:
    """Loss, retrieval and cost of one model, by method and length."""
    lengths = list(dict.fromkeys(row["length"] for row in line["rows"]))
    cells = {(row["method"], row["length"]): row for row in line["rows"]}
    heads = [f"{length:,} ({length / line['context_length']:g}x)" for length in lengths]

    def table(title: str, text: str) -> str:
        rows = (
            [name, *(text.format(**cells[name, length]) for length in lengths)]
            for name in dict.fromkeys(name for name, _ in cells)
        )
        return markdown_table([title, *heads], rows)

    cost = (
        "{tokens_per_second:,}"
        if line["rows"][0]["gpu_gigabytes"] is None
        else "{tokens_per_second:,}, {gpu_gigabytes} GB"
    )
    return (
        f"### {line['model']}\n\n{line['parameters'] / 1e9:.3g} billion parameters, context length "
        f"{line['context_length']:,}, {line['dtype']}; {line['scored_tokens']:,} tokens of {line['documents']} texts "
        f"in `{line['data']}` scored at every length, {line['questions']} questions of the task `{line['task']}`.\n"
        + table("loss, nats per token", "{loss:.3f} ({increase[0]:+.3f} [{increase[1]:+.3f}, {increase[2]:+.3f}])")
        + table("answered exactly", "{found:.0%}")
        + table("tokens read per second", cost)
        + stamp(line, f"benchmarks/real_models.py --model {line['model']}")
        + "\n\n"
    )

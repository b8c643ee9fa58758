"""Results for people: a table in the terminal, curves in a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rope_ext_hf.errors import printable
from rope_ext_hf.eval.protocols import resolve_protocol
from rope_ext_hf.eval.results import Result, label

__all__ = ["best_of_lengths", "by_method", "perplexity_text", "scored", "table", "throughput_text"]


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results grouped by label, in the order they came."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(label(result.method), []).append(result)
    return rows


def best_of_lengths(results: Sequence[Result]) -> dict[int, float]:
    """The lowest finite loss at each length; NaN where there is none."""
    found = {result.length: math.nan for result in results}
    for result in results:
        if math.isfinite(result.loss) and not found[result.length] <= result.loss:
            found[result.length] = result.loss
    return found


def scored(result: Result) -> str:
    """What was scored, in words."""
    setting = result.setting
    left_out = f"; {setting.left_out} documents too short" if setting.left_out else ""
    if resolve_protocol(setting.protocol).same_targets:
        return (
            f"protocol matched: the same {result.tokens:,} tokens scored at every length, "
            f"the last {setting.targets} of {result.spans} spans{left_out}"
        )
    tokens = f"{result.tokens:,} tokens in {result.spans} spans at {result.length:,}"
    return f"protocol {setting.protocol}: {tokens}{left_out}"


def throughput_text(results: Sequence[Result]) -> str:
    """How fast text was read, from the slowest to the fastest, and the GPU memory that took."""
    rates = sorted(result.tokens_per_second for result in results if result.tokens_per_second)
    if not rates:
        return "not timed"
    slowest, fastest = f"{rates[0]:,.0f}", f"{rates[-1]:,.0f}"
    text = f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} tokens per second"
    peak = max(result.gpu_bytes or 0 for result in results)
    return f"{text}, at most {peak / 1e9:.1f} GB of GPU memory" if peak else text


def perplexity_text(value: float) -> str:
    """Two decimals as long as they mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"


def table(
    results: Sequence[Result],
    trained_length: int,
    increases: Mapping[str, tuple[float, float, float] | None] | None = None,
) -> Table:
    """One row per method, one column per context length: perplexity and (bits per byte), the best of a column marked.

    `increases`, by label, adds a column: how much higher the loss is at the trained length, in nats per token.
    """
    lengths = sorted({result.length for result in results})
    best = best_of_lengths(results)
    view = Table(
        title=f"Perplexity and (bits per byte) by context length, trained at {trained_length:,} tokens",
        caption=f"{scored(results[0])}; * best of a column",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    view.add_column("method", overflow="fold")
    for length in lengths:
        view.add_column(f"{length:,}\n{length / trained_length:g}x", justify="right", overflow="fold")
    if increases is not None:
        view.add_column(f"loss increase at\n{trained_length:,}", justify="right", overflow="fold")
    for name, row in by_method(results).items():
        found = {result.length: result for result in row}
        cells = [_cell(found.get(length), best[length]) for length in lengths]
        if increases is not None:
            increase = increases.get(name)
            cells.append("" if increase is None else f"{increase[0]:+.3f}")
        view.add_row(escape(printable(name)), *cells)
    return view


def _cell(result: Result | None, best: float) -> str:
    if result is None:
        return ""
    if not math.isfinite(result.loss):
        return "[red]not finite[/red]"
    text = f"{perplexity_text(result.perplexity)} ({result.bits_per_byte:.2f})"
    return f"[bold green]{text}*[/bold green]" if result.loss == best else f"{text} "

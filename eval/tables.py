"""Results as tables, for a terminal and for a page.

Names come from files and models and may hold anything: they go into tables as text, never as markup, with control
characters escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import multiple_text, printable, short
from rope_ext_hf.eval.protocols import PROTOCOLS
from rope_ext_hf.eval.results import Result, Retrieval, labels, method_key, perplexity_from_loss
from rope_ext_hf.eval.run_folder import Run

__all__ = [
    "by_method",
    "by_method_and_depth",
    "loss_lines",
    "perplexity_table",
    "retrieval_table",
    "run_table",
    "throughput_text",
]

R = TypeVar("R", Result, Retrieval)
Increase = tuple[float, float, float]


def by_method(results: Sequence[R]) -> dict[str, list[R]]:
    """Results by the label of their method, in the order they came."""
    names = labels(result.method for result in results)
    rows: dict[str, list[R]] = {name: [] for name in names.values()}
    for result in results:
        rows[names[method_key(result.method)]].append(result)
    return rows


def by_method_and_depth(results: Sequence[Retrieval]) -> dict[str, dict[float, dict[int, Retrieval]]]:
    """Results by label, depth and length; methods in the order they came."""
    rows: dict[str, dict[float, dict[int, Retrieval]]] = {}
    for name, of_method in by_method(results).items():
        rows[name] = {depth: {} for depth in sorted({result.depth for result in of_method})}
        for result in of_method:
            rows[name][result.depth][result.length] = result
    return rows


def best_of_lengths(results: Sequence[Result]) -> dict[int, float]:
    """The lowest finite loss at each length; NaN where there is none."""
    best = {result.length: math.nan for result in results}
    for result in results:
        if math.isfinite(result.loss) and not best[result.length] <= result.loss:
            best[result.length] = result.loss
    return best


def loss_lines(results: Sequence[Result]) -> dict[str, list[tuple[int, float]]]:
    """Bits per byte where they are finite, as (length, value) by label."""
    return {
        name: [(r.length, r.bits_per_byte) for r in row if math.isfinite(r.loss)]
        for name, row in by_method(results).items()
    }


def scored_text(result: Result) -> str:
    """What was scored, as a phrase."""
    setting = result.setting
    left_out = f"; documents too short: {setting.left_out}" if setting.left_out else ""
    protocol = PROTOCOLS.get(setting.protocol)  # a run of somebody else's may have a protocol of its own
    name = short(printable(setting.protocol))
    if protocol is not None and protocol.same_targets:
        return (
            f"protocol {name}: the same {result.tokens:,} tokens scored at every length, "
            f"the last {setting.targets} of {result.spans} spans{left_out}"
        )
    tokens = f"{result.tokens:,} tokens in {result.spans} spans at {result.length:,}"
    return f"protocol {name}: {tokens}{left_out}"


def throughput_text(results: Sequence[Result]) -> str:
    """The speed of reading, from the slowest to the fastest, and the GPU memory that took."""
    rates = sorted(result.tokens_per_second for result in results if result.tokens_per_second)
    if not rates:
        return "not timed"
    slowest, fastest = f"{rates[0]:,.0f}", f"{rates[-1]:,.0f}"
    text = f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} tokens per second"
    peak = max(result.gpu_bytes or 0 for result in results)
    return f"{text}, at most {peak / 1e9:.1f} GB of GPU memory" if peak else text


def perplexity_text(value: float) -> str:
    """A perplexity with as many digits as mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"


def run_table(run: Run[Result] | Run[Retrieval], *, detailed: bool = False) -> Table | None:
    """The table of a run's results, `detailed` with the intervals of perplexities; None where nothing is complete."""
    if not run.results:
        return None
    perplexities = [result for result in run.results if isinstance(result, Result)]
    if not perplexities:
        return retrieval_table([r for r in run.results if isinstance(r, Retrieval)], run.context_length)
    increases = {name: run.loss_increase(row[0].method) for name, row in by_method(perplexities).items()}
    return perplexity_table(perplexities, run.context_length, increases, detailed=detailed, meant_for=run.meant_for)


def perplexity_table(
    results: Sequence[Result],
    context_length: int,
    increases: Mapping[str, Increase | None] | None = None,
    *,
    detailed: bool = False,
    meant_for: str | None = None,
) -> Table:
    """One row per method, one column per length: perplexity and (bits per byte), the best of a column marked.

    Args:
        results: at least one.
        context_length: the length in tokens that the model as loaded is for.
        increases: by label, how much higher the loss is at that length than as loaded, in nats per token, and its 95%
            interval, paired by document: a column more.
        detailed: with a second line in each cell, the interval, or the documents whose loss is not finite.
        meant_for: `context_length` as a phrase.
    """
    lengths = sorted({result.length for result in results})
    best = best_of_lengths(results)
    meant_for = meant_for or f"{context_length:,} tokens"
    title = f"Perplexity and (bits per byte) by context length; the model is for {meant_for}"
    shown = increases if increases and any(increases.values()) else None
    units = "; loss increase in nats per token" if shown else ""
    lines = "; below: the 95% interval over documents" if detailed else ""
    view = _table(title, f"{scored_text(results[0])}; * best of a column{units}{lines}")
    view.add_column("method", overflow="fold")
    _add_lengths(view, lengths, context_length)
    if shown is not None:
        view.add_column(f"loss\nincrease\nat {context_length:,}", justify="right", overflow="fold")
    for name, row in by_method(results).items():
        at = {result.length: result for result in row}
        cells = [_perplexity_cell(at.get(length), best[length], detailed) for length in lengths]
        if shown is not None:
            increase = shown.get(name)
            interval = f"\n{increase[1]:+.3f} to {increase[2]:+.3f}" if increase and detailed else ""
            cells.append(Text("" if increase is None else f"{increase[0]:+.3f}{interval}"))
        view.add_row(Text(name), *cells)
    return view


def _perplexity_cell(result: Result | None, best: float, detailed: bool) -> Text:
    if result is None:
        return Text("")
    if not math.isfinite(result.loss):
        names = f"\n{', '.join(map(printable, result.nonfinite))}" if detailed else ""
        return Text(f"not finite{names}", style="red")
    mark = "*" if result.loss == best else " "
    low, high = (perplexity_text(perplexity_from_loss(bound)) for bound in (result.low, result.high))
    interval = f"\n{low} to {high}" if detailed else ""
    text = f"{perplexity_text(result.perplexity)} ({result.bits_per_byte:.{3 if detailed else 2}f}){mark}{interval}"
    return Text(text, style="bold green" if mark == "*" else "")


def retrieval_table(results: Sequence[Retrieval], context_length: int) -> Table:
    """One row per method and depth, one column per length: exact match and mean rank."""
    lengths = sorted({result.length for result in results})
    title = f"Retrieval, {task_text(results[0])}: exact match, mean rank"
    view = _table(title, f"{retrieval_caption(results[0])}; green: better than chance by 3 standard errors")
    view.add_column("method", overflow="fold")
    view.add_column("depth", justify="right")
    _add_lengths(view, lengths, context_length)
    for name, depths in by_method_and_depth(results).items():
        for index, (depth, row) in enumerate(depths.items()):
            cells = [_retrieval_cell(row.get(length)) for length in lengths]
            view.add_row(Text("" if index else name), f"{depth:.0%}", *cells, end_section=index == len(depths) - 1)
    return view


def task_text(result: Retrieval) -> str:
    """The task as a phrase."""
    keys = f", one of {result.keys} keys" if result.keys > 1 else ""
    return f"task {short(printable(result.task))}{keys}"


def retrieval_caption(result: Retrieval) -> str:
    """How many prompts a cell stands for, and what luck gives."""
    return (
        f"{result.trials} prompts per cell, each answer ranked among {result.distractors} others; by luck the mean "
        f"rank is {result.chance_rank:g}"
    )


def _retrieval_cell(result: Retrieval | None) -> Text:
    if result is None:
        return Text("")
    text = f"{result.exact_match:.0%} {result.rank:4.1f}"
    return Text(text, style="green" if result.above_chance else "")


def _table(title: str, caption: str) -> Table:
    return Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)


def _add_lengths(view: Table, lengths: Sequence[int], context_length: int) -> None:
    for length in lengths:
        view.add_column(f"{length:,}\n{multiple_text(length, context_length)}", justify="right", overflow="fold")

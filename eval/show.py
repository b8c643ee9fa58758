"""Results for people: a table in the terminal, curves in a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rope_ext_hf.eval.results import Result, label

__all__ = ["best_of_lengths", "by_method", "curves", "perplexity_text", "scored", "speed", "spread", "table"]


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
    if setting.protocol == "matched":
        return (
            f"protocol matched: the same {result.tokens:,} tokens scored at every length, "
            f"the last {setting.targets} of {result.windows} windows{left_out}"
        )
    tokens = f"{result.tokens:,} tokens in {result.windows} windows at {result.length:,}"
    return f"protocol {setting.protocol}: {tokens}{left_out}"


def speed(results: Sequence[Result]) -> str:
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
    results: Sequence[Result], trained_length: int, costs: Mapping[str, tuple[float, float, float] | None] | None = None
) -> Table:
    """One row per method, one column per context length: perplexity and (bits per byte), the best of a column marked.

    `costs`, by label, adds a column: how much higher the loss is at the trained length, in nats per token.
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
    if costs is not None:
        view.add_column(f"cost at\n{trained_length:,}", justify="right", overflow="fold")
    for name, row in by_method(results).items():
        found = {result.length: result for result in row}
        cells = [_cell(found.get(length), best[length]) for length in lengths]
        if costs is not None:
            cost = costs.get(name)
            cells.append("" if cost is None else f"{cost[0]:+.3f}")
        view.add_row(name, *cells)
    return view


def _cell(result: Result | None, best: float) -> str:
    if result is None:
        return ""
    if not math.isfinite(result.loss):
        return "[red]not finite[/red]"
    text = f"{perplexity_text(result.perplexity)} ({result.bits_per_byte:.2f})"
    return f"[bold green]{text}*[/bold green]" if result.loss == best else f"{text} "


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Ascending heights moved as little as needed to be `gap` apart, none above `top`."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else top)
    return placed


def _family(name: str) -> str:
    """The label without its factor."""
    return name.rpartition(" x")[0] or name


def curves(results: Sequence[Result], trained_length: int, path: Path, title: str) -> None:
    """Loss against context length, one line per method, as a PNG; the factors of one method share a colour.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lengths = sorted({result.length for result in results})
    markers = "osD^vP*Xhd"
    ends: list[tuple[float, str, str]] = []
    methods = by_method(results)
    families = list(dict.fromkeys(_family(name) for name in methods if name != "as loaded"))
    for name, row in methods.items():
        points = [(r.length, r.bits_per_byte) for r in row if math.isfinite(r.loss)]
        if not points:
            continue
        which = families.index(_family(name)) if name != "as loaded" else 0
        siblings = [other for other in methods if _family(other) == _family(name)]
        nth = siblings.index(name)
        colour = "#222222" if name == "as loaded" else f"C{which % 10}"
        axes.plot(
            *zip(*points, strict=True),
            marker=markers[(which + 3 * nth) % len(markers)],
            markersize=5,
            linewidth=2.4 if name == "as loaded" else 1.6,
            linestyle="--" if name == "as loaded" else ("-", "-.", ":")[(len(siblings) - 1 - nth) % 3],
            color=colour,
            label=name,
        )
        ends.append((points[-1][1], name, colour))
    axes.axvline(trained_length, color="#888888", linewidth=1, linestyle=":")
    axes.annotate(
        "trained length",
        (trained_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#666666",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("bits per byte of held-out text (lower is better)")
    axes.set_title(title, fontsize=11)
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    ends.sort()
    heights = spread([value for value, _, _ in ends], (high - low) / 22, high)
    for height, (_, name, colour) in zip(heights, ends, strict=True):
        axes.annotate(
            name,
            (1.01, height),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            color=colour,
            va="center",
            annotation_clip=False,
        )
    figure.savefig(path)

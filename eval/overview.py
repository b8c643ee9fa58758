"""Perplexity and retrieval in one picture: what is lost beyond the context length, and what a method brings back.

picture = Overview(perplexities, retrievals, context_length=256)
picture.draw(Path("overview.png"), "the bundled model")
print(picture.conclusions())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, TypeVar

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.eval.perplexity_runs import loss_lines
from rope_ext_hf.eval.results import Result, Retrieval, short_labels
from rope_ext_hf.eval.retrieval_runs import by_method_and_depth
from rope_ext_hf.eval.tables import by_method
from rope_ext_hf.pictures.drawing import LOADED, picture, plot_text
from rope_ext_hf.pictures.result_plots import draw_curves, draw_heat_map, line_styles

__all__ = ["Overview"]

R = TypeVar("R", Result, Retrieval)


@dataclass(frozen=True)
class Overview:
    """Results of two runs of one model; the model as loaded and at least one method are among the retrievals.

    Attributes:
        perplexities: by length and method.
        retrievals: by length, depth and method.
        context_length: the length in tokens that the model as loaded is for.
    """

    perplexities: Sequence[Result]
    retrievals: Sequence[Retrieval]
    context_length: int

    @cached_property
    def found(self) -> dict[str, dict[int, float]]:
        """The share of exact answers over all depths, by method and length."""
        shares: dict[str, dict[int, float]] = {}
        for name, rows in _by_short_name(self.retrievals).items():
            lengths = sorted({row.length for row in rows})
            shares[name] = {n: fmean(row.exact_match for row in rows if row.length == n) for n in lengths}
        return shares

    @cached_property
    def best(self) -> str:
        """The method that answers most beyond the context length."""

        def beyond(name: str) -> float:
            return sum(share for length, share in self.found[name].items() if length > self.context_length)

        return max((name for name in self.found if name != LOADED), key=beyond)

    def conclusions(self) -> tuple[str, str, str]:
        """One line each: for bits per byte, for retrieval by length, for retrieval by depth."""
        return self._of_loss(), self._of_retrieval(), self._of_depth()

    def _of_loss(self) -> str:
        at = {
            name: {r.length: r.bits_per_byte for r in rows} for name, rows in _by_short_name(self.perplexities).items()
        }
        longest = max(at[LOADED])
        best = min((name for name in at if name != LOADED), key=lambda name: at[name].get(longest, float("inf")))
        return (
            f"As loaded, the loss rises from {at[LOADED][self.context_length]:.2f} bits per byte at "
            f"{self.context_length:,} to {at[LOADED][longest]:.2f} at {longest:,}; with {best} it is "
            f"{at[best][longest]:.2f}."
        )

    def _of_retrieval(self) -> str:
        loaded, best = self.found[LOADED], self.found[self.best]
        longest = max(best)
        return (
            f"As loaded, {loaded[self.context_length]:.0%} of the answers are found at {self.context_length:,} and "
            f"{loaded[longest]:.0%} at {longest:,} ({multiple_text(longest, self.context_length)}); with {self.best} "
            f"{best[longest]:.0%}."
        )

    def _of_depth(self) -> str:
        beyond = [r for r in _by_short_name(self.retrievals)[self.best] if r.length > self.context_length]
        worst = min(beyond, key=lambda r: r.exact_match)
        share = fmean(r.exact_match for r in beyond)
        if worst.exact_match == share:
            return f"Beyond {self.context_length:,}, {self.best} finds {share:.0%} at every length and depth."
        return (
            f"Beyond {self.context_length:,}, {self.best} finds {share:.0%} over all depths, and least, "
            f"{worst.exact_match:.0%}, at depth {worst.depth:.0%} of {worst.length:,}."
        )

    def draw(self, path: Path, title: str) -> None:
        """Draw a PNG: both curves side by side, and below them two heat maps, as loaded and of the best method.

        Args:
            path: the file; an existing one is replaced.
            title: stands above the picture.

        Raises:
            ImportError: matplotlib is not installed.
        """
        of_loss, of_retrieval, of_depth = self.conclusions()
        one = self.retrievals[0]
        by_name = zip(_by_short_name(self.perplexities), loss_lines(self.perplexities).values(), strict=True)
        losses = dict(by_name)
        styles = line_styles(list(dict.fromkeys([*losses, *self.found])))
        with picture(path, 12.4, 8.6) as figure:
            (left, right), below = figure.subplots(2, 2, height_ratios=(5, 4))

            most = max(value for points in losses.values() for _, value in points)
            draw_curves(left, losses, styles, self.context_length, (0.0, 1.15 * most))
            left.set_ylabel("bits per byte (lower is better)")
            left.set_title("Loss on the same held-out text, by context length", fontsize=11)
            _conclude(left, of_loss)

            shares = {name: list(row.items()) for name, row in self.found.items()}
            draw_curves(right, shares, styles, self.context_length, (-0.03, 1.15))
            right.set_ylabel("answered exactly (higher is better)")
            right.set_yticks([share / 5 for share in range(6)], [f"{share / 5:.0%}" for share in range(6)])
            keys = f"one of {one.keys} statements" if one.keys > 1 else "a statement"
            right.set_title(f"Retrieval: {keys} in a long text is asked for at its end", fontsize=11)
            _conclude(right, of_retrieval)

            by_depth = dict(zip(self.found, by_method_and_depth(self.retrievals).values(), strict=True))
            lengths = sorted({r.length for r in self.retrievals})
            depths = sorted({r.depth for r in self.retrievals})
            for axes, name in zip(below, (LOADED, self.best), strict=True):
                draw_heat_map(axes, by_depth[name], lengths, depths, self.context_length)
                axes.set_title(plot_text(f"Retrieval by depth, {name}", 80), fontsize=11)
                axes.set_ylabel("depth of the statement (0%: first)")
            luck = f"rank among {one.distractors + 1} answers (by luck {one.chance_rank:g})"
            _conclude(below[0], f"{one.trials} questions per cell; {luck}")
            _conclude(below[1], of_depth)
            figure.suptitle(plot_text(title), fontsize=13)


def _by_short_name(results: Sequence[R]) -> dict[str, list[R]]:
    """Results by method and factor, without further parameters where that tells them apart."""
    rows = by_method(results)
    return dict(zip(short_labels(rows), rows.values(), strict=True))


def _conclude(axes: Any, text: str) -> None:
    axes.set_xlabel(f"context length (tokens)\n{fill(plot_text(text, 200), 110)}", fontsize=8.3)

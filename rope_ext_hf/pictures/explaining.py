"""RoPE in pictures, of a geometry or of a model: one page, and each picture as a PNG beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import printable
from rope_ext_hf.files import atomic_file, write_text
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary
from rope_ext_hf.pictures import html_page as html
from rope_ext_hf.pictures import rope_plots


@dataclass(frozen=True)
class Explanation:
    """What `explain` wrote: the page, and the pictures by name."""

    page: Path
    pictures: dict[str, Path]


def explain(
    folder: str | Path,
    rotary: Rotary,
    methods: Mapping[str, RopeMethod],
    *,
    length: int,
    title: str = "Rotary position embedding",
    trained: Tensor | None = None,
    note: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Draw a rotary embedding and what methods change in it; write the PNGs and explanation.html.

    Args:
        folder: exists; files in it of the same names are replaced, each whole or not at all.
        length: how far the pictures reach, in tokens; at least the trained length.
        trained: as `attention_vectors.spectra` gives it; None: mean scores are drawn of random vectors only. `note` is
            a sentence about it.
        progress: called before each picture with how many are drawn, of how many.
    """
    rope_plots.check_size(rotary, length)
    pictures, parts, sections = {}, [], _sections(rotary, methods, length, title, trained, note)
    for done, (name, (what, text, draw_on)) in enumerate(sections.items()):
        if progress is not None:
            progress(done, len(sections))
        pictures[name] = Path(folder) / f"{name}.png"
        with atomic_file(pictures[name]) as part:
            draw_on(part)
        parts.append(
            html.heading(what) + html.paragraph(text) + html.embedded_picture(name, pictures[name].read_bytes())
        )
    summary = (
        f"{rotary.dim} rotated dims in {rotary.dim // 2} pairs, theta {rotary.theta:,.10g}, trained at "
        f"{rotary.trained_length:,} tokens, drawn up to {length:,}. Position m turns pair i by the angle m theta_i, "
        "theta_i = theta^(-2i/d): a query at m and a key at n then score by their difference m - n alone."
    )
    settings: dict[str, Any] = {
        "rotary": rotary.to_dict(),
        "length": length,
        "methods": {name: method.to_dict() for name, method in methods.items()},
    }
    parts += [
        html.html_table(_table(rotary, methods, length)),
        html.provenance_section("What the pictures are of", settings),
    ]
    page = html.html_page(printable(title), summary, *parts)
    return Explanation(write_text(Path(folder) / "explanation.html", page), pictures)


def _sections(
    rotary: Rotary, methods: Mapping[str, RopeMethod], length: int, title: str, trained: Tensor | None, note: str
) -> dict[str, tuple[str, str, Callable[[Path], None]]]:
    """By the name of each picture its title, what to look for in it, and what draws it."""
    slow = rope_plots.pairs_without_full_cycle(rotary.inv_freq(), rotary.trained_length)
    return {
        "angles": (
            "What pairs are rotated by: cos and sin",
            "Each row is a pair of dims. Fast pairs come round every few tokens and tell neighbours apart; slow ones "
            "hardly move and tell far from near.",
            lambda path: rope_plots.draw_angles(path, rotary),
        ),
        "similarity": (
            "Similarity by offset",
            "The mean of cos((m - n) theta_i) over the pairs: 1 at offset 0, falling with distance, with ripples. "
            "It is the mean score of a random vector with itself. Interpolating methods stretch the curve.",
            lambda path: rope_plots.draw_similarity(path, rotary, methods, length),
        ),
        "bound": (
            "Long-range decay",
            "Summation by parts (Abel) bounds a score by max |h_(i+1) - h_i| times sum |S_j|, where S_j is the sum of "
            "the first j exp(1j (m - n) theta_i): the curve is the mean of |S_j| over the d/2 pairs (Su et al. 2021, "
            "sec. 3.4.3). It bounds scores of any q and k; it does not promise that they fall.",
            lambda path: rope_plots.draw_bound(path, rotary, methods, length),
        ),
        "scores": (
            "Scores, not bounds",
            "Independent random q and k show no decay at all: their mean is 0 at every distance and their spread does "
            "not change. Equal ones fall as the similarity does. Training gives queries and keys means that are not 0, "
            f"and with them a preference for some distances. {note}".strip(),
            lambda path: rope_plots.draw_scores(path, rotary, methods, length, trained),
        ),
        "rotated": (
            "Rotated vectors",
            "t-SNE puts similar vectors side by side. The slow pairs put the positions of a vector in one straight "
            "line; the fast ones wind it at each of their cycles, and alone may break it into pieces.",
            lambda path: rope_plots.draw_rotated(path, rotary),
        ),
        "wavelengths": (
            "Wavelengths against the trained length, and what methods change",
            f"{slow} of {rotary.dim // 2} pairs have no full cycle in {rotary.trained_length:,} tokens. Beyond that "
            "length they reach angles that training never showed, which is why plain RoPE fails there; methods slow "
            "them down, or change the distances that are seen.",
            lambda path: rope_plots.draw(path, rotary, methods, extended_length=length, title=title),
        ),
    }


def _table(rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> Table:
    """Wavelengths of a few pairs, and counts of slow pairs and unseen angles, by method."""
    pairs = sorted({round(share * (rotary.dim // 2 - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    table = Table(
        *("wavelength in tokens", *(f"pair {pair}" for pair in pairs), "slow pairs", "unseen"),
        title="Wavelengths in numbers",
        caption="A slow pair has no full cycle within the trained length. Unseen: pairs that reach, within the length "
        "drawn, angles that did not occur in training.",
    )
    everything = {"plain RoPE": rotary.inv_freq()} | {
        name: method.frequencies(rotary, length).inv_freq for name, method in methods.items()
    }
    for name, inv_freq in everything.items():
        wavelengths = (TWO_PI / inv_freq)[pairs].tolist()
        slow = rope_plots.pairs_without_full_cycle(inv_freq, rotary.trained_length)
        unseen = int(rope_plots.unseen_angles(rotary, inv_freq, length).sum())
        cells = (f"{value:,.{0 if value >= 100 else 1}f}" for value in wavelengths)
        table.add_row(Text(name), *cells, str(slow), str(unseen))
    return table

"""The picture of a search: by what each method divides the inverse frequency of each pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary
from rope_ext_hf.pictures import drawing

_SHADE = "#fbe3d6"


def pairs_without_full_cycle(inv_freq: Tensor, length: int) -> int:
    """Return the number of pairs whose wavelength, 2 pi / inv_freq, is longer than `length` tokens, or infinite.

    inv_freq: (pairs,) radians per token.
    """
    return int((TWO_PI / inv_freq.double() > length).sum())


def draw_divisors(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """Draw what each method divides the inverse frequency of each pair by at `length` tokens, in one PNG."""
    plain = rotary.inv_freq()
    pairs = int((plain > 0).sum())
    lines: list[drawing.Line] = []
    for index, (name, method) in enumerate(methods.items()):
        divisors = plain / method.frequencies(rotary, length).inv_freq
        style = {"color": f"C{index % 10}", "linewidth": 1.4}
        lines.append((name, range(pairs), divisors[:pairs].tolist(), style))
    with drawing.picture(path, 8, 5) as figure:
        axes = figure.subplots()
        axes.set_yscale("log", base=2)
        drawing.draw_lines(axes, lines, (None, None))
        slow = pairs - pairs_without_full_cycle(plain[:pairs], rotary.trained_length)
        axes.axvspan(slow - 0.5, pairs - 1, color=_SHADE, linewidth=0, zorder=0)
        title = f"Divisors at {length:,} tokens. Shaded: slow pairs, no full cycle in training"
        drawing.finish_axes(axes, title, "pair of dims, fastest first", "divisor of the inverse frequency")

"""The picture of a search: divisors at a length, and the pairs that complete no cycle in training."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.static import Linear
from rope_ext_hf.pictures.divisors import draw_divisors, pairs_without_full_cycle

SMALL = Rotary(dim=16, theta=100.0, trained_length=64)
PROPORTIONAL = Rotary(dim=16, theta=1e4, trained_length=512, rotated_pairs=5)


@pytest.mark.parametrize(
    ("theta", "length", "count"), [(1e4, 4096, 18), (5e5, 8192, 29), (1e4, 10**6, 0), (1e4, 6, 64), (1e4, 7, 63)]
)
def test_never_turning_by_hand(theta: float, length: int, count: int) -> None:
    # 2 pi b^(2i/d) > L  <=>  i > d ln(L / 2 pi) / (2 ln b)
    boundary = 128 * math.log(length / (2 * math.pi)) / (2 * math.log(theta))
    assert count == sum(i > boundary for i in range(64))
    assert pairs_without_full_cycle(Rotary(128, theta, length).inv_freq(), length) == count


def test_pairs_that_do_not_turn_at_all_are_counted() -> None:
    assert (
        pairs_without_full_cycle(PROPORTIONAL.inv_freq(), 512) == 3 + 1
    )  # wavelengths 6.3, 20, 63, 199, 628, then infinite
    assert pairs_without_full_cycle(PROPORTIONAL.inv_freq(), 10**9) == 3


def test_divisors_are_drawn_at_the_length_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    two_lists = LongRoPE(factor=4.0, short_factor=(1.0,) * 8, long_factor=tuple(map(float, range(1, 9))))
    methods = {"PI": Linear(factor=4.0), "two lists": two_lists}
    for length, expected in ((SMALL.trained_length, [1] * 8), (SMALL.trained_length + 1, list(range(1, 9)))):
        draw_divisors("unwritten.png", SMALL, methods, length)
        (axes,) = figures.pop().axes
        drawn: list[Any] = [torch.tensor(line.get_ydata()).tolist() for line in axes.get_lines()]
        assert drawn == [pytest.approx([4] * 8), pytest.approx(expected)]
        assert {"PI", "two lists"} <= {text.get_text() for text in axes.texts}


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install"):
        draw_divisors(tmp_path / "divisors.png", SMALL, {}, 64)

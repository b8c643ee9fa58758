"""The numbers behind the pictures against naive loops and formulas by hand; the pictures: size and texts."""

from __future__ import annotations

import cmath
import itertools
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import DynamicNTK, LongRoPE
from rope_ext_hf.methods.grouped import SelfExtend
from rope_ext_hf.methods.input_chunks import DualChunk
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.remapping import RemappingMethod, ReRoPE
from rope_ext_hf.methods.static import NTK, ByParts, Default, Linear, Llama3, Yarn
from rope_ext_hf.pictures.rope_plots import (
    decay,
    draw,
    draw_divisors,
    pairs_without_full_cycle,
    similarity,
    similarity_as_seen,
    unseen_angles,
)
from tests.support.method_examples import example_method

LLAMA2 = Rotary(dim=128, theta=1e4, trained_length=4096)
SMALL = Rotary(dim=16, theta=100.0, trained_length=64)
PROPORTIONAL = Rotary(dim=16, theta=1e4, trained_length=512, rotated_pairs=5)
GEOMETRIES = pytest.mark.parametrize("rotary", [SMALL, PROPORTIONAL, Rotary(2, 1e4, 8)], ids=["small", "part", "pair"])


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, from its header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


# --- decay --------------------------------------------------------------------------------------------------------


@GEOMETRIES
def test_decay_is_the_papers_sum(rotary: Rotary) -> None:
    inv_freq = rotary.inv_freq()
    distances = [0, 1, 2, 7, 100, 4095]
    expected = []
    for distance in distances:
        sizes = []
        for j in range(1, rotary.dim // 2 + 1):
            sizes.append(abs(sum(cmath.exp(1j * distance * float(inv_freq[i])) for i in range(j))))
        expected.append(sum(sizes) / len(sizes))
    found = decay(inv_freq, torch.tensor(distances))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found[0] == (rotary.dim // 2 + 1) / 2


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_do_not_change_the_decay(chunk: int) -> None:
    distances = torch.arange(50)
    torch.testing.assert_close(
        decay(LLAMA2.inv_freq(), distances, chunk=chunk), decay(LLAMA2.inv_freq(), distances), rtol=1e-13, atol=0
    )


def test_float32_frequencies_are_computed_with_in_float64() -> None:
    inv_freq = SMALL.inv_freq().float()
    assert decay(inv_freq, torch.tensor([1000])).tolist() == decay(inv_freq.double(), torch.tensor([1000])).tolist()


# --- similarity ---------------------------------------------------------------------------------------------------


def naive_similarity(inv_freq: list[float], m: int, n: int) -> float:
    return sum((cmath.exp(1j * m * f) * cmath.exp(-1j * n * f)).real for f in inv_freq) / len(inv_freq)


@GEOMETRIES
@pytest.mark.parametrize("block", [1, 3])
def test_similarity_is_the_mean_cosine(rotary: Rotary, block: int) -> None:
    inv_freq = rotary.inv_freq()
    positions = [0, 1, 5, 64, 1000]
    found = similarity(inv_freq, torch.tensor(positions), block=block)
    assert found.dtype == torch.float64
    assert found.shape == (5, 5)
    for (row, m), (column, n) in itertools.product(enumerate(positions), repeat=2):
        cells = [
            naive_similarity(inv_freq.tolist(), m + a, n + b) for a, b in itertools.product(range(block), repeat=2)
        ]
        assert float(found[row, column]) == pytest.approx(sum(cells) / len(cells), abs=1e-12)


def test_similarity_is_symmetric_one_at_home_and_relative() -> None:
    inv_freq = Yarn(factor=8.0).frequencies(LLAMA2).inv_freq
    found = similarity(inv_freq, torch.arange(0, 32768, 128))
    shifted = similarity(inv_freq, torch.arange(0, 32768, 128) + 777)
    ones = torch.ones(256, dtype=torch.float64)
    for one, other in (
        (found, found.T),
        (found.diagonal(), ones),
        (found[1:, 1:], found[:-1, :-1]),
        (found, shifted),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert float(found[0, 1:].max()) < 0.9


@pytest.mark.parametrize(
    ("method", "seen"),
    [
        (ReRoPE(window=40), lambda m, n: min(m - n, 40)),
        (SelfExtend(window=40, group=4), lambda m, n: m - n if m - n < 40 else m // 4 - n // 4 + 30),
    ],
    ids=["rerope", "self-extend"],
)
@pytest.mark.parametrize("block", [1, 3])
def test_similarity_where_keys_are_seen_elsewhere(
    method: RemappingMethod, seen: Callable[[int, int], int], block: int
) -> None:
    inv_freq = SMALL.inv_freq()
    positions = [0, 60, 63, 1000]
    found = similarity_as_seen(method, inv_freq, torch.tensor(positions), block=block)
    for (row, m), (column, n) in itertools.product(enumerate(positions), repeat=2):
        cells = [
            naive_similarity(inv_freq.tolist(), seen(max(m + a, n + b), min(m + a, n + b)), 0)
            for a, b in itertools.product(range(block), repeat=2)
        ]
        assert float(found[row, column]) == pytest.approx(sum(cells) / len(cells), abs=1e-12)


# --- what training showed -----------------------------------------------------------------------------------------


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


def test_unseen_angles() -> None:
    plain = LLAMA2.inv_freq()
    slow = torch.arange(64) >= 64 - 18
    assert not unseen_angles(LLAMA2, plain, 4096).any()
    assert torch.equal(unseen_angles(LLAMA2, plain, 4097), slow)
    for method in (Linear(factor=8.0), ByParts(factor=8.0, ramp="cycles"), Llama3(factor=8.0)):
        inv_freq = method.frequencies(LLAMA2).inv_freq
        assert not unseen_angles(LLAMA2, inv_freq, 32768).any()
        assert torch.equal(unseen_angles(LLAMA2, inv_freq, 32769), slow)
    # NTK divides its last pair alone by the whole factor
    assert torch.equal(
        unseen_angles(LLAMA2, NTK(factor=8.0).frequencies(LLAMA2).inv_freq, 32768), slow & (torch.arange(64) < 63)
    )
    assert unseen_angles(PROPORTIONAL, PROPORTIONAL.inv_freq(), 10**9).tolist() == [False] * 4 + [True] + [False] * 3


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Every text of a picture, without the time it takes to paint it."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))

    def read(rotary: Rotary, chosen: dict[str, RopeMethod], **kwargs: Any) -> list[str]:
        draw("unwritten.png", rotary, chosen, **kwargs)
        return [text.get_text() for text in figures.pop().findobj(Text)]

    return read


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


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", list_methods())
def test_a_picture_of_every_method(name: str, texts: Callable[..., list[str]]) -> None:
    found = texts(SMALL, {name: example_method(list_methods()[name], SMALL)}, title=f"{name} drawn")
    assert any(text.startswith(f"{name} drawn") for text in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotary", "extended_length"),
    [
        (PROPORTIONAL, None),
        (Rotary(16, 1e4, 512, rotated_pairs=0), None),
        (Rotary(2, 1e4, 1), 1),
    ],
    ids=["part turns", "none turns", "one pair, one token"],
)
def test_odd_geometries(rotary: Rotary, extended_length: int | None, tmp_path: Path) -> None:
    draw(str(tmp_path / "rope.png"), rotary, {"linear": Linear(factor=2.0)}, extended_length=extended_length)
    assert size(tmp_path / "rope.png") == (1600, 1200)


@pytest.mark.slow
def test_the_key_says_what_is_drawn(texts: Callable[..., list[str]]) -> None:
    chosen = {"yarn x8": Yarn(factor=8.0), "ntk x8": NTK(factor=8.0), "dynamic": DynamicNTK(), "same": Default()}
    found = texts(LLAMA2, chosen, title="Llama 2")
    assert [text for text in found if "slow pairs," in text and "unseen" in text] == [
        "plain RoPE: 18 slow pairs, 18 at unseen angles",
        "yarn x8 (attention factor 1.208): 25 slow pairs, 0 at unseen angles",
        "ntk x8: 27 slow pairs, 17 at unseen angles",
        "dynamic (at length 32,768): 27 slow pairs, 17 at unseen angles",  # its alpha is 8 there
    ]
    assert any(text.startswith("Llama 2\n128 rotated dims in 64 pairs, base 10,000, ") for text in found)
    assert {"trained length 4,096", "extended length 32,768", "at 4k (trained)", "at 1k", "at 32k"} <= set(found)
    assert "same" not in found


@pytest.mark.slow
def test_the_key_says_how_far_keys_are_seen(texts: Callable[..., list[str]]) -> None:
    found = texts(LLAMA2, {"dca": DualChunk(), "rerope": ReRoPE(window=1024)})
    assert "dca (keys seen 4,095 tokens away at most): 18 slow pairs, 0 at unseen angles" in found
    assert "rerope (keys seen 1,024 tokens away at most): 18 slow pairs, 0 at unseen angles" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "extended_length", "reach"),
    [
        ({}, None, 512),
        ({"x": Default()}, None, 512),
        ({"x": DynamicNTK()}, None, 512),
        ({"x": Linear(factor=4.0), "y": Yarn(factor=16.0)}, None, 1024),
        ({"x": Linear(factor=4.0)}, 300, 300),
        ({"x": Linear(factor=4.0)}, 10**6, 10**6),
    ],
    ids=["plain", "default", "follows the input", "the farthest", "given", "far"],
)
def test_how_far_the_panels_reach(
    chosen: dict[str, RopeMethod], extended_length: int | None, reach: int, texts: Callable[..., list[str]]
) -> None:
    assert f"extended length {reach:,}" in texts(SMALL, chosen, extended_length=extended_length)


@pytest.mark.slow
def test_all_methods_in_one_picture(texts: Callable[..., list[str]]) -> None:
    chosen: dict[str, RopeMethod] = {name: example_method(cls, SMALL) for name, cls in list_methods().items()}
    found = texts(SMALL, chosen)
    for name in chosen.keys() - {"default"}:
        assert found.count(name) == 2, name  # its map and the end of its decay curve


def test_an_extended_length_below_the_trained_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match=r"extended_length=63 .* 64"):
        draw(tmp_path / "rope.png", SMALL, {}, extended_length=63)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install"):
        draw(tmp_path / "rope.png", SMALL, {})

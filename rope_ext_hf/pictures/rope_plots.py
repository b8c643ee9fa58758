"""Pictures of RoPE itself: what a method does to a model's wavelengths, angles, similarities and long-range decay.

    >>> from rope_ext_hf.pictures.rope_plots import draw
    >>> from rope_ext_hf.methods.static import Yarn
    >>> draw("rope.png", Rotary(128, 10000.0, 4096), {"yarn x8": Yarn(factor=8.0)}, title="Llama 2")  # doctest: +SKIP

The numbers come from pure functions of the inverse frequencies, float64 throughout; `draw` puts four panels of them
into one picture, and the functions at the end draw one subject each. A pair is two dims that rotate together; a pair
with inverse frequency 0 has an infinite wavelength.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.pictures import drawing
from rope_ext_hf.pictures.attention_vectors import mean_scores

_MOST_DIMS = 4_096  # one line a pair; the widest published heads have 512 dims
_MOST_POSITIONS = 2**53  # beyond, a float skips positions
_MOST_THETA = 1e30  # beyond, scales of wavelengths overflow


def pairs_without_full_cycle(inv_freq: Tensor, length: int) -> int:
    """The number of pairs without a full cycle in `length` tokens: wavelength 2 pi / inv_freq above it, or infinite.

    inv_freq: (pairs,) radians per token.
    """
    return int((TWO_PI / inv_freq.double() > length).sum())


def unseen_angles(rotary: Rotary, inv_freq: Tensor, position: int) -> Tensor:
    """The pairs that reach, by `position`, angles that did not occur in training; (pairs,) bool.

    In training a pair goes through the angles from 0 to L0 theta_i: all angles, once that is a full cycle.
    inv_freq: (pairs,) radians per token, those of the method in use.
    """
    shown = rotary.trained_length * rotary.inv_freq()
    # The margin lets a method that divides by exactly the extension end where training ended.
    return (shown < TWO_PI) & (position * inv_freq.double() > shown * (1 + 1e-9))


def similarity(inv_freq: Tensor, positions: Tensor, *, block: int = 1) -> Tensor:
    """Mean over pairs of cos((m - n) theta_i) for every two positions m and n: the cosine of their rotary encodings.

    With `block` above 1, the mean of that over the `block` positions from m on and the `block` from n on, in closed
    form, so that pairs faster than a coarse grid of positions do not show up as stripes (aliasing).

    inv_freq: (pairs,); positions: (count,) -> (count, count) float64, a function of m - n alone.
    """
    frequencies = inv_freq.double()
    # |mean of exp(1j k theta) over k < block|, the Dirichlet kernel
    kernel = torch.where(frequencies > 0, (block * frequencies / 2).sin() / (block * (frequencies / 2).sin()), 1.0)
    angles = positions.double()[:, None] * frequencies
    # cos(a - b) = cos a cos b + sin a sin b, so no (count, count, pairs) tensor is needed
    encodings = torch.cat((kernel * angles.cos(), kernel * angles.sin()), dim=-1)  # (count, 2 pairs)
    return encodings @ encodings.T / len(inv_freq)


def similarity_as_seen(method: RemappingMethod, inv_freq: Tensor, positions: Tensor, *, block: int = 1) -> Tensor:
    """`similarity` under a remapping method: means over at most 4 x 4 of the positions of a block.

    method: bound to a model. Of two positions the later one is the query's.
    """
    offsets = range(0, block, max(1, block // 4))
    total = torch.zeros(len(positions), len(positions), dtype=torch.float64)
    for a, b in itertools.product(offsets, repeat=2):
        one, other = positions[:, None] + a, positions + b
        seen = method.distance(torch.maximum(one, other), torch.minimum(one, other))
        distances, which = torch.unique(seen, return_inverse=True)
        total += (distances[:, None] * inv_freq.double()).cos().mean(dim=-1)[which]
    return total / len(offsets) ** 2


def decay(inv_freq: Tensor, distances: Tensor, *, chunk: int = 4096) -> Tensor:
    """RoFormer's bound on attention at a distance (Su et al. 2021, arXiv 2104.09864, sec. 3.4.3 and fig. 2).

    Mean of |S_j| over j = 1 .. pairs, S_j = sum over i < j of exp(1j distance theta_i). At distance 0 it is
    (pairs + 1) / 2, the mean of j.

    inv_freq: (pairs,); distances: (count,) -> (count,) float64. At most `chunk` distances are in work at a time.
    """
    frequencies = inv_freq.double()
    means = []
    for start in range(0, len(distances), chunk):
        angles = distances[start : start + chunk, None].double() * frequencies  # (chunk, pairs)
        partial_sums = torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1)
        means.append(partial_sums.abs().mean(dim=-1))
    return torch.cat(means)


_DISTANCE = "distance m - n (tokens)"
_PAIRS = "pair of dims, fastest first"
_SHADE = "#fbe3d6"
_BOUND = "mean |S_j|"
_NEAR = 256  # the distances of the figure that introduced RoPE
_SAMPLES = 500  # random queries and keys
_ROTATED = 128  # positions of rotated vectors


class _MethodCurve(NamedTuple):
    """What is drawn of one method."""

    name: str
    note: str
    inv_freq: Tensor  # (pairs,) at the extended length
    style: dict[str, Any]
    farthest: int  # the largest relative position within the extended length, in tokens
    relative: RemappingMethod | None = None  # bound, where the method maps distances


def check_size(rotary: Rotary, length: int) -> None:
    """Refuse more dims or positions, or a larger base, than can be drawn, and a length below the trained one."""
    if rotary.theta > _MOST_THETA:
        raise MethodError(f"a base of {rotary.theta:g} cannot be drawn; at most {_MOST_THETA:g} can")
    if rotary.dim > _MOST_DIMS or length > _MOST_POSITIONS:
        raise MethodError(
            f"{rotary.dim:,} rotated dims up to position {short(f'{length:,}')} cannot be drawn; at most "
            f"{_MOST_DIMS:,} dims and {_MOST_POSITIONS:,} positions can"
        )
    if length < rotary.trained_length:
        raise MethodError(f"extended_length={length} is below the trained length {rotary.trained_length}")


def draw(
    path: str | Path,
    rotary: Rotary,
    methods: Mapping[str, RopeMethod],
    *,
    extended_length: int | None = None,
    title: str = "Rotary position embedding",
) -> None:
    """Four panels, methods laid over plain RoPE, in one PNG of 1600 x 1200 pixels.

    Wavelengths by pair, angles by pair at chosen positions, similarity of positions, long-range decay. A `Default` is
    plain RoPE and not drawn twice. The panels reach to `extended_length`, at which length-dependent methods are drawn;
    None: the largest length a method is meant for, else 8 times the trained length.
    """
    length = reach(rotary, methods.values()) if extended_length is None else extended_length
    check_size(rotary, length)
    curves = _method_curves(rotary, methods, length)

    with drawing.picture(path, 32 / 3, 8) as figure:
        rotated = "" if rotary.rotated_pairs is None else f" ({rotary.rotated_pairs} of them rotate)"
        figure.suptitle(
            f"{drawing.plot_text(title)}\n{rotary.dim} rotated dims in {rotary.dim // 2} pairs{rotated}, "
            f"base {rotary.theta:,.10g}, trained at {rotary.trained_length:,} tokens, drawn up to {length:,}",
            fontsize=10.5,
        )
        rows: Any = figure.subfigures(2, 1, height_ratios=(0.03 + 0.0185 * math.ceil(len(curves) / 2), 1))
        (upper_left, upper_right), (lower_left, lower_right) = rows[1].subfigures(2, 2)
        _wavelengths_panel(upper_left.subplots(), rotary, curves, length)
        _angles_panel(upper_right.subplots(), rotary, curves, length)
        _similarity_panel(lower_left, rotary, curves, length)
        decay_axes = lower_right.subplots()
        top = (rotary.dim // 2 + 1) / 2 * 1.05  # a little above its value at distance 0
        _draw_by_distance(decay_axes, rotary, curves, length, decay, (0, top))
        subject = "Long-range decay (RoFormer, sec. 3.4.3), mean over 1/8 octave"
        drawing.finish_axes(decay_axes, subject, _DISTANCE, "mean |S_j| (relative upper bound)")
        _key_panel(rows[0], upper_left.axes[0].get_lines(), rotary, curves)


def draw_divisors(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """What each method divides the inverse frequency of each pair by at `length` tokens, in one PNG."""
    plain, *curves = _method_curves(rotary, methods, length)
    pairs = int((plain.inv_freq > 0).sum())
    with drawing.picture(path, 8, 5) as figure:
        axes = figure.subplots()
        axes.set_yscale("log", base=2)
        lines = [
            (curve.name, range(pairs), (plain.inv_freq / curve.inv_freq)[:pairs].tolist(), curve.style)
            for curve in curves
        ]
        drawing.draw_lines(axes, lines, (None, None))
        slow = pairs - pairs_without_full_cycle(plain.inv_freq[:pairs], rotary.trained_length)
        axes.axvspan(slow - 0.5, pairs - 1, color=_SHADE, linewidth=0, zorder=0)
        title = f"Divisors at {length:,} tokens. Shaded: slow pairs, no full cycle in training"
        drawing.finish_axes(axes, title, _PAIRS, "divisor of the inverse frequency")


def reach(rotary: Rotary, methods: Iterable[RopeMethod]) -> int:
    """The largest length in tokens that a method is meant for, else 8 times the trained length."""
    meant = max((method.extended_length(rotary) or 0 for method in methods), default=0)
    return meant if meant > rotary.trained_length else 8 * rotary.trained_length


def _method_curves(rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> list[_MethodCurve]:
    """What is drawn of plain RoPE, first, and of each method, up to `length` tokens."""
    # Dashes let the lower of two equal curves show through; colour and dash together repeat after 44 methods.
    dashes = ("-", (0, (5, 2)), (0, (3, 1.2, 1, 1.2)), (0, (1.5, 1.2)))
    colours = [*(f"C{index}" for index in range(10)), "#00441b"]
    curves = [_MethodCurve("plain RoPE", "", rotary.inv_freq(), {"color": drawing.PLAIN, "linewidth": 2.4}, length)]
    for index, (name, method) in enumerate((n, m) for n, m in methods.items() if not isinstance(m, Default)):
        relative, farthest = None, length
        if isinstance(method, RemappingMethod):
            relative = method = method.bind(rotary, None)
            farthest = math.ceil(method.distance(torch.tensor(length), torch.arange(length)).max())
        inv_freq, attention_factor = method.frequencies(rotary, length)
        notes = [f"at length {length:,}"] if method.length_dependent else []
        notes += [f"attention factor {attention_factor:.3f}"] if attention_factor != 1 else []
        notes += [f"keys seen {farthest:,} tokens away at most"] if relative else []
        style = {"color": colours[index % len(colours)], "linewidth": 1.4, "linestyle": dashes[index % len(dashes)]}
        note = f" ({', '.join(notes)})" if notes else ""
        curves.append(_MethodCurve(name, note, inv_freq, style, farthest, relative))
    return curves


def _key_panel(panel: Any, lines: Sequence[Any], rotary: Rotary, curves: Sequence[_MethodCurve]) -> None:
    """The colours of all panels, and what is counted in the upper two."""
    texts = [
        f"{drawing.plot_text(curve.name, 40)}{curve.note}: "
        f"{pairs_without_full_cycle(curve.inv_freq, rotary.trained_length)} slow pairs, "
        f"{int(unseen_angles(rotary, curve.inv_freq, curve.farthest).sum())} at unseen angles"
        for curve in curves
    ]
    panel.legend(lines[: len(curves)], texts, loc="center", ncols=2, fontsize=7.5, frameon=False, handlelength=3.5)


def _wavelengths_panel(axes: Any, rotary: Rotary, curves: Sequence[_MethodCurve], length: int) -> None:
    """Both scales are of one curve: a wavelength is 2 pi over an inverse frequency."""
    pairs = rotary.dim // 2
    wavelengths = [_finite(TWO_PI / curve.inv_freq) for curve in curves]
    shown = torch.cat(wavelengths)
    bottom, top = (f([TWO_PI, length, *shown[shown.isfinite()].tolist()]) for f in (min, max))
    bottom, top = bottom / 1.5, top * 1.8
    for curve, heights in zip(curves, wavelengths, strict=True):
        axes.plot(range(pairs), heights, marker="." if pairs <= 16 else "", **curve.style)
    axes.axhspan(rotary.trained_length, top, color=_SHADE, linewidth=0, zorder=0)
    for value, text in _lengths(rotary, length):
        axes.axhline(value, **drawing.RULE)
        drawing.write_note(axes, f"{text} length {value:,}", (0.01, value), ("axes fraction", "data"), (0, 3))
    _set_limits(axes, (-0.5, pairs - 0.5), (bottom, top))
    mirror = axes.twinx()
    mirror.set_yscale("log")
    mirror.set_ylim(TWO_PI / bottom, TWO_PI / top)
    mirror.set_ylabel("inverse frequency (radians per token)", fontsize=8)
    mirror.tick_params(which="both", labelsize=7.5)
    mirror.spines["top"].set_visible(False)
    slow = pairs_without_full_cycle(curves[0].inv_freq, rotary.trained_length)
    title = f"Wavelengths. Shaded: slow pairs, no full cycle in training ({slow} of {pairs} in plain RoPE)"
    drawing.finish_axes(axes, title, _PAIRS, "wavelength (tokens)")


def _angles_panel(axes: Any, rotary: Rotary, curves: Sequence[_MethodCurve], length: int) -> None:
    """Cycles at some positions in plain RoPE, in grey, and at the farthest distance that occurs in each method.

    Unseen angles lie above the line of the trained length, among the pairs without a full cycle in training.
    """
    pairs, trained = rotary.dim // 2, rotary.trained_length
    plain = curves[0].inv_freq * trained / TWO_PI  # cycles in training
    slow = bool(((plain > 0) & (plain < 1)).any())
    # Fast pairs have been at every angle: where there are slow ones, begin a little before them.
    first, last = int((plain >= 10).sum()) if slow else 0, max(int((plain > 0).sum()), 1) - 1
    # Positions in units of the trained length: powers of 2 around 1, at most five, and the extension itself last.
    extension = length / trained
    step = max(1, math.ceil(math.log2(extension) / 3))
    multiples = [*(2.0**k for k in range(-2 * step, 2 * step + 1, step) if 2.0**k < extension), extension]
    lines = [
        *((multiple * plain, {"color": "#999999", "linewidth": 0.7}) for multiple in multiples),
        *((curve.inv_freq * curve.farthest / TWO_PI, curve.style) for curve in curves),
    ]
    for cycles, style in lines:
        axes.plot(range(pairs), _finite(cycles), marker="." if pairs <= 16 else "", **style)
    shown = [cycle for cycles, _ in lines for cycle in cycles[first : last + 1].tolist() if cycle > 0] or [1.0]
    bottom, top = min(shown) / 1.5, 20.0 if slow else max(shown) * 1.5
    if slow:
        boundary = rotary.dim * math.log(trained / TWO_PI) / (2 * math.log(rotary.theta))  # one cycle there
        edge = [max(boundary, first - 0.5), last + 0.5]
        floor = [trained * rotary.theta ** (-2 * pair / rotary.dim) / TWO_PI for pair in edge]
        axes.fill_between(edge, floor, top, color=_SHADE, linewidth=0, zorder=0)  # straight: the scale is logarithmic
    _set_limits(axes, (first - 0.5, last + 0.5), (bottom, top))
    ends = []
    for multiple in multiples if plain[last] > 0 else ():
        position = round(multiple * trained)
        text = f"at {drawing.short_length(position)}{' (trained)' if position == trained else ''}"
        ends.append((float(plain[last]) * multiple, text, "#666666"))
    drawing.name_ends(axes, ends)
    note = f"grey: plain RoPE at the positions on the right\nblack, coloured: each method, farthest key of {length:,}"
    drawing.write_note(axes, note, (0.015, 0.02), "axes fraction", (0, 0))
    drawing.finish_axes(axes, "Angles at some positions. Shaded: never seen in training", _PAIRS, "cycles")


def _set_limits(axes: Any, pairs: tuple[float, float], values: tuple[float, float]) -> None:
    """Pairs across, in whole numbers, and a logarithmic scale up."""
    axes.set_yscale("log")
    axes.set_ylim(*values)
    axes.set_xlim(*pairs)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _similarity_panel(panel: Any, rotary: Rotary, curves: Sequence[_MethodCurve], length: int) -> None:
    block = math.ceil(length / 256)
    positions = torch.arange(0, length, block)
    end = len(positions) * block  # the last block may reach beyond the length
    maps = [
        similarity_as_seen(curve.relative, curve.inv_freq, positions, block=block)
        if curve.relative
        else similarity(curve.inv_freq, positions, block=block)
        for curve in curves
    ]
    low, high = min(float(values.min()) for values in maps), max(float(values.max()) for values in maps)
    columns = max(1, round(math.sqrt(1.4 * len(maps))))
    grid = panel.subplots(math.ceil(len(maps) / columns), columns, squeeze=False)
    ticks = [0, length // 2, length]
    marked = rotary.trained_length < length <= 32 * rotary.trained_length  # beyond, the lines would hide the diagonal
    for index, axes in enumerate(grid.flat):
        if index >= len(maps):
            axes.set_axis_off()
            continue
        values, scale = maps[index].numpy(), {"vmin": low, "vmax": max(high, low + 1e-3)}
        image = axes.imshow(values, extent=(0, end, end, 0), cmap="viridis", **scale)
        if marked:
            for m, n in ((rotary.trained_length, 0), (0, rotary.trained_length)):
                axes.axline((n, m), slope=1, color="white", linewidth=0.7, linestyle=(0, (4, 3)))
        axes.set_title(drawing.plot_text(curves[index].name, 40), fontsize=7, color=curves[index].style["color"], pad=3)
        below = index + columns >= len(maps)
        axes.set_xticks(ticks, [drawing.short_length(tick) for tick in ticks] if below else [])
        axes.set_yticks(ticks, [drawing.short_length(tick) for tick in ticks] if index % columns == 0 else [])
        axes.tick_params(labelsize=6.5, length=2)
    drawing.colour_bar(panel, image, list(grid.flat))
    title = "Similarity of positions"
    title += f", means of {block} x {block}" if block > 1 else ""
    title += ". Dashed: trained length" if marked else ""
    panel.suptitle(title, fontsize=9)


def _draw_by_distance(
    axes: Any,
    rotary: Rotary,
    curves: Sequence[_MethodCurve],
    length: int,
    measure: Callable[[Tensor, Tensor], Tensor],
    limits: tuple[float | None, float | None] = (None, None),
) -> None:
    """`measure(inv_freq, distances)` of each method, means over bins of distances up to `length` tokens."""
    bins = _distance_bins(length)
    lines: list[drawing.Line] = []
    query = torch.tensor(length)
    for curve in curves:
        # the relative positions, for a query at the extended length, of keys at these distances
        seen = [curve.relative.distance(query, query - part.long()) if curve.relative else part for part in bins]
        means = [float(measure(curve.inv_freq, part).mean()) for part in seen]
        lines.append((curve.name, _middles(bins), means, curve.style))
    drawing.distance_axis(axes, length)
    drawing.draw_lines(axes, lines, limits, last=8)
    for tokens, name in _lengths(rotary, length):
        at, of = (tokens, 1), ("data", "axes fraction")
        axes.axvline(tokens, **drawing.RULE)
        drawing.write_note(axes, f"{name} length", at, of, (-3, -4), ha="right", va="top", rotation=90)


def _distance_bins(length: int) -> list[Tensor]:
    """Distances 1 .. length in tokens, float64, in bins of 1/8 octave; at most 64 of a bin, spread evenly."""
    octaves = math.log2(length + 1)
    steps = 8 * math.ceil(octaves)
    edges = sorted({round(2 ** (octaves * step / steps)) for step in range(steps + 1)})
    return [
        torch.linspace(start, stop - 1, min(64, stop - start), dtype=torch.float64).round()
        for start, stop in itertools.pairwise(edges)
    ]


def _middles(bins: Sequence[Tensor]) -> list[float]:
    """Where each bin stands on a logarithmic scale."""
    return [math.sqrt(float(part[0] * part[-1])) for part in bins]


def _lengths(rotary: Rotary, length: int) -> list[tuple[int, str]]:
    extended = [(length, "extended")] if length > rotary.trained_length else []
    return [(rotary.trained_length, "trained"), *extended]


def _finite(values: Tensor) -> Tensor:
    """NaN, a gap in a line, where a pair does not rotate: the scale is logarithmic."""
    return torch.where((values > 0) & values.isfinite(), values, math.nan)


# --- one subject each -------------------------------------------------------------------------------------------------


def draw_angles(path: str | Path, rotary: Rotary) -> None:
    """cos and sin of every pair at the first positions, as two heat maps."""
    angles = torch.arange(_NEAR).double()[:, None] * rotary.inv_freq()
    with drawing.picture(path, 9, 3.6) as figure:
        for axes, name, values in zip(
            figure.subplots(1, 2, sharey=True), ("cos", "sin"), (angles.cos(), angles.sin()), strict=True
        ):
            image = axes.imshow(
                values.T.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
            )
            drawing.finish_axes(
                axes, f"{name}(m theta_i)", "position m", "pair i, fastest first" if name == "cos" else ""
            )
            axes.grid(visible=False)
        drawing.colour_bar(figure, image, figure.axes)


def draw_similarity(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """The mean of cos((m - n) theta_i) over pairs: near by for plain RoPE, and up to `length` for each method.

    That is the mean score of a random vector with itself at another position, in units of its squared length.
    """
    with drawing.picture(path, 10.5, 3.8) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
        near = torch.arange(_NEAR + 1)
        left.plot(near, _cosines(rotary.inv_freq(), near), color=drawing.PLAIN, linewidth=1.4)
        drawing.finish_axes(left, f"Similarity by offset, 0 to {_NEAR}", _DISTANCE, "mean cos((m - n) theta_i)")
        _draw_by_distance(right, rotary, _method_curves(rotary, methods, length), length, _cosines)
        drawing.finish_axes(right, f"The same up to {length:,} tokens, mean over 1/8 octave", _DISTANCE, "")


def draw_bound(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """RoFormer's bound on scores by distance: of this rotary embedding, by theta, by dims, and under each method."""
    near = torch.arange(_NEAR + 1)

    def lines(geometries: Iterable[tuple[str, Rotary]], *, relative: bool = False) -> list[drawing.Line]:
        made: list[drawing.Line] = []
        for index, (name, geometry) in enumerate(geometries):
            values = decay(geometry.theta_inv_freq(), near)
            values = values / values[0] if relative else values
            made.append((name, near.tolist(), values.tolist(), {"color": f"C{index}", "linewidth": 1.3}))
        return made

    with drawing.picture(path, 10.5, 7.2) as figure:
        (first, by_theta), (by_dims, by_method) = figure.subplots(2, 2)
        dim, theta, trained = rotary.dim, rotary.theta, rotary.trained_length
        first.plot(near, decay(rotary.inv_freq(), near), color=drawing.PLAIN, linewidth=1.4)
        drawing.finish_axes(first, f"The bound: d = {dim}, theta = {theta:,.10g}", _DISTANCE, _BOUND)
        thetas = [100.0, 1e4, 5e5, 1e7]
        drawing.draw_lines(
            by_theta, lines((f"theta {value:,.10g}", Rotary(dim, value, trained)) for value in thetas), (0, None)
        )
        drawing.finish_axes(by_theta, f"By theta, d = {dim}: a larger base falls less", _DISTANCE, _BOUND)
        dims = [16, 32, 64, 128, 256]
        drawing.draw_lines(
            by_dims, lines(((f"d {value}", Rotary(value, theta, trained)) for value in dims), relative=True), (0, None)
        )
        drawing.finish_axes(
            by_dims, f"By dims, theta = {theta:,.10g}: fewer dims, more ripple", _DISTANCE, f"{_BOUND} / at 0"
        )
        _draw_by_distance(by_method, rotary, _method_curves(rotary, methods, length), length, decay, (0, None))
        drawing.finish_axes(by_method, f"By method, to {length:,} tokens, mean over 1/8 octave", _DISTANCE, _BOUND)
        first.set_ylim(bottom=0)


def draw_scores(
    path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int, trained: Tensor | None = None
) -> None:
    """Mean scores by distance: of random queries and keys of plain RoPE and, if given, of a trained model's.

    `trained` is what `attention_vectors.spectra` gives, (heads, pairs) complex; methods are drawn with it alone.
    """
    near = torch.arange(_NEAR + 1)
    widths = (1.0,) if trained is None else (1.0, 1.35)
    with drawing.picture(path, 4.5 * sum(widths), 3.9) as figure:
        panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
        for colour, name, values in (
            ("C0", "k = q", _random_scores(rotary, near, same=True)),
            ("C1", "q and k independent", _random_scores(rotary, near, same=False)),
        ):
            mean, spread = values.mean(0), values.std(0)
            panels[0].fill_between(near, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
            panels[0].plot(near, mean, color=colour, linewidth=1.4, label=f"{name}: mean, and one standard deviation")
        panels[0].legend(fontsize=7.5, frameon=False)
        drawing.finish_axes(panels[0], f"{_SAMPLES} random q and k, plain RoPE", _DISTANCE, "cosine of rotated q and k")
        if trained is not None:
            curves = _method_curves(rotary, methods, length)
            heads = partial(mean_scores, trained)
            bins = _distance_bins(length)
            shares = torch.stack([heads(curves[0].inv_freq, part).mean(-1) for part in bins], -1)
            low, high = shares.quantile(0.1, dim=0), shares.quantile(0.9, dim=0)
            panels[1].fill_between(_middles(bins), low, high, color="#999999", alpha=0.2, linewidth=0, zorder=0)
            _draw_by_distance(panels[1], rotary, curves, length, lambda *at: heads(*at).mean(0))
            title = f"Trained q and k, mean over {len(trained)} heads. Grey: 80% of heads, plain RoPE"
            drawing.finish_axes(panels[1], title, _DISTANCE, "")


def draw_rotated(path: str | Path, rotary: Rotary) -> None:
    """t-SNE of two random vectors, each rotated to every position: by all pairs, the fast ones, the slow ones."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(f"t-SNE needs scikit-learn: {install_command('eval')}") from error
    inv_freq = rotary.inv_freq()
    pairs, few = len(inv_freq), _ROTATED // 4
    vectors = torch.randn(2, 1, pairs, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(_ROTATED).double()[:, None] * inv_freq
    rotated = vectors * torch.polar(torch.ones_like(angles), angles)  # (2, positions, pairs)
    fast = pairs - pairs_without_full_cycle(inv_freq, few)
    slow = pairs_without_full_cycle(inv_freq, _ROTATED)
    parts = {
        f"all {pairs} pairs": slice(None),
        f"{fast} fast pairs, a cycle in {few} tokens": slice(fast),
        f"{slow} slow pairs, no cycle in {_ROTATED} tokens": slice(pairs - slow, None),
    }
    with drawing.picture(path, 10.5, 3.8) as figure:
        for axes, (name, part) in zip(figure.subplots(1, 3), parts.items(), strict=True):
            axes.set_title(name, fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
            flat = torch.view_as_real(rotated[..., part]).flatten(2).flatten(0, 1).numpy()
            if not flat.size:
                continue
            places = TSNE(perplexity=30, random_state=0, init="pca").fit_transform(flat)
            places = places.reshape(2, _ROTATED, -1)
            for own, mark in zip(places, "o^", strict=True):
                image = axes.scatter(*own.T[:2], c=range(_ROTATED), s=7, marker=mark, cmap="viridis")
        drawing.colour_bar(figure, image, figure.axes, "position")
        figure.suptitle(f"t-SNE of 2 vectors (marks), each rotated to positions 0 to {_ROTATED - 1}", fontsize=10)


def _cosines(inv_freq: Tensor, distances: Tensor) -> Tensor:
    return (distances.double()[:, None] * inv_freq.double()).cos().mean(-1)


def _random_scores(rotary: Rotary, distances: Tensor, *, same: bool) -> Tensor:
    """The cosine of random q and k at each distance, (_SAMPLES, distances); k = q if `same`."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, _SAMPLES, rotary.dim // 2, dtype=torch.complex128, generator=generator)
    q, k = pairs / pairs.abs().square().sum(-1, keepdim=True).sqrt()
    return mean_scores(q * (q if same else k).conj(), rotary.inv_freq(), distances)

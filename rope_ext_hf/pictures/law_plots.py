"""Pictures of the laws of RoPE: angles, similarity by distance, the bound on scores, mean scores, rotated vectors.

`rope_plots.draw` lays methods over one another in one picture; each function here draws one subject, as a PNG.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.pictures.attention_vectors import mean_scores
from rope_ext_hf.pictures.drawing import PLAIN, Line, colour_bar, draw_lines, finish_axes, picture
from rope_ext_hf.pictures.rope_plots import (
    DISTANCE,
    decay,
    distance_bins,
    draw_by_distance,
    method_curves,
    middles,
    pairs_without_full_cycle,
)

_BOUND = "mean |S_j|"
_NEAR = 256  # the distances of the figure that introduced RoPE
_SAMPLES = 500  # random queries and keys
_ROTATED = 128  # positions of rotated vectors


def draw_angles(path: str | Path, rotary: Rotary) -> None:
    """cos and sin of every pair at the first positions, as two heat maps."""
    angles = torch.arange(_NEAR).double()[:, None] * rotary.inv_freq()
    with picture(path, 9, 3.6) as figure:
        for axes, name, values in zip(
            figure.subplots(1, 2, sharey=True), ("cos", "sin"), (angles.cos(), angles.sin()), strict=True
        ):
            image = axes.imshow(
                values.T.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
            )
            finish_axes(axes, f"{name}(m theta_i)", "position m", "pair i, fastest first" if name == "cos" else "")
            axes.grid(visible=False)
        colour_bar(figure, image, figure.axes)


def draw_similarity(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """The mean of cos((m - n) theta_i) over pairs: near by for plain RoPE, and up to `length` for each method.

    That is the mean score of a random vector with itself at another position, in units of its squared length.
    """
    with picture(path, 10.5, 3.8) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
        near = torch.arange(_NEAR + 1)
        left.plot(near, _cosines(rotary.inv_freq(), near), color=PLAIN, linewidth=1.4)
        finish_axes(left, f"Similarity by offset, 0 to {_NEAR}", DISTANCE, "mean cos((m - n) theta_i)")
        draw_by_distance(right, rotary, method_curves(rotary, methods, length), length, _cosines)
        finish_axes(right, f"The same up to {length:,} tokens, mean over 1/8 octave", DISTANCE, "")


def draw_bound(path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int) -> None:
    """RoFormer's bound on scores by distance: of this rotary embedding, by theta, by dims, and under each method."""
    near = torch.arange(_NEAR + 1)

    def lines(geometries: Iterable[tuple[str, Rotary]], *, relative: bool = False) -> list[Line]:
        made: list[Line] = []
        for index, (name, geometry) in enumerate(geometries):
            values = decay(geometry.theta_inv_freq(), near)
            values = values / values[0] if relative else values
            made.append((name, near.tolist(), values.tolist(), {"color": f"C{index}", "linewidth": 1.3}))
        return made

    with picture(path, 10.5, 7.2) as figure:
        (first, by_theta), (by_dims, by_method) = figure.subplots(2, 2)
        dim, theta, trained = rotary.dim, rotary.theta, rotary.trained_length
        first.plot(near, decay(rotary.inv_freq(), near), color=PLAIN, linewidth=1.4)
        finish_axes(first, f"The bound: d = {dim}, theta = {theta:,.10g}", DISTANCE, _BOUND)
        thetas = [100.0, 1e4, 5e5, 1e7]
        draw_lines(
            by_theta, lines((f"theta {value:,.10g}", Rotary(dim, value, trained)) for value in thetas), (0, None)
        )
        finish_axes(by_theta, f"By theta, d = {dim}: a larger base falls less", DISTANCE, _BOUND)
        dims = [16, 32, 64, 128, 256]
        draw_lines(
            by_dims, lines(((f"d {value}", Rotary(value, theta, trained)) for value in dims), relative=True), (0, None)
        )
        finish_axes(by_dims, f"By dims, theta = {theta:,.10g}: fewer dims, more ripple", DISTANCE, f"{_BOUND} / at 0")
        draw_by_distance(by_method, rotary, method_curves(rotary, methods, length), length, decay, (0, None))
        finish_axes(by_method, f"By method, to {length:,} tokens, mean over 1/8 octave", DISTANCE, _BOUND)
        first.set_ylim(bottom=0)


def draw_scores(
    path: str | Path, rotary: Rotary, methods: Mapping[str, RopeMethod], length: int, trained: Tensor | None = None
) -> None:
    """Mean scores by distance: of random queries and keys of plain RoPE and, if given, of a trained model's.

    `trained` is what `attention_vectors.spectra` gives, (heads, pairs) complex; methods are drawn with it alone.
    """
    near = torch.arange(_NEAR + 1)
    widths = (1.0,) if trained is None else (1.0, 1.35)
    with picture(path, 4.5 * sum(widths), 3.9) as figure:
        panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
        for colour, name, values in (
            ("C0", "k = q", _random_scores(rotary, near, same=True)),
            ("C1", "q and k independent", _random_scores(rotary, near, same=False)),
        ):
            mean, spread = values.mean(0), values.std(0)
            panels[0].fill_between(near, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
            panels[0].plot(near, mean, color=colour, linewidth=1.4, label=f"{name}: mean, and one standard deviation")
        panels[0].legend(fontsize=7.5, frameon=False)
        finish_axes(panels[0], f"{_SAMPLES} random q and k, plain RoPE", DISTANCE, "cosine of rotated q and k")
        if trained is not None:
            curves = method_curves(rotary, methods, length)

            def heads(inv_freq: Tensor, distances: Tensor) -> Tensor:
                return mean_scores(trained, inv_freq, distances)

            bins = distance_bins(length)
            shares = torch.stack([heads(curves[0].inv_freq, part).mean(-1) for part in bins], -1)
            low, high = shares.quantile(0.1, dim=0), shares.quantile(0.9, dim=0)
            panels[1].fill_between(middles(bins), low, high, color="#999999", alpha=0.2, linewidth=0, zorder=0)
            draw_by_distance(panels[1], rotary, curves, length, lambda *at: heads(*at).mean(0))
            title = f"Trained q and k, mean over {len(trained)} heads. Grey: 80% of heads, plain RoPE"
            finish_axes(panels[1], title, DISTANCE, "")


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
    with picture(path, 10.5, 3.8) as figure:
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
        colour_bar(figure, image, figure.axes, "position")
        figure.suptitle(f"t-SNE of 2 vectors (marks), each rotated to positions 0 to {_ROTATED - 1}", fontsize=10)


def _cosines(inv_freq: Tensor, distances: Tensor) -> Tensor:
    return (distances.double()[:, None] * inv_freq.double()).cos().mean(-1)


def _random_scores(rotary: Rotary, distances: Tensor, *, same: bool) -> Tensor:
    """The cosine of random q and k at each distance, (_SAMPLES, distances); k = q if `same`."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, _SAMPLES, rotary.dim // 2, dtype=torch.complex128, generator=generator)
    q, k = pairs / pairs.abs().square().sum(-1, keepdim=True).sqrt()
    return mean_scores(q * (q if same else k).conj(), rotary.inv_freq(), distances)

"""Score how well the queries and keys of a layer fit the half and the interleaved pairing, by their weights alone.

Training makes rows of W_q and W_k that rotate at similar frequencies similar. For one head, let

    energy[i, j]     = (W_q W_k^T)[i, j]^2
    likeness_p[i, j] = sum over r in DECAY_LENGTHS of 1 / (1 + (r (f_p[i] - f_p[j]))^2),

where f_p[i] is the frequency of dim i under the pairing p. Each summand of the likeness is the Fourier transform of an
attention that falls off as e^(-distance / r); the two dims of a pair have the greatest likeness. The score of a head is
the correlation of its energy with the likeness of the half pairing, minus that with the likeness of the interleaved
pairing. Correlations leave out the diagonal and the means of rows and columns, so that dims with large weights do not
count as similar. (The energies of pairs alone left half-paired models with norms of q and k undecided: neighbouring
frequencies are similar too, which raises the energies of adjacent dims of half-paired weights.)

`benchmarks/detection.py` measures how often the sign of the mean score is right; its results are in docs/conversion.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_DECAY_LENGTHS = (256, 1024, 4096)  # tokens; each alone gives every benchmarked model the right sign, none is the best


def pairing_correlations(query: Tensor, key: Tensor, inv_freq: Tensor) -> Tensor:
    """Correlate the energies of each head with the likenesses of its dims under the half and the interleaved pairing.

    Args:
        query: (heads, dims, width), the rows of W_q that rotate.
        key: (key heads, dims, width), those of W_k; each key head belongs to heads / key heads query heads, in order.
        inv_freq: (dims / 2,), radians per token.

    Returns:
        (heads, 2), the correlations with the half and the interleaved pairing.
    """
    group = len(query) // len(key)
    grouped = query.reshape(len(key), group * query.shape[1], -1)
    energy = (grouped @ key.mT).view(*query.shape[:2], -1).square()
    centered = _double_center(energy).flatten(1)
    return nn.functional.normalize(centered, dim=1) @ _likenesses(inv_freq).to(centered).T


def mean_score(by_head: Tensor, inv_freq: Tensor) -> tuple[float, float]:
    """Return the mean of the scores of all heads, and its standard error.

    The error is computed from the differences between heads; or, if that is larger, it is the one that energies in
    random order would give, which correlate with either likeness by chance.

    Args:
        by_head: (heads,), the score of each head.
        inv_freq: (dims / 2,), radians per token.
    """
    between_heads = float(by_head.std()) if len(by_head) > 1 else 0.0
    like_half, like_interleaved = _likenesses(inv_freq)
    independent = max(1, len(like_half) - 2 * len(inv_freq))  # entries of an energy without its diagonal
    by_chance = float((like_half - like_interleaved).norm()) / math.sqrt(independent)
    return float(by_head.mean()), max(between_heads, by_chance) / math.sqrt(len(by_head))


def confidence(difference: float, error: float) -> float:
    """Return the probability that a difference of this size is not chance, if its error is normally distributed."""
    return math.erf(abs(difference) / error / math.sqrt(2)) if error else 0.0


def _likenesses(inv_freq: Tensor) -> Tensor:
    """Return the likeness of any two dims of a head under the half and under the interleaved pairing.

    The result is (2, dims * dims), each row of norm 1.
    """
    frequencies = torch.stack([torch.cat([inv_freq, inv_freq]), inv_freq.repeat_interleave(2)])  # (2, dims)
    difference = frequencies[:, :, None] - frequencies[:, None]
    likeness = torch.stack([1 / (1 + (difference * length).square()) for length in _DECAY_LENGTHS]).sum(0)
    return nn.functional.normalize(_double_center(likeness).flatten(1), dim=1)


def _double_center(table: Tensor) -> Tensor:
    """Return square tables (..., n, n) with a zero diagonal and the means of rows and columns subtracted."""
    diagonal = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
    for _ in range(4):  # without the diagonal, centring rows shifts the columns a little
        for dim in (-1, -2):
            table = table.masked_fill(diagonal, 0.0)
            table = table - table.sum(dim, keepdim=True) / (table.shape[-1] - 1)
    return table.masked_fill(diagonal, 0.0)

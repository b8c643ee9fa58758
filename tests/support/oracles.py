"""Independent definitions: what the papers and the protocols say, in plain Python and float64.

Nothing here imports the package. A method or a geometry comes in as an object with the attributes named in `Geometry`
and `SavedMethod`; what comes out is compared with what the package computes.

    >>> from types import SimpleNamespace
    >>> ntk(SimpleNamespace(dim=4, theta=100.0, trained_length=64), alpha=4.0)
    [1.0, 0.025]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tests.conformance import formulas

Pairing = Literal["half", "interleaved"]


class Geometry(Protocol):
    """Rotated dims per head, base, and trained length in tokens."""

    @property
    def dim(self) -> int: ...
    @property
    def theta(self) -> float: ...
    @property
    def trained_length(self) -> int: ...


class SavedMethod(Protocol):
    """A remapping method with all its parameters filled in, read through its saved form."""

    @property
    def max_distance(self) -> int | None: ...
    @property
    def temperature(self) -> str | None: ...
    def to_dict(self) -> dict[str, Any]: ...


# --- frequencies --------------------------------------------------------------------------------------------------


def plain(rotary: Geometry) -> list[float]:
    """RoFormer, eq. 15: theta_i = b^(-2i/d)."""
    return with_theta(rotary, rotary.theta)


def with_theta(rotary: Geometry, theta: float) -> list[float]:
    """The same with another base."""
    return [theta ** (-2 * i / rotary.dim) for i in range(rotary.dim // 2)]


def ntk(rotary: Geometry, alpha: float) -> list[float]:
    """The equivalent per-dim form theta_i c^(-i), c = alpha^(2/(d-2)), rather than the changed base."""
    c = alpha ** (2 / (rotary.dim - 2))
    return [value * c**-i for i, value in enumerate(plain(rotary))]


def dynamic_ntk_alpha(growth: str, ratio: float, factor: float = 1.0, initial: float = 1.0) -> float:
    """alpha of each growth rule of dynamic NTK, for ratio = length / trained length."""
    if growth == "paper":  # YaRN paper, sec. 3.3
        return max(1.0, ratio)
    if growth == "hf":  # transformers' "dynamic"
        return factor * max(1.0, ratio) - (factor - 1)
    if growth == "even":
        return initial if ratio <= initial else next(k for k in itertools.count(2, 2) if k >= ratio)
    if growth == "pow2":  # Qwen
        return max(1.0, 2.0 ** math.ceil(math.log2(ratio) + 1) - 1)
    raise KeyError(growth)


def by_cycles(rotary: Geometry, s: float, slow: float = 1, fast: float = 32) -> list[float]:
    """YaRN paper, Def. 2: (1 - gamma) theta_i / s + gamma theta_i, gamma a ramp in r_i = L0 / wavelength_i."""
    mixed = []
    for value in plain(rotary):
        wavelength = 2 * math.pi / value
        r = rotary.trained_length / wavelength
        gamma = 0.0 if r < slow else 1.0 if r > fast else (r - slow) / (fast - slow)
        mixed.append((1 - gamma) * value / s + gamma * value)
    return mixed


def by_dimension(rotary: Geometry, s: float, slow: float = 1, fast: float = 32, truncate: bool = True) -> list[float]:
    """The YaRN authors' code: a ramp in the dim index, between the dims with `fast` and `slow` cycles."""
    betas = {"beta_slow": slow, "beta_fast": fast, "truncate": truncate, "rope_theta": rotary.theta}
    return _by_paper(formulas.yarn, rotary, s, betas)


def llama3(rotary: Geometry, s: float, low: float = 1, high: float = 4) -> list[float]:
    """Llama 3.1's published code, which compares wavelengths."""
    return _by_paper(formulas.llama3, rotary, s, {"low_freq_factor": low, "high_freq_factor": high})


def _by_paper(formula: Callable[..., Any], rotary: Geometry, s: float, settings: dict[str, Any]) -> list[float]:
    """The formula by which the numbers of conformance/ are checked."""
    settings = settings | {"factor": s, "original_max_position_embeddings": rotary.trained_length}
    return [float(value) for value in formula(plain(rotary), settings, {}, None)[0]]


def mrrope(
    rotary: Geometry, s: float, radix: str = "progressive", fast: float = 32, slow: float = 1
) -> list[float] | None:
    """MrRoPE, arXiv 2601.22181: theta_i over the product of the radices up to i; None: no such band.

    The paper's eq. 13-16 as a running product: within the band of n pairs, radix k is s^(2k/(n(n+1))), or s^(1/n).
    """
    turns = [rotary.trained_length * value / (2 * math.pi) for value in plain(rotary)]
    above, below = [i for i, r in enumerate(turns) if r > fast], [i for i, r in enumerate(turns) if r < slow]
    if not above or not below or below[0] <= above[-1]:
        return None
    n = below[0] - above[-1]
    divided_by, product = [], 1.0
    for i in range(len(turns)):
        if above[-1] < i <= below[0]:
            k = i - above[-1]
            product *= s ** (1 / n) if radix == "uniform" else s ** (2 * k / (n * (n + 1)))
        divided_by.append(product)
    return divided(rotary, divided_by)


def faded(frequencies: Sequence[float], clip: int, *, hard: bool = False) -> list[float]:
    """CoPE, its authors' code: the last `clip` times (1 + cos(angle)) / 2, with angles evenly from 0 to pi."""
    kept, last = frequencies[: len(frequencies) - clip], frequencies[len(frequencies) - clip :]
    if hard:
        return [*kept, *[0.0] * clip]
    step = math.pi / (clip - 1)
    return [*kept, *[w * (1 + math.cos(k * step)) / 2 for k, w in enumerate(last)]]


def slower_than(frequencies: Sequence[float], tokens: int) -> int:
    """The number of pairs that do not turn around within so many tokens."""
    return sum(2 * math.pi / w > tokens for w in frequencies)


def divided(rotary: Geometry, divisors: Sequence[float]) -> list[float]:
    """Each frequency divided by its own number, as in longrope."""
    return [value / divisor for value, divisor in zip(plain(rotary), divisors, strict=True)]


def yarn_attention_factor(s: float, m: float = 1.0) -> float:
    """YaRN paper, eq. 22, with DeepSeek's mscale m."""
    return 0.1 * m * math.log(s) + 1


def longrope_attention_factor(rotary: Geometry, s: float) -> float:
    """LongRoPE paper, sec. 3.3, as in Phi-3: sqrt(1 + ln s / ln L0)."""
    return math.sqrt(1 + math.log(s) / math.log(rotary.trained_length))


def rising_divisors(rotary: Geometry, top: float) -> list[float]:
    """Per-dim divisors from 1 to `top`, as a search would give."""
    pairs = rotary.dim // 2
    return [1 + (top - 1) * (i / (pairs - 1)) ** 2 for i in range(pairs)]


# --- rotation -----------------------------------------------------------------------------------------------------


def rotate(x: Tensor, angles: Tensor, pairing: Pairing) -> Tensor:
    """Rotate pairs of the last dimension, float64 inside: x (..., head_dim), angles (..., rotated dims / 2)."""
    dim = 2 * angles.shape[-1]
    members = (
        (slice(0, dim, 2), slice(1, dim, 2)) if pairing == "interleaved" else (slice(dim // 2), slice(dim // 2, dim))
    )
    cos, sin, out = angles.double().cos(), angles.double().sin(), x.double().clone()
    first, second = (x[..., member].double() for member in members)
    out[..., members[0]] = first * cos - second * sin
    out[..., members[1]] = second * cos + first * sin
    return out.to(x.dtype)


def rotate_to(x: Tensor, positions: Tensor, dim: int, theta: float, pairing: Pairing = "half") -> Tensor:
    """RoPE on the first `dim` dims: x (..., tokens, head_dim), positions (..., tokens)."""
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return rotate(x, positions.double()[..., None] * inv_freq, pairing)


def rotation_matrix(angles: Tensor, dim: int, pairing: Pairing) -> Tensor:
    """RoFormer, eq. 15: the matrix R of one rotation, (dim, dim) float64, for angles (rotated dims / 2,)."""
    matrix = torch.eye(dim, dtype=torch.float64)
    pairs = len(angles)
    for i, angle in enumerate(angles.tolist()):
        first, second = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + pairs)
        matrix[first, first] = matrix[second, second] = math.cos(angle)
        matrix[first, second], matrix[second, first] = -math.sin(angle), math.sin(angle)
    return matrix


# --- linear attention ---------------------------------------------------------------------------------------------

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": lambda x: x.clamp(min=0),
}


def naive_linear_attention(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, angles: Tensor, *, seen: Tensor, eps: float
) -> Tensor:
    """Su 2021 (https://kexue.fm/archives/8265), from the matrices of scores; float64.

    Args:
        kernel: "elu" or "relu", rotated in the numerator alone, or "cosine", 1 + cos of the angle between them.
        q, k: (heads, tokens, head_dim), not rotated.
        v: (heads, tokens, value_dim).
        angles: (tokens, rotated dims / 2), by half pairing.
        seen: (tokens, tokens) bool, which keys each query sees.
        eps: added to the denominator.
    """
    q, k, v = q.double(), k.double(), v.double()
    if kernel == "cosine":
        product = rotate(q, angles, "half") @ rotate(k, angles, "half").transpose(1, 2)
        lengths = q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None]
        scores = norms = 1 + torch.where(lengths > 0, product / lengths, 0)
    else:
        q, k = PHI[kernel](q), PHI[kernel](k)
        scores = rotate(q, angles, "half") @ rotate(k, angles, "half").transpose(1, 2)
        norms = q @ k.transpose(1, 2)
    return (scores * seen) @ v / ((norms * seen).sum(-1, keepdim=True) + eps)


# --- remapping methods: relative positions and attention ----------------------------------------------------------


Saved = dict[str, Any]


def self_extend(saved: Saved, m: int, n: int) -> float:
    """Self-Extend paper, sec. 3.2; without `floor_window` as self_extend_patch/Llama.py of datamllab/LongLM has it."""
    w, g = saved["window"], saved["group"]
    return float(m // g - n // g + w - (w // g if saved.get("floor_window", True) else w / g))


def dual_chunk(saved: Saved, m: int, n: int) -> float:
    """DCA paper, sec. 2.2, with its ceiling c = s + w."""
    s, c = saved["chunk"], saved["chunk"] + saved["window"]
    if m // s == n // s:
        return float(m % s - n % s)
    if m // s - n // s == 1:
        return float(min(m % s + s, c - 1) - n % s)
    return float(c - 1 - n % s)


def follows_length(saved: Saved) -> bool:
    """Whether short rows are read as loaded, so that every key is cached at its own position."""
    return bool(saved.get("beyond_only")) or saved.get("group") == "length"


def group_of_length(saved: Saved, length: int) -> int:
    """The group of a row of `length` tokens: jet-long has ceil(L / C), self-extend tries one after the other."""
    return _group_of_length(tuple(saved.items()), length)


@functools.cache
def _group_of_length(items: tuple[tuple[str, Any], ...], length: int) -> int:
    saved = dict(items)
    limit = saved["max_distance"]
    if saved["method"] == "jet-long":
        return int(-(-length // limit))

    def farthest(group: int) -> float:
        return max(distance_in(saved | {"group": group}, length - 1, n) for n in range(length))

    return next(group for group in range(1, length + 1) if farthest(group) <= limit - 1)


STORED_POSITIONS: dict[str, Callable[[Saved, int], float]] = {
    "rerope": lambda saved, n: 0.0,
    "leaky-rerope": lambda saved, n: n / saved["k"],
    "self-extend": lambda saved, n: float(n // saved["group"]),
    "jet-long": lambda saved, n: float(n // saved["group"]),
    "dca": lambda saved, n: float(n % saved["chunk"]),
    "stairs": lambda saved, n: float(n),
}
"""method -> the position with which the key of token n is rotated in the cache."""

FAR_DISTANCES: dict[str, Callable[[Saved, int, int], float]] = {
    "rerope": lambda saved, m, n: float(saved["window"]),
    "leaky-rerope": lambda saved, m, n: saved["window"] + (m - n - saved["window"]) / saved["k"],
    "self-extend": self_extend,
    "dynamic-self-extend": self_extend,
    "jet-long": lambda saved, m, n: float(m // saved["group"] - n // saved["group"]),
    "stairs": lambda saved, m, n: float(saved["start"] + (m - n - saved["window"]) % saved["chunk"]),
}
"""Methods with a window inside which distances stay: the distance beyond it."""

DISTANCES: dict[str, Callable[[Saved, int, int], float]] = {"dca": dual_chunk}
"""Methods without: the distance of any pair."""


def stored_position(method: SavedMethod, n: int) -> float:
    """The position with which the key of token n is rotated in the cache."""
    saved = method.to_dict()
    if follows_length(saved):
        return float(n)
    return STORED_POSITIONS[saved["method"]](saved, n)


def temperature_scale(method: SavedMethod, m: int, length: int | None = None) -> float:
    """The factor of the scores of the query at m by the temperature; `length` as in `distances`."""
    if read_as_loaded(method.to_dict(), length):
        return 1.0
    if method.temperature in (None, "none"):
        return 1.0
    assert method.max_distance is not None
    if method.temperature == "log-n":  # Su 2022
        return max(1.0, math.log(m + 1) / math.log(method.max_distance))
    assert method.temperature == "llama4"  # Llama 4's attention scale
    return 1 + 0.1 * math.log(1 + (m + 1) // method.max_distance)


def read_as_loaded(saved: Saved, length: int | None) -> bool:
    return length is not None and follows_length(saved) and length <= saved["max_distance"]


def plain_distance(m: int, n: int) -> float:
    return float(m - n)


def distances(method: SavedMethod, length: int | None = None) -> Callable[[int, int], float]:
    """The relative position at which query m sees key n <= m, as a function of m and n, straight from the papers.

    Args:
        length: tokens in the row, which some methods follow; None: the method has one rule.
    """
    saved = method.to_dict()
    if read_as_loaded(saved, length):
        return plain_distance
    if saved.get("group") == "length":
        assert length is not None
        saved["group"] = group_of_length(saved, length)
    return functools.partial(distance_in, saved)


def distance_in(saved: Saved, m: int, n: int) -> float:
    if saved["method"] in DISTANCES:
        return DISTANCES[saved["method"]](saved, m, n)
    near = saved["window"] + (saved["method"] == "jet-long")  # there the key at the distance w is near
    return float(m - n) if m - n < near else FAR_DISTANCES[saved["method"]](saved, m, n)


def naive_attention(
    method: SavedMethod | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dim: int,
    theta: float,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of one row, pair by pair, every score at once; float64.

    Args:
        method: the remapping method; None: plain RoPE.
        q: (heads, tokens, head_dim), not rotated.
        k: (kv_heads, keys, head_dim), not rotated; the queries are the last of the keys.
        v: (kv_heads, keys, value_dim).
        dim: rotated dims, by half pairing.
        theta: base of the frequencies.
        window: of sliding attention: keys that a query sees, itself included.
        cap: softcap of the scores.
        sinks: one score a head (heads,).
        mask: (tokens, keys) added to the scores; as bool: False where a key is not seen.
    """
    tokens, count = q.shape[-2], k.shape[-2]
    groups = q.shape[0] // k.shape[0]
    far = distances(method) if method else plain_distance
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for i in range(tokens):
        m = count - tokens + i
        seen = range(max(0, m - window + 1) if window else 0, m + 1)
        places = torch.tensor([far(m, n) for n in seen])
        query = rotate_to(q[:, i : i + 1].expand(-1, len(seen), -1), places, dim, theta)
        scores = (query * k[:, list(seen)]).sum(-1) / math.sqrt(q.shape[-1])
        if method is not None:
            scores *= temperature_scale(method, m)
        if cap:
            scores = torch.tanh(scores / cap) * cap
        if mask is not None:
            row = mask[i, list(seen)]
            scores = scores.masked_fill(~row, -math.inf) if row.dtype == torch.bool else scores + row
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
        weights = scores.softmax(-1)[:, : len(seen)]
        out[:, i] = (weights[..., None] * v[:, list(seen)]).sum(-2)
    return out


# --- protocols of perplexity, from their descriptions -------------------------------------------------------------


def nats(model: Any, ids: Tensor, scored: range) -> float:
    """Negative log likelihood of ids[i], i in `scored`, from float64 logits, one probability at a time."""
    with torch.no_grad():
        probabilities = model(ids[None], use_cache=False).logits[0].double().softmax(-1)
    return -math.fsum(math.log(probabilities[i - 1, ids[i]].item()) for i in scored)


Losses = list[tuple[float, int]]


class NaiveProtocol(Protocol):
    """One document's ids read at length n, where `longest` is the longest length: (nats, tokens) of each span."""

    def __call__(self, model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses: ...


def naive_matched(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    ends = range(longest, len(ids) + 1, longest)
    return [(nats(model, ids[end - n : end], range(n - targets, n)), targets) for end in ends]


def naive_sliding(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    if len(ids) < longest:
        return []
    starts = range(0, len(ids) - n + 1, stride)
    return [(nats(model, ids[a : a + n], range(n - stride, n)), stride) for a in starts]


def naive_sliding_all(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    """The loop of Hugging Face's page on perplexity, each token with the same weight."""
    losses: Losses = []
    if len(ids) < longest:
        return losses
    previous_end = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + n, len(ids))
        new = end - previous_end
        labels = ids[begin:end].clone()
        labels[:-new] = -100
        first = next(place for place in range(1, end - begin) if labels[place] != -100)
        scored = range(first, end - begin)
        losses.append((nats(model, ids[begin:end], scored), len(scored)))
        previous_end = end
        if end == len(ids):
            break
    return losses


def naive_truncate(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    return [(nats(model, ids[:n], range(1, n)), n - 1)] if len(ids) >= longest else []


def naive_stream(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    return [(nats(model, ids[a : a + n], range(1, n)), n - 1) for a in range(0, len(ids) - n + 1, stride)]


def naive_blocks(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    losses = []
    for first in range(0, len(ids), n):  # without a prefix token the very first token is not scored
        last = min(first + n, len(ids))
        begin = max(0, last - n - 1)
        scored = range(max(first, 1) - begin, last - begin)
        losses.append((nats(model, ids[begin:last], scored), len(scored)))
    return losses


def naive_position(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    """Lengths double from one to the next: the shortest is scored from its second token, the others by halves."""
    if len(ids) < longest:
        return []
    after = {16: 1, 32: 16, 64: 32}[n]
    return [(nats(model, ids[:longest], range(after, n)), n - after)]


def naive_same_start(model: Any, ids: Tensor, n: int, longest: int, *, targets: int, stride: int) -> Losses:
    starts = range(0, len(ids) - longest + 1, longest)
    return [(nats(model, ids[a : a + n], range(n - targets, n)), targets) for a in starts]


NAIVE_PROTOCOLS: dict[str, NaiveProtocol] = {
    "matched": naive_matched,
    "same-start": naive_same_start,
    "sliding": naive_sliding,
    "sliding-all": naive_sliding_all,
    "truncate": naive_truncate,
    "stream": naive_stream,
    "blocks": naive_blocks,
    "position": naive_position,
}


# --- key tokens, as the code of LongPPL's authors finds them (PKU-ML/LongPPL, longppl/longppl.py) -----------------


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Of all tokens but the first, (N - 1,), by transformers' own loss over one forward."""
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")


def naive_key_tokens(
    model: Any, ids: Tensor, window: int, stride: int, gain: float, likely: float, bos: int | None
) -> list[int]:
    """`find_key_token` there: the numbers of the key tokens. Every window begins with BOS here, where there is one."""
    long = token_losses(model, ids)
    keys = []
    for start in range(0, len(ids) - window, stride):
        part = ids[start : start + window + stride].clone()
        if bos is not None:
            part[0] = bos
        short = token_losses(model, part)
        for token in range(start + window, start + len(part)):
            lost, kept = short[token - start - 1], long[token - 1]
            if lost - kept > gain and kept < -likely:
                keys.append(token)
    return keys

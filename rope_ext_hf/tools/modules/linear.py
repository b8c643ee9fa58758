"""Linear attention with RoPE, in time and memory linear in the length (Su 2021, https://kexue.fm/archives/8265).

    cos, sin = rotary(query, position_ids)                                   # rope_ext_hf.RotaryEmbedding
    out = linear_attention(query, key, value, cos, sin, kernel="elu")        # (batch, heads, length, value_dim)

Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) replaces exp(q.k) by a similarity that is a product of
features, so that sums over keys can be kept in a state of fixed size. With R_i the rotation at position i there are two
ways to put RoPE into it:

    (a) out_i = sum_j (R_i phi(q_i)).(R_j phi(k_j)) v_j / sum_j phi(q_i).phi(k_j)         "elu": phi = elu + 1; "relu"
    (b) out_i = sum_j s_ij v_j / sum_j s_ij,  s_ij = 1 + (R_i q_i).(R_j k_j) / |q_i||k_j|                     "cosine"

In (a) the numerator alone is rotated: rotated products of non-negative features can be negative, and a denominator of
them can vanish. In (b) a rotation keeps norms, so that s_ij stays between 0 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from rope_ext_hf.rotary.standalone import apply_rotary_pos_emb, check_padding_mask

_Kernel = Literal["elu", "relu", "cosine"]
_Form = Literal["chunked", "parallel", "recurrent"]
_KERNELS, _FORMS = get_args(_Kernel), get_args(_Form)


@dataclass
class LinearAttentionState:
    """What causal linear attention keeps of the tokens read so far; its size does not depend on their number.

    Start with `LinearAttentionState()` and give it to every call of `linear_attention`, which updates it.

    Attributes:
        kernel: the kernel of the calls so far; None: there was no call.
        length: tokens read so far, padding included.
        numerator: sum over keys of features x values, (batch, heads, features, value_dim), float32 or float64.
        denominator: sum over keys of features, (batch, heads, features), in the same dtype.
    """

    kernel: str | None = None
    length: int = 0
    numerator: Tensor | None = None
    denominator: Tensor | None = None


class _Features(NamedTuple):
    """Features whose products are the terms of the two sums, each (batch, heads, length, features)."""

    query: Tensor
    key: Tensor
    denominator_query: Tensor
    denominator_key: Tensor


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    kernel: _Kernel = "elu",
    causal: bool = True,
    padding_mask: Tensor | None = None,
    state: LinearAttentionState | None = None,
    form: _Form = "chunked",
    chunk_size: int = 64,
    eps: float = 1e-6,
) -> Tensor:
    """Attend with a kernel in place of the softmax, rotated by RoPE.

    Args:
        query, key: (batch, heads, length, head_dim), not rotated, not scaled.
        value: (batch, heads, length, value_dim).
        cos, sin: (length, rotated) or (batch or 1, length, rotated) in half layout, as `RotaryEmbedding` gives them.
            They are divided by sqrt(cos^2 + sin^2): a method's attention factor, which is meant for a softmax, has no
            effect. A state holds rotated keys: under a length-dependent method fix the length around all its calls.
        kernel: "elu" and "relu": phi(x) = elu(x) + 1 or relu(x), rotated in the numerator alone; "cosine":
            1 + cosine of the rotated query and key, in numerator and denominator.
        causal: whether a query sees the keys up to its own alone; False: all keys.
        padding_mask: (batch, length) bool, False for padding, which is not attended to and whose output is 0.
        state: the tokens before these, for reading token by token or piece by piece; updated. Causal attention only.
        form: how a causal sum is computed; the results are equal. "chunked": matrix products within chunks, a state
            between them; time and memory linear in the length. "parallel": all scores at once, (length x length).
            "recurrent": one token after the other. Full attention sums over all keys once.
        chunk_size: tokens of a chunk.
        eps: added to the denominator. The denominator of "relu" can be 0, and that of a row without keys is.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value, computed in float32, or in float64 where an input is.

    Raises:
        ValueError: shapes that do not fit each other, an unknown kernel or form, or a state of another kernel or shape.

    Sources: Su 2021, https://kexue.fm/archives/8265; Katharopoulos et al. 2020, arXiv 2006.16236, whose
    code adds an epsilon, too.
    """
    for name, given, known in (("kernel", kernel, _KERNELS), ("form", form, _FORMS)):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {given!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    _check_shapes(query, key, value, padding_mask)
    if state is not None:
        _check_state(state, query, value, kernel, causal)
    dtype = torch.float32
    for tensor in (query, key, value, None if state is None else state.numerator):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    # Sums over many tokens need more than the 8 bits of precision that autocast would leave them.
    with torch.autocast(query.device.type, enabled=False):
        values = value.to(dtype)
        hidden = None if padding_mask is None else ~padding_mask[:, None, :, None]
        if hidden is not None:
            query, key, values = (x.masked_fill(hidden, 0) for x in (query, key, values))
        features = _features(kernel, query.to(dtype), key.to(dtype), cos.to(dtype), sin.to(dtype))
        if hidden is not None:
            features = features._replace(
                key=features.key.masked_fill(hidden, 0), denominator_key=features.denominator_key.masked_fill(hidden, 0)
            )
        if not causal:
            numerator = features.query @ (features.key.mT @ values)
            denominator = features.denominator_query @ features.denominator_key.sum(-2)[..., None]
        elif form == "recurrent":
            numerator, denominator = _recurrent(features, values)
        else:
            numerator, denominator = _chunked(features, values, chunk_size if form == "chunked" else query.shape[2])
        if state is not None:
            sums = features.key.mT @ values, features.denominator_key.sum(-2)
            if state.numerator is not None and state.denominator is not None:
                numerator = numerator + features.query @ state.numerator
                denominator = denominator + features.denominator_query @ state.denominator[..., None]
                sums = state.numerator + sums[0], state.denominator + sums[1]
            state.kernel, state.length = kernel, state.length + values.shape[-2]
            state.numerator, state.denominator = sums
        out = numerator / (denominator + eps)
        if hidden is not None:
            out = out.masked_fill(hidden, 0)
    return out.to(value.dtype)


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, which is exp(x) below 0; written so that it stays positive where exp(x) - 1 rounds to -1."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _features(kernel: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> _Features:
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    scale = (cos.square() + sin.square()).rsqrt()
    cos, sin = cos * scale, sin * scale

    def rotated(x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(x.transpose(1, 2), cos, sin).transpose(1, 2)

    if kernel == "cosine":
        query, key = (functional.pad(rotated(functional.normalize(x, dim=-1)), (0, 1), value=1.0) for x in (query, key))
        return _Features(query, key, query, key)
    query, key = (_elu_plus_one(x) if kernel == "elu" else x.relu() for x in (query, key))
    return _Features(rotated(query), rotated(key), query, key)


_Sums = tuple[Tensor, Tensor]  # (batch, heads, length, value_dim) and (batch, heads, length, 1)


def _chunked(features: _Features, value: Tensor, chunk_size: int) -> _Sums:
    length = value.shape[-2]
    chunk_size = min(chunk_size, max(length, 1))
    query, key, padded = (
        functional.pad(x, (0, 0, 0, -length % chunk_size)).reshape(*x.shape[:2], -1, chunk_size, x.shape[-1])
        for x in (features.query, features.key, value)
    )  # (batch, heads, chunks, chunk_size, ...)
    of_chunk = key.mT @ padded
    before = functional.pad(of_chunk[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)
    numerator = (query @ key.mT).tril() @ padded + query @ before
    denominator = (features.denominator_query * features.denominator_key.cumsum(-2)).sum(-1, keepdim=True)
    return numerator.flatten(2, 3)[:, :, :length], denominator


def _recurrent(features: _Features, value: Tensor) -> _Sums:
    numerator = value.new_zeros(*value.shape[:2], features.key.shape[-1], value.shape[-1])
    denominator = value.new_zeros(*value.shape[:2], features.denominator_key.shape[-1], 1)
    sums = []
    for i in range(value.shape[-2]):
        numerator = numerator + features.key[:, :, i, :, None] * value[:, :, i, None, :]
        denominator = denominator + features.denominator_key[:, :, i, :, None]
        sums.append(
            (features.query[:, :, i, None] @ numerator, features.denominator_query[:, :, i, None] @ denominator)
        )
    above, below = zip(*sums, strict=True)
    return torch.cat(above, -2), torch.cat(below, -2)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor | None) -> None:
    if query.ndim != 4 or query.shape[-2] < 1:
        raise ValueError(f"query must be (batch, heads, length, head_dim), got {tuple(query.shape)}")
    if key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            "key must have the shape of query, and value must differ in its last dimension alone; got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    check_padding_mask(padding_mask, query.shape[0], query.shape[2])


def _check_state(state: LinearAttentionState, query: Tensor, value: Tensor, kernel: str, causal: bool) -> None:
    if not causal:
        raise ValueError(
            "a state holds the tokens before these, and full attention needs those after, too; use causal=True"
        )
    if state.kernel is None or state.denominator is None or state.numerator is None:
        return
    if state.kernel != kernel:
        raise ValueError(f"the state is one of kernel {state.kernel!r}, and cannot be continued with {kernel!r}")
    expected = (*query.shape[:2], query.shape[-1] + (kernel == "cosine"), value.shape[-1])
    if state.numerator.shape != expected:
        raise ValueError(
            f"the state is one of {tuple(state.numerator.shape)} (batch, heads, features, value_dim), and these "
            f"tokens need {expected}"
        )

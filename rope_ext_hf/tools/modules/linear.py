"""Linear attention with RoPE, whose time and memory are linear in the length (Su 2021, https://kexue.fm/archives/8265).

    cos, sin = rotary(query, position_ids)                                   # rope_ext_hf.RotaryEmbedding
    out = linear_attention(query, key, value, cos, sin, kernel="elu")        # (batch, heads, length, value_dim)

Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) replaces exp(q.k) by a similarity that is a product of
features, so that the sums over keys fit into a state of fixed size. With R_i the rotation at position i, there are two
ways to combine it with RoPE:

    (a) out_i = sum_j (R_i phi(q_i)).(R_j phi(k_j)) v_j / sum_j phi(q_i).phi(k_j)         "elu": phi = elu + 1; "relu"
    (b) out_i = sum_j s_ij v_j / sum_j s_ij,  s_ij = 1 + (R_i q_i).(R_j k_j) / |q_i||k_j|                     "cosine"

In (a) only the numerator is rotated, because rotated products of non-negative features can be negative, and a
denominator of such products could vanish. In (b) everything is rotated: a rotation preserves norms, so s_ij stays
between 0 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from rope_ext_hf.rotary.standalone import apply_rotary_pos_emb
from rope_ext_hf.tools.modules.rotary_attention import check_padding_mask

_Kernel = Literal["elu", "relu", "cosine"]
_Form = Literal["chunked", "parallel", "recurrent"]
_KERNELS, _FORMS = get_args(_Kernel), get_args(_Form)


@dataclass
class LinearAttentionState:
    """The sums that causal linear attention keeps of all tokens read so far, in a size independent of their number.

    Start with `LinearAttentionState()` and pass it to every call of `linear_attention`, which updates it.

    Attributes:
        kernel: the kernel of the calls so far; None: there was no call.
        length: tokens read so far, padding included.
        numerator: the sum over keys of features x values, (batch, heads, features, value_dim), float32 or float64.
        denominator: the sum over keys of features, (batch, heads, features), in the same dtype.
    """

    kernel: str | None = None
    length: int = 0
    numerator: Tensor | None = None
    denominator: Tensor | None = None


class _Features(NamedTuple):
    """Features of queries and keys; their products are the terms of linear attention's numerator and denominator."""

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
    """Compute linear attention with RoPE: a kernel takes the place of the softmax.

    Sources: Su 2021, https://kexue.fm/archives/8265; Katharopoulos et al. 2020, arXiv 2006.16236, whose code adds an
    epsilon, too.

    Args:
        query: (batch, heads, length, head_dim), neither rotated nor scaled.
        key: (batch, heads, length, head_dim), not rotated.
        value: (batch, heads, length, value_dim).
        cos: (length, rotated) or (batch or 1, length, rotated) in half layout, as `RotaryEmbedding` returns it. cos and
            sin are divided by sqrt(cos^2 + sin^2), since a method's attention factor is meant for a softmax. A state
            holds rotated keys: under a length-dependent method, fix the length around all calls with one state.
        sin: the same shape as cos.
        kernel: "elu" or "relu": phi(x) = elu(x) + 1 or relu(x), rotated in the numerator only; "cosine": 1 + the cosine
            of rotated query and key, in numerator and denominator.
        causal: True: a query sees only the keys up to its own; False: it sees all keys.
        padding_mask: (batch, length) bool, False for padding, which is not attended to and whose output is 0.
        state: the state after the tokens before these, to read token by token or piece by piece; it is updated. Only
            for causal attention.
        form: the way in which a causal sum is computed; the results are equal. "chunked": matrix products within
            chunks and a state between them, in linear time and memory; "parallel": all scores at once, (length,
            length); "recurrent": token by token. Full attention sums over all keys once.
        chunk_size: tokens of a chunk.
        eps: added to the denominator, which can be 0 for "relu" and is 0 for a row without keys.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value. It is computed in float32, or in float64 if any input
        is float64.

    Raises:
        ValueError: shapes do not fit each other, the kernel or form is unknown, or the state is of another kernel or
            shape.
    """
    for name, choice, known in (("kernel", kernel, _KERNELS), ("form", form, _FORMS)):
        if choice not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    _check_shapes(query, key, value, padding_mask)
    if state is not None:
        _check_state(state, query, value, kernel, causal)
    dtype = torch.float32
    for tensor in (query, key, value, None if state is None else state.numerator):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    # Autocast would leave 8 bits of precision, too few for sums over many tokens.
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
    """Return elu(x) + 1, which is exp(x) below 0 and stays positive even where exp(x) - 1 rounds to -1."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _features(kernel: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> _Features:
    """Return the features of queries and keys for a kernel, rotated by cos and sin where the kernel needs it."""
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
    """Return the causal sums of numerator and denominator, by matrix products within chunks."""
    length = value.shape[-2]
    chunk_size = min(chunk_size, max(length, 1))
    query, key, padded = (
        functional.pad(x, (0, 0, 0, -length % chunk_size)).reshape(*x.shape[:2], -1, chunk_size, x.shape[-1])
        for x in (features.query, features.key, value)
    )  # (batch, heads, chunks, chunk_size, ...)
    chunk_sums = key.mT @ padded
    before = functional.pad(chunk_sums[:, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(2)  # the sums of all earlier chunks
    numerator = (query @ key.mT).tril() @ padded + query @ before
    denominator = (features.denominator_query * features.denominator_key.cumsum(-2)).sum(-1, keepdim=True)
    return numerator.flatten(2, 3)[:, :, :length], denominator


def _recurrent(features: _Features, value: Tensor) -> _Sums:
    """Return the causal sums of numerator and denominator, one token after the other."""
    numerator = value.new_zeros(*value.shape[:2], features.key.shape[-1], value.shape[-1])
    denominator = value.new_zeros(*value.shape[:2], features.denominator_key.shape[-1], 1)
    numerators, denominators = [], []
    for i in range(value.shape[-2]):
        numerator = numerator + features.key[:, :, i, :, None] * value[:, :, i, None, :]
        denominator = denominator + features.denominator_key[:, :, i, :, None]
        numerators.append(features.query[:, :, i, None] @ numerator)
        denominators.append(features.denominator_query[:, :, i, None] @ denominator)
    return torch.cat(numerators, -2), torch.cat(denominators, -2)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor | None) -> None:
    if query.ndim != 4 or query.shape[-2] < 1:
        raise ValueError(f"query must be (batch, heads, length, head_dim), got {tuple(query.shape)}")
    if key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            "key must have the shape of query, and value may differ only in its last dimension; got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    check_padding_mask(padding_mask, query.shape[0], query.shape[2])


def _check_state(state: LinearAttentionState, query: Tensor, value: Tensor, kernel: str, causal: bool) -> None:
    if not causal:
        raise ValueError(
            "a state holds only earlier tokens, and full attention needs later ones, too; use causal=True, or no state"
        )
    if state.kernel is None or state.denominator is None or state.numerator is None:
        return
    if state.kernel != kernel:
        raise ValueError(f"the state was made with kernel {state.kernel!r}, and cannot be continued with {kernel!r}")
    expected = (*query.shape[:2], query.shape[-1] + (kernel == "cosine"), value.shape[-1])
    if state.numerator.shape != expected:
        raise ValueError(
            f"the state has the shape {tuple(state.numerator.shape)} (batch, heads, features, value_dim), but these "
            f"tokens need {expected}"
        )

"""RoPE with a learned relative bias or with xPos, for models that are trained with them.

    hybrid = HybridAttention(bias=T5Bias(heads=8))
    AttentionInterface.register("rope-t5", hybrid)         # transformers' tables of attention functions and masks
    AttentionMaskInterface.register("rope-t5", sdpa_mask)
    model.set_attn_implementation("rope-t5")
    model.hybrid = hybrid                                  # its numbers are trained and saved with the model

Queries and keys arrive already rotated by the model's rotary module; the additions here depend on the distance alone.
`T5Bias` adds 0 before its training, so that a trained model computes the same at first. For ALiBi and KERPLE with fixed
numbers, which need no training, see `rope_ext_hf.tools.modules.score_biases`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.blockwise import attend, query_key_product
from rope_ext_hf.attention.rules import LocalAttention, ScoreModifiers, TokenPositions
from rope_ext_hf.errors import MethodError, UnsupportedModelError


class T5Bias(nn.Module):
    """A learned bias for each head and bucket of distances (Raffel et al. 2020, arXiv 1910.10683, sec. 2.1).

    Args:
        heads: heads of the attention.
        buckets: the number of biases per head, at least 4. Half of them are for one distance each, and the others for
            ranges of distances that get wider up to `max_distance`; all larger distances share the last one.
        max_distance: the distance in tokens from which on all share a bucket; it must be above `buckets` // 2.
        bidirectional: whether keys after the query are seen; they get half of the buckets.

    Attributes:
        bias: (buckets, heads) float32, zeros before the training.

    Raises:
        MethodError: there are fewer than 4 buckets, they cannot be halved as described, or `max_distance` is too small.
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = False) -> None:
        super().__init__()
        if buckets < 4 or (bidirectional and buckets % 4):
            raise MethodError(f"buckets must be at least 4, and a multiple of 4 if bidirectional; got {buckets}")
        self.one_way = buckets // 2 if bidirectional else buckets
        if max_distance <= self.one_way // 2:
            raise MethodError(f"max_distance must be above {self.one_way // 2} tokens, got {max_distance}")
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.bias = nn.Parameter(torch.zeros(buckets, heads))

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance (query - key), int64; unless bidirectional, negative ones count as 0."""
        exact = self.one_way // 2
        after = (distance < 0).long() * self.one_way if self.bidirectional else 0
        distance = distance.abs() if self.bidirectional else distance.clamp(min=0)
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (growth * (self.one_way - exact)).long()).clamp(max=self.one_way - 1)
        return after + torch.where(distance < exact, distance, far)

    def forward(self, m: Tensor, n: Tensor) -> Tensor:
        """Return the bias for queries at m (rows, queries) and keys at n (rows, keys): (rows, heads, queries, keys)."""
        return self.bias.float()[self.bucket(m[:, :, None] - n[:, None])].permute(0, 3, 1, 2)


class KerpleBias(nn.Module):
    """KERPLE with learned numbers (Chi et al. 2022, arXiv 2205.09921): -r1 ln(1 + r2 d), or -r1 d^r2.

    Args:
        heads: heads of the attention.
        kernel: "log" or "power".

    Attributes:
        raw_r1: (heads,) float32, with r1 = softplus(raw_r1) > 0. Before the training r1 is 0.01 for every head, so that
            a trained model changes little.
        raw_r2: (heads,) float32, with r2 = softplus(raw_r2) for the log kernel, and r2 = 2 sigmoid(raw_r2), between 0
            and 2, for the power kernel. Before the training r2 is 1.

    Raises:
        MethodError: the kernel is another one.
    """

    def __init__(self, heads: int, *, kernel: str = "log") -> None:
        super().__init__()
        if kernel not in ("log", "power"):
            raise MethodError(f"kernel must be 'log' or 'power', got {kernel!r}")
        self.kernel = kernel
        self.raw_r1 = nn.Parameter(torch.full((heads,), math.log(math.expm1(0.01))))
        self.raw_r2 = nn.Parameter(torch.full((heads,), math.log(math.expm1(1.0)) if kernel == "log" else 0.0))

    @property
    def r1(self) -> Tensor:
        """The factor of the bias, (heads,) float32."""
        return nn.functional.softplus(self.raw_r1.float())

    @property
    def r2(self) -> Tensor:
        """The factor of the distance, or its exponent for the power kernel, (heads,) float32."""
        raw = self.raw_r2.float()
        return nn.functional.softplus(raw) if self.kernel == "log" else 2 * raw.sigmoid()

    def forward(self, m: Tensor, n: Tensor) -> Tensor:
        """Return the bias for queries at m (rows, queries) and keys at n (rows, keys): (rows, heads, queries, keys)."""
        distance = (m[:, None, :, None] - n[:, None, None, :]).abs().float()
        r1, r2 = self.r1[:, None, None], self.r2[:, None, None]
        if self.kernel == "log":
            return -r1 * torch.log1p(r2 * distance)
        power = torch.where(distance > 0, distance, 1) ** r2  # the gradient of 0^r2 is not finite
        return -r1 * torch.where(distance > 0, power, 0)


class XPos(nn.Module):
    """xPos (Sun et al. 2022, arXiv 2212.10554): the product of pair i of query m and key n is scaled by z_i^((m-n)/B).

    z_i = (2i/d + gamma) / (1 + gamma), so that fast pairs fade with the distance and slow ones hardly do. Queries are
    multiplied by z_i^(m/B) and keys by z_i^(-n/B), with positions counted from the first key of a block, so that no
    scale grows with the length. Cached keys are kept without the scale. The module has no parameters, but a model must
    be trained with it.

    Args:
        dim: rotated dims per head, d; even. Dims after them are not scaled.
        gamma: the larger, the less pairs fade; 0.4 in the paper.
        scale_base: B, in tokens; 512 in the paper.
        pairing: the dims of a head that rotate together: "half" (i and i + d/2) or "interleaved" (2i and 2i + 1).

    Raises:
        MethodError: `dim` is odd, the pairing is another one, or `gamma` or `scale_base` is not positive.
    """

    def __init__(self, dim: int, *, gamma: float = 0.4, scale_base: int = 512, pairing: str = "half") -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise MethodError(f"dim must be even and at least 2, got {dim}")
        if pairing not in ("half", "interleaved"):
            raise MethodError(f"pairing must be 'half' or 'interleaved', got {pairing!r}")
        if not (gamma > 0 and scale_base > 0):
            raise MethodError(f"gamma and scale_base must be above 0, got {gamma:g} and {scale_base}")
        self.dim, self.gamma, self.scale_base, self.pairing = dim, gamma, scale_base, pairing
        self.block_size = scale_base  # keys that share an origin; the fastest pair's scale stays below 1 + 1/gamma

    def scale(self, distance: Tensor) -> Tensor:
        """Return z_i^(distance / B) for distances (...) in tokens: (..., dim // 2) float32."""
        z = (torch.arange(0, self.dim, 2, device=distance.device) / self.dim + self.gamma) / (1 + self.gamma)
        return z ** (distance.float()[..., None] / self.scale_base)

    def scale_pairs(self, x: Tensor, distance: Tensor) -> Tensor:
        """Return x, (rows, heads, tokens, head_dim), with each pair scaled for the distances, (rows or 1, tokens)."""
        scale = self.scale(distance)[:, None]
        of_dims = torch.cat([scale, scale], -1) if self.pairing == "half" else scale.repeat_interleave(2, -1)
        scaled = (x[..., : self.dim] * of_dims).to(x.dtype)
        return scaled if x.shape[-1] == self.dim else torch.cat([scaled, x[..., self.dim :]], -1)

    def product(self, query: Tensor, key: Tensor, m: Tensor, n: Tensor, scale: float) -> Tensor:
        """Return the scores of queries and keys scaled by xPos: (rows, heads, queries, keys) float32.

        Scales grow with the position, so positions are counted from a token near each block of keys. Counted from 0,
        the scales would overflow.

        Args:
            query, key: (rows, heads or kv_heads, tokens, head_dim).
            m, n: positions of queries and keys, (rows or 1, tokens).
            scale: the factor of scores.
        """
        parts = []
        for start in range(0, key.shape[-2], self.block_size):
            block = slice(start, start + self.block_size)
            origin = n[:, block].amin(-1, keepdim=True)
            # A query before the whole block sees none of it: its scale, which could overflow, is not needed.
            scaled_query = self.scale_pairs(query, (m - origin).clamp(min=0))
            scaled_key = self.scale_pairs(key[:, :, block], origin - n[:, block])
            parts.append(query_key_product(scaled_query, scaled_key, scale))
        return torch.cat(parts, dim=-1)


class HybridAttention(nn.Module):
    """An attention function for transformers' attention interface, with a bias and with scales by distance.

    Memory is linear in the length if the model passes no mask. A mask is used as the model passes it, so that padding,
    packed rows, sliding windows and static caches work as they do without this function.

    Args:
        bias: a module that returns biases (rows, heads, queries, keys) for query positions (rows, queries) and key
            positions (rows, keys), such as `T5Bias`; all layers that call this function share it.
        scales: an `XPos`.
    """

    def __init__(self, *, bias: nn.Module | None = None, scales: XPos | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.scales = scales

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of one layer, as transformers calls it.

        Args:
            module: the attention layer.
            query: (rows, heads, tokens, head_dim).
            key: (rows, kv_heads, past + tokens, head_dim).
            value: (rows, kv_heads, past + tokens, head_dim).
            attention_mask: (rows or 1, 1, tokens, keys), bool or numbers to add. None: there is no padding, and the
                attention is causal as in torch: a single query sees all keys, the first of several sees the first key.
            scaling: the factor of scores; None: 1 / sqrt(head_dim).
            dropout: the dropout probability of attention weights.
            softcap: the limit of scores, as in Gemma 2; None: none.
            s_aux: attention sinks, as in gpt-oss; None: none.

        Returns:
            The output, (rows, tokens, heads, head_dim), and None for the attention weights.

        Raises:
            UnsupportedModelError: xPos is used in attention that is not causal.
        """
        tokens, count = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True)
        if not causal and self.scales is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} sees keys after the query, where the scores of xPos would grow with the "
                "distance; use a bias"
            )
        if not causal and attention_mask is None:
            attention_mask = torch.ones(1, 1, tokens, count, dtype=torch.bool, device=query.device)
        if attention_mask is None and tokens > 1:  # a static cache has empty places after these tokens
            key, value, count = key[:, :, :tokens], value[:, :, :tokens], tokens
        n = torch.arange(count, device=query.device)[None]
        m = n[:, count - tokens :] if attention_mask is None or not causal else _last_visible(attention_mask)
        positions = TokenPositions(m, n, None if attention_mask is not None else (0,) * query.shape[0], None)
        product = None if self.scales is None else self.scales.product
        modifiers = ScoreModifiers(softcap, s_aux, attention_mask, dropout, self.bias, product)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend(LocalAttention(), None, positions, query, key, value, scale, modifiers)
        return out.transpose(1, 2).contiguous(), None


def _last_visible(mask: Tensor) -> Tensor:
    """Return the index of the last key that each query sees, its own in causal attention: (rows or 1, queries)."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return mask.shape[-1] - 1 - visible[:, 0].flip(-1).int().argmax(-1)

"""`RotaryAttention`: self-attention with RoPE, for your own models.

rotary = RotaryEmbedding("yarn", Rotary(dim=64, theta=10000.0, trained_length=4096), factor=8)
attention = RotaryAttention(512, 8, rotary, num_kv_heads=2, qk_norm=True)
out = attention(hidden_states)                          # both (batch, length, 512)
cache = KeyValueCache()
out = attention(hidden_states, cache=cache)             # a prompt, then token by token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rope_ext_hf.errors import MethodError
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.standalone import apply_rotary_pos_emb


def check_padding_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError unless a mask, if there is one, is a bool tensor (batch, length)."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, length)):
        raise ValueError(
            f"padding_mask must be bool ({batch}, {length}), False for padding; got {mask.dtype} {tuple(mask.shape)}"
        )


@dataclass
class KeyValueCache:
    """Keys and values of all tokens that one `RotaryAttention` layer has read.

    Start with `KeyValueCache()`, one for each layer, and pass it to every call, which adds its tokens.

    Attributes:
        key: (batch, tokens, kv_heads, head_dim), not rotated: every call rotates all keys, so that they have the same
            frequencies under a length-dependent method.
        value: (batch, tokens, kv_heads, head_dim).
        position_ids: (batch, tokens) integers.
        padding_mask: (batch, tokens) bool, False for padding.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    position_ids: Tensor | None = None
    padding_mask: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens read so far, padding included."""
        return 0 if self.key is None else self.key.shape[1]

    def update(
        self, key: Tensor, value: Tensor, position_ids: Tensor, padding_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add new tokens to the cache, and return keys, values, positions and mask for all tokens."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), 1), torch.cat((self.value, value), 1)
        if self.position_ids is not None and self.padding_mask is not None:
            position_ids = torch.cat((self.position_ids, position_ids), 1)
            padding_mask = torch.cat((self.padding_mask, padding_mask), 1)
        self.key, self.value, self.position_ids, self.padding_mask = key, value, position_ids, padding_mask
        return key, value, position_ids, padding_mask

    def next_positions(self) -> Tensor | int:
        """Return the position after the last token of each row, (batch, 1); 0 if nothing was read."""
        if self.position_ids is None or self.padding_mask is None:
            return 0
        return self.position_ids.masked_fill(~self.padding_mask, -1).amax(-1, keepdim=True) + 1


class RotaryAttention(nn.Module):
    """Self-attention with RoPE, grouped queries and QK-norm, as in Llama and Qwen3.

    Parameters have the names and shapes of transformers' `LlamaAttention` and `Qwen3Attention`, whose state_dict can be
    loaded, and outputs are equal to theirs.

    Sources: RoFormer (Su et al. 2021, arXiv 2104.09864); grouped queries (Ainslie et al. 2023, arXiv 2305.13245);
    QK-norm (Qwen3, arXiv 2505.09388).

    Args:
        hidden_size: the width of the model.
        num_heads: query heads.
        rotary: the module that returns cos and sin under any frequency method, in half layout; layers may share it. If
            it rotates fewer dims than `head_dim`, these are the first ones.
        num_kv_heads: key and value heads, a divisor of `num_heads`; default: `num_heads`.
        head_dim: dims of a head; default: hidden_size / num_heads.
        qk_norm: whether every head of queries and keys is normalised by an RMSNorm before the rotation, as in Qwen3.
        norm_eps: the epsilon of these norms.
        bias: whether the four projections have a bias.
        causal: True: a token sees itself and earlier tokens; False: it sees all tokens.

    Raises:
        ValueError: sizes do not fit each other.
        MethodError: the rotary module has another layout, or is for more dims than a head has.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        rotary: RotaryEmbedding,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must be a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size = {hidden_size} is not a multiple of num_heads = {num_heads}: give head_dim"
                )
            head_dim = hidden_size // num_heads
        if rotary.layout != "half":
            raise MethodError(f"rotary must have layout='half', got {rotary.layout!r}")
        if rotary.rotary.dim > head_dim:
            raise MethodError(f"rotary is for {rotary.rotary.dim} dims, but a head has only {head_dim}")
        self.hidden_size = hidden_size
        self.head_dim = head_dim
        self.causal = causal
        self.rotary = rotary
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute the attention of these tokens to themselves and to the tokens in the cache.

        Args:
            hidden_states: (batch, length, hidden_size); a row is one input.
            position_ids: (batch or 1, length) integers; default: the tokens of each row are counted without padding,
                from the end of the cache on.
            padding_mask: (batch, length) bool, False for padding, which no other token sees; default: no padding.
            cache: the earlier tokens, in causal attention; it is updated.

        Returns:
            (batch, length, hidden_size) in the dtype of `hidden_states`; the output of padding is undefined.

        Raises:
            ValueError: shapes do not fit each other, or a cache is given in full attention.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must be (batch, length, {self.hidden_size}), got {tuple(hidden_states.shape)}"
            )
        batch, length, _ = hidden_states.shape
        if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
            raise ValueError(
                f"position_ids must be ({batch}, {length}) or (1, {length}), got {tuple(position_ids.shape)}"
            )
        check_padding_mask(padding_mask, batch, length)
        if cache is not None and not self.causal:
            raise ValueError("a cache holds only earlier tokens, and full attention needs later ones, too; give none")
        if cache is not None and cache.key is not None and cache.key.shape[0] != batch:
            raise ValueError(f"the cache holds {cache.key.shape[0]} rows, but hidden_states has {batch}")
        heads = (batch, length, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads))
        key = self.k_norm(self.k_proj(hidden_states).view(heads))
        value = self.v_proj(hidden_states).view(heads)

        plain = padding_mask is None and cache is None  # these tokens alone: torch's own causal mask fits
        if padding_mask is None:
            padding_mask = torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device)
        if position_ids is None:
            begin = 0 if cache is None else cache.next_positions()
            position_ids = (begin + padding_mask.cumsum(-1) - 1).clamp(min=0)
        position_ids = position_ids.expand(batch, -1)
        if cache is not None:
            key, value, position_ids, padding_mask = cache.update(key, value, position_ids, padding_mask)

        # Under a length-dependent method the length of a row is that of all its tokens.
        cos, sin = self.rotary.of_rows(
            query, position_ids, lambda: position_ids.masked_fill(~padding_mask, 0).amax(-1) + 1
        )
        query = apply_rotary_pos_emb(query, cos[:, -length:], sin[:, -length:])
        key = apply_rotary_pos_emb(key, cos, sin)
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if plain else self._mask(padding_mask, length),
            is_causal=plain and self.causal,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _mask(self, padding_mask: Tensor, length: int) -> Tensor:
        """Return a mask that is True where one of the last `length` tokens sees a key: (batch, 1, length, keys)."""
        keys = padding_mask.shape[1]
        index = torch.arange(keys, device=padding_mask.device)
        query = index[keys - length :, None]
        seen = padding_mask[:, None, :] | (index == query)  # padding sees itself, so that no softmax is empty
        if self.causal:
            seen = seen & (index <= query)
        return seen[:, None]

"""Use `RotaryEmbedding` in an attention layer of your own, without transformers.

python examples/rotary_in_own_model.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import rope_ext_hf as rope


class Attention(nn.Module):
    """Causal self-attention with rotary positions, for inputs (batch, length, width)."""

    def __init__(self, width: int, heads: int, rotary: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)  # (batch, length, heads, head_dim)
        cos, sin = self.rotary(x, positions)  # (batch or 1, length, head_dim), in the dtype of x
        q, k = rope.apply_rotary_pos_emb(q, cos, sin), rope.apply_rotary_pos_emb(k, cos, sin)  # half pairing
        mixed = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


torch.manual_seed(0)
geometry = rope.Rotary(dim=32, theta=10_000.0, trained_length=64)
layer = Attention(width=128, heads=4, rotary=rope.RotaryEmbedding("yarn", geometry, factor=4))
x = torch.randn(1, 200, 128)
positions = torch.arange(200)[None]
out = layer(x, positions)
print("out:", tuple(out.shape))

# Attention depends on relative positions alone, so shifting all positions changes nothing.
assert torch.allclose(out, layer(x, positions + 1000), atol=1e-4)
# Frequencies keep their float64 precision when the model changes its dtype.
layer.to(torch.bfloat16)
print("in bfloat16:", layer(x.bfloat16(), positions).dtype)

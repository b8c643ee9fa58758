"""What people build models of their own from, as `rope.modules`: rotary modules, attention layers, learned biases.

    attention = rope.modules.RotaryAttention(512, 8, rope.RotaryEmbedding("default", rotary))

Patched models do without all of it.
"""

from rope_ext_hf.modules.axial import AxialRotaryEmbedding
from rope_ext_hf.modules.hybrids import HybridAttention, KerpleBias, T5Bias, XPos
from rope_ext_hf.modules.linear import LinearAttentionState, linear_attention
from rope_ext_hf.modules.rotary_attention import KeyValueCache, RotaryAttention
from rope_ext_hf.modules.standalone import NTKAwareRoPE, apply_rotary_pos_emb
from rope_ext_hf.rotary.embedding import RotaryEmbedding

__all__ = [
    "AxialRotaryEmbedding",
    "HybridAttention",
    "KerpleBias",
    "KeyValueCache",
    "LinearAttentionState",
    "NTKAwareRoPE",
    "RotaryAttention",
    "RotaryEmbedding",
    "T5Bias",
    "XPos",
    "apply_rotary_pos_emb",
    "linear_attention",
]

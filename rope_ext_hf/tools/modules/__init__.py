"""What people build models of their own from, as `modules`: rotary modules, attention layers, learned biases.

    attention = modules.RotaryAttention(512, 8, rope.RotaryEmbedding("default", rotary))

Patched models do without all of it.
"""

from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.standalone import NTKAwareRoPE, apply_rotary_pos_emb
from rope_ext_hf.tools.modules.axial import AxialRotaryEmbedding
from rope_ext_hf.tools.modules.hybrids import HybridAttention, KerpleBias, T5Bias, XPos
from rope_ext_hf.tools.modules.linear import LinearAttentionState, linear_attention
from rope_ext_hf.tools.modules.rotary_attention import KeyValueCache, RotaryAttention

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

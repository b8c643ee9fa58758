"""Building blocks for your own models: rotary modules, attention layers, learned biases, and RoPE for encoders.

    from rope_ext_hf.tools import modules
    attention = modules.RotaryAttention(512, 8, rope.RotaryEmbedding("default", rotary))

Patched models need none of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.rotary.embedding import RotaryEmbedding as RotaryEmbedding
    from rope_ext_hf.rotary.standalone import NTKAwareRoPE as NTKAwareRoPE
    from rope_ext_hf.rotary.standalone import apply_rotary_pos_emb as apply_rotary_pos_emb
    from rope_ext_hf.tools.modules.axial import AxialRotaryEmbedding as AxialRotaryEmbedding
    from rope_ext_hf.tools.modules.hybrids import HybridAttention as HybridAttention
    from rope_ext_hf.tools.modules.hybrids import KerpleBias as KerpleBias
    from rope_ext_hf.tools.modules.hybrids import T5Bias as T5Bias
    from rope_ext_hf.tools.modules.hybrids import XPos as XPos
    from rope_ext_hf.tools.modules.linear import LinearAttentionState as LinearAttentionState
    from rope_ext_hf.tools.modules.linear import linear_attention as linear_attention
    from rope_ext_hf.tools.modules.migration import migrate_to_rope as migrate_to_rope
    from rope_ext_hf.tools.modules.rotary_attention import KeyValueCache as KeyValueCache
    from rope_ext_hf.tools.modules.rotary_attention import RotaryAttention as RotaryAttention

__all__, __getattr__, __dir__ = lazy_names(__name__)

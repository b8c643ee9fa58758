"""cos and sin, and how vectors and cached keys are rotated by them."""

from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.standalone import NTKAwareRoPE, apply_rotary_pos_emb

__all__ = ["NTKAwareRoPE", "RotaryEmbedding", "apply_rotary_pos_emb"]

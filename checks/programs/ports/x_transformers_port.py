"""x-transformers: a decoder with `rotary_base_rescale_factor` and `rotary_interpolation_factor`.

Its base is 10,000 x rotary_base_rescale_factor ** (d / (d - 2)) for d rotated dims: the port inverts that for theta.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import numpy as np
import rope_settings
import rotation
import torch
from x_transformers import Decoder
from x_transformers.x_transformers import apply_rotary_pos_emb


def version() -> str:
    return f"x-transformers {installed('x-transformers')}"


def inv_freq(config: dict[str, Any]) -> Any:
    rope = rope_settings.read(config)
    if rope_settings.local_theta(config) is not None or rope["rope_type"] not in ("default", "linear"):
        raise NotImplementedError
    width = rope_settings.head_dim(config)
    decoder = Decoder(
        dim=width, depth=1, heads=1, attn_dim_head=width, rotary_pos_emb=True, rotary_emb_dim=width,
        rotary_base_rescale_factor=(rope["rope_theta"] / 10_000) ** ((width - 2) / width),
        rotary_interpolation_factor=rope.get("factor", 1.0),
    )  # fmt: skip

    def rotate(vectors: Any) -> Any:
        angles, _ = decoder.rotary_pos_emb(torch.arange(len(vectors)))
        return apply_rotary_pos_emb(torch.tensor(vectors)[None, None], angles)[0, 0].numpy()

    return np.angle(rotation.pairs(rotate, width, None)).tolist()

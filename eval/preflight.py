"""What a measurement will need, worked out from the config before any weights are read.

>>> needs(model_on_meta, longest=32768, dtype=torch.bfloat16).total
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rope_ext_hf.eval.reading import CHUNK_BYTES, HEAD_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Needs", "available", "needs"]


@dataclass(frozen=True)
class Needs:
    """Bytes: of the weights, of the keys and values of one window, and of what is computed with."""

    weights: int
    cache: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working

    def __str__(self) -> str:
        parts = ((self.weights, "weights"), (self.cache, "keys and values"), (self.working, "computing"))
        return f"{self.total / 1e9:.1f} GB: " + ", ".join(f"{size / 1e9:.1f} {name}" for size, name in parts)


def needs(model: PreTrainedModel, longest: int, dtype: torch.dtype | None = None) -> Needs:
    """Memory for windows of `longest` tokens.

    Args:
        model: on any device, the meta device included.
        dtype: what the weights will be loaded in; default: what the model has.
    """
    width = torch.finfo(dtype or model.dtype).bits // 8
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * head_dim * longest * width
    return Needs(model.num_parameters() * width, cache, CHUNK_BYTES + HEAD_BYTES)


def available(device: torch.device) -> int:
    """Bytes free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

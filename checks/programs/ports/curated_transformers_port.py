"""curated-transformers: the class that its loader takes for a config.json, whose first layer rotates."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import numpy as np
import rotation
import torch
from curated_transformers.models import LlamaCausalLM


def version() -> str:
    return f"curated-transformers {installed('curated-transformers')}, torch {installed('torch')}"


def _pairs(config: dict[str, Any]) -> Any:
    if not LlamaCausalLM.is_supported(config):
        raise NotImplementedError
    rotary = LlamaCausalLM.from_hf_config(hf_config=config).decoder.layers[0].mha.rotary_embeds

    def rotate(vectors: Any) -> Any:
        heads = torch.tensor(vectors)[None, None]
        return rotary(query=heads, key=heads)[0][0, 0].numpy()

    return rotation.pairs(rotate, rotary.rotary_width, None)


def inv_freq(config: dict[str, Any]) -> Any:
    return np.angle(_pairs(config)).tolist()


def magnitude(config: dict[str, Any]) -> float:
    return float(np.median(np.abs(_pairs(config))))

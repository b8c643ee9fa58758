"""transformer-lens: the bridge that it makes of a folder, and the cos and sin that pass its hooks."""

from __future__ import annotations

import tempfile
from importlib.metadata import version as installed
from typing import Any

import loaded
from transformer_lens.model_bridge import TransformerBridge


def version() -> str:
    return f"transformer-lens {installed('transformer-lens')}, transformers {installed('transformers')}"


def _bridge(config: loaded.Config, context_length: int, original_length: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        loaded.write(config, folder)
        return TransformerBridge.boot_transformers(folder, device="cpu").original_model


inv_freq, magnitude = loaded.functions(_bridge)

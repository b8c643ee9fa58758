"""Plug-in for SGLang that runs RoPE with any frequencies, for models whose config has the rope type "rope_ext_hf".

SGLang calls `register` in each of its processes before it builds a model, by the entry point `sglang.srt.plugins`.
`tables` describes the rope settings.
"""

from __future__ import annotations

from typing import Any

from rope_ext_hf.tools.engines.keys import PLUGIN_TYPE
from rope_ext_hf.tools.plugins.tables import build_rotary, for_transformers, own_get_rope

FACTORY = "sglang.srt.layers.rotary_embedding.factory"  # SGLang's module that builds rotary embeddings


def register() -> None:
    """Let SGLang's `get_rope` build rotary embeddings of the rope type "rope_ext_hf"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in ("get_rope", "get_rope_cpu"):
        HookRegistry.register(f"{FACTORY}.{name}", own_get_rope("rope_scaling", _build), HookType.AROUND)
    ROPE_INIT_FUNCTIONS[PLUGIN_TYPE] = for_transformers  # SGLang's Gemma 3 takes its frequencies from this table


def _build(arguments: dict[str, Any], settings: dict[str, Any]) -> Any:
    from sglang.srt.layers import rotary_embedding

    share = min(arguments["partial_rotary_factor"], 1.0)
    return build_rotary(rotary_embedding, arguments, settings, int(arguments["rotary_dim"] * share))

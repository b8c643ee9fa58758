"""A plug-in of vLLM: RoPE with any frequencies, by the rope type "rope_ext_hf" in a model's config.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes, before it builds
a model. What the rope settings hold is described in plugin_tables.py.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rope_ext_hf.engines.plugin_type import PLUGIN_TYPE
from rope_ext_hf.serving.plugin_tables import build_rotary, taken_over

__all__ = ["register"]


def register() -> None:
    """Let vLLM's `get_rope` build rotary embeddings of the rope type "rope_ext_hf"; a second call changes nothing."""
    from vllm.model_executor.layers import rotary_embedding

    stock = rotary_embedding.get_rope
    if getattr(stock, PLUGIN_TYPE, False):
        return
    wrapped = functools.wraps(stock)(functools.partial(taken_over("rope_parameters", _build), stock))
    setattr(wrapped, PLUGIN_TYPE, True)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if getattr(module, "get_rope", None) is stock:  # models that were imported before
            module.get_rope = wrapped  # type: ignore[attr-defined]


def _build(arguments: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The rotary module of vLLM for these settings."""
    from vllm.model_executor.layers import rotary_embedding

    head_size = arguments["head_size"]
    return build_rotary(
        rotary_embedding,
        settings,
        head_size=head_size,
        rotary_dim=int(head_size * (settings.get("partial_rotary_factor") or 1.0)),
        max_position=arguments["max_position"],
        half=arguments["is_neox_style"],
        dtype=arguments.get("dtype"),
    )

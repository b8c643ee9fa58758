"""Plug-in for vLLM that runs RoPE with any frequencies, for models whose config has the rope type "rope_ext_hf".

vLLM calls `register` in each of its processes before it builds a model, by the entry point `vllm.general_plugins`.
`tables` describes the rope settings. The plug-in also compares every rotary module that vLLM builds with the
fingerprint of the frequencies that `save_pretrained` left in the model's config.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.patches.saved.fingerprint import table_differences
from rope_ext_hf.tools.engines.keys import PLUGIN_TYPE
from rope_ext_hf.tools.plugins.tables import build_rotary, for_transformers, own_get_rope


def register() -> None:
    """Let vLLM's `get_rope` build rotary embeddings of the rope type "rope_ext_hf"; a second call changes nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.model_executor.layers import rotary_embedding

    ROPE_INIT_FUNCTIONS[PLUGIN_TYPE] = for_transformers  # vLLM runs some models with transformers' classes
    stock = rotary_embedding.get_rope
    if getattr(stock, PLUGIN_TYPE, False):
        return
    wrapped = functools.wraps(stock)(_compared(functools.partial(own_get_rope("rope_parameters", _build), stock)))
    setattr(wrapped, PLUGIN_TYPE, True)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if getattr(module, "get_rope", None) is stock:  # a model's module that was imported earlier
            module.get_rope = wrapped  # type: ignore[attr-defined]


def _compared(get_rope: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_rope` wrapped so that it warns about a module that rotates otherwise than the model did when saved.

    It is not an error, since options of the server may set another scaling than the folder has.
    """
    warned: set[str] = set()

    def compared(*args: Any, **kwargs: Any) -> Any:
        from vllm import config

        module, vllm_config = get_rope(*args, **kwargs), config.get_current_vllm_config_or_none()
        text_config = getattr(getattr(vllm_config, "model_config", None), "hf_text_config", None)
        record = getattr(text_config, PATCH_KEY, None)
        table = getattr(module, "cos_sin_cache", None)  # cos, then sin, (positions, rotary_dim)
        if isinstance(record, dict) and table is not None and not table.is_meta and len(table) > 1:
            text = " ".join(table_differences(record, *table[1].chunk(2)))
            if text and text not in warned:
                warned.add(text)
                warnings.warn(f"vLLM does not rotate as the model did when it was saved: {text}", stacklevel=2)
        return module

    return compared


def _build(arguments: dict[str, Any], settings: dict[str, Any]) -> Any:
    from vllm.model_executor.layers import rotary_embedding

    dim = int(arguments["head_size"] * (settings.get("partial_rotary_factor") or 1.0))
    return build_rotary(rotary_embedding, arguments, settings, dim)

"""A plug-in of vLLM: RoPE with any frequencies, by the rope type "rope_ext_hf" in a model's config (tables.py).

vLLM calls `register`, its entry point `vllm.general_plugins`, in each of its processes before it builds a model. Every
rotary module that vLLM builds is compared with the fingerprint that `save_pretrained` left in the model's config.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from rope_ext_hf.config_keys.keys import PLUGIN_TYPE, REMAPPING_KEY
from rope_ext_hf.patches.config import PATCH_KEY
from rope_ext_hf.patches.fingerprint import table_differences
from rope_ext_hf.plugins.tables import build_rotary, for_transformers, held_remapping, taken_over

BACKEND = "rope_ext_hf.plugins.vllm_attention.RemappingBackend"


def register() -> None:
    """Let vLLM's `get_rope` build rotary embeddings of the rope type "rope_ext_hf"; a second call changes nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.model_executor.layers import rotary_embedding

    ROPE_INIT_FUNCTIONS[PLUGIN_TYPE] = for_transformers  # vLLM runs some models by the classes of transformers
    _offer_backend()
    stock = rotary_embedding.get_rope
    if getattr(stock, PLUGIN_TYPE, False):
        return
    wrapped = functools.wraps(stock)(_compared(functools.partial(taken_over("rope_parameters", _build), stock)))
    setattr(wrapped, PLUGIN_TYPE, True)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if getattr(module, "get_rope", None) is stock:  # models that were imported before
            module.get_rope = wrapped  # type: ignore[attr-defined]


def _offer_backend() -> None:
    """Let `--attention-backend CUSTOM` name `vllm_attention`, also on the CPU, where vLLM passes over that option."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # a version that has its backends elsewhere
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():  # by another plug-in, or by this one before
        return
    register_backend(custom, BACKEND)
    stock = current_platform.get_attn_backend_cls

    def choose(selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if selected is not custom:
            return str(stock(selected, attn_selector_config=attn_selector_config, num_heads=num_heads))
        reasons = custom.get_class().validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"the attention backend CUSTOM does not run this model: {', '.join(reasons)}")
        return str(custom.get_path())

    if current_platform.is_cpu():
        current_platform.get_attn_backend_cls = choose


def _check_backend(chosen: Any) -> None:
    """Raise ValueError where vLLM will not run a remapping method, by its attention_config."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if chosen.backend is not custom or chosen.backend_per_kind:
        raise ValueError(
            "the rope settings of this config have a remapping method: start vLLM with --attention-backend CUSTOM, and "
            "with no backends per kind"
        )
    if custom.get_path() != BACKEND:
        raise ValueError(f"another plug-in of vLLM has the attention backend CUSTOM, which {BACKEND} needs")


def _compared(get_rope: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a warning where a module rotates otherwise than the model in the folder did when it was saved.

    A warning and no error: options of the server may ask for another scaling than the folder has.
    """
    warned: set[str] = set()

    def compared(*args: Any, **kwargs: Any) -> Any:
        from vllm import config

        module, present = get_rope(*args, **kwargs), config.get_current_vllm_config_or_none()
        text_config = getattr(getattr(present, "model_config", None), "hf_text_config", None)
        if REMAPPING_KEY in (getattr(text_config, "rope_parameters", None) or {}):
            _check_backend(present.attention_config)
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

    remapping, pairing = held_remapping(settings), "half" if arguments["is_neox_style"] else "interleaved"
    if remapping is not None and remapping[1] != pairing:
        raise ValueError(
            f"vLLM rotates this model in {pairing} pairs, and its rope settings are for {remapping[1]} ones"
        )
    dim = int(arguments["head_size"] * (settings.get("partial_rotary_factor") or 1.0))
    return build_rotary(rotary_embedding, arguments, settings, dim)

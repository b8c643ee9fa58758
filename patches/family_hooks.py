"""What the classes of single families do as no others do: one function each. What several share is in families.toml."""

from __future__ import annotations

from typing import Any

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.families import family

# -- its classes -------------------------------------------------------------------------------------------------------


def rotates_back(model_type: str) -> bool:
    """Whether its attention rotates values as well, and rotates its output back."""
    return model_type == "deepseek_v4"


def rows_rotate(model_type: str, layer: Any) -> bool:
    """Whether a layer rotates, by its part of the config; elsewhere every layer of a kind does."""
    return model_type != "mistral_large4_text" or bool(layer.no_rope_layers)  # named for the contrary


def rope_key(model_type: str, layer_type: str) -> str:
    """The key of `rope_parameters` under which the rotary embedding of a layer type stands."""
    if model_type == "deepseek_v4":
        return "main" if layer_type == "sliding_attention" else "compress"
    return layer_type


# -- its configs -------------------------------------------------------------------------------------------------------

_FORMER = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def former_key(model_type: str, key: str) -> str:
    """The top-level key of a rope setting in its configs of transformers 4."""
    return _FORMER.get(key, key) if model_type in ("gpt_neox", "gpt_neox_japanese") else key


def check_architecture(text: Any) -> None:
    """Check that a text config is no other architecture of the same model_type than the family table describes."""
    if text.model_type == "chatglm" and getattr(text, "inner_hidden_size", None) is not None:
        raise UnsupportedModelError(
            "by 'inner_hidden_size' in its config this 'chatglm' is the first ChatGLM-6B, which rotates each half of a "
            "head by positions of its own; that one is not in the family table"
        )


# -- its scalings ------------------------------------------------------------------------------------------------------


def linear_is_extended(model_type: str, theta: float, max_position_embeddings: int) -> bool:
    """Whether max_position_embeddings beside a linear scaling is the extended length already, not the original."""
    if model_type == "llama":  # as in deepseek-coder and others, but not in Vicuna-16k and LongChat
        return theta != 10_000 or max_position_embeddings > 4096
    return family(model_type).linear_extended


def original_length_of_linear(model_type: str, extended: int, factor: float) -> int:
    """The length in tokens before a linear scaling, where the config states the extended one."""
    if model_type == "gemma3_text":  # technical report, arXiv 2503.19786, sec. 2; no config has it
        return 32_768
    return round(extended / factor)


def runs_short_list(model_type: str, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The longrope settings as its class runs them, and a note where that is not what they state.

    The PhiMoE class never uses the long list, and multiplies cos and sin by short_mscale or long_mscale.
    """
    if model_type != "phimoe":
        return settings, ""
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if short is None or short != long:
        raise UnsupportedModelError(
            f"the {model_type!r} class multiplies cos and sin by short_mscale={short} or long_mscale={long}, whichever "
            "the longest row of a batch asks for; that cannot be replaced unless both are equal"
        )
    note = (
        f"The {model_type!r} class of transformers never uses long_factor; the model runs short_factor. A longrope "
        "patch with both lists uses it beyond the original length and is no identity, even at factor 1."
    )
    changed = {"long_factor": settings["short_factor"], "attention_factor": short}
    return settings | changed, note if settings["long_factor"] != settings["short_factor"] else ""

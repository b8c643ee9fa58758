"""The rope keys of a config.json, in both spellings, as plain values; no model is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from rope_ext_hf.errors import ServingError, short

Config = Mapping[str, Any]
GEOMETRY_KEYS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Rope settings that say which dims rotate and by which positions, whatever the method is."""
_SLIDING_LAYERS = frozenset({"sliding_attention", "chunked_attention", "main"})
"""Keys of rope settings of other layers than full-attention ones; "main" is that of DeepSeek V4's sliding windows."""


def text_settings(config: Config) -> dict[str, Any]:
    """The text config of a config, itself where it is not composite.

    With the usual keys, too, where its class knows them by other names: DBRX has d_model and max_seq_len.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ServingError(f"text_config must be an object, got {type(text).__name__}")
    own = own_keys(str(text.get("model_type")))
    return {usual: text[key] for usual, key in own.items() if key in text} | dict(text) if own else dict(text)


@cache
def own_keys(model_type: str) -> Mapping[str, str]:
    """The keys of a config.json of this model type that stand for usual ones, by these."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


def rope_settings(text: Config) -> dict[str, Any]:
    """The rope settings of the full-attention layers, as transformers 5 standardises them.

    Both spellings are read: `rope_parameters`, and `rope_theta` beside `rope_scaling`, which wins where both stand.
    """
    parameters = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ServingError(f"the rope settings must be an object, got {type(parameters).__name__}")
    if dict in map(type, parameters.values()):
        nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
        wanted = next((key for key in nested if key not in _SLIDING_LAYERS), next(iter(nested)))
        settings = dict(nested[wanted])
        settings["_shared_truncate"] = parameters.get("truncate", True)
    else:
        settings = dict(parameters)
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is None and text.get(key) is not None:
            settings[key] = text[key]
    if settings["rope_type"] in ("yarn", "longrope", "su", "llama3") and text.get("original_max_position_embeddings"):
        settings["original_max_position_embeddings"] = text["original_max_position_embeddings"]
    settings["rope_theta"] = needed(settings, "rope_theta", above=1.0)
    return settings


def unread_settings(text: Config) -> str | None:
    """Return how `rope_parameters` of a text config differs from `rope_scaling` beside it, which is read in its place.

    None if they do not differ, or only one of them is there. transformers 5 takes `rope_scaling` whole, and theta from
    top-level `rope_theta`, else the default of the model's class: convert_rope_params_to_dict of
    modeling_rope_utils.py.
    """
    if not (text.get("rope_scaling") and text.get("rope_parameters")):
        return None
    try:
        read, unread = rope_settings(text), rope_settings({**text, "rope_scaling": None})
    except ServingError:  # which reading one of them explains
        return None
    differ = [key for key in sorted(unread) if key[0] != "_" and key != "type" and unread[key] != read.get(key)]
    if not differ:
        return None
    stated = ", ".join(f"{key} {short(str(unread[key]))} ({short(str(read.get(key)))})" for key in differ)
    return (
        f"rope_parameters is not read here, in transformers 5 and in engines that load its config: rope_scaling and "
        f"rope_theta beside it are; it differs in {stated}. Change both, or delete rope_scaling and rope_theta"
    )


def needed(settings: Config, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A number of the settings; ServingError where it is missing without a default, or not finite and above `above`."""
    value = settings.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
        given = "is missing" if value is None else f"is {value!r}"
        raise ServingError(f"{key} must be a number above {above:g} and {given}")
    return float(value)


def rotated_dims(text: Config, settings: Config, layer_type: str | None = "full_attention") -> int:
    """Rotated dims per head of the layers of a type."""
    latent: Any = text.get("qk_rope_head_dim")  # latent attention rotates a part of its own
    dims = latent or _head_dim(text, layer_type)
    if dims is None:
        dims = int(needed(text, "hidden_size") // needed(text, "num_attention_heads"))
    numeric = isinstance(dims, (int, float)) and not isinstance(dims, bool)
    whole = latent or settings.get("rope_type") == "proportional"  # the pairs that this leaves unrotated count
    if numeric and not whole and "partial_rotary_factor" in settings:
        dims = int(dims * needed(settings, "partial_rotary_factor"))
    if not numeric or not 2 <= dims <= 65536 or dims % 2:
        raise ServingError(f"an even number of dims per head rotates; the config gives {dims!r}")
    return int(dims)


def _head_dim(text: Config, layer_type: str | None) -> Any:
    """`head_dim` of the layers of a type: Gemma 4's full-attention layers have heads of another size, by two keys."""
    types = text.get("layer_types")
    first = types.index(layer_type) if isinstance(types, list | tuple) and layer_type in types else None
    own = text.get("per_layer_config")
    for index, values in own.items() if isinstance(own, Mapping) else ():  # "5", or "05" beside layers from 10 on
        if str(index).isdecimal() and int(index) == first and isinstance(values, Mapping) and "head_dim" in values:
            return values["head_dim"]
    stated = text.get("global_head_dim") if layer_type == "full_attention" else None
    return text.get("head_dim") if stated is None else stated


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return g(s, m) = 0.1 m ln s + 1 (YaRN paper, arXiv 2309.00071, sec. 3.4); 1 up to s = 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def yarn_magnitude_by_config(settings: Config, factor: float) -> float:
    """Return the magnitude of a yarn: attention_factor, else the ratio of both mscales, else 0.1 ln s + 1.

    Raises:
        ServingError: an attention_factor that is not a number above 0.
    """
    if settings.get("attention_factor") is not None:
        return needed(settings, "attention_factor")
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)

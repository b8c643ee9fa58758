"""The rope keys of a config.json, in both spellings, and those of this package's plug-ins for engines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import ServingError, short

Config = Mapping[str, Any]
GEOMETRY_KEYS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Rope settings that say which dims rotate and by which positions, whatever the method is."""
PLUGIN_TYPE = "rope_ext_hf"
"""The rope type of the plug-ins; `rope_ext_hf.plugins.tables` describes its settings and builds their tables."""
REMAPPING_KEY = "remapping"  # the setting that holds a remapping method and the pairing of the model, as JSON text
_SLIDING_LAYERS = frozenset({"sliding_attention", "chunked_attention"})


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
    """How `rope_parameters` of a text config differs from `rope_scaling` beside it, which is read in its place.

    None: it does not, or stands alone. transformers 5 takes `rope_scaling` whole, and theta from top-level
    `rope_theta`, else the default of the model's class: convert_rope_params_to_dict of modeling_rope_utils.py.
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


def check_sliding_layers(text: Config, every: int, engine: str) -> None:
    """Refuse a config whose full-attention layers are others than each `every`-th, which an engine takes them to be."""
    layers = text.get("layer_types")
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", every))
    usual = [(index + 1) % every == 0 for index in range(len(layers or ()))]
    if [kind == "full_attention" for kind in layers or ()] != usual or (not layers and pattern != every):
        raise ServingError(
            f"{engine} takes every {every}th layer for one of full attention, and those of this model are others"
        )


def needed(settings: Config, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A number of the settings; ServingError where it is missing without a default, or not finite and above `above`."""
    value = settings.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
        given = "is missing" if value is None else f"is {value!r}"
        raise ServingError(f"{key} must be a number above {above:g} and {given}")
    return float(value)


def length_setting(text: Config) -> int:
    """max_position_embeddings, in tokens."""
    length = text.get("max_position_embeddings") or text_settings(text).get("max_position_embeddings")
    if not isinstance(length, (int, float)) or isinstance(length, bool) or not 0 < length <= MOST_TOKENS:
        given = "is missing" if length is None else f"is {length!r}"
        raise ServingError(f"max_position_embeddings must be a length in tokens and {given}")
    return int(length)


def rotated_dims(text: Config, settings: Config) -> int:
    """Rotated dims per head."""
    latent: Any = text.get("qk_rope_head_dim")  # latent attention rotates a part of its own
    dims = latent or text.get("head_dim")
    if dims is None:
        dims = int(needed(text, "hidden_size") // needed(text, "num_attention_heads"))
    numeric = isinstance(dims, (int, float)) and not isinstance(dims, bool)
    if numeric and not latent and "partial_rotary_factor" in settings:
        dims = int(dims * needed(settings, "partial_rotary_factor"))
    if not numeric or not 2 <= dims <= 65536 or dims % 2:
        raise ServingError(f"an even number of dims per head rotates; the config gives {dims!r}")
    return int(dims)


def rope_divisors(settings: Config, key: str, dim: int) -> list[float]:
    """One of the lists of a longrope, a number above 0 for each rotated pair."""
    values = settings.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        raise ServingError(f"{key} must be a list of {dim // 2} numbers")
    if [value for value in values if not isinstance(value, (int, float)) or not 0 < value < math.inf]:
        raise ServingError(f"every number in {key} must be above 0")
    return list(values)


def plugin_settings(settings: Config) -> dict[str, Any] | None:
    """Rope settings with their `inv_freq` and `attention_factor`, under whatever keys they came; None without them.

    Some models of engines read or hand on certain keys alone: vLLM's gpt-oss YaRN's, of which `beta_fast` holds the
    frequencies and `beta_slow` the magnitude, and its DeepSeek has another use for an `attention_factor` of 1.
    """
    if "inv_freq" in settings:
        return {"attention_factor": settings.get("magnitude")} | dict(settings)
    if isinstance(settings.get("beta_fast"), str):
        return dict(settings) | {"inv_freq": settings["beta_fast"], "attention_factor": settings["beta_slow"]}
    return None


def plugin_frequencies(settings: Config) -> tuple[tuple[float, ...], float]:
    held = plugin_settings(settings) or {}
    return tuple(map(float, json.loads(held["inv_freq"]))), float(held["attention_factor"])

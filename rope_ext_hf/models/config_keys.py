"""The rope settings of a config.json as plain values, without a config class of transformers or a model.

Both spellings are read: `rope_parameters` of transformers 5, and `rope_theta` beside `rope_scaling` of transformers 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from rope_ext_hf.errors import ServingError, short

__all__ = [
    "GEOMETRY_KEYS",
    "PAIRING_KEY",
    "PATCH_KEY",
    "Config",
    "needed",
    "rope_settings",
    "rotated_dims",
    "text_settings",
    "unread_settings",
    "yarn_magnitude",
    "yarn_magnitude_by_config",
]

Config = Mapping[str, Any]
PAIRING_KEY = "rope_pairing"
"""The key that states the pairing of the weights, in folders that were converted."""
PATCH_KEY = "rope_ext_hf"
"""The key of the record of a patch."""
GEOMETRY_KEYS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Rope settings that state which dims rotate and by which positions, whatever the method is."""
_SLIDING_LAYERS = frozenset({"sliding_attention", "chunked_attention", "main"})
"""Keys under which `rope_parameters` holds settings of layers with a window; "main" is that of DeepSeek V4."""


def text_settings(config: Config) -> dict[str, Any]:
    """Return the values of the text config in a config, which is the config itself unless it has several parts.

    Where a family has names of its own for usual keys (DBRX has d_model and max_seq_len), both names are there.

    Raises:
        ServingError: `text_config` is not an object.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ServingError(f"text_config must be an object, got {type(text).__name__}")
    own = own_keys(str(text.get("model_type")))
    usual_keys = {usual: text[key] for usual, key in own.items() if key in text}
    return usual_keys | dict(text)


@cache
def own_keys(model_type: str) -> Mapping[str, str]:
    """Return a model type's names for usual config keys, {usual key: own key}, as transformers maps them."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


def _default_theta(model_type: str) -> float | None:
    """Return the theta that transformers 5 takes for a model type whose config states none.

    The result is None where the class has no such number, because its layers have thetas of their own.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    theta = getattr(CONFIG_MAPPING[model_type], "default_theta", None)
    return float(theta) if isinstance(theta, (int, float)) else None


def rope_settings(text: Config) -> dict[str, Any]:
    """Return the rope settings of the full-attention layers of a text config, as transformers 5 reads them.

    `rope_scaling` wins over `rope_parameters` where a config has both. Settings for each layer type share one
    `truncate`, which is then under "_shared_truncate".

    Raises:
        ServingError: the settings are not an object, or have no possible rope_theta.
    """
    parameters = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ServingError(f"the rope settings must be an object, got {type(parameters).__name__}")
    by_layer_type = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if by_layer_type:
        full_attention = [key for key in by_layer_type if key not in _SLIDING_LAYERS]
        settings = dict(by_layer_type[full_attention[0] if full_attention else next(iter(by_layer_type))])
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
    """Return a sentence on how `rope_parameters` of a text config differs from the `rope_scaling` that is read instead.

    None if they do not differ, or only one of them is there. transformers 5 takes `rope_scaling` whole, and theta from
    `rope_theta` at the top level, or else the default of the model's class (convert_rope_params_to_dict in
    modeling_rope_utils.py).
    """
    if not (text.get("rope_scaling") and text.get("rope_parameters")):
        return None
    try:
        unread = rope_settings({**text, "rope_scaling": None})
        theta = text.get("rope_theta") or _default_theta(str(text.get("model_type")))
        read = rope_settings({**text, "rope_theta": theta})
    except ServingError:  # whoever reads these settings explains the error
        return None
    differ = [key for key in sorted(unread) if key[0] != "_" and key != "type" and unread[key] != read.get(key)]
    if not differ:
        return None
    values = ", ".join(f"{key} {short(str(unread[key]))} ({short(str(read.get(key)))})" for key in differ)
    return (
        "rope_parameters is not read here, in transformers 5 and in engines that load its config: rope_scaling is, "
        f"with the rope_theta beside it, or else the theta of the class; it differs in {values}. Change both, or "
        "delete rope_scaling and rope_theta"
    )


def needed(settings: Config, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """Return a number of the settings, or the default where it is missing.

    Raises:
        ServingError: it is missing and there is no default; or it is not a finite number above `above`.
    """
    value = settings.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
        actual = "is missing" if value is None else f"is {value!r}"
        raise ServingError(f"{key} must be a number above {above:g}, but {actual}")
    return float(value)


def rotated_dims(text: Config, settings: Config, layer_type: str | None = "full_attention") -> int:
    """Return how many dims of each head rotate in the layers of a type.

    Args:
        text: the values of a text config.
        settings: the rope settings of these layers.
        layer_type: the type of the layers; None: the config has no layer types.

    Raises:
        ServingError: the config gives no even number of at least 2.
    """
    latent: Any = text.get("qk_rope_head_dim")  # latent attention rotates a part of the head that has its own size
    dims = latent or _head_dim(text, layer_type)
    if dims is None:
        dims = int(needed(text, "hidden_size") // needed(text, "num_attention_heads"))
    numeric = isinstance(dims, (int, float)) and not isinstance(dims, bool)
    # A proportional embedding counts the pairs that it leaves unrotated as well.
    all_rotate = latent or settings.get("rope_type") == "proportional"
    if numeric and not all_rotate and "partial_rotary_factor" in settings:
        dims = int(dims * needed(settings, "partial_rotary_factor"))
    if not numeric or not 2 <= dims <= 65536 or dims % 2:
        raise ServingError(f"an even number of dims per head rotates; the config gives {dims!r}")
    return int(dims)


def _head_dim(text: Config, layer_type: str | None) -> Any:
    """Return `head_dim` of the layers of a type, None where it is not stated.

    The full-attention layers of Gemma 4 have heads of another size, which `per_layer_config` or `global_head_dim`
    states.
    """
    types = text.get("layer_types")
    first = types.index(layer_type) if isinstance(types, list | tuple) and layer_type in types else None
    by_layer = text.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        for index, values in by_layer.items():  # indices are texts, "05" where there are layers from 10 on
            if str(index).isdecimal() and int(index) == first and isinstance(values, Mapping) and "head_dim" in values:
                return values["head_dim"]
    if layer_type == "full_attention" and text.get("global_head_dim") is not None:
        return text["global_head_dim"]
    return text.get("head_dim")


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 m ln s + 1 for a factor s and an mscale m (YaRN, arXiv 2309.00071, sec. 3.4); 1 for s up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def yarn_magnitude_by_config(settings: Config, factor: float) -> float:
    """Return the factor of cos and sin that yarn settings state, as transformers computes it.

    It is attention_factor where that is stated, else the ratio of the magnitudes by mscale and mscale_all_dim where
    both are stated, else 0.1 ln s + 1 for the factor s.

    Raises:
        ServingError: attention_factor is not a number above 0.
    """
    if settings.get("attention_factor") is not None:
        return needed(settings, "attention_factor")
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)

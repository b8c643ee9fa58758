"""Write a patch into a transformers config.

Where a rope type of transformers computes the same as the method, the config gets that type. Otherwise it gets a rope
type under the name of this package, at which plain transformers stops instead of running another model. Beside either
stands the record of the patch (`patch_records`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.models.config import PLUGIN_PREFIX, rope_dict
from rope_ext_hf.models.config_keys import GEOMETRY_KEYS, PATCH_KEY
from rope_ext_hf.models.engine_keys import KEYS_FOR_OTHER_ENGINES, attention_factor_keys
from rope_ext_hf.models.families import Family, family, linear_is_extended
from rope_ext_hf.models.patch_records import SAVED_KEYS, Patch

__all__ = ["config_encoding", "softmax_scale", "write_settings"]

_METHOD_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "alpha"}
    | {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}
    | {"short_factor", "long_factor"}
    | KEYS_FOR_OTHER_ENGINES
)
"""The rope settings that describe a method; a family may keep others beside them."""
_ORIGINAL_KEY = "original_max_position_embeddings"
"""At the top level of a config (Phi-3) it overrides the one in rope_parameters."""


@dataclass(frozen=True)
class ConfigEncoding:
    """The keys and values by which a config states a patch: rope settings and lengths."""

    parameters: Mapping[str, Any]  # `rope_parameters` of the layers that the method applies to
    extended_length: int | None  # tokens that the patched model is for; None: it follows the input
    saved_length: int
    """max_position_embeddings of a saved folder: engines multiply it by the factor of a linear or dynamic scaling, and
    take it as it is under the other rope types.
    """
    loads_plainly: bool = True  # whether plain transformers loads the folder; if not, it stops and names this package
    exact: bool = True  # whether plain transformers then computes the same

    @property
    def rope_type(self) -> str:
        """The `rope_type` that is written into the config."""
        return str(self.parameters["rope_type"])


def config_encoding(config: Any, patch: Patch, layer_type: str | None, *, writable: bool = True) -> ConfigEncoding:
    """Return how a config states a patch; nothing is changed.

    Args:
        config: the text config before the patch.
        patch: the patch.
        layer_type: one of the layer types that the method applies to; None: the config has one set for all layers.
        writable: whether the config can state settings for the layers that the method applies to, and for no others.

    Raises:
        MethodError: `native` was given for a method without a native form.
    """
    method, rotary, known = patch.method, patch.rotary, family(config.model_type)
    settings = rope_dict(config, layer_type)
    extended = patch.target_length or method.extended_length(rotary)
    length = extended or int(config.max_position_embeddings)
    parameters = method.rope_parameters(rotary) if writable else None
    exact = True
    if parameters is None and patch.native:
        parameters = method.approximate_rope_parameters(rotary)
        exact = False
        if parameters is None:
            raise MethodError(f"{method.name} has no native form in transformers; leave native=True away")
    static = not method.depends_on_length(rotary) and rotary.rotated_pairs is None
    kept_original = _unrelated_settings(settings).get(_ORIGINAL_KEY)
    if parameters is not None and _needs_divisors(parameters, config, settings, kept_original):
        parameters = method.longrope_parameters(rotary) if static and _accepts(known, "longrope") else None
    if parameters is None:
        # Plain transformers raises a KeyError whose whole text is the rope type, so the way out must stand in it.
        rope_type = f"{PLUGIN_PREFIX}{method.name}: load with rope_ext_hf.from_pretrained"
        own_settings = {"rope_type": rope_type, "rope_theta": rotary.theta}
        return ConfigEncoding(own_settings, extended, length, loads_plainly=False)

    parameters = dict(parameters)
    if parameters["rope_type"] == "longrope" and static:
        # Where the config has this key itself, `generate` fills its cache anew beyond that length, for nothing here.
        renews = hasattr(config, _ORIGINAL_KEY)
        parameters[_ORIGINAL_KEY] = length if renews else _original_length(parameters["attention_factor"], length)
    if softmax_scale(known, settings) != 1.0:  # attention reads these two when it is built
        parameters |= {key: settings[key] for key in ("factor", "mscale_all_dim")}
    if kept_original is not None:
        parameters[_ORIGINAL_KEY] = kept_original
    parameters |= attention_factor_keys(parameters, known)
    saved_length = length
    if parameters["rope_type"] == "dynamic":
        saved_length = rotary.context_length
    elif parameters["rope_type"] == "linear" and not _states_extended_length(config, patch):
        saved_length = round(length / parameters["factor"])
    return ConfigEncoding(parameters, extended, saved_length, exact=exact)


def _original_length(attention_factor: float, length: int) -> int:
    """Return the original length that gives this factor to engines that compute it from two lengths under longrope.

    They compute sqrt(1 + ln(C / L0) / ln L0) for the length C, and 1 where C <= L0. A static method has the same list
    for short and for long inputs, so that the original length has no other meaning.
    """
    original: float = length ** (1 / max(1.0, attention_factor) ** 2)
    return round(original)


def _states_extended_length(config: Any, patch: Patch) -> bool:
    """Return whether max_position_embeddings beside a linear scaling is the extended length in this model's config."""
    own = patch.rotary.own
    if own is not None and own.method.name == "linear":  # the config of this very model shows it
        return linear_is_extended(config.model_type, patch.rotary.theta, own.context_length)
    return family(config.model_type).linear_extended


def _accepts(known: Family, rope_type: str) -> bool:
    """Return whether the config class of a family accepts a rope type."""
    return known.rope_types is None or rope_type in known.rope_types


def _needs_divisors(
    parameters: Mapping[str, Any], config: Any, settings: Mapping[str, Any], kept_original: int | None
) -> bool:
    """Return whether a method must be written as explicit divisors of the frequencies, a longrope, or not at all.

    That is so where the family does not accept the rope type, or reads one of its keys for another purpose too.

    Args:
        parameters: the settings that state the method.
        config: the text config before the patch.
        settings: its rope settings.
        kept_original: the original length that the family reads for another purpose; None: it does not.
    """
    known = family(config.model_type)
    if not _accepts(known, parameters["rope_type"]):
        return True
    if parameters["rope_type"] == "longrope":
        return False
    if getattr(config, "layer_rope_theta", None) and parameters["rope_theta"] != settings["rope_theta"]:
        return True  # the class reads the thetas of the layers instead of rope_theta
    scale = softmax_scale(known, settings)
    if scale != 1.0 and not math.isclose(scale, softmax_scale(known, parameters)):
        return True
    original = parameters.get(_ORIGINAL_KEY, kept_original)
    return kept_original is not None and original != kept_original


def softmax_scale(known: Family, settings: Mapping[str, Any]) -> float:
    """Return the factor by which rope settings make attention multiply its softmax scale; 1 in most families.

    The attention of DeepSeek and its kin computes it from `mscale_all_dim` and `factor` when it is built: (0.1 m ln s +
    1)^2.
    """
    mscale_all_dim = settings.get("mscale_all_dim")
    if not known.softmax_mscale or settings.get("rope_type", "default") == "default" or not mscale_all_dim:
        return 1.0
    return (0.1 * float(mscale_all_dim) * math.log(settings["factor"]) + 1) ** 2


def write_rope(
    config: Any, encoding: ConfigEncoding, patch: Patch, below: Sequence[Patch], layer_types: list[str | None]
) -> None:
    """Write a patch and its record into a copy of a config.

    Args:
        config: the copy, which is changed.
        encoding: how the config states the patch.
        patch: the patch.
        below: the patches underneath it, bottom first.
        layer_types: the layer types that the method applies to; [None]: all layers.
    """
    before = {key: copy.deepcopy(value) for key, value in config.to_dict().items() if key in SAVED_KEYS}
    before["max_position_embeddings"] = config.max_position_embeddings  # `to_dict` has max_seq_len for it (DBRX)
    parameters = write_settings(config, encoding, layer_types)  # changes the config
    record = patch.to_dict() | {
        "layer_types": layer_types,
        "rope_parameters": copy.deepcopy(parameters),
        "max_position_embeddings": encoding.saved_length,
        "before": before,
    }
    if below:
        record["below"] = [each.to_dict() for each in below]
    setattr(config, PATCH_KEY, record)


def write_settings(config: Any, encoding: ConfigEncoding, layer_types: list[str | None]) -> dict[str, Any]:
    """Write rope settings and the extended length into a copy of a config, and return the `rope_parameters`.

    A config class that does not accept the rope type keeps its `rope_parameters`, since it could not be saved with
    them; `saving` writes them into the file afterwards.

    Args:
        config: the copy, which is changed.
        encoding: how the config states the patch.
        layer_types: the layer types that the method applies to; [None]: all layers.
    """
    if encoding.rope_type == "longrope" and hasattr(config, _ORIGINAL_KEY):
        setattr(config, _ORIGINAL_KEY, encoding.parameters[_ORIGINAL_KEY])
    if vars(config).get("head_dim", 0) is None:  # transformers computes with it under yarn and longrope (Mixtral)
        config.head_dim = config.hidden_size // config.num_attention_heads
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    for layer_type in layer_types:
        written = _unrelated_settings(rope_dict(config, layer_type)) | dict(encoding.parameters)
        if layer_type is None:
            parameters = written
        else:
            parameters[layer_type] = written
            if encoding.parameters.get("truncate") is False:  # transformers looks for it here, and nowhere else
                parameters["truncate"] = False
    if _accepts(family(config.model_type), encoding.rope_type):
        config.rope_parameters = parameters
    config.max_position_embeddings = encoding.extended_length or config.max_position_embeddings
    return parameters


def _unrelated_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope settings that a family keeps for other purposes than the frequencies."""
    kept = {key: value for key, value in settings.items() if key not in _METHOD_KEYS and value is not None}
    original = settings.get(_ORIGINAL_KEY)
    if original is not None and set(kept) - GEOMETRY_KEYS:  # Ministral 3 counts its temperature from it
        kept[_ORIGINAL_KEY] = original
    return kept

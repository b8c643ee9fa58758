"""The rotary embedding that a transformers config describes.

Patches read `rope_parameters` (one set of settings, or one for each layer type) and the lengths of a config here;
`patched_config` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import method_class, resolve_method
from rope_ext_hf.methods.static import Default
from rope_ext_hf.models.config_keys import rotated_dims, text_settings
from rope_ext_hf.models.families import family, linear_is_extended, original_length_of_linear, runs_short_list
from rope_ext_hf.models.family_settings import config_number

GUESSED_LENGTH_KEY = "rope_guessed_length"
"""The config key that repeats max_position_embeddings where a conversion had to guess it; other programs ignore it."""
PLUGIN_PREFIX = "rope_ext_hf/"
"""The beginning of the rope types of this package, which are written where transformers has no type of its own."""
EXPECTED_LINES = (
    "transformers.modeling_rope_utils",
    f"'rope_type'='{PLUGIN_PREFIX}",
    "'longrope': {'short_mscale', 'long_mscale'}",
    "'longrope': {'long_mscale', 'short_mscale'}",
    "'yarn': {'attn_factor'}",
)
"""The logger of transformers that writes of rope settings that it does not know, and a part of each of its lines.

They are on rope types of this package, and on keys that are there for other engines (`KEYS_FOR_OTHER_ENGINES`).
"""

_METHOD_OF_TYPE = {"dynamic": "dynamic-ntk", "su": "longrope"}
"""The method of each rope type that has another name than its method."""
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "su", "yarn")
_HAS_ORIGINAL = frozenset({"yarn", "longrope", "su", "llama3"})
"""Rope types whose settings state the original length, in tokens."""


@dataclass(frozen=True)
class ConfigRope:
    """The rotary embedding that a config describes for one layer type."""

    plain: Rotary  # without the scaling; its `trained_length` is the original length
    method: RopeMethod  # the scaling; `default` where there is none
    context_length: int  # tokens that the model is for
    rule: str  # which reading of the config gave `context_length`, for `describe`
    note: str = ""  # a sentence on what the model's class does differently from its config

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of the model as loaded, with the config's own scaling applied; a patch extends this."""
        if self.method.name == "default" or not self.method.composable:
            return Rotary(self.plain.dim, self.plain.theta, self.context_length, self.plain.rotated_pairs)
        return self.plain.scaled(self.method, context_length=self.context_length)

    @property
    def follows_length(self) -> bool:
        """True if the model, as loaded, has other frequencies for longer inputs."""
        return self.method.depends_on_length(self.plain)

    def describes(self, inv_freq: Tensor) -> bool:
        """Return whether frequencies of a rotary module, (dim // 2,), are those stated here, up to rounding."""
        stated = self.method.frequencies(self.plain, self.plain.trained_length).inv_freq
        # A cast to bfloat16 or float16, which may have been undone since, leaves relative differences below 1e-2;
        # another base or another number of dims leaves far larger ones. Near zero float16 keeps multiples of 6e-8 only.
        same_shape = inv_freq.shape == stated.shape
        return same_shape and torch.allclose(inv_freq.double().cpu(), stated, rtol=1e-2, atol=6e-8)

    def is_kept(self, method: RopeMethod, rotary: Rotary) -> bool:
        """Return whether a method over a rotary embedding gives the shortest inputs the frequencies stated here."""
        ours, stated = method.frequencies(rotary, 1), self.method.frequencies(self.plain, 1)
        same = torch.allclose(ours.inv_freq, stated.inv_freq, rtol=1e-9, atol=0)
        return same and math.isclose(ours.attention_factor, stated.attention_factor, rel_tol=1e-9)


def rope_dict(config: Any, layer_type: str | None) -> dict[str, Any]:
    """Return a copy of the rope settings of one layer type; with None, of the one set that all layers share.

    Raises:
        UnsupportedModelError: the config has no such settings, or they have no rope_theta.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters and family(config.model_type).angle_table:  # its config does not mention the table
        parameters = {"rope_type": "default", "rope_theta": config_number(config, "rope_theta")}
    settings = parameters.get(layer_type) if layer_type is not None else parameters
    if not settings or settings.get("rope_theta") is None:
        layers = f" for its {layer_type!r} layers" if layer_type else ""
        raise UnsupportedModelError(
            f"the config of this {config.model_type!r} model has no rope_parameters with a rope_theta{layers}, in "
            "which a patch is stated and saved. If its class reads them, set them in the config, such as "
            "rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0}; a class that reads none cannot be "
            "patched (docs/models.md lists the models that can)"
        )
    return dict(settings)


def read_rope(config: Any, dim: int, layer_type: str | None = None) -> ConfigRope:
    """Return the rotary embedding that a config describes for a layer type; None: for all layers.

    Args:
        config: a text config of transformers, without the patches that are recorded in it.
        dim: how many dims of each head rotate.
        layer_type: a key of `rope_parameters`, where that has settings for each layer type.

    Raises:
        UnsupportedModelError: theta or max_position_embeddings is missing, or the rope type is unknown.
        MethodError: a setting is impossible.
    """
    settings = rope_dict(config, layer_type)
    rotary = Rotary(dim, float(settings["rope_theta"]), _stated_length(config))
    rope_type = settings.get("rope_type", "default")
    if rope_type == "proportional":  # Gemma 4: the slowest pairs do not rotate
        rotary = replace(rotary, rotated_pairs=int(settings.get("partial_rotary_factor", 1.0) * dim // 2))
        rope_type = "linear" if settings.get("factor", 1.0) != 1.0 else "default"
    if rope_type == "default":
        read = ConfigRope(rotary, Default(), rotary.trained_length, "max_position_embeddings")
    else:
        read = _read_scaling(config, rotary, rope_type, settings, layer_type)
    return replace(read, rule=_rule_of_length(config, read.rule))


def _read_scaling(
    config: Any, rotary: Rotary, rope_type: str, settings: dict[str, Any], layer_type: str | None
) -> ConfigRope:
    """Return a rotary embedding with the scaling that a config describes, whatever its type of rope settings.

    Args:
        config: the text config.
        rotary: the rotary embedding, for the length that the config states as if there were no scaling.
        rope_type: the type of the scaling.
        settings: the rope settings of the layer type.
        layer_type: as `read_rope` takes it.
    """
    stated = rotary.trained_length
    _check_rope_type(config, rope_type)
    if rope_type == "dynamic" and family(config.model_type).alpha_is_ntk and settings.get("alpha"):
        ntk = resolve_method("ntk", None, factor=float(settings["alpha"]))
        rule = "max_position_embeddings: the dynamic scaling of this family with alpha is a static ntk"
        return ConfigRope(rotary, ntk, stated, rule)

    original = _original_length(config, rope_type, settings, stated)
    note = ""
    if rope_type in ("longrope", "su"):
        settings, note = runs_short_list(config.model_type, settings)
    elif rope_type == "yarn":
        note = _attn_factor_note(settings)
    parameters = _method_parameters(config, rope_type, settings, layer_type)
    if rope_type in ("yarn", "longrope", "su"):
        parameters.setdefault("factor", max(1.0, stated / original))
    factor = parameters.get("factor", 1.0)
    # Configs use two conventions beside a linear scaling.
    if rope_type == "linear" and linear_is_extended(config.model_type, rotary.theta, stated):
        original = original_length_of_linear(config.model_type, stated, factor)
        context_length, rule = stated, "linear: max_position_embeddings is the extended length in this family"
    else:
        context_length, rule = _context_length(rope_type, stated, original, factor)
    plain = replace(rotary, trained_length=original)
    method = resolve_method(_METHOD_OF_TYPE.get(rope_type, rope_type), plain, **parameters)
    return ConfigRope(plain, method, context_length, rule, note)


def _rule_of_length(config: Any, rule: str) -> str:
    """Return the rule that gives the context length, with what is unusual about the length that the config states."""
    if _dual_chunk_length(config) is not None:
        rule = f"dual_chunk_attention_config: the original length of attention which transformers does not run; {rule}"
    if getattr(config, GUESSED_LENGTH_KEY, None) == _stated_length(config):
        rule += ", which is a guess: the weights come from Meta's format, which states no length"
    return rule


def rope_by_sizes(config: Any, layer_type: str | None, values: Mapping[str, Any] | None = None) -> ConfigRope:
    """Return the rotary embedding that a config describes for a layer type, as `read_rope` does, without a model.

    A model has as many rotated dims as its frequencies need. Here the number follows from sizes in the config.

    Args:
        config: a text config without patches.
        layer_type: as `read_rope` takes it.
        values: the values of the config under their usual keys; None: those are looked up in the class of the config,
            which is imported for it.
    """
    values = text_settings(config.to_dict()) if values is None else values
    settings = rope_dict(config, layer_type)
    proportional = settings.get("rope_type") == "proportional"
    partial = values.get("partial_rotary_factor") or settings.get("partial_rotary_factor")
    share = {} if proportional or partial is None else {"partial_rotary_factor": partial}
    return read_rope(config, rotated_dims(values, share, layer_type), layer_type)


def _stated_length(config: Any) -> int:
    """Return the length in tokens that a config states, as max_position_embeddings in most models."""
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None:
        raise UnsupportedModelError(
            f"the config of this {config.model_type!r} model has no max_position_embeddings, so the length it was "
            "trained with is not known; set it in the config"
        )
    return _dual_chunk_length(config) or int(stated)


def _dual_chunk_length(config: Any) -> int | None:
    """Return the trained length in tokens of a model whose config states dual chunk attention (Qwen2.5-1M).

    transformers does not run that attention, so that the longer length of the config is not that of the model. None:
    the config states no such attention, or no shorter length.
    """
    stated = getattr(config, "dual_chunk_attention_config", None)
    length = stated.get("original_max_position_embeddings") if isinstance(stated, Mapping) else None
    return length if type(length) is int and 0 < length < int(config.max_position_embeddings) else None


def _check_rope_type(config: Any, rope_type: Any) -> None:
    """Raise UnsupportedModelError for a rope type that is not one of transformers' own."""
    if rope_type in _ROPE_TYPES:
        return
    saved_patched = str(rope_type).startswith(PLUGIN_PREFIX)
    raise UnsupportedModelError(
        f"unknown rope type {rope_type!r} in the config of this {config.model_type!r} model; known: "
        f"{', '.join(_ROPE_TYPES)}, proportional"
        + ("; load this folder with rope_ext_hf.from_pretrained" if saved_patched else "")
    )


def _original_length(config: Any, rope_type: str, settings: Mapping[str, Any], stated: int) -> int:
    """Return the length in tokens that a model was for before scaling; a key at the top of the config wins (Phi-3)."""
    if rope_type not in _HAS_ORIGINAL:
        return stated
    at_top = getattr(config, "original_max_position_embeddings", None)
    return int(at_top or settings.get("original_max_position_embeddings") or stated)


def _method_parameters(
    config: Any, rope_type: str, settings: Mapping[str, Any], layer_type: str | None
) -> dict[str, Any]:
    """Return the parameters that rope settings state for the method behind a rope type; whole numbers become float."""
    accepted = method_class(_METHOD_OF_TYPE.get(rope_type, rope_type)).parameters
    stated = {key: value for key, value in settings.items() if key in accepted and value is not None}
    if rope_type == "yarn":
        if layer_type is not None:  # transformers reads `truncate` beside the settings of the layer types
            stated["truncate"] = config.rope_parameters.get("truncate", True)
        for key in ("beta_fast", "beta_slow"):
            if not stated.get(key, True):  # transformers takes a 0 for "not given"
                del stated[key]
    parameters: dict[str, Any] = {}
    for key, value in stated.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        parameters[key] = float(value) if whole else value
    if rope_type == "dynamic":
        parameters["growth"] = "hf"
    return parameters


def _context_length(rope_type: str, stated: int, original: int, factor: float) -> tuple[int, str]:
    """Return the length in tokens that a model is for, and the rule that gives it.

    `stated` is max_position_embeddings, and `original` the length before the scaling.
    """
    if rope_type == "default":
        return stated, "max_position_embeddings"
    if rope_type == "linear":
        return round(stated * factor), f"linear: max_position_embeddings {stated:,} x the factor {factor:g}"
    if rope_type == "yarn":
        extended = round(original * factor)
        if extended > stated:
            return extended, f"yarn: the original length {original:,} x the factor {factor:g}"
    if rope_type in ("longrope", "su") and stated <= original:
        return round(original * factor), f"longrope: the original length {original:,} x the factor {factor:g}"
    if rope_type == "llama3":  # its factor is not a ratio of lengths: 8 or 32 over 8,192, and 131,072 either way
        return stated, "llama3: max_position_embeddings, whatever the factor"
    return stated, f"{rope_type}: max_position_embeddings"


def _attn_factor_note(settings: Mapping[str, Any]) -> str:
    """Return a sentence on an attn_factor of yarn settings, which transformers ignores; empty if there is none."""
    if settings.get("attn_factor", 1) == 1 or settings.get("attention_factor") is not None:
        return ""
    return (
        f"attn_factor {settings['attn_factor']!r} of its yarn settings is read by some engines, but not by "
        "transformers. For the same result everywhere, multiply it by 0.1 ln s + 1 and state it as attention_factor."
    )

"""RoPE in a transformers config, read and written; no other module does either.

Reading: `rope_parameters` (flat, or one dict per layer type), theta, lengths, per rope type. Writing: a rope type of
transformers that computes the same where there is one, else a rope type under our own name, so that plain loading stops
there. Beside either stands a record under the top-level key `rope_ext_hf`: the patch, and the settings before it.
transformers keeps unknown keys, so the record survives saving and loading.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import CheckpointError, MethodError, UnknownMethodError, UnsupportedModelError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods, method_from_dict, resolve_method, rotary_from_dict
from rope_ext_hf.patches.config_keys import GEOMETRY_KEYS
from rope_ext_hf.patches.engine_keys import KEYS_FOR_OTHER_ENGINES, attention_factor_keys, former_keys
from rope_ext_hf.patches.families import Family, family, linear_is_extended, original_length_of_linear, runs_short_list
from rope_ext_hf.patches.family_settings import config_number

PATCH_KEY = "rope_ext_hf"
PAIRING_KEY = "rope_pairing"  # the config key that states in which pairing the weights are, where they were converted
GUESSED_LENGTH_KEY = "rope_guessed_length"
"""The config key that states max_position_embeddings as a conversion guessed it; other programs pass over it."""
_PLUGIN_PREFIX = "rope_ext_hf/"
UNKNOWN_TYPE = ("transformers.modeling_rope_utils", f"'rope_type'='{_PLUGIN_PREFIX}")
"""The logger, and what its line contains, that misses transformers' own check of a rope type of ours."""

_METHODS = {"dynamic": "dynamic-ntk", "su": "longrope"}  # where the method of a rope type has another name
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "su", "yarn")
_HAS_ORIGINAL = frozenset({"yarn", "longrope", "su", "llama3"})
_METHOD_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "alpha"}
    | {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}
    | {"short_factor", "long_factor"}
    | KEYS_FOR_OTHER_ENGINES
)
"""The rope settings that describe a method; a family may keep others beside them."""
_ORIGINAL_KEY = "original_max_position_embeddings"
"""At the top level of a config it overrides the one in rope_parameters (Phi-3)."""
SAVED_KEYS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim")
"""Every config key that a patch may change."""


@dataclass(frozen=True)
class PatchSpec:
    """One patch, with every parameter of its method filled in."""

    method: RopeMethod
    rotary: Rotary  # what it is applied to, scalings underneath included
    target_length: int | None = None  # tokens that were asked for; None: the method's own
    native: bool = False  # whether a native form that behaves otherwise is accepted
    layers: tuple[str | int, ...] | None = None  # as asked for; None: those that attend to everything before them

    def to_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "method": self.method.to_dict(),
            "rotary": self.rotary.to_dict(),
            "target_length": self.target_length,
            "native": self.native,
        }
        return saved if self.layers is None else saved | {"layers": list(self.layers)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PatchSpec:
        """The inverse of `to_dict`; other keys are left alone."""
        try:
            method = method_from_dict(saved["method"])
            rotary = rotary_from_dict(saved["rotary"])
            layers, target_length, native = saved.get("layers"), saved["target_length"], saved["native"]
        except (KeyError, TypeError) as error:
            raise MethodError(f"not a saved patch: {error!r}") from error
        whole = type(target_length) is int and 0 < target_length <= MOST_TOKENS
        listed = isinstance(layers, list | tuple) and all(type(each) in (int, str) for each in layers)
        for key, value, right, kind in (
            ("target_length", target_length, target_length is None or whole, "a positive whole number or null"),
            ("native", native, isinstance(native, bool), "true or false"),
            ("layers", layers, layers is None or listed, "a list of layer numbers and layer types"),
        ):
            if not right:
                raise MethodError(f"not a saved patch: {key} must be {kind}, and is {short(repr(value))}")
        return cls(method, rotary, target_length, native, layers and tuple(layers))


@dataclass(frozen=True)
class ConfigRope:
    """The rotary embedding that a config describes for one layer type."""

    plain: Rotary  # without its scaling; `trained_length` is the original length
    method: RopeMethod  # the scaling; `default` where there is none
    context_length: int  # tokens that the model is for
    rule: str  # which reading of the config gave `context_length`
    note: str = ""  # what the model's class does differently from its config

    @property
    def rotary(self) -> Rotary:
        """What a patch extends: the rotary embedding with its scaling underneath."""
        if self.method.name == "default" or not self.method.composable:
            return Rotary(self.plain.dim, self.plain.theta, self.context_length, self.plain.rotated_pairs)
        return self.plain.scaled(self.method, context_length=self.context_length)


def rope_dict(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The rope settings of one layer type (None: of a model with one set for all layers)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters and family(config.model_type).angle_table:  # a table that the config does not mention
        parameters = {"rope_type": "default", "rope_theta": config_number(config, "rope_theta")}
    settings = parameters.get(layer_type) if layer_type is not None else parameters
    if not settings or settings.get("rope_theta") is None:
        raise UnsupportedModelError(
            f"the config of this {config.model_type!r} model has no rope_parameters with a rope_theta"
            + (f" for its {layer_type!r} layers" if layer_type else "")
        )
    return dict(settings)


def read_rope(config: Any, dim: int, layer_type: str | None = None) -> ConfigRope:
    """The rotary embedding, of `dim` dims per head, that a config describes for a layer type (None: for all)."""
    settings = rope_dict(config, layer_type)
    rope_type, theta = settings.get("rope_type", "default"), float(settings["rope_theta"])
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        raise UnsupportedModelError(
            f"the config of this {config.model_type!r} model has no max_position_embeddings, so the length it was "
            "trained with is not known; set it in the config"
        )
    most, dual = int(most), _dual_chunk_length(config)
    if by_dual_chunks := dual is not None and dual < most:
        most = dual
    rotated_pairs = None
    if rope_type == "proportional":
        rotated_pairs = int(settings.get("partial_rotary_factor", 1.0) * dim // 2)
        rope_type = "linear" if settings.get("factor", 1.0) != 1.0 else "default"
    if rope_type not in _ROPE_TYPES:
        ours = str(rope_type).startswith(_PLUGIN_PREFIX)
        raise UnsupportedModelError(
            f"unknown rope type {rope_type!r} in the config of this {config.model_type!r} model; known: "
            f"{', '.join(_ROPE_TYPES)}, proportional"
            + ("; load this folder with rope_ext_hf.from_pretrained" if ours else "")
        )
    if rope_type == "dynamic" and family(config.model_type).alpha_is_ntk and settings.get("alpha"):
        method = resolve_method("ntk", None, factor=float(settings["alpha"]))
        rule = "max_position_embeddings: the dynamic scaling of this family with alpha is a static ntk"
        return ConfigRope(Rotary(dim, theta, most, rotated_pairs), method, most, rule)
    original = most
    if rope_type in _HAS_ORIGINAL:
        in_config = getattr(config, "original_max_position_embeddings", None)
        original = int(in_config or settings.get("original_max_position_embeddings") or most)
    note = ""
    if rope_type in ("longrope", "su"):
        settings, note = runs_short_list(config.model_type, settings)
    name = _METHODS.get(rope_type, rope_type)
    accepted = list_methods()[name].parameters
    given = {key: value for key, value in settings.items() if key in accepted and value is not None}
    if rope_type == "yarn" and layer_type is not None:  # transformers reads it from the top level of nested dicts
        given["truncate"] = config.rope_parameters.get("truncate", True)
    if name in ("yarn", "longrope") and "factor" not in given:
        given["factor"] = max(1.0, most / original)
    if name == "yarn":  # transformers reads a 0 as "not given"
        given = {k: v for k, v in given.items() if not (k in ("beta_fast", "beta_slow") and not v)}
    given = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in given.items()}
    if rope_type == "dynamic":
        given["growth"] = "hf"
    factor = given.get("factor", 1.0)
    if name == "linear" and linear_is_extended(config.model_type, theta, most):  # two conventions are in use
        original, context_length = original_length_of_linear(config.model_type, most, factor), most
        rule = "linear: max_position_embeddings is the extended length in this family"
    elif name == "linear":
        context_length, rule = round(most * factor), f"linear: max_position_embeddings {most:,} x the factor {factor:g}"
    else:
        context_length, rule = _context_length(rope_type, most, original, factor)
    if by_dual_chunks:
        rule = f"dual_chunk_attention_config: the original length of attention which transformers does not run; {rule}"
    if rope_type == "yarn" and settings.get("attn_factor", 1) != 1 and settings.get("attention_factor") is None:
        dropped = (
            f"attn_factor {settings['attn_factor']!r} of its yarn is not read by transformers, and is by some engines"
        )
        note = f"{note} {dropped}: state it as attention_factor, times 0.1 ln s + 1, to have it everywhere.".strip()
    if getattr(config, GUESSED_LENGTH_KEY, None) == most:
        rule += ", which is a guess: the weights come from Meta's format, which states no length"
    plain = Rotary(dim, theta, original, rotated_pairs)
    return ConfigRope(plain, resolve_method(name, plain, **given), context_length, rule, note)


def _dual_chunk_length(config: Any) -> int | None:
    """The trained length in tokens of a model that states dual chunk attention (Qwen2.5-1M) for longer inputs."""
    stated = getattr(config, "dual_chunk_attention_config", None)
    length = stated.get("original_max_position_embeddings") if isinstance(stated, Mapping) else None
    return length if type(length) is int and length > 0 else None


def _context_length(rope_type: str, most: int, original: int, factor: float) -> tuple[int, str]:
    """The length in tokens that a model is for, and the rule it follows from; `most` is max_position_embeddings."""
    if rope_type == "yarn":
        if (extended := round(original * factor)) > most:
            return extended, f"yarn: the original length {original:,} x the factor {factor:g}"
        return most, "yarn: max_position_embeddings"
    if rope_type in ("longrope", "su") and most <= original:
        return round(original * factor), f"longrope: the original length {original:,} x the factor {factor:g}"
    if rope_type == "llama3":  # its factor is no ratio of lengths: 8 or 32 over 8,192, and 131,072 either way
        return most, "llama3: max_position_embeddings, whatever the factor"
    return most, "max_position_embeddings" if rope_type == "default" else f"{rope_type}: max_position_embeddings"


@dataclass(frozen=True)
class ConfigEncoding:
    """How a patched model is written into a config."""

    parameters: Mapping[str, Any]  # `rope_parameters` of the layers that the method applies to
    extended_length: int | None  # tokens that the patched model is for; None: it follows the input
    saved_length: int
    """max_position_embeddings as engines expect it: linear and dynamic multiply it by the factor, the others do not."""
    loads_plainly: bool = True  # whether plain transformers loads it; False: it stops there, naming this package
    exact: bool = True  # whether plain loading computes the same

    @property
    def rope_type(self) -> str:
        return str(self.parameters["rope_type"])


def config_encoding(config: Any, spec: PatchSpec, layer_type: str | None, *, writable: bool = True) -> ConfigEncoding:
    """How a config, as it was before a patch, states it for one of the layer types; nothing is changed.

    `writable`: whether it can state settings for the layers that the method applies to, and no others.
    """
    method, rotary, known = spec.method, spec.rotary, family(config.model_type)
    settings = rope_dict(config, layer_type)
    extended = spec.target_length or method.extended_length(rotary)
    length, exact = extended or int(config.max_position_embeddings), True
    parameters = method.rope_parameters(rotary) if writable else None
    if parameters is None and spec.native:
        parameters, exact = method.approximate_rope_parameters(rotary), False
        if parameters is None:
            raise MethodError(f"{method.name} has no native form in transformers; leave native=True away")
    static = not method.depends_on_length(rotary) and rotary.rotated_pairs is None
    kept_original = _unrelated_settings(settings).get("original_max_position_embeddings")
    if parameters is not None and _needs_divisors(parameters, config, settings, kept_original):
        parameters = method.longrope_parameters(rotary) if static and _accepts(known, "longrope") else None
    if parameters is None:
        # transformers raises KeyError with the rope type alone: the way out must stand in it
        rope_type = f"{_PLUGIN_PREFIX}{method.name}: load with rope_ext_hf.from_pretrained"
        plugin = {"rope_type": rope_type, "rope_theta": rotary.theta}
        return ConfigEncoding(plugin, extended, length, loads_plainly=False)
    parameters = dict(parameters)
    if parameters["rope_type"] == "longrope" and hasattr(config, _ORIGINAL_KEY) and static:
        # generate() starts over when it crosses the original length; a static method changes nothing there.
        parameters["original_max_position_embeddings"] = length
    if softmax_scale(known, settings) != 1.0:  # the attention reads these when it is built
        parameters |= {key: settings[key] for key in ("factor", "mscale_all_dim")}
    if kept_original is not None:
        parameters["original_max_position_embeddings"] = kept_original
    parameters |= attention_factor_keys(parameters, known)
    saved = length
    if parameters["rope_type"] == "dynamic":
        saved = rotary.context_length
    elif parameters["rope_type"] == "linear":
        own, extended_already = rotary.own, known.linear_extended
        if own is not None and own.method.name == "linear":  # this model's own config tells
            extended_already = linear_is_extended(config.model_type, rotary.theta, own.context_length)
        saved = length if extended_already else round(length / parameters["factor"])
    return ConfigEncoding(parameters, extended, saved, exact=exact)


def _accepts(known: Family, rope_type: str) -> bool:
    return known.rope_types is None or rope_type in known.rope_types


def _needs_divisors(
    parameters: Mapping[str, Any], config: Any, settings: Mapping[str, Any], kept_original: int | None
) -> bool:
    """Whether settings must be written as explicit divisors, because the family reads its keys for other ends too."""
    known = family(config.model_type)
    if not _accepts(known, parameters["rope_type"]):
        return True
    if parameters["rope_type"] == "longrope":
        return False
    # Thetas of layers are read instead of rope_theta.
    if getattr(config, "layer_rope_theta", None) and parameters["rope_theta"] != settings["rope_theta"]:
        return True
    scale = softmax_scale(known, settings)
    if scale != 1.0 and not math.isclose(scale, softmax_scale(known, parameters)):
        return True
    original = parameters.get("original_max_position_embeddings", kept_original)
    return kept_original is not None and original != kept_original


def softmax_scale(known: Family, settings: Mapping[str, Any]) -> float:
    """What the attention of DeepSeek and its kin multiplies its softmax scale by when it is built."""
    all_dim = settings.get("mscale_all_dim")
    if not known.softmax_mscale or settings.get("rope_type", "default") == "default" or not all_dim:
        return 1.0
    return (0.1 * float(all_dim) * math.log(settings["factor"]) + 1) ** 2


def write_rope(
    config: Any, encoding: ConfigEncoding, spec: PatchSpec, below: Sequence[PatchSpec], layer_types: list[str | None]
) -> None:
    """Write a patch, over those `below`, bottom first, and its record into a config; see `write_settings`."""
    before = {key: copy.deepcopy(value) for key, value in config.to_dict().items() if key in SAVED_KEYS}
    before["max_position_embeddings"] = config.max_position_embeddings  # which DBRX states as max_seq_len
    record = spec.to_dict() | {
        "layer_types": layer_types,
        "rope_parameters": copy.deepcopy(write_settings(config, encoding, layer_types)),
        "max_position_embeddings": encoding.saved_length,
        "before": before,
    }
    if below:
        record["below"] = [each.to_dict() for each in below]
    setattr(config, PATCH_KEY, record)


def write_settings(config: Any, encoding: ConfigEncoding, layer_types: list[str | None]) -> dict[str, Any]:
    """Write rope settings and length into a copy of a config, for these layer types ([None]: all); the settings."""
    if encoding.rope_type == "longrope" and hasattr(config, _ORIGINAL_KEY):
        setattr(config, _ORIGINAL_KEY, encoding.parameters[_ORIGINAL_KEY])
    if vars(config).get("head_dim", 0) is None:  # Mixtral: transformers' yarn and longrope do arithmetic with it
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
        config.rope_parameters = parameters  # otherwise the config class refuses to be saved; see saving.py
    config.max_position_embeddings = encoding.extended_length or config.max_position_embeddings
    return parameters


def _unrelated_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings that a family keeps for other ends than the frequencies."""
    kept = {key: value for key, value in settings.items() if key not in _METHOD_KEYS and value is not None}
    original = settings.get("original_max_position_embeddings")
    if original is not None and set(kept) - GEOMETRY_KEYS:  # Ministral 3 counts its temperature from it
        kept["original_max_position_embeddings"] = original
    return kept


def original_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a config dict before the patch recorded in it; None where there is no record."""
    record = config.get(PATCH_KEY)
    if record is None:
        return None
    checked_specs(record, "this config")
    try:
        written, before = record["rope_parameters"], record["before"]
        restored = {key: copy.deepcopy(before[key]) for key in SAVED_KEYS if key in before}
        former = former_keys(config["model_type"], written, record["layer_types"])
        agree = all(config[key] == former.get(key) for key in _former_in(record) & config.keys())
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the {PATCH_KEY!r} record of this config is damaged ({error!r}); delete that key"
        ) from error
    if not agree or not _is_subset(config.get("rope_parameters"), written):
        raise CheckpointError(
            f"this config carries a {PATCH_KEY!r} record, but its rope settings were changed since "
            f"(rope_parameters, or rope_scaling beside it); delete the {PATCH_KEY!r} key to use them as they stand"
        )
    return restored


def checked_specs(record: Any, owner: str) -> list[PatchSpec]:
    """`saved_specs` for a record that others may have written; `owner` is what holds it, for error messages."""
    try:
        return saved_specs(record)
    except UnknownMethodError as error:
        raise CheckpointError(
            f"{owner} records a patch with a method that is not registered here: {error}. Import the module that "
            f"registers it; or, where rope_type is one of transformers' own, delete the {PATCH_KEY!r} key"
        ) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if isinstance(error, MethodError) else repr(error)
        raise CheckpointError(f"the {PATCH_KEY!r} record of {owner} is damaged ({reason}); delete that key") from error


def written_keys(record: Mapping[str, Any]) -> set[str]:
    """The top-level keys of a config with this record that go with the patch."""
    return {PATCH_KEY, *SAVED_KEYS, *_former_in(record)}


def _former_in(record: Mapping[str, Any]) -> set[str]:
    """The top-level keys of a config.json that state its rope settings in the former spelling, beside the record."""
    keys = record.get("former", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"former is {keys!r}")
    return {"rope_scaling", *keys} - {PATCH_KEY, *SAVED_KEYS}


def saved_specs(record: Mapping[str, Any]) -> list[PatchSpec]:
    """The patches of a record, bottom first; MethodError: it is damaged."""
    return [PatchSpec.from_dict(each) for each in (*record.get("below", ()), record)]


def recorded_specs(config: Any) -> list[PatchSpec]:
    """`saved_specs` of a config object; none where it has no record."""
    record = vars(config).get(PATCH_KEY)
    return [] if record is None else saved_specs(record)


def _is_subset(now: Any, then: Any) -> bool:
    """Whether every setting written then still stands; transformers may have added defaults beside them."""
    if isinstance(then, Mapping):
        return isinstance(now, Mapping) and all(_is_subset(now.get(key), value) for key, value in then.items())
    return bool(now == then)

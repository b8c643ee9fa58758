"""The one place that knows how transformers spells RoPE in a config, read and written.

Reading: `rope_parameters` (flat or one dict per layer type), theta, the original length, per rope type. Writing: the
native form of a method where there is one, else a rope type under our own name, so that plain loading stops there.
Beside either form goes a record under the top-level key `rope_ext_hf`: the method, and what the config said before.
transformers keeps unknown keys, so the record survives saving and loading.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods, method_from_dict, resolve_method
from rope_ext_hf.patches.families import Family

__all__ = [
    "PAIRING_KEY",
    "PLUGIN_PREFIX",
    "RECORD",
    "SAVED_KEYS",
    "SLIDING",
    "Config",
    "original_settings",
    "read_rope",
    "rope_dict",
    "sliding_layers",
    "write_rope",
]

RECORD = "rope_ext_hf"
PAIRING_KEY = "rope_pairing"
"""The config key that says in which pairing the weights are, where they were converted."""
PLUGIN_PREFIX = "rope_ext_hf/"
SLIDING = frozenset({"sliding_attention", "chunked_attention"})
"""Layer types that never attend past their window, whatever their rotary embedding does."""

# transformers' rope type -> our method and the parameters it takes from the dict.
_METHOD_OF_ROPE_TYPE: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {}),
    "dynamic": ("dynamic-ntk", {"growth": "hf"}),
    "yarn": ("yarn", {}),
    "longrope": ("longrope", {}),
    "su": ("longrope", {}),
    "llama3": ("llama3", {}),
}
_HAS_ORIGINAL = frozenset({"yarn", "longrope", "su", "llama3"})
_METHOD_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}
    | {"short_factor", "long_factor", "short_mscale", "long_mscale"}
)
"""The rope settings that say a method."""
# Everything a patch may change in a config.
SAVED_KEYS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim")


class Config(Protocol):
    """The part of a transformers config used here; attributes differ from family to family."""

    model_type: str
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


def rope_dict(config: Config, layer_type: str | None) -> dict[str, Any]:
    """The rope settings of one layer type (None: of a model that has one set for all layers)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get(layer_type) if layer_type is not None else parameters
    if not found or found.get("rope_theta") is None:
        raise UnsupportedModelError(
            f"the config of this {config.model_type!r} model has no rope_parameters with a rope_theta"
            + (f" for its {layer_type!r} layers" if layer_type else "")
        )
    return dict(found)


def read_rope(config: Config, dim: int, layer_type: str | None = None) -> tuple[Rotary, RopeMethod]:
    """Geometry and method a config describes, for `dim` rotated dims per head.

    The trained length is the original one where the rope type keeps it (yarn, llama3, longrope); linear and dynamic
    keep it in max_position_embeddings, as transformers documents.
    """
    settings = rope_dict(config, layer_type)
    rope_type = settings.get("rope_type", "default")
    rotated_pairs = None
    if rope_type == "proportional":
        rotated_pairs = int(settings.get("partial_rotary_factor", 1.0) * dim // 2)
        rope_type = "linear" if settings.get("factor", 1.0) != 1.0 else "default"
    if rope_type not in _METHOD_OF_ROPE_TYPE:
        raise UnsupportedModelError(
            f"unknown rope type {rope_type!r} in the config of this {config.model_type!r} model; "
            f"known: {', '.join(sorted(_METHOD_OF_ROPE_TYPE))}, proportional"
            + (
                "; load this folder with rope_ext_hf.from_pretrained"
                if str(rope_type).startswith(PLUGIN_PREFIX)
                else ""
            )
        )
    trained_length = config.max_position_embeddings
    if rope_type in _HAS_ORIGINAL:
        trained_length = (
            getattr(config, "original_max_position_embeddings", None)
            or settings.get("original_max_position_embeddings")
            or trained_length
        )
    rotary = Rotary(dim, float(settings["rope_theta"]), int(trained_length), rotated_pairs)
    name, implied = _METHOD_OF_ROPE_TYPE[rope_type]
    accepted = {item.name for item in fields(list_methods()[name])}
    given = {key: value for key, value in settings.items() if key in accepted and value is not None}
    if rope_type == "yarn" and layer_type is not None:  # transformers reads it from the top level of nested dicts
        given["truncate"] = config.rope_parameters.get("truncate", True)
    if name in ("yarn", "longrope") and "factor" not in given:
        given["factor"] = max(1.0, config.max_position_embeddings / trained_length)
    if name == "yarn":  # transformers takes a 0 for "not given"
        given = {k: v for k, v in given.items() if not (k in ("beta_fast", "beta_slow") and not v)}
    given = {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in given.items()}
    return rotary, resolve_method(name, rotary, **(given | implied))


def write_rope(
    config: Any,
    rotary: Rotary,
    method: RopeMethod,
    family: Family,
    layer_types: list[str | None],
    target_length: int | None,
    native: bool,
) -> str:
    """Write a method into a config, which must be a copy of the caller's own.

    Args:
        layer_types: the layer types it applies to; [None] for a config with one set for all layers.
        target_length: the length asked for in tokens, where the method's parameters do not say it.
        native: accept a native form that is known to behave otherwise.

    Returns:
        The rope type plain transformers will read; it begins with `PLUGIN_PREFIX` where it will stop there.
    """
    before = {key: copy.deepcopy(value) for key, value in config.to_dict().items() if key in SAVED_KEYS}
    form = method.native(rotary)
    if form is None and native:
        form = method.approximate_rope_parameters(rotary)
        if form is None:
            raise MethodError(f"{method.name} has no native form in transformers; leave native=True away")
    accepted = family.rope_types
    if form is not None and accepted is not None and form["rope_type"] not in accepted:
        form = None if method.length_dependent or "longrope" not in accepted else method.longrope_parameters(rotary)
    if form is None:
        form = {"rope_type": PLUGIN_PREFIX + method.name, "rope_theta": rotary.theta}

    extended = target_length or method.extended_length(rotary)
    length = extended or config.max_position_embeddings
    if form["rope_type"] == "dynamic":  # transformers takes its trained length from max_position_embeddings
        length = rotary.trained_length
    if family.original_in_config and form["rope_type"] == "longrope":
        # generate() starts over when it crosses the original length; a static method has nothing to switch there.
        original = rotary.trained_length if method.length_dependent else length
        config.original_max_position_embeddings = form["original_max_position_embeddings"] = original
    if vars(config).get("head_dim", 0) is None:  # Mixtral: transformers' yarn and longrope do arithmetic with it
        config.head_dim = config.hidden_size // config.num_attention_heads

    parameters = dict(config.rope_parameters)
    for layer_type in layer_types:
        kept = _unrelated_settings(rope_dict(config, layer_type))
        if layer_type is None:
            parameters = kept | form
        else:
            parameters[layer_type] = kept | form
            if form.get("truncate") is False:  # transformers looks for it here, and nowhere else
                parameters["truncate"] = False
    if accepted is None or form["rope_type"] in accepted:
        config.rope_parameters = parameters  # else the config class would refuse to be saved; see saving.py
    config.max_position_embeddings = length
    setattr(
        config,
        RECORD,
        {
            "method": method.to_dict(),
            "target_length": extended,
            "native": native,
            "layer_types": layer_types,
            "rope_parameters": copy.deepcopy(parameters),
            "before": before,
        },
    )
    return str(form["rope_type"])


def _unrelated_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What a family keeps among its rope settings for other ends than the frequencies."""
    kept = {key: value for key, value in settings.items() if key not in _METHOD_KEYS and value is not None}
    original = settings.get("original_max_position_embeddings")
    if original is not None and set(kept) - {"partial_rotary_factor"}:  # Ministral 3 counts from it, whatever the type
        kept["original_max_position_embeddings"] = original
    return kept


def original_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings a config dict had before the patch recorded in it; None where there is no record.

    Raises:
        CheckpointError: a damaged record, or rope_parameters that were changed after the patch, so that the record no
            longer speaks of them.
    """
    record = config.get(RECORD)
    if record is None:
        return None
    try:
        written, before = record["rope_parameters"], record["before"]
        restored = {key: copy.deepcopy(before[key]) for key in SAVED_KEYS if key in before}
        method_from_dict(record["method"])
    except (KeyError, TypeError, MethodError) as error:
        raise CheckpointError(
            f"the {RECORD!r} record of this config is damaged ({error!r}); delete that key"
        ) from error
    if not _is_subset(config.get("rope_parameters"), written):
        raise CheckpointError(
            f"this config carries a {RECORD!r} record, but its rope_parameters were changed since; "
            f"delete the {RECORD!r} key to use them as they stand"
        )
    return restored


def _is_subset(now: Any, then: Any) -> bool:
    """Whether every setting written then still stands; transformers may have added defaults beside them."""
    if isinstance(then, Mapping):
        return isinstance(now, Mapping) and all(_is_subset(now.get(key), value) for key, value in then.items())
    return bool(now == then)


def sliding_layers(config: Any) -> tuple[int | None, int]:
    """The window of the layers that see only so many tokens, and how many layers those are."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layers = getattr(config, "layer_types", None)
    if not window:
        return None, 0
    return window, sum(kind in SLIDING for kind in layers) if layers else config.num_hidden_layers

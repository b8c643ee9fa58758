"""Keys of a saved config.json for other programs than transformers 5, and which engines compute the same from it.

transformers 5, vLLM and SGLang read `rope_parameters`. transformers 4 and mlx-lm read the former spelling, `rope_theta`
and `rope_scaling` at the top level. A table says which of the written settings each engine ignores; tests hold it to
the rules of the tool box.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rope_ext_hf.models.config_keys import yarn_magnitude, yarn_magnitude_by_config
from rope_ext_hf.models.families import Family, family, former_key

KEYS_FOR_OTHER_ENGINES = frozenset({"attn_factor", "short_mscale", "long_mscale"})
"""Rope settings that are written for other engines; transformers ignores them and logs that."""
_Settings = Mapping[str, Any]


def attention_factor_keys(settings: _Settings, known: Family) -> dict[str, Any]:
    """Return the attention factor of rope settings under the keys of engines that do not read `attention_factor`.

    Of longrope settings, vLLM and SGLang read short_mscale and long_mscale. Of yarn settings, mlx-lm and SGLang read
    mscale and mscale_all_dim, which give exactly 1 where they are equal; SGLang multiplies the result by attn_factor.

    Args:
        settings: the rope settings of transformers that state a method.
        known: the family of the model.

    Returns:
        The keys to add; none where the settings have no attention factor, as those of plain yarn have none.
    """
    factor = settings.get("attention_factor")
    if factor is None:
        return {}
    if settings["rope_type"] == "longrope":
        return dict.fromkeys(("short_mscale", "long_mscale"), factor)
    if factor == 1 and not known.softmax_mscale:  # such a family would scale its softmax by mscale_all_dim
        return dict.fromkeys(("mscale", "mscale_all_dim"), 1.0)
    without = {key: value for key, value in settings.items() if key != "attention_factor"}
    return {"attn_factor": factor / yarn_magnitude_by_config(without, settings["factor"])}


# --- the former spelling --------------------------------------------------------------------------------------------


def former_keys(model_type: str, rope_parameters: _Settings, layer_types: Sequence[str | None]) -> dict[str, Any]:
    """Return rope settings under the top-level keys of transformers 4; none where these cannot state the settings.

    Args:
        model_type: the model type of the text config.
        rope_parameters: the settings, one set or one for each layer type.
        layer_types: the layer types that a method applies to; [None]: there is one set for all layers.
    """
    first = layer_types[0]  # the others have the same settings
    scaled = rope_parameters if first is None else rope_parameters[first]
    former = {key: scaled[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaled}
    if scaled["rope_type"] != "default":
        former["rope_scaling"] = {key: value for key, value in scaled.items() if key != "rope_theta"}
    if first is not None:
        others = {name: value for name, value in rope_parameters.items() if name not in layer_types}
        for other in others.values():
            if not isinstance(other, Mapping):
                continue
            if other.get("rope_type", "default") != "default":
                return {}
            if other["rope_theta"] != scaled["rope_theta"]:
                former["rope_local_base_freq"] = other["rope_theta"]
    return {former_key(model_type, key): value for key, value in former.items()}


def former_spelling(config: _Settings, layer_types: Sequence[str | None]) -> dict[str, Any]:
    """Return the keys of transformers 4 to write beside `rope_parameters` in a config.json.

    There are none where transformers 5 would then read other settings: it lets `rope_scaling` win over
    `rope_parameters`, and some of its classes read it differently.

    Args:
        config: the values of the config.json.
        layer_types: the layer types that a method applies to; [None]: there is one set of settings for all layers.
    """
    if family(config["model_type"]).angle_table:  # every program reads the table in the weights instead of settings
        return {}
    former = former_keys(config["model_type"], config["rope_parameters"], layer_types)
    former = {key: value for key, value in former.items() if key not in config}
    read_without = _settings_read_from(config)
    read_with = _settings_read_from({**config, **former})
    return former if read_without is not None and read_without == read_with else {}


def _settings_read_from(config: _Settings) -> dict[str, Any] | None:
    """Return the rope settings that the installed transformers reads from a config.json; None where it refuses it."""
    from transformers import AutoConfig

    values = copy.deepcopy(dict(config))
    values |= {key: _plain(values[key]) for key in ("rope_parameters", "rope_scaling") if key in values}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # a class that only sets the deprecated attribute refuses it
        try:
            settings: dict[str, Any] = AutoConfig.for_model(values.pop("model_type"), **values).rope_parameters
        except Exception:  # config classes raise anything for keys that they do not expect
            return None
    return settings


def _plain(settings: Any) -> Any:
    """Return rope settings without the keys and rope types that transformers does not know.

    transformers would log such a key, and refuse such a type.
    """
    if not isinstance(settings, Mapping):
        return settings
    kept = {key: value for key, value in settings.items() if key not in KEYS_FOR_OTHER_ENGINES}
    kept |= {key: _plain(value) for key, value in kept.items() if isinstance(value, Mapping)}
    if "/" in str(kept.get("rope_type")):
        kept["rope_type"] = "default"
    return kept


# --- which engines agree ----------------------------------------------------------------------------------------------

TRIED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose classes, in all these engines, pass the rope settings on unchanged."""
_PLAIN: dict[str, tuple[str, ...]] = {"default": (), "linear": (), "llama3": ()}
_ROUNDED = 4e-6  # the largest relative difference that computing frequencies in float32 leaves


class _Engine(NamedTuple):
    """A serving engine, and what it makes of the rope settings that patched folders hold.

    Attributes:
        label: the name of the engine with its version.
        ignored: the rope types that it runs, each with the settings that it ignores; `_taken_instead` says which value
            it takes in the place of each.
        families: the families that this is true for.
        was_run: whether the engine, or its rotary classes, were run; if not, its source was read.
        runs_dual_chunk: whether it runs the dual chunk attention that a config states, by a rotary class of its own.
    """

    label: str
    ignored: Mapping[str, tuple[str, ...]]
    families: frozenset[str] = TRIED_FAMILIES
    was_run: bool = True
    runs_dual_chunk: bool = False


_ENGINES = (
    _Engine("transformers 4.57", _PLAIN | {"dynamic": (), "yarn": (), "longrope": ("long_factor",)}),
    _Engine(
        "ExLlamaV3 1.6.5", _PLAIN | {"yarn": ("factor", "mscale"), "longrope": ("short_factor", "attention_factor")}
    ),
    _Engine(
        "mlx-lm 0.32.2",
        _PLAIN | {"yarn": ("truncate", "attention_factor"), "longrope": ("short_factor", "attention_factor")},
    ),
    _Engine("vLLM 0.33", _PLAIN | {"yarn": (), "longrope": ("short_factor",)}, runs_dual_chunk=True),
    _Engine("SGLang 0.5.23", _PLAIN | {"yarn": (), "longrope": ("short_factor",)}),
    _Engine(
        "TensorRT-LLM 1.2.0rc2",
        _PLAIN | {"longrope": ("short_factor", "attention_factor")},
        frozenset({"llama", "mistral"}),
        was_run=False,
    ),
    _Engine("TensorRT-LLM 1.2.0rc2", {"default": ()}, frozenset({"qwen2"}), was_run=False),
    _Engine(
        "TensorRT-LLM 1.2.0rc2",
        {"default": (), "yarn": ("factor",)}
        | dict.fromkeys(("dynamic", "linear", "llama3", "longrope"), ("rope_type",)),
        frozenset({"qwen3"}),  # whose kernel runs every rope type as yarn
        was_run=False,
    ),
)


class EngineAgreement(NamedTuple):
    """The serving engines that run a saved patched model as transformers 5 does, and those that do not.

    Attributes:
        agreeing: engines known to run it as transformers 5 does, from runs or from the engine's own rotary classes.
        disagreeing: engines known to load it without an error and to run another model.
        by_source: engines that run it as transformers 5 does by their source, which was read but not run.
    """

    agreeing: list[str]
    disagreeing: list[str]
    by_source: list[str]


def compare_engines(config: _Settings) -> EngineAgreement:
    """Return which serving engines compute from a saved config.json the same as transformers 5, and which do not.

    An engine that refuses the config is in no list. For a family outside `TRIED_FAMILIES` all lists are empty.

    Args:
        config: values of the config.json: its model_type, and the `rope_parameters` and max_position_embeddings that a
            patch writes.
    """
    agreement = EngineAgreement([], [], [])
    settings = config["rope_parameters"]
    for engine in _ENGINES:
        if config["model_type"] not in engine.families or settings.get("rope_type") not in engine.ignored:
            continue
        if engine.runs_dual_chunk and config.get("dual_chunk_attention_config"):
            continue  # this package does not know the class that rotates then
        ignored = engine.ignored[settings["rope_type"]]
        if ignored and {*ignored} & _with_other_values(settings, config["max_position_embeddings"]):
            agreement.disagreeing.append(engine.label)
        else:
            (agreement.agreeing if engine.was_run else agreement.by_source).append(engine.label)
    return agreement


def _with_other_values(settings: _Settings, length: int) -> set[str]:
    """Return the rope settings whose values differ from those that engines which ignore them take in their place.

    `length`: max_position_embeddings of the config.
    """
    taken = _taken_instead(settings, length)
    return {key for key, (stated, other) in taken.items() if not _equal(stated, other)}


def _taken_instead(settings: _Settings, length: int) -> dict[str, tuple[Any, Any]]:
    """Return the value of each setting that an engine ignores, and the value that this engine takes in its place."""
    factor, original = settings.get("factor", 1.0), settings.get("original_max_position_embeddings", 0)
    longer = length / original if original else factor
    # Every rope type computes the same where nothing is scaled. A longrope that spells out this very yarn is rare.
    scales = factor != 1 or longer != 1 or any(divisor != 1 for divisor in settings.get("long_factor", ()))
    taken: dict[str, tuple[Any, Any]] = {
        "rope_type": (settings["rope_type"], "yarn" if scales else settings["rope_type"])
    }
    if settings["rope_type"] == "longrope":
        magnitude = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 < original else 1.0
        taken["long_factor"] = taken["short_factor"] = (settings["long_factor"], settings["short_factor"])
        taken["attention_factor"] = (settings.get("attention_factor"), magnitude)
    if settings["rope_type"] == "yarn":
        magnitude = yarn_magnitude_by_config(settings, factor)
        mscale, mscale_all_dim = settings.get("mscale", 1), settings.get("mscale_all_dim", 0)
        taken["factor"] = (factor, longer)
        taken["truncate"] = (settings.get("truncate", True), True)
        taken["attention_factor"] = (magnitude, yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim))
        taken["mscale"] = (magnitude, settings.get("attention_factor") or yarn_magnitude(longer))
    return taken


def _equal(stated: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal up to the rounding of float32."""
    if isinstance(stated, float | int) and isinstance(other, float | int):
        return math.isclose(stated, other, rel_tol=_ROUNDED)
    return bool(stated == other)

"""Keys of a saved config.json for engines other than transformers 5, and which of them run the folder as it does.

transformers 5, vLLM and SGLang read `rope_parameters`. transformers 4 and mlx-lm read the former spelling: top-level
`rope_theta` and `rope_scaling`. Which of them compute the same is asked of plug-ins.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rope_ext_hf.patches.config_keys import yarn_magnitude_by_config
from rope_ext_hf.patches.families import Family, family, former_key
from rope_ext_hf.plug_ins import plug_ins

KEYS_FOR_OTHER_ENGINES = frozenset({"attn_factor", "short_mscale", "long_mscale"})
"""Rope settings that are written for other engines; transformers passes over them with a log message."""
_Settings = Mapping[str, Any]


def attention_factor_keys(settings: _Settings, known: Family) -> dict[str, Any]:
    """The attention factor of a form, under the keys of the engines that do not read `attention_factor`.

    vLLM and SGLang read short_mscale and long_mscale of a longrope. Of a yarn, mlx-lm and SGLang read mscale and
    mscale_all_dim, which give exactly 1 where they are equal; SGLang multiplies the result by attn_factor.
    """
    factor = settings.get("attention_factor")
    if factor is None:
        return {}
    if settings["rope_type"] == "longrope":
        return dict.fromkeys(("short_mscale", "long_mscale"), factor)
    if factor == 1 and not known.softmax_mscale:  # there the attention scales its softmax by mscale_all_dim
        return dict.fromkeys(("mscale", "mscale_all_dim"), 1.0)
    without = {key: value for key, value in settings.items() if key != "attention_factor"}
    return {"attn_factor": factor / yarn_magnitude_by_config(without, settings["factor"])}


# --- the former spelling --------------------------------------------------------------------------------------------


def former_keys(model_type: str, rope_parameters: _Settings, layer_types: Sequence[str | None]) -> dict[str, Any]:
    """Rope settings of the scaled layer types under the top-level keys of transformers 4; {}: they cannot be."""
    scaled = rope_parameters if layer_types[0] is None else rope_parameters[layer_types[0]]
    former = {key: scaled[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaled}
    if scaled["rope_type"] != "default":
        former["rope_scaling"] = {key: value for key, value in scaled.items() if key != "rope_theta"}
    for name, other in rope_parameters.items():
        if layer_types[0] is None or name in layer_types or not isinstance(other, Mapping):
            continue
        if other.get("rope_type", "default") != "default":
            return {}
        if other["rope_theta"] != scaled["rope_theta"]:
            former["rope_local_base_freq"] = other["rope_theta"]
    return {former_key(model_type, key): value for key, value in former.items()}


def former_spelling(config: _Settings, layer_types: Sequence[str | None]) -> dict[str, Any]:
    """What to write beside `rope_parameters` in a config.json: {} where plain loading would then read other settings.

    transformers 5 lets `rope_scaling` win over `rope_parameters`, and some of its classes read it otherwise.
    """
    if family(config["model_type"]).angle_table:  # every program reads the table, and no setting
        return {}
    former = former_keys(config["model_type"], config["rope_parameters"], layer_types)
    former = {key: value for key, value in former.items() if key not in config}
    alone, both = _settings_read_from(config), _settings_read_from({**config, **former})
    return former if alone is not None and alone == both else {}


def _settings_read_from(config: _Settings) -> dict[str, Any] | None:
    """The rope settings that the installed transformers reads from a config.json; None: it takes it for an error."""
    from transformers import AutoConfig

    values = copy.deepcopy(dict(config))
    values |= {key: _plain(values[key]) for key in ("rope_parameters", "rope_scaling") if key in values}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # a class that has `rope_scaling` set from outside
        try:
            settings: dict[str, Any] = AutoConfig.for_model(values.pop("model_type"), **values).rope_parameters
        except Exception:  # whatever a config class makes of keys that it does not expect
            return None
    return settings


def _plain(settings: Any) -> Any:
    """Rope settings without what transformers has no name for: such keys are logged, and such rope types refused."""
    if not isinstance(settings, Mapping):
        return settings
    kept = {key: value for key, value in settings.items() if key not in KEYS_FOR_OTHER_ENGINES}
    kept |= {key: _plain(value) for key, value in kept.items() if isinstance(value, Mapping)}
    if "/" in str(kept.get("rope_type")):
        kept["rope_type"] = "default"
    return kept


# --- which engines agree ----------------------------------------------------------------------------------------------


class EngineAgreement(NamedTuple):
    """Engines by what they make of a saved config.json."""

    agreeing: list[str]  # known to run it as transformers 5 does: by runs, or by the engine's own rotary classes
    disagreeing: list[str]  # known to load it without an error and run another model
    by_source: list[str]  # run it as transformers 5 does by their source alone, which was read and not run


def compare_engines(config: _Settings) -> EngineAgreement:
    """Return what engines make of a config.json, by every plug-in of the group rope_ext_hf.engine_checks."""
    agreement = EngineAgreement([], [], [])
    for check in plug_ins("engine_checks").values():
        for known, more in zip(agreement, check(config), strict=True):
            known += more
    return agreement

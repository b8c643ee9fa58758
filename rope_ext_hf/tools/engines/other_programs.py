"""Converters, exporters, servers and trainers that read config.json, and what each of them makes of a scaling.

Most compute RoPE as transformers does from the scalings that they know, and drop others without a word or stop at them.
So the rules here give the config that transformers would have to be given to compute the same: without the scaling, or
with another value in it. other_programs.toml has the rules, program by program.

>>> program = other_programs()["ctranslate2"]
>>> program.reads_as({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
...     "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})["rope_parameters"]
{'rope_type': 'default', 'rope_theta': 500000.0}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.files.whole import package_table
from rope_ext_hf.models.config_keys import (
    GEOMETRY_KEYS,
    Config,
    needed,
    rope_settings,
    text_settings,
    yarn_magnitude_by_config,
)
from rope_ext_hf.tools.engines.base import NotCheckedError, reference_engine
from rope_ext_hf.tools.engines.comparison import Expected, engine_difference
from rope_ext_hf.tools.engines.keys import Computed, length_setting

_ORIGINAL = "original_max_position_embeddings"
_Settings = dict[str, Any]


class OtherRopeError(ServingError):
    """An error for a program whose RoPE no config of transformers states; the message is a clause about it."""


def _lengths_as_factor(text: Config, settings: _Settings) -> _Settings:
    """Take max_position_embeddings divided by the original length for YaRN's factor, whatever the settings state."""
    return settings | {"factor": length_setting(text) / needed(settings, _ORIGINAL)}


def _lengths_as_factor_and_original(text: Config, settings: _Settings) -> _Settings:
    """Take YaRN's factor from the lengths, and the extended length for the original one; keep its magnitude."""
    magnitude = yarn_magnitude_by_config(settings, needed(settings, "factor"))
    return _lengths_as_factor(text, settings) | {
        _ORIGINAL: length_setting(text), "truncate": True, "attention_factor": magnitude
    }  # fmt: skip


def _extended_length_as_original(text: Config, settings: _Settings) -> _Settings:
    """Take the extended length for YaRN's original one."""
    return settings | {_ORIGINAL: length_setting(text)}


def _factor_alone(text: Config, settings: _Settings) -> _Settings:
    """Compute YaRN from its factor, whatever `truncate` and `attention_factor` say."""
    return {key: value for key, value in settings.items() if key not in ("truncate", "attention_factor")}


def _unrounded_bounds(text: Config, settings: _Settings) -> _Settings:
    """Leave the bounds of YaRN's ramp between pairs, and stop where the settings do not state its betas."""
    if not settings.get("beta_fast") or not settings.get("beta_slow"):
        raise ServingError("it needs beta_fast and beta_slow")
    return {key: value for key, value in settings.items() if key != "attention_factor"} | {"truncate": False}


def _magnitude_by_lengths(text: Config, settings: _Settings) -> _Settings:
    """Compute LongRoPE's magnitude from the two lengths, whatever the settings state."""
    return {key: value for key, value in settings.items() if key not in ("attention_factor", "factor")}


def _short_list(text: Config, settings: _Settings) -> _Settings:
    """Give inputs of every length LongRoPE's short list."""
    return settings | {"long_factor": settings.get("short_factor")}


_CHANGES: Mapping[str, Callable[[Config, _Settings], _Settings]] = {
    function.__name__[1:]: function
    for function in (
        *(_lengths_as_factor, _lengths_as_factor_and_original, _extended_length_as_original),
        *(_factor_alone, _unrounded_bounds, _magnitude_by_lengths, _short_list),
    )
}
"""What a program may make of the settings of a layer, by the names that stand in other_programs.toml."""


@dataclass(frozen=True)
class _Rule:
    """Rule on what a program makes of the rope types of some model families; see the head of other_programs.toml."""

    families: tuple[str, ...]
    reads: str = ""
    theta: float | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)

    def applied(self, text: Config, settings: _Settings) -> _Settings:
        """Return the settings of a layer as the program computes them; errors are those of `OtherProgram.reads_as`."""
        kind = settings["rope_type"]
        if kind in self.kept:
            return settings
        if kind in self.dropped:
            kept = {key: value for key, value in settings.items() if key in GEOMETRY_KEYS | {"rope_theta"}}
            return {"rope_type": "default"} | kept
        if kind in self.changed:
            return _CHANGES[self.changed[kind]](text, settings)
        if kind in self.otherwise:
            raise OtherRopeError(self.otherwise[kind])
        if kind in self.refused:
            raise ServingError(f"it stops at the rope type {kind!r}")
        raise NotCheckedError(f"what it makes of the rope type {kind!r} was not checked")


@dataclass(frozen=True)
class OtherProgram:
    """A program that reads config.json, with the rules by which one version of it computes RoPE.

    Attributes:
        name: the name by which commands know it.
        title, version: as its makers write them.
        reads: the spelling of the rope settings that it reads: "transformers", "former" or "former scaling".
        rules: what it makes of each rope type, by model families.
        advice: a sentence on what to do where it computes something else; empty: there is none.
    """

    name: str
    title: str
    version: str
    reads: str
    rules: tuple[_Rule, ...]
    advice: str = ""

    def reads_as(self, config: Config) -> dict[str, Any]:
        """Return the text config from which transformers computes what this program computes from a config.

        Raises:
            ServingError: the program stops at this config.
            NotCheckedError: this was not checked for the family or its rope type.
            OtherRopeError: the program computes what no config states.
        """
        from rope_ext_hf.models.layer_types import SLIDING  # it imports torch, which the command line starts without

        text = text_settings(config)
        rule = next((rule for rule in self.rules if text.get("model_type") in rule.families), None)
        if rule is None:
            raise NotCheckedError(f"what it makes of {str(text.get('model_type'))!r} models was not checked")
        reads = rule.reads or self.reads
        if reads == "former":
            text = {key: value for key, value in text.items() if key != "rope_parameters"}
            if text.get("rope_theta") is None and rule.theta is None:
                raise ServingError("it needs rope_theta at the top level of config.json")
            text["rope_theta"] = text.get("rope_theta") or rule.theta
        parameters = _loaded_parameters(text)
        drops_all = reads != "transformers" and not text.get("rope_scaling")
        nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}

        def applied(settings: _Settings, *, window: bool = False) -> _Settings:
            if drops_all:
                settings = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
            if not window:
                settings = settings | {key: value for key, value in rule.constants.items() if key in settings}
            return rule.applied(text, settings)

        if nested:
            read = parameters | {key: applied(each, window=key in SLIDING) for key, each in nested.items()}
        else:
            read = applied(parameters)
        return text | {"rope_parameters": read, "rope_scaling": None, "rope_theta": None}

    def computes(self, config: Config, expected: Expected) -> tuple[Computed | None, str | None]:
        """Return the numbers that it computes from a config, and in a clause what it makes of the model in silence.

        The numbers are None where it computes the expected ones or what no config states, the clause where it computes
        the expected ones. Errors are those of `reads_as`, but for OtherRopeError.

        Args:
            config: the contents of config.json.
            expected: the numbers of transformers.
        """
        text = text_settings(config)
        try:
            read = self.reads_as(config)
        except OtherRopeError as error:
            return None, str(error)
        if read["rope_parameters"] == (stated := _loaded_parameters(text)):
            return None, None
        reference = reference_engine()
        difference = engine_difference(reference, expected, read)
        if difference is None:
            return None, None
        before, after = rope_settings({**text, "rope_parameters": stated, "rope_scaling": None}), rope_settings(read)
        kind, losses = before["rope_type"], []
        if kind != "default" and after["rope_type"] == "default":
            losses.append(f"without its {kind} scaling")
        if after["rope_theta"] != before["rope_theta"]:
            losses.append(f"with theta {after['rope_theta']:,.8g} in place of {before['rope_theta']:,.8g}")
        computed = reference.computes(read, expected[0][0])
        return computed, " and ".join(losses) or difference


def _loaded_parameters(text: Config) -> _Settings:
    """Return `rope_parameters` as transformers loads them from a text config.

    Raises:
        ServingError: transformers refuses the config.
    """
    from transformers import AutoConfig

    values = copy.deepcopy(dict(text))
    try:
        parameters: _Settings = AutoConfig.for_model(values.pop("model_type"), **values).rope_parameters
    except Exception as error:  # config classes raise anything for values that they do not expect
        raise ServingError(f"transformers refuses the config: {type(error).__name__}: {error}") from error
    return parameters


@cache
def other_programs() -> Mapping[str, OtherProgram]:
    """Return the programs by name."""
    table = package_table("rope_ext_hf.tools.engines", "other_programs.toml")
    return {
        name: OtherProgram(name, **entry | {"rules": tuple(_Rule(**rule) for rule in entry["rules"])})
        for name, entry in table.items()
    }

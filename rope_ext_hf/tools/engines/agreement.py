"""`check_engines`: a check that serving engines run a saved config.json as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.engine_keys import EngineAgreement
from rope_ext_hf.tools.engines.base import reference_engine
from rope_ext_hf.tools.engines.comparison import engine_difference, expected_numbers
from rope_ext_hf.tools.engines.config_engine import other_engines

TRIED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose classes, in all these engines, pass the rope settings on unchanged."""


def check_engines(config: Mapping[str, Any]) -> EngineAgreement:
    """Compute a config.json by the rules of every engine, and list the engines that agree with transformers or differ.

    An engine that refuses the config is in no list. For a family outside `TRIED_FAMILIES`, and for a config that
    transformers itself refuses, all lists are empty.
    """
    agreement = EngineAgreement([], [], [])
    model_type = config["model_type"]
    if model_type not in TRIED_FAMILIES:
        return agreement
    try:
        expected = expected_numbers(reference_engine(), config)
    except (ServingError, ArithmeticError):
        return agreement
    for engine in other_engines():
        with suppress(ServingError, ArithmeticError):
            if engine_difference(engine, expected, config) is not None:
                agreement.disagreeing.append(engine.label)
            elif engine.checked(model_type) == "read":
                agreement.by_source.append(engine.label)
            else:
                agreement.agreeing.append(engine.label)
    return agreement

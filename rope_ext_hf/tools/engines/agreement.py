"""Find out which engines run a saved config.json as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.patches.engine_keys import EngineAgreement
from rope_ext_hf.tools.engines.base import expected_of, other_engines, reference_engine, runs_otherwise

TRIED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose classes in all these engines hand the rope settings on unchanged."""


def check_engines(config: Mapping[str, Any]) -> EngineAgreement:
    """Run the rules of every engine on a config.json; an engine that refuses it, or fails, is in no list."""
    agreement = EngineAgreement([], [], [])
    try:
        expected = expected_of(reference_engine(), config) if config["model_type"] in TRIED_FAMILIES else ()
    except (ServingError, ArithmeticError):
        expected = ()  # transformers itself refuses it: there is nothing to agree with
    for engine in other_engines() if expected else ():
        with suppress(ServingError, ArithmeticError):
            same = runs_otherwise(engine, expected, config) is None
            known = agreement.by_source if engine.checked(config["model_type"]) == "read" else agreement.agreeing
            (known if same else agreement.disagreeing).append(engine.label)
    return agreement

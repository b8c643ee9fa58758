"""The examples of conformance/, as far as they need no other program: how they read the settings of a config."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

from tests.conformance import formulas
from tests.conformance.generate import KIT
from tests.conformance.test_run import KIT_MODULE

CASES = dict(KIT_MODULE.cases())
OWN_WIDTHS = {"gemma-4-31b"}
"""Configurations whose layers have heads of several widths."""


def settings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_settings", KIT / "examples" / "rope_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETTINGS = settings()


@pytest.mark.parametrize("name", CASES)
def test_base_scaling_and_rotated_dims_are_those_of_the_formulas(name: str) -> None:
    entry: dict[str, Any] = CASES[name]
    row = entry["rows"][-1]
    text = entry["config"].get("text_config", entry["config"])
    right = formulas.settings_of(text, row["layer_type"])
    rope = SETTINGS.read(entry["config"])
    assert rope["rope_theta"] == right["rope_theta"]
    assert rope["rope_type"] == right.get("rope_type", right.get("type", "default"))
    assert rope.get("factor") == right.get("factor")
    if name not in OWN_WIDTHS:
        assert SETTINGS.rotated_dims(entry["config"]) == 2 * len(row["inv_freq"])

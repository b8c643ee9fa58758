"""Patched models saved in folders, and readers of what lies there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

import rope_ext_hf as rope
from tests.support.models import FAMILIES, build, dynamic_cases, static_cases
from tests.support.tiers import spread

FREQUENCIES = 2e-5  # relative, of inverse frequencies
STATIC = spread(FAMILIES, static_cases)
DYNAMIC = spread(FAMILIES, dynamic_cases)


@dataclass
class Saved:
    """A patched model saved in a folder, and what a plain process read from it, where one was run."""

    model: Any
    folder: Path
    read: dict[str, Any] = field(default_factory=dict)


Lookup = Callable[[str, str, str], Saved]
"""kind ("static", "far" or "dynamic"), family, and which of the family's cases -> the saved model."""


def save_case(root: Path, kind: str, name: str, which: str) -> Saved:
    """Patch a family's model with one of its cases and save it below `root`; "far": extended 16 times."""
    if kind == "dynamic":
        method, params = dynamic_cases(name)[which]
    else:
        case = static_cases(name, 16.0 if kind == "far" else 4.0)[which]
        method, params = case.method, case.params
    model = rope.patch(build(name), method, **params)
    folder = root / f"{kind}, {name}, {which}"
    model.save_pretrained(folder)
    return Saved(model, folder)


def saved_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def saved_rope(folder: Path) -> dict[str, Any]:
    """The rope settings of the full-attention layers."""
    parameters = saved_config(folder)["rope_parameters"]
    scaled: dict[str, Any] = parameters.get("full_attention", parameters)
    return scaled


def load_plainly(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

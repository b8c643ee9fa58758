"""The config.json of folders that this package saves: small models of four families, patched by five methods."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

import rope_ext_hf as rope

FAMILIES = {
    "Llama": "llama-3-8b",
    "Mistral": "mistral-7b-v0.3",
    "Qwen2": "qwen2.5-7b-yarn",
    "Qwen3": "qwen3-8b-yarn",
}
"""The configurations of conformance/ that are patched, without a scaling of their own."""
METHODS = {"yarn": 4.0, "ntk": 4.0, "linear": 4.0, "llama3": 8.0, "mrrope": 4.0}
"""Factors by method; mrrope is saved as longrope."""


def saved_configs(published: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the config.json of each folder; `published` are configs by the names of `FAMILIES`."""
    for family, name in FAMILIES.items():
        values = {key: value for key, value in published[name].items() if key != "rope_scaling"}
        for method, factor in METHODS.items():
            config = AutoConfig.for_model(**values)
            model = rope.patch(AutoModelForCausalLM.from_config(config), method, factor=factor)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                yield f"{family}, {method}", json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))

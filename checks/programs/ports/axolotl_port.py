"""axolotl: the model that its loader makes of a folder and of `sequence_len` in a file of settings."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"

import loaded
from axolotl.cli.config import load_cfg
from axolotl.loaders import ModelLoader, load_tokenizer

USUAL = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 1e-4}


def version() -> str:
    return f"axolotl {installed('axolotl')}, transformers {installed('transformers')}"


def _load(config: loaded.Config, context_length: int, original_length: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        loaded.write(config, folder)
        given = USUAL | {"base_model": folder, "sequence_len": context_length, "output_dir": f"{folder}/made"}
        given["datasets"] = [{"path": folder, "type": "alpaca"}]
        file = Path(folder, "settings.yaml")
        file.write_text(json.dumps(given), encoding="utf-8")
        settings = load_cfg(str(file))
        return ModelLoader(settings, load_tokenizer(settings)).load()[0]


inv_freq, magnitude = loaded.functions(_load)

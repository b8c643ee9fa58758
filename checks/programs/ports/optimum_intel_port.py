"""optimum-intel: it exports a folder to OpenVINO, which reads it in float32 on a CPU."""

from __future__ import annotations

import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import transformers
from exported import last_logits
from optimum.exporters.openvino import main_export
from optimum.intel import OVModelForCausalLM

transformers.logging.set_verbosity_error()


def version() -> str:
    names = ("optimum-intel", "openvino", "transformers")
    return ", ".join(f"{name} {installed(name)}" for name in names)


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with tempfile.TemporaryDirectory() as made:
        main_export(str(folder), made, task="text-generation-with-past", convert_tokenizer=False)
        model = OVModelForCausalLM.from_pretrained(made, ov_config={"INFERENCE_PRECISION_HINT": "f32"})
        return last_logits(model, rows)

"""optimum-onnx: it exports a folder to ONNX, which ONNX Runtime reads in float32 on a CPU."""

from __future__ import annotations

import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForCausalLM

transformers.logging.set_verbosity_error()


def version() -> str:
    names = ("optimum-onnx", "onnxruntime", "transformers")
    return ", ".join(f"{name} {installed(name)}" for name in names)


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with tempfile.TemporaryDirectory() as made:
        main_export(str(folder), made, task="text-generation", do_validation=False)
        model = ORTModelForCausalLM.from_pretrained(made, use_cache=False)
        inputs = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row)).long()} for row in rows]
        return np.stack([model(**each).logits[0, -1].double().numpy() for each in inputs])

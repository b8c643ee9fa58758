"""optimum-onnx: it exports a folder to ONNX, which ONNX Runtime reads in float32 on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from exported import last_logits
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForCausalLM

transformers.logging.set_verbosity_error()


def version() -> str:
    names = ("optimum-onnx", "onnxruntime", "transformers")
    return ", ".join(f"{name} {installed(name)}" for name in names)


@contextmanager
def opened(source: Any) -> Iterator[Callable[[list[int]], Any]]:
    """Export a folder; yield a function that returns the logits of the last token of a row."""
    with tempfile.TemporaryDirectory() as made:
        main_export(str(source), made, task="text-generation", do_validation=False)
        model = ORTModelForCausalLM.from_pretrained(made, use_cache=False)
        yield lambda row: last_logits(model, row)


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with opened(folder) as read:
        return np.stack([read(row) for row in rows])

"""optimum-intel: it exports a folder to OpenVINO, which reads it in float32 on a CPU."""

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
from optimum.exporters.openvino import export_from_model, main_export
from optimum.intel import OVModelForCausalLM

transformers.logging.set_verbosity_error()


def version() -> str:
    names = ("optimum-intel", "openvino", "transformers")
    return ", ".join(f"{name} {installed(name)}" for name in names)


@contextmanager
def opened(source: Any) -> Iterator[Callable[[list[int]], Any]]:
    """Export a folder or a model; yield a function that returns the logits of the last token of a row."""
    with tempfile.TemporaryDirectory() as made:
        options = {"task": "text-generation-with-past"}
        if isinstance(source, Path):
            main_export(str(source), made, **options, convert_tokenizer=False)
        else:
            export_from_model(source, made, **options, stateful=True)
        model = OVModelForCausalLM.from_pretrained(made, ov_config={"INFERENCE_PRECISION_HINT": "f32"})
        yield lambda row: last_logits(model, row)


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with opened(folder) as read:
        return np.stack([read(row) for row in rows])

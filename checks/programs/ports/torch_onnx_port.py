"""torch.onnx.export: ONNX Runtime reads the file on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from graphs import Logits, ids, last, shapes


def version() -> str:
    return ", ".join(f"{name} {installed(name)}" for name in ("torch", "onnxscript", "onnxruntime", "transformers"))


@contextmanager
def opened(source: Any, example: list[int], one_shape: bool) -> Iterator[Callable[[list[int]], Any]]:
    """Export a model; yield a function that returns the logits of the last token of a row."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "model.onnx")
        options = {"dynamo": True, "dynamic_shapes": shapes(one_shape), "verbose": False}
        torch.onnx.export(Logits(source), (ids(example),), file, **options)
        session = onnxruntime.InferenceSession(file)
        name = session.get_inputs()[0].name
        yield lambda row: last(session.run(None, {name: ids(row).numpy()})[0])

"""ONNX Runtime GenAI: its model builder makes a folder in float32, and its runtime reads the whole prompt."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og


def version() -> str:
    names = ("onnxruntime-genai", "onnxruntime", "transformers")
    return ", ".join(f"{name} {installed(name)}" for name in names)


def build(folder: Path, made: str, cache: str) -> None:
    """Run `python -m onnxruntime_genai.models.builder` in this process, so that its errors keep their types."""
    options = {"-i": str(folder), "-o": made, "-p": "fp32", "-e": "cpu", "-c": cache}
    before, path = sys.argv, list(sys.path)
    sys.argv = ["builder", *(word for option in options.items() for word in option)]
    try:
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
    finally:
        sys.argv, sys.path[:] = before, path


@contextmanager
def opened(source: Any) -> Iterator[Callable[[list[int]], Any]]:
    """Build a folder; yield a function that returns the logits of the last token of a row."""
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as cache:
        build(source, made, cache)
        model = og.Model(made)

        def last_logits(row: list[int]) -> Any:
            parameters = og.GeneratorParams(model)
            parameters.set_search_options(max_length=len(row))
            generator = og.Generator(model, parameters)
            generator.append_tokens(np.array([row], np.int32))
            return generator.get_logits().reshape(-1).astype(np.float64)

        yield last_logits


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with opened(folder) as read:
        return np.stack([read(row) for row in rows])

"""OpenVINO's converter: it takes a program of torch.export, and runs it in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from typing import Any

import openvino
from graphs import ids, last, program


def version() -> str:
    return ", ".join(f"{name} {installed(name)}" for name in ("openvino", "torch", "transformers"))


@contextmanager
def opened(source: Any, example: list[int], one_shape: bool) -> Iterator[Callable[[list[int]], Any]]:
    """Export a model; yield a function that returns the logits of the last token of a row."""
    graph = openvino.convert_model(program(source, example, one_shape))
    run = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    yield lambda row: last(run([ids(row).numpy()])[0])

"""ExecuTorch: a program of torch.export is lowered for XNNPACK, written to a .pte file, and run by its runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from graphs import ids, last, program


def version() -> str:
    return ", ".join(f"{name} {installed(name)}" for name in ("executorch", "torch", "transformers"))


@contextmanager
def opened(source: Any, example: list[int], one_shape: bool) -> Iterator[Callable[[list[int]], Any]]:
    """Export a model; yield a function that returns the logits of the last token of a row."""
    exported = program(source, example, one_shape)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "model.pte")
        file.write_bytes(lowered.buffer)
        method = Runtime.get().load_program(file).load_method("forward")
        yield lambda row: last(method.execute([ids(row)])[0].clone())

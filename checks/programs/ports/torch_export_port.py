"""torch.export: the program is run by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from typing import Any

from graphs import ids, last, program


def version() -> str:
    return ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers"))


@contextmanager
def opened(source: Any, example: list[int], one_shape: bool) -> Iterator[Callable[[list[int]], Any]]:
    """Export a model; yield a function that returns the logits of the last token of a row."""
    run = program(source, example, one_shape).module()
    yield lambda row: last(run(ids(row)))

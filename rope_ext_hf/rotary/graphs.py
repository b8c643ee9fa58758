"""Keep a function out of graphs that `torch.compile` builds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["graph_break"]

P = ParamSpec("P")
R = TypeVar("R")


def graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """A compiled caller stops for this function and goes on after it; torch's compiler is not loaded on its account."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disable: Any = torch.compiler.disable
        # The next line is what torch.compile shows who asks for fullgraph=True.
        result: R = disable(function)(*args, **kwargs)  # a graph ends here; with rope_ext_hf.fixed_length it goes on
        return result

    return call

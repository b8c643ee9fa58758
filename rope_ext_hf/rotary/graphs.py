"""Keep a function out of the graphs that `torch.compile` builds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function uncompiled in a compiled caller: its graph ends before the call and another begins after it.

    torch's compiler is not imported for this alone.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disable: Any = torch.compiler.disable
        # Under fullgraph=True the error message of torch.compile quotes the next line.
        result: R = disable(function)(*args, **kwargs)  # a graph ends here; with rope_ext_hf.fixed_length it goes on
        return result

    return call

"""The forwards that are under way in this thread, innermost last, and what each of them tells the modules inside.

A forward enters its state with a `with` statement, and the modules that run inside look up the state that names them.
Each thread has a stack of its own, so that several threads may run one model. docs/internals.md lists what the states
hold. `graph_break` keeps functions that look at the values of tensors, or that change a state, out of the graphs that
`torch.compile` builds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")

# A plain threading.local: torch.compile traces its attributes, and not those of a ContextVar.
_local = threading.local()


@dataclass(eq=False, kw_only=True)
class ForwardState:
    """The values that the modules inside one forward read. The forward is under way inside `with state:`."""

    tables: tuple[nn.Module, ...] = ()  # the rotary modules inside that read this state
    row_lengths: Tensor | None = None
    """The lengths in tokens whose frequencies the rows get, (rows,) or (rows, tokens) integers.

    None: each row's largest position + 1.
    """
    frequency: Tensor | None = None  # fixed point, int64 (dim // 2,), in place of the method's frequencies
    attention_factor: float = 1.0  # the factor of cos and sin that goes with `frequency`

    def __enter__(self) -> Self:
        _local.states = (*getattr(_local, "states", ()), self)
        return self

    def __exit__(self, *_: object) -> None:
        _local.states = _local.states[:-1]
        self.close()

    def close(self) -> None:
        """Undo the changes that this forward has made elsewhere; called when it ends, also by an error."""


def running() -> Iterator[ForwardState]:
    """Return the states of the forwards that are under way in this thread, innermost first."""
    return reversed(getattr(_local, "states", ()))


def state_of_table(table: nn.Module) -> ForwardState | None:
    """Return the state that a rotary module has to read: that of the innermost forward whose `tables` name the module.

    None: no forward names it. A replica of a module (nn.DataParallel) reads the state that names the original module.
    """
    identity = getattr(table, "identity", table)
    for state in running():
        for named in state.tables:
            if getattr(named, "identity", named) is identity:
                return state
    return None


def graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs uncompiled even if its caller is compiled by torch.compile.

    The caller's graph ends before the call, and another begins after it. torch's compiler is not imported here, unless
    something else has imported it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disable: Any = torch.compiler.disable
        # Under fullgraph=True the error message of torch.compile quotes the next line, so it holds the advice.
        result: R = disable(function)(*args, **kwargs)  # a graph ends here; with rope_ext_hf.fixed_length it goes on
        return result

    return call

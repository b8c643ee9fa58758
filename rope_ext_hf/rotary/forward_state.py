"""The states of the forwards that are running in this thread: whatever is kept for the time of one forward.

A decoder's hooks `push` a state before its forward and `pop` it after; the modules inside look up the state that names
them. Each thread has a stack of its own, so that several threads may run one model. docs/internals.md lists what the
states hold. `graph_break` keeps functions that look at the values of tensors, or that change a state, out of the graphs
that `torch.compile` builds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False, kw_only=True)
class ForwardState:
    """The values that are kept while one module runs its forward, for the rotary modules inside it."""

    owner: object  # the module whose forward it is, or another object that began it
    tables: tuple[nn.Module, ...] = ()  # the rotary modules inside that read this state
    row_lengths: Tensor | None = None
    """The lengths in tokens whose frequencies the rows get, (rows,) or (rows, tokens) integers.

    None: each row's largest position + 1.
    """
    frequency: Tensor | None = None  # fixed point, int64 (dim // 2,), in place of the method's frequencies
    attention_factor: float = 1.0  # the factor of cos and sin that goes with `frequency`

    def close(self) -> None:
        """Undo the changes that this forward has made elsewhere; called after an error has ended the forward."""


# A plain threading.local: torch.compile traces its attributes, and not those of a ContextVar.
_local = threading.local()


def running() -> Iterator[ForwardState]:
    """Return the states of the forwards that are running in this thread, innermost first."""
    return reversed(getattr(_local, "states", ()))


def push(state: ForwardState) -> None:
    """Make this state that of the innermost forward in this thread; `pop` ends it."""
    _local.states = (*getattr(_local, "states", ()), state)


def pop(owner: object) -> ForwardState | None:
    """Remove the state of the innermost forward that `owner` began, and return it.

    None: it began none, because an earlier hook raised an error.
    """
    states = getattr(_local, "states", ())
    for index in range(len(states) - 1, -1, -1):
        if states[index].owner is owner:
            _local.states = states[:index]
            for interrupted in states[index + 1 :]:  # an error ended them before their hooks after the forward ran
                interrupted.close()
            return states[index]  # type: ignore[no-any-return]
    return None


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

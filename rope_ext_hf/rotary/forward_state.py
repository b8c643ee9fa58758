"""States of the forwards under way in this thread: everything that lives for one forward is reached from here.

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
    """The state of one forward of one module."""

    owner: object  # the module whose forward it is, or another object that began it
    tables: tuple[nn.Module, ...] = ()  # the rotary modules inside that read this state
    row_lengths: Tensor | None = None
    """The lengths in tokens whose frequencies the rows get, (rows,) or (rows, tokens) integers.

    None: each row's largest position + 1.
    """
    frequency: Tensor | None = None  # fixed point, int64 (dim // 2,), in place of the method's frequencies
    attention_factor: float = 1.0  # the factor of cos and sin that goes with `frequency`

    def close(self) -> None:
        """Undo what this forward has changed elsewhere, after an error has ended it."""


# A plain threading.local: torch.compile traces its attributes, and not those of a ContextVar.
_local = threading.local()


def running() -> Iterator[ForwardState]:
    """Return the states of this thread's forwards, innermost first."""
    return reversed(getattr(_local, "states", ()))


def push(state: ForwardState) -> None:
    """Begin a forward in this thread."""
    _local.states = (*getattr(_local, "states", ()), state)


def pop(owner: object) -> ForwardState | None:
    """End the innermost forward of `owner` and return its state; None where none was begun (an earlier hook raised)."""
    states = getattr(_local, "states", ())
    for index in range(len(states) - 1, -1, -1):
        if states[index].owner is owner:
            _local.states = states[:index]
            for interrupted in states[index + 1 :]:  # an error ended them before their hooks after the forward ran
                interrupted.close()
            return states[index]  # type: ignore[no-any-return]
    return None


def state_of_table(table: nn.Module) -> ForwardState | None:
    """Return the state that a rotary module reads, that of the innermost forward which names it; None: no forward does.

    A replica of a module (nn.DataParallel) reads the state that names the module.
    """
    identity = getattr(table, "identity", table)
    for state in running():
        for named in state.tables:
            if getattr(named, "identity", named) is identity:
                return state
    return None


def graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run uncompiled in a compiled caller, whose graph ends before the call; another begins after it.

    torch's compiler is not imported where nothing else has imported it.
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

"""The `forward` of a hooked module, which also runs the hooks where it is called directly.

torch runs the hooks of a module in `module(...)` alone. Some libraries call `module.forward(...)` instead
(sentence-transformers, and PEFT for AdaLoRA), and would run a patched model without its hooks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rope_ext_hf.rotary.forward_state import ForwardState, pop, push, running

_KEPT_BY_HOOKS = "_old_forward"
"""The attribute in which accelerate's hooks keep the forward that they call, and that they put back at the end."""
_KEPT_BY_PREPARE = "_original_forward"
"""The attribute in which `Accelerator.prepare` keeps a forward that it has replaced; `unwrap_model` removes it."""


class ForwardHooks(Protocol):
    """Hooks around the forward of a module, as torch calls them."""

    def pre_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Run before the forward; return other arguments for it, by position and by name, or None."""

    def post_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, /) -> Any:
        """Run after the forward, also after an exception; `output` is None then."""


@dataclass(eq=False, kw_only=True)
class _Entering(ForwardState):
    """A note that the next call of a module's `forward` must not run its hooks: they have run, or are not wanted."""

    forward: HookedForward | None = None


class HookedForward:
    """The `forward` of a hooked module, which runs the hooks where it is called directly.

    In `module(...)` torch runs the hooks and then calls `module.forward(...)`, which is this object. The last hook
    before the forward leaves a note (`enter`), by which this object knows that the hooks have run. Without the note
    somebody called `forward` directly, and this object runs them. It is an object and not a function, so that copies
    and pickles of the module get one of their own.

    accelerate puts forwards of its own around that of a module, and takes them off again. Its hooks keep the forward
    that they call as an attribute, so this object takes the place of that one and stays when they go. The forward that
    `Accelerator.prepare` makes for mixed precision stays inside of this object, which stops calling it when
    `unwrap_model` has taken the mixed precision away.
    """

    def __init__(self, module: nn.Module, hooks: ForwardHooks) -> None:
        self.module = module
        self.hooks = hooks
        own = module.__dict__
        place = _KEPT_BY_HOOKS if _KEPT_BY_HOOKS in own else "forward"
        self.in_place = own.get(place)  # the forward that stood there; None: that of the class
        self.unprepared = own.get(_KEPT_BY_PREPARE)  # the forward before `Accelerator.prepare`; None: it was not called
        self.removed = False  # after `remove`, other libraries may still call it from what they have put around it
        own[place] = self

    @property
    def replaced(self) -> Any:
        """The forward that this object stands in for; None: that of the class."""
        kept = self.unprepared
        if kept is not None and self.module.__dict__.get(_KEPT_BY_PREPARE) is not kept:  # `unwrap_model` was called
            return kept
        return self.in_place

    # torch.export and others look at the signature and the code of a forward.

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._visible)

    @property
    def __code__(self) -> Any:
        return self._visible.__code__

    @property
    def _visible(self) -> Any:
        """The bound `forward` without hooks that this object replaces."""
        return self.replaced or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate binds the forward that it takes out of its float32 wrapper
            args = args[1:]
        state = next(running(), None)
        if isinstance(state, _Entering) and (state.forward is self or state.owner is self.module):
            pop(state.owner)
            if torch.compiler.is_exporting():
                return self._exported(args, kwargs)
            return self._bare(state.owner, args, kwargs)  # in nn.DataParallel the owner is a replica of the module
        if self.removed:
            return self._bare(self.module, args, kwargs)
        output = None
        try:
            args, kwargs = self.hooks.pre_forward(self.module, args, kwargs) or (args, kwargs)
            output = self._bare(self.module, args, kwargs)
        finally:
            self.hooks.post_forward(self.module, args, kwargs, output)
        return output

    def _exported(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward without its hooks for torch.export, which leaves out the hooks after an exception."""
        try:
            return self._bare(self.module, args, kwargs)
        except Exception:
            self.hooks.post_forward(self.module, args, kwargs, None)
            raise

    def _bare(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module without its hooks."""
        if self.replaced:
            return self.replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Leave a note that the hooks of the next forward have run; this is called as the last of these hooks."""
        push(_Entering(owner=module, forward=self))

    def leave(self, *_: Any) -> None:
        """Take the note back where an exception has kept the forward from running."""
        state = next(running(), None)
        if isinstance(state, _Entering) and state.forward is self:
            pop(state.owner)

    def remove(self) -> None:
        """Put the `forward` back that was there before."""
        self.removed = True
        own = self.module.__dict__
        for place in ("forward", _KEPT_BY_HOOKS):
            forward = own.get(place)
            if forward is not self and getattr(forward, "__func__", None) is not self:
                continue
            if place == "forward" and self.replaced is None:
                del own[place]
            else:
                own[place] = self._visible


def forward_without_hooks(module: nn.Module, **kwargs: Any) -> Any:
    """Run the forward of a hooked module without any of its hooks, and return its output."""
    entering = _Entering(owner=module)
    push(entering)
    try:
        return module.forward(**kwargs)
    finally:
        if next(running(), None) is entering:
            pop(module)

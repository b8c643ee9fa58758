"""The forward that a patch puts in the place of a module's own, which is all that stands around a decoder's forward.

    module(...), module.forward(...)  ->  PatchedForward.__call__  ->  the forward that stood there before

A rotary module or an attention function knows little of the forward that it runs in. A length-dependent or a remapping
method needs more: which tokens are padding, how long each row is, what the cache holds. So the decoder gets a
`DecoderForward`, which reads the arguments of the call, and the modules around the decoder an `OuterForward`, which
notes theirs. A static method needs neither.

The place is the attribute `forward` of the instance, because some libraries call `module.forward(...)`
(sentence-transformers, and PEFT for AdaLoRA), and a hook of torch would not run then.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.models.decoder_arguments import cache_of_output
from rope_ext_hf.patches.forward.forward_call import ForwardCall, ModuleCall
from rope_ext_hf.patches.forward.rotation_kernels import RotationKernels
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, tables_of
from rope_ext_hf.rotary.cache_memory import CacheMemory, KeyOrigin, remember
from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.forward_state import graph_break

_KEPT_BY_HOOKS = "_old_forward"
"""The attribute in which accelerate's hooks keep the forward that they call, and that they put back at the end."""
_KEPT_BY_PREPARE = "_original_forward"
"""The attribute in which `Accelerator.prepare` keeps a forward that it has replaced; `unwrap_model` removes it."""
_REPLICATE = "_replicate_for_data_parallel"
"""The method by which nn.DataParallel copies the attributes of a module, `forward` among them, into a replica."""


class PatchedForward(ABC):
    """The `forward` of one module while its model is patched. A subclass says what happens around the module's own.

    It is an object and not a function, so that copies and pickles of the module get one of their own.

    accelerate puts forwards of its own around that of a module, and takes them off again. Its hooks keep the forward
    that they call as an attribute, so this object takes the place of that one and stays when they go. The forward that
    `Accelerator.prepare` makes for mixed precision stays inside of this object, which stops calling it when
    `unwrap_model` has taken the mixed precision away.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.in_place: Any = None  # the forward that stood in the place before; None: that of the class
        self.unprepared: Any = None  # the forward before `Accelerator.prepare`; None: it was not called
        self.removed = False  # after `remove`, other libraries may still call it from what they have put around it

    @abstractmethod
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the patched model, and return the output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate binds the forward that it takes out of its float32 wrapper
            args = args[1:]
        return self.own_forward(args, kwargs) if self.removed else self.call(args, kwargs)

    def own_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward that this object has replaced."""
        if self.replaced is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.replaced(*args, **kwargs)

    @property
    def replaced(self) -> Any:
        """The forward that this object stands in for; None: that of the class."""
        kept = self.unprepared
        if kept is not None and self.module.__dict__.get(_KEPT_BY_PREPARE) is not kept:  # `unwrap_model` was called
            return kept
        return self.in_place

    # --- coming and going ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the place of the module's forward."""
        own = self.module.__dict__
        place = _KEPT_BY_HOOKS if _KEPT_BY_HOOKS in own else "forward"
        self.in_place, self.unprepared = own.get(place), own.get(_KEPT_BY_PREPARE)
        own[place] = self
        own[_REPLICATE] = self.replicate

    def replicate(self) -> nn.Module:
        """Return a replica of the module for nn.DataParallel, with a forward of its own around the replica."""
        replica: nn.Module = getattr(type(self.module), _REPLICATE)(self.module)
        forward = object.__new__(type(self))
        vars(forward).update(vars(self), module=replica)
        own = vars(replica)
        del own[_REPLICATE]
        own.update({name: forward for name in ("forward", _KEPT_BY_HOOKS) if own.get(name) is self})
        return replica

    def remove(self) -> None:
        """Put the `forward` back that was there before."""
        self.removed = True
        own = self.module.__dict__
        own.pop(_REPLICATE, None)
        for place in ("forward", _KEPT_BY_HOOKS):
            forward = own.get(place)
            if forward is not self and getattr(forward, "__func__", None) is not self:
                continue
            if place == "forward" and self.replaced is None:
                del own[place]
            else:
                own[place] = self._bound

    # torch.export and others look at the signature and the code of a forward.

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._bound)

    @property
    def __code__(self) -> Any:
        return self._bound.__code__

    @property
    def _bound(self) -> Any:
        """The bound forward that this object replaces."""
        return self.replaced or type(self.module).forward.__get__(self.module)


class OuterForward(PatchedForward):
    """The forward of a module around the decoder, which may give the decoder another mask than it was given."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward, while its arguments can be looked up."""
        with ModuleCall(module=self.module, args=args, kwargs=kwargs):
            return self.own_forward(args, kwargs)


class DecoderForward(PatchedForward):
    """The forward of a decoder, around the modules of class `PatchedRotaryEmbedding` inside it.

    Each kind of method has a subclass. Nothing here changes with a call: what belongs to one call is in its
    `ForwardCall`, so that several threads may run one model.
    """

    def __init__(self, module: nn.Module, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        super().__init__(module)
        self.slots = list(slots)
        self.tables = tables_of(slots)
        self.axes = max(slot.axes for slot in slots)  # how many axes the positions of the model may have
        self.kernels = RotationKernels.in_use(self.tables[0])

    def prepare(self, model: nn.Module) -> None:
        """Find out what later calls need to know of the decoder. This is called once, before `install`."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder's own forward between `begin` and `end`."""
        call = ForwardCall.read(self.module, args, kwargs)
        if call is None:
            return self.own_forward(args, kwargs)
        with call:  # however the forward ends, what it has changed in its cache is undone
            kwargs = self.begin(call, kwargs)
            output = self.own_forward(args, kwargs)
            self.end(call, output)
        return output

    @abstractmethod
    def begin(self, call: ForwardCall, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Work out what the modules inside will look up, and return the keyword arguments to go on with."""

    @abstractmethod
    def end(self, call: ForwardCall, output: Any) -> None:
        """Remember with the cache how its keys are rotated. It is not called after an exception."""

    # --- shared by both kinds -----------------------------------------------------------------------------------------

    def install(self) -> None:
        super().install()
        for table in self.tables:
            table.check_outside = self.check_in_place

    def remove(self) -> None:
        super().remove()
        for table in self.tables:
            table.check_outside = None

    def check_in_place(self) -> None:
        """Check that nobody has replaced this forward, when a rotary module inside runs without it.

        Raises:
            LengthError: somebody has; a cache would then meet queries of other frequencies than its keys have.
        """
        places = [self.module.__dict__.get(place) for place in ("forward", _KEPT_BY_HOOKS)]
        if not any(self in (place, getattr(place, "__func__", None)) for place in places):
            name = self.tables[0].method.name
            raise LengthError(
                f"the forward of {type(self.module).__name__} was replaced after the patch, and {name} needs what "
                "stood there: replace it before the patch, or call the forward that you replace"
            )

    def check(self, call: ForwardCall) -> None:
        """Check that the modules inside can compute this call: an exported one, or one by fused kernels.

        Raises:
            LengthError, UnsupportedModelError: see `check_exportable` and `RotationKernels.check`.
        """
        if is_exporting():
            self.check_exportable(call)
        if self.kernels is not None and call.new_tokens.shape[0] > 1:
            graph_break(self.kernels.check)(self.module, call.new_tokens.device)

    def check_exportable(self, call: ForwardCall) -> None:
        """Check that a graph for another program can hold this forward, which is traced or exported.

        Raises:
            LengthError: the frequencies follow the length of each input.
            UnsupportedModelError: torch.jit.trace cannot follow the method.
        """
        for table in self.tables:
            table.check_exportable()
            if getattr(table.method, "depends_on_total_length", False) and not torch.compiler.is_exporting():
                raise UnsupportedModelError(
                    f"the positions of {table.method.name} depend on the length of each input, and torch.jit.trace "
                    "would keep those of its example for all inputs; trace a model under a frequency method, such as "
                    "yarn"
                )

    def origin(self) -> KeyOrigin:
        """Return the methods, rotary embeddings and fixed lengths by which keys that are stored now are rotated."""
        return KeyOrigin(tuple((table.method, table.rotary, table.fixed_length) for table in self.tables))

    def remember(self, call: ForwardCall, output: Any, memory: CacheMemory) -> None:
        """Remember how keys are rotated with the cache of a call: the one it was given, or else the one it returns."""
        cache = cache_of_output(output) if call.cache is None else call.cache
        if cache is not None:
            remember(cache, memory)

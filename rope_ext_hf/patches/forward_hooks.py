"""The hooks around a decoder's forward: one installer, one base class, for every method that needs them."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.decoder_arguments import arguments, cache_of_output, takes_tokens
from rope_ext_hf.patches.forward_context import ForwardContext, GivenMask
from rope_ext_hf.patches.slots import PatchedSlot, tables_of
from rope_ext_hf.rotary.cache_state import CacheState, KeyOrigin, follow_rows, store_state
from rope_ext_hf.rotary.embedding import RotaryEmbedding, arrange
from rope_ext_hf.rotary.forward_state import ForwardState, graph_break, pop, push, running

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a forward, by position and by name


class DecoderHooks(ABC):
    """Hooks around the forward of a decoder, for the slots inside; a subclass works out what the modules inside need.

    They hold nothing that changes with a forward, so that several threads may run one model.
    """

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        self.slots = list(slots)
        self.axes = max(slot.axes for slot in slots)  # of the positions of a token, which are read as one position
        # transformers has taken in the library by now, if it is there.
        self.kernels = _RotationKernels(tables_of(slots)[0]) if "kernels" in sys.modules else None

    @abstractmethod
    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Begin a forward; may return other arguments for it."""

    @abstractmethod
    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End a forward, also after an exception in it (`output` is None then)."""

    def begin(self, decoder: nn.Module, call: Mapping[str, Any]) -> ForwardContext | None:
        """Make the arguments of a call the thread's current context; None: no tokens were given."""
        if (interrupted := pop(decoder)) is not None:  # a KeyboardInterrupt skips the hooks after a forward
            interrupted.close()
        if torch._C._get_tracing_state() is not None:  # torch.jit.trace runs this forward
            self._check_traceable()
        context = ForwardContext.from_call(decoder, call, self.axes)
        if context is not None:
            if self.kernels is not None and context.new_tokens.shape[0] > 1:
                graph_break(self.kernels.check)(decoder, context.new_tokens.device)
            push(context)
        return context

    def _check_traceable(self) -> None:
        """Check that torch.jit.trace can follow the method; else UnsupportedModelError."""
        for table in tables_of(self.slots):
            if getattr(table.method, "by_length", False):
                raise UnsupportedModelError(
                    f"{table.method.name} sees positions by the length of each input, and torch.jit.trace would keep "
                    "those of its example for all inputs; trace a model under a frequency method, such as yarn"
                )

    def end(self, decoder: nn.Module) -> ForwardContext | None:
        """End the forward and undo what it changed in others; None where none was begun."""
        context = pop(decoder)
        if not isinstance(context, ForwardContext):
            return None
        context.close()
        return context

    def origin(self) -> KeyOrigin:
        """What rotates the keys that a forward stores now."""
        return KeyOrigin(tuple((table.method, table.rotary, table.fixed_length) for table in tables_of(self.slots)))

    def record(self, cache: Any, output: Any, state: CacheState) -> None:
        """Store a state with the cache of a forward that has ended: the one given, or (None) the one returned."""
        given = cache is not None
        if not given:
            cache = cache_of_output(output)
        if cache is None:
            return
        store_state(cache, state)
        # A call without a cache compiles whole, so no graph ends there.
        if state.rows is not None and not state.follows and (given or not torch.compiler.is_compiling()):
            graph_break(follow_rows)(cache, state)


class _RotationKernels:
    """The functions that rotate queries and keys in a decoder, each compared once with a kernel that stands in for it.

    Kernels of the Hub (`use_kernels=True`) multiply by the cos and sin that a patched model gives, and so keep its
    frequencies. Some rotate every row by the angles of the first one (kernels-community/aiter-rope, for AMD), which is
    wrong where each row has angles of its own. All models of a class share the function, so its kernel may have come
    with another model.
    """

    def __init__(self, table: RotaryEmbedding) -> None:
        self.table = table
        self.functions: list[Any] | None = None  # looked up at first need
        self.compared: dict[Any, Any] = {}

    def check(self, decoder: nn.Module, device: torch.device) -> None:
        """Refuse a kernel that rotates rows of different angles otherwise than transformers (UnsupportedModelError)."""
        if self.functions is None:
            attached = (module.__dict__.get("_kernel_funcs", {}) for module in decoder.modules())
            named = {function for each in attached for function in each.values()}
            self.functions = [function for function in named if function.kernel_layer_name == "rotary_pos_emb"]
        for function in self.functions:
            running = function.__dict__.get("forward")
            if running is None or running is self.compared.get(function):
                continue
            x = torch.linspace(-1, 1, self.table.rotary.dim, device=device).expand(2, 1, 1, -1).contiguous()
            angle = torch.linspace(0, 1, 2, device=device)[:, None, None].expand(2, 1, self.table.rotary.dim // 2)
            given = (x, x, *arrange(angle.cos(), angle.sin(), self.table.layout, None))
            if not torch.allclose(function(*given)[0], type(function).forward(function, *given)[0], atol=1e-2):
                raise UnsupportedModelError(
                    "the kernel that rotates queries and keys (use_kernels=True) gives rows of different length, "
                    "padding or positions other angles than transformers' own function, so a batch of several rows is "
                    f"wrong under {self.table.method.name}: give one row at a time, or load the model without kernels"
                )
            self.compared[function] = running


class _MaskHooks:
    """Hooks around a module outside the decoder, which may turn the mask that the user gives into another one."""

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = arguments(module, args, kwargs)
        mask, positions = call.get("attention_mask"), call.get("position_ids")
        push(GivenMask(owner=module, attention_mask=mask, with_positions=positions is not None))

    def post_forward(self, module: nn.Module, *_: Any) -> None:
        pop(module)


@dataclass(eq=False, kw_only=True)
class _Entering(ForwardState):
    """A module whose hooks have run, or shall not run: the next call of its `forward` is the bare one."""

    forward: _HookedForward | None = None


class _HookedForward:
    """The `forward` of a hooked module, which runs the hooks itself where it is called directly.

    torch runs hooks in `module(...)` alone, and other libraries call `module.forward(...)` (sentence-transformers, and
    PEFT for AdaLoRA). This is an object and not a function, so that copies and pickles of the module get one of theirs.
    """

    def __init__(self, module: nn.Module, hooks: DecoderHooks | _MaskHooks) -> None:
        self.module, self.hooks = module, hooks
        self.replaced = module.__dict__.get("forward")  # accelerate may have put one there; None: that of the class
        self.removed = False  # it may live on inside of what others have put around it
        module.__dict__["forward"] = self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._visible)

    @property
    def __code__(self) -> Any:
        return self._visible.__code__  # torch.export names its place in the source

    @property
    def _visible(self) -> Any:
        """The forward that this one stands for, to code that looks at it."""
        return self.replaced or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate binds the forward that it takes out of its float32 wrapper
            args = args[1:]
        state = next(running(), None)
        if isinstance(state, _Entering) and (state.forward is self or state.owner is self.module):
            pop(state.owner)
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

    def _bare(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.replaced(*args, **kwargs) if self.replaced else type(module).forward(module, *args, **kwargs)

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Note, as the last hook before a forward, that the others have run."""
        push(_Entering(owner=module, forward=self))

    def leave(self, *_: Any) -> None:
        """Forget that note where an exception has kept the forward from running."""
        state = next(running(), None)
        if isinstance(state, _Entering) and state.forward is self:
            pop(state.owner)

    def remove(self) -> None:
        """Put back the `forward` that was there before."""
        self.removed = True
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.replaced is not None:
                self.module.__dict__["forward"] = self.replaced


def forward_without_hooks(module: nn.Module, **kwargs: Any) -> Any:
    """Run the forward of a hooked module, and none of its hooks."""
    entering = _Entering(owner=module)
    push(entering)
    try:
        return module.forward(**kwargs)
    finally:
        if next(running(), None) is entering:
            pop(module)


def install_forward_hooks(model: nn.Module, make_hooks: Callable[[Sequence[PatchedSlot]], DecoderHooks]) -> None:
    """Hook every decoder of a model that holds patched slots, and the modules around it; the slots keep the handles."""
    modules = dict(model.named_modules())
    slots_of: dict[str, list[PatchedSlot]] = {}
    for path, slot in modules.items():
        if isinstance(slot, PatchedSlot):
            slots_of.setdefault(_decoder_path(modules, path.rpartition(".")[0]), []).append(slot)
    for path, slots in slots_of.items():
        hooked: list[tuple[nn.Module, DecoderHooks | _MaskHooks]] = [(modules[path], make_hooks(slots))]
        outside = path
        while outside:
            outside = outside.rpartition(".")[0]
            if "attention_mask" in inspect.signature(type(modules[outside]).forward).parameters:
                hooked.append((modules[outside], _MaskHooks()))
        for module, hooks in hooked:
            forward = _HookedForward(module, hooks)
            slots[0].hooks += [
                module.register_forward_pre_hook(hooks.pre_forward, with_kwargs=True),
                module.register_forward_pre_hook(forward.enter),
                module.register_forward_hook(forward.leave, always_call=True),
                module.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True),
                forward,
            ]


def decoder_of(model: nn.Module, module: nn.Module) -> nn.Module:
    """The decoder that a module of a model belongs to: itself, or the next one around it that takes tokens."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    start = next(path for path, each in modules.items() if each is module)
    return modules[_decoder_path(modules, start)]


def _decoder_path(modules: Mapping[str, nn.Module], path: str) -> str:
    while not takes_tokens(modules[path]):
        if not path:
            raise UnsupportedModelError(
                f"no module of {type(modules['']).__name__} around its rotary embedding takes input_ids or "
                "inputs_embeds; patch the whole model, not a part of it"
            )
        path = path.rpartition(".")[0]
    return path

"""The hooks around a decoder's forward: the base class of all hooks, and the function that installs them.

A static method needs no hooks. A length-dependent or a remapping method must know more of a forward than its rotary
modules and attention functions are given, so hooks before the decoder's forward read the arguments of the call, and
hooks after it record what was done. docs/internals.md shows the order in which they run.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.decoder_arguments import arguments, cache_of_output, is_of_transformers, takes_tokens
from rope_ext_hf.patches.forward.forward_call import ForwardContext, GivenMask
from rope_ext_hf.patches.forward.hooked_forward import ForwardHooks, HookedForward
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, tables_of
from rope_ext_hf.rotary.cache_state import CacheState, KeyOrigin, follow_rows, store_state
from rope_ext_hf.rotary.embedding import RotaryEmbedding, arrange
from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.forward_state import graph_break, pop, push

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a forward: those by position, and those by name."""


class DecoderHooks(ABC):
    """Hooks around the forward of a decoder, which serve the modules of class `PatchedRotaryEmbedding` inside it.

    Each kind of method has a subclass.

    Nothing here changes with a forward: what belongs to one forward is in its `ForwardContext`, so that several threads
    may run one model.
    """

    def __init__(self, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        self.slots = list(slots)
        self.axes = max(slot.axes for slot in slots)  # how many axes the positions of the model may have
        self.kernels = _kernels_of(tables_of(slots))

    def prepare(self, model: nn.Module, decoder: nn.Module) -> None:  # noqa: B027 - not every kind has to
        """Find out what later forwards need to know of a decoder. Called once, when its model has been patched."""

    @abstractmethod
    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Begin a forward; return other arguments for it, or None to leave them as they are."""

    @abstractmethod
    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End a forward. It is called after an exception, too; `output` is None then."""

    def begin(self, decoder: nn.Module, call: Mapping[str, Any]) -> ForwardContext | None:
        """Return a new context for a call, the innermost of this thread from now on; None where it has no tokens.

        `call`: the arguments by name.
        """
        interrupted = pop(decoder)
        if interrupted is not None:  # a KeyboardInterrupt has skipped the hooks after that forward
            interrupted.close()
        context = ForwardContext.from_call(decoder, call, self.axes)
        if context is not None:
            if is_exporting():
                self.check_exportable(context)
            if self.kernels is not None and context.new_tokens.shape[0] > 1:
                graph_break(self.kernels.check)(decoder, context.new_tokens.device)
            push(context)
        return context

    def check_exportable(self, context: ForwardContext) -> None:
        """Check that a graph for another program can hold this forward, which is traced or exported.

        Raises:
            LengthError: the frequencies follow the length of each input.
            UnsupportedModelError: torch.jit.trace cannot follow the method.
        """
        for table in tables_of(self.slots):
            table.check_exportable()
            if getattr(table.method, "depends_on_total_length", False) and not torch.compiler.is_exporting():
                raise UnsupportedModelError(
                    f"the positions of {table.method.name} depend on the length of each input, and torch.jit.trace "
                    "would keep those of its example for all inputs; trace a model under a frequency method, such as "
                    "yarn"
                )

    def end(self, decoder: nn.Module) -> ForwardContext | None:
        """End a forward, undo what it changed in its cache, and return its context; None where none was begun."""
        context = pop(decoder)
        if not isinstance(context, ForwardContext):
            return None
        context.close()
        return context

    def origin(self) -> KeyOrigin:
        """Return the methods, rotary embeddings and fixed lengths by which a forward now rotates the keys it stores."""
        return KeyOrigin(tuple((table.method, table.rotary, table.fixed_length) for table in tables_of(self.slots)))

    def record(self, cache: Any, output: Any, state: CacheState) -> None:
        """Store a record of how keys are rotated with the cache of a forward that has ended.

        `state`: the record. `cache`: the cache that the call was given; None: the one in its output, if there is one.
        """
        was_given = cache is not None
        if not was_given:
            cache = cache_of_output(output)
        if cache is None:
            return
        store_state(cache, state)
        # A compiled call that is given no cache is one graph, which `follow_rows` would end; the first forward onto the
        # cache makes up for it.
        if state.rows is not None and not state.follows and (was_given or not torch.compiler.is_compiling()):
            graph_break(follow_rows)(cache, state)


class _MaskHooks:
    """Hooks around a module that contains the decoder; they note the mask it was given, before it makes another."""

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the mask of a call, and whether the call has positions."""
        call = arguments(module, args, kwargs)
        mask, positions = call.get("attention_mask"), call.get("position_ids")
        push(GivenMask(owner=module, attention_mask=mask, with_positions=positions is not None))

    def post_forward(self, module: nn.Module, *_: Any) -> None:
        """Forget the call that `pre_forward` noted."""
        pop(module)


def install_forward_hooks(
    model: nn.Module, make_hooks: Callable[[Sequence[PatchedRotaryEmbedding]], DecoderHooks]
) -> None:
    """Install hooks on every decoder with patched rotary modules, and on the modules around it that take a mask.

    `make_hooks` makes the hooks of a decoder for its patched rotary modules. The first of these modules keeps the
    handles that remove the hooks.
    """
    modules = dict(model.named_modules())
    slots_of: dict[str, list[PatchedRotaryEmbedding]] = {}
    for path, slot in modules.items():
        if isinstance(slot, PatchedRotaryEmbedding):
            slots_of.setdefault(_decoder_path(modules, path.rpartition(".")[0]), []).append(slot)
    for path, slots in slots_of.items():
        decoder_hooks = make_hooks(slots)
        hooked: list[tuple[nn.Module, ForwardHooks]] = [(modules[path], decoder_hooks)]
        around = path
        while around:  # from the decoder outwards, up to the model itself, whose path is empty
            around = around.rpartition(".")[0]
            if "attention_mask" in inspect.signature(type(modules[around]).forward).parameters:
                hooked.append((modules[around], _MaskHooks()))
        for module, hooks in hooked:
            forward = HookedForward(module, hooks)
            slots[0].hooks += [
                module.register_forward_pre_hook(hooks.pre_forward, with_kwargs=True),
                module.register_forward_pre_hook(forward.enter),
                module.register_forward_hook(forward.leave, always_call=True),
                module.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True),
                forward,
            ]
        decoder_hooks.prepare(model, modules[path])


def _takes_no_tokens(model: Any) -> UnsupportedModelError:
    """Return the error for a model that takes neither token ids nor embeddings: a part, or one that reads no text.

    Every model of transformers takes what its class names as its main input.
    """
    arguments = list(inspect.signature(type(model).forward).parameters)[1:]
    main = getattr(model, "main_input_name", None)
    which = f"{type(model).__name__} takes {main if main in arguments else arguments[0]}"
    if "hidden_states" in arguments:
        way_out = "It is a part of a model: patch the whole model"
    elif not is_of_transformers(model):
        way_out = "Give its forward input_ids (docs/own-models.md), or use a static method (yarn, ntk, linear, ...)"
    else:
        way_out = "Use a static method (yarn, ntk, linear, ...)"
    return UnsupportedModelError(
        f"{which}, and neither input_ids nor inputs_embeds, by which length-dependent and remapping methods count "
        f"tokens. {way_out}"
    )


def decoder_of(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return the decoder that a module of a model belongs to: itself, or the next module around it that takes tokens.

    Raises:
        UnsupportedModelError: no module around it does.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    start = next(path for path, candidate in modules.items() if candidate is module)
    return modules[_decoder_path(modules, start)]


def _decoder_path(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the path of the decoder that the module at a path belongs to; `modules` are those of a model by path."""
    while not takes_tokens(modules[path]):
        if not path:
            raise _takes_no_tokens(modules[""])
        path = path.rpartition(".")[0]
    return path


# --- kernels that would leave the hooks out -----------------------------------------------------------------------


_TOLERANCE = 1e-2
"""The largest difference that counts as rounding; a wrong row differs by about 1."""


class _RotationKernels:
    """A check of the fused kernels that may rotate queries and keys in one decoder, run before every forward.

    It compares each kernel once with the function of transformers that it replaces. All models of a class share these
    functions, so that loading another model may bring a kernel at any time.
    """

    def __init__(self, table: RotaryEmbedding) -> None:
        self.table = table  # a rotary module of the decoder, whose size and layout the comparison uses
        self.functions: list[Any] | None = None  # looked up when first needed
        self.compared: dict[Any, Any] = {}  # the kernel that was last compared, by function

    def check(self, decoder: nn.Module, device: torch.device) -> None:
        """Check that the kernels in use rotate rows of different angles as transformers' own functions do.

        Raises:
            UnsupportedModelError: a kernel does not.
        """
        if self.functions is None:
            attached = [module.__dict__.get("_kernel_funcs", {}) for module in decoder.modules()]
            every = {function for functions in attached for function in functions.values()}
            self.functions = [function for function in every if function.kernel_layer_name == "rotary_pos_emb"]
        for function in self.functions:
            kernel = function.__dict__.get("forward")
            if kernel is None or kernel is self.compared.get(function):
                continue
            if not self._rotates_each_row(function, device):
                raise UnsupportedModelError(
                    "the kernel that rotates queries and keys (use_kernels=True) gives rows of different length, "
                    "padding or positions other angles than transformers' own function, so a batch of several rows is "
                    f"wrong under {self.table.method.name}: give one row at a time, or load the model without kernels"
                )
            self.compared[function] = kernel

    def _rotates_each_row(self, function: Any, device: torch.device) -> bool:
        """Return whether a function, run by its kernel, rotates two rows by different angles as its class does."""
        dim = self.table.rotary.dim
        x = torch.linspace(-1, 1, dim, device=device).expand(2, 1, 1, -1).contiguous()
        angle = torch.linspace(0, 1, 2, device=device)[:, None, None].expand(2, 1, dim // 2)
        arguments = (x, x, *arrange(angle.cos(), angle.sin(), self.table.layout, None))
        expected = type(function).forward(function, *arguments)[0]
        return torch.allclose(function(*arguments)[0], expected, atol=_TOLERANCE)


def _kernels_of(tables: Sequence[RotaryEmbedding]) -> _RotationKernels | None:
    """Return an object that checks fused rotation kernels in a decoder; None if no kernels can be in use.

    `tables`: rotary modules of that decoder, at least one.
    """
    # transformers has imported the library by now, if any model of this process uses kernels.
    return _RotationKernels(tables[0]) if "kernels" in sys.modules else None

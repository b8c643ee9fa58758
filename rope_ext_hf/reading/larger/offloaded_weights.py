"""Weights that accelerate keeps in main memory or on disk, and brings to a device for each call of their module.

Texts that are read layer by layer need the weights of each layer once (`LayersInTurn`). If there is room for two
layers, a thread reads those of the next one while one computes. It reads values alone; modules are changed in the
thread that computes.
"""

from __future__ import annotations

import mmap
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.patches.forward.decoders import decoder_of
from rope_ext_hf.patches.slots.slot_finding import find_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Values = dict[Any, dict[str, Tensor]]
"""The weights of modules by hook of accelerate, and by name in its module."""


def is_offloaded(module: nn.Module) -> bool:
    """Return whether the weights of any part of a module are brought to their device for each call."""
    return any(_offloading_hooks(part) for part in module.modules())


def offloaded_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights of a module that are brought to their device for each call."""
    return sum(weight.numel() * weight.itemsize for weight in module.parameters() if weight.is_meta)


def device_of_ids(model: Any) -> torch.device:
    """Return the device on which a model takes token ids: the one on which it computes their embeddings."""
    embeddings: nn.Module = model.get_input_embeddings()
    for part in embeddings.modules():
        for hook in _offloading_hooks(part):  # the weights themselves are on the meta device
            return _device_of(hook)
    return next(embeddings.parameters()).device


@contextmanager
def loaded_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Bring the offloaded weights of modules to their device once inside the with block, at their first call.

    Without it they come at each call, and are freed after it. Other modules stay as they are.
    """
    with ExitStack() as stack:
        for module in modules:
            if _offloading_hooks(module):
                stack.enter_context(_LoadingOnce(module).in_place())
        yield


class LayersInTurn:
    """The offloaded weights of layers, which come to their device one layer after the other, in a with block.

    With `ahead`, a thread reads the weights of the next layer while one computes: those on disk into main memory, and
    those of a layer on CUDA onto the device. The weights of two layers are then in memory at the same time.

    Args:
        layers: the layers, in the order in which they compute. Those without offloaded weights stay as they are.
        ahead: whether the weights of the next layer are read while one computes. Otherwise they are read when it has
            computed, so that the weights of one layer are in memory at a time.
    """

    def __init__(self, layers: Sequence[nn.Module], *, ahead: bool = True) -> None:
        self._layers = layers
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, "next-layer")
        self._stopped = Event()
        self._coming: Future[_Values] | None = None

    def __enter__(self) -> LayersInTurn:
        self._begin(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()  # so that an error, or the user's Ctrl-C, waits for one weight at most
        self._thread.shutdown()
        self._coming = None

    @contextmanager
    def loaded(self, index: int) -> Iterator[None]:
        """Bring the weights of one layer to their device inside the with block.

        Args:
            index: the place of the layer; each is asked for once, in order.

        Raises:
            Exception: whatever reading the weights raised in the thread.
        """
        values = {} if self._coming is None else self._coming.result()
        self._coming = None
        with ExitStack() as stack:
            for module in self._layers[index].modules():
                if _offloading_hooks(module):
                    loading = _LoadingOnce(module)
                    stack.enter_context(loading.in_place())
                    # Now and not at the first call: accelerate empties CUDA's cache at each weight that it sets, which
                    # waits for all copies that are under way.
                    loading.load(values)
            self._begin(index + 1)
            yield

    def _begin(self, index: int) -> None:
        """Begin to read the weights of a layer in the thread; `index`: its place, beyond the last one for none."""
        if not self._ahead:
            return
        wanted = [each for layer in self._layers[index : index + 1] for each in _wanted(layer)]
        if not wanted:
            return
        # They take the memory of the previous layer, which the device may not have computed yet.
        previous = [
            torch.cuda.current_stream(device).record_event() for device in {each.copied_to for each in wanted} - {None}
        ]
        self._coming = self._thread.submit(_read, wanted, previous, self._stopped)


class _Wanted(NamedTuple):
    """A weight that is to be read: the hook of accelerate that brings it, and its name there."""

    hook: Any
    name: str
    copied_to: torch.device | None  # the CUDA device that it is copied to; None: it is only read into main memory


def _wanted(layer: nn.Module) -> list[_Wanted]:
    """Return the offloaded weights of a layer, as accelerate's hooks bring them."""
    from accelerate.utils import named_module_tensors  # imports half of its package

    wanted = []
    for module in layer.modules():
        for hook in _offloading_hooks(module):
            device = _device_of(hook)
            weights = named_module_tensors(
                module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
            )
            for name, weight in weights:
                # Quantised weights have classes of their own, which accelerate moves each in its way.
                copies = device.type == "cuda" and type(weight) in (Tensor, nn.Parameter)
                wanted.append(_Wanted(hook, name, device if copies else None))
    return wanted


def _read(wanted: Sequence[_Wanted], previous: Sequence[Any], stopped: Event) -> _Values:
    """Return the values of weights, read in a thread.

    Args:
        wanted: the weights.
        previous: CUDA events to wait for.
        stopped: is set when nobody needs the rest.
    """
    values: _Values = {}
    for event in previous:
        event.synchronize()
    with torch.no_grad():  # a setting of each thread
        for hook, name, device in wanted:
            if stopped.is_set():
                break
            value = hook.weights_map[name]
            # accelerate finds weights that several modules share by their place in main memory
            is_shared = value.data_ptr() in (hook.tied_params_map or ())
            if device is not None and not is_shared:
                with torch.cuda.stream(_copying_stream(device)):
                    value = value.to(device)  # returns when the copy is done: no other stream has to wait
            elif type(value) in (Tensor, nn.Parameter):
                _read_pages(value)
            values.setdefault(hook, {})[name] = value
    return values


@cache
def _copying_stream(device: torch.device) -> Any:
    """Return the stream in which weights are copied to a CUDA device; memory is kept for each stream, so it is one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _read_pages(value: Tensor) -> None:
    """Have the system read a tensor into main memory, if it is in a file that safetensors has mapped.

    One byte of each page is read, by numpy, which needs no threads for it.
    """
    if value.device.type == "cpu" and value.is_contiguous():
        value.detach().flatten().view(torch.uint8)[:: mmap.PAGESIZE].numpy().max(initial=0)


class _LoadingOnce:
    """A stand-in for the hook of a module, which loads the weights at the first call and keeps them.

    accelerate's forward of the module calls `module._hf_hook`, and takes all else from it as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hook: Any = module._hf_hook
        self._offloading = _offloading_hooks(module)
        self._called = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in for the hook inside the with block, and free the weights at its end."""
        module: Any = self._module
        module._hf_hook = self
        try:
            yield
        finally:
            module._hf_hook = self._hook
            for hook in self._offloading:
                hook.offload = True
            if self._called:
                self._hook.post_forward(module, None)

    def load(self, values: _Values) -> None:
        """Load the weights before the first call. `values`: those that are read already, which are taken out."""
        self._called = True
        for hook in self._offloading:
            weights_map = hook.weights_map
            hook.weights_map = ChainMap(values.pop(hook, {}), weights_map)
            try:
                hook.pre_forward(self._module)
            finally:
                hook.weights_map = weights_map
            hook.offload = False  # neither loads in the next calls nor frees after them

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Load the weights if this is the first call, and return the arguments on the device."""
        self._called = True
        arguments = self._hook.pre_forward(module, *args, **kwargs)
        for hook in self._offloading:
            hook.offload = False  # neither loads in the next calls nor frees after this one
        return arguments


def _offloading_hooks(module: nn.Module) -> list[Any]:
    """Return those hooks of accelerate on a module that bring its weights to a device for each call."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))  # of a SequentialHook
    return [hook for hook in hooks if getattr(hook, "offload", False)]


def _device_of(hook: Any) -> torch.device:
    """Return the device to which a hook of accelerate brings weights."""
    device: Any = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


# --- where layers are placed --------------------------------------------------------------------------------------


class LayerWeights(NamedTuple):
    """The numbers of weights in the parts of a model that have to be on the device at the same time.

    Attributes:
        outside: the weights outside of the layers.
        layers: the weights of each layer.
    """

    outside: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerWeights:
        """Return the numbers of a model, which may be on the meta device."""
        layers = tuple(_count(layer) for layer in _layers(model))
        return cls(_count(model) - sum(layers), layers)

    def least(self, *, ahead: bool = True) -> int:
        """Return the most weights that are on the device at the same time, if no layer stays there.

        `ahead`: whether each layer comes while the one before it computes, so that those of two are there.
        """
        return self.outside + sum(sorted(self.layers)[-2 if ahead else -1 :])


def layer_map(model: PreTrainedModel, room: int, main: int, width: int, device: torch.device) -> dict[str, Any]:
    """Return a device map with which the weights of a model fit a device: the place of every part by its path.

    Args:
        model: the model, which may be on the meta device.
        room: the free bytes on the device for weights.
        main: the free bytes of main memory for weights, if the device is not the CPU.
        width: the bytes of one weight.
        device: the device.
    """
    weights = LayerWeights.of(model)
    here: Any = "cpu" if device.type == "cpu" else device.index or 0 if device.type == "cuda" else str(device)
    free = {here: room - weights.least() * width}
    if here != "cpu":
        free["cpu"] = main
    layers, places = _layers(model), {}

    def place(path: str, module: nn.Module) -> None:
        """Put a part of the model, and what is inside of it, in its place."""
        children = list(module.named_children())
        is_list = module is layers
        if not is_list and (not children or not any(part is layers for part in module.modules())):
            places[path] = here
            return
        for name, child in children:
            inside = f"{path}.{name}" if path else name
            if is_list:
                size = _count(child) * width
                places[inside] = next((where for where, left in free.items() if left >= size), "disk")
                if places[inside] in free:
                    free[places[inside]] -= size
            else:
                place(inside, child)
        for name, _ in module.named_parameters(recurse=False):
            places[f"{path}.{name}" if path else name] = here

    place("", model)
    return places


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model: of the lists of modules in its decoder, the one with most weights."""
    decoder = decoder_of(model, find_slots(model)[0].parent)
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=_count, default=nn.ModuleList())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

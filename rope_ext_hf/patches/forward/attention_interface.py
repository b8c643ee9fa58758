"""transformers' attention interface: our names in its tables, and the arguments that it gives to mask functions.

transformers has two tables by name: one of attention functions, which every attention module calls by the name in its
config, and one of functions that make their masks. This package adds names of its own and changes no other entry; a
model runs our function once its config has our name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import Rotation
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.remapping import AttentionRule

T = TypeVar("T")
ATTENTION_NAME = "rope_ext_hf.remapped"
"""A name without a slash: transformers looks for one with a slash among the kernels on the Hub."""
PROBE_NAME = "rope_ext_hf.probe"
LAYER_ATTRIBUTE = "_rope_ext_hf_layer"
"""The attribute of an attention module that holds its `Layer` while its model is patched."""
UNSUPPORTED_KWARGS = ("position_bias", "sinks", "head_mask")
"""Additions to the scores that blockwise attention does not apply."""
_MASK_ARGUMENTS = ("mask_function", "attention_mask", "local_size")
"""Arguments of a mask function that are read by their name here; a release that renames one is refused."""
PROBE_RECORDS: ContextVar[list[Any] | None] = ContextVar("rope_ext_hf_probe_records", default=None)
"""While a model is probed: the calls of its attention functions, in order (see attention_probe.py); else None."""


@dataclass(frozen=True)
class Layer:
    """The way in which one attention module attends under a remapping method; it is the same in every forward."""

    rule: AttentionRule  # the keys that a query sees, and at which relative positions
    rotation: Rotation | None  # how the module rotates queries and keys; None: it does not
    index: int = 0  # the number of the module among the attention modules of its decoder
    as_loaded: Any = None  # the config that the module was loaded with, which names its own attention function


Places = list[tuple[nn.Module, str, nn.Module]]
"""The places of modules in a model: the parent of each, its attribute that holds the module, and the module."""


def places_of_attention(decoder: nn.Module, attention: Collection[nn.Module], name: str) -> Places:
    """Return the place of each attention module in a decoder: its parent, the attribute of the parent, and itself.

    Args:
        attention: these modules.
        name: the name of the remapping method, for messages.

    Raises:
        UnsupportedModelError: a module with weights of its own stands between a layer and its attention, as PEFT's
            AdaptionPrompt puts one there. It would rotate queries of its own by the layer's cos and sin, which under a
            remapping method are only one half of a rotation.
    """
    modules: dict[str, nn.Module] = dict(decoder.named_modules())
    members = set(attention)
    places: Places = []
    for path, module in modules.items():
        if module in members:
            for wrapper in _paths_inside_layer(modules, path):
                _check_has_no_weights(modules[wrapper], wrapper, name)
            parent, _, attribute = path.rpartition(".")
            places.append((modules[parent], attribute, module))
    return places


def _paths_inside_layer(modules: Mapping[str, nn.Module], path: str) -> list[str]:
    """Return the paths of the modules around an attention module that are inside of its layer, outermost first.

    The layer is the item of the last list on the way: of `layers.3.self_attn.attn` it is `layers.3`, and
    `layers.3.self_attn` is inside of it. Without a list there is no layer.
    """
    parts = path.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    lists = [index for index, outer in enumerate(around) if isinstance(modules[outer], nn.ModuleList)]
    return around[lists[-1] + 2 :] if lists else []


def _check_has_no_weights(wrapper: nn.Module, path: str, method: str) -> None:
    if any(True for _ in wrapper.parameters(recurse=False)):
        raise UnsupportedModelError(
            f"{type(wrapper).__name__} wraps the attention of {path} and has weights of its own. It uses only the cos "
            f"and sin that it receives, but {method} also rotates inside the attention: use a frequency method, such "
            "as yarn, or LoRA in place of this adapter"
        )


def register_attention(name: str, function: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Add an attention function and its mask function to transformers' tables, under a name of ours.

    Raises:
        UnsupportedModelError: mask functions of this release lack an argument that we read by name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.masking_utils import sdpa_mask

    parameters = inspect.signature(sdpa_mask).parameters
    missing = [argument for argument in _MASK_ARGUMENTS if argument not in parameters]
    if missing:
        raise UnsupportedModelError(
            f"the mask functions of transformers {__version__} take no {' and no '.join(missing)}, from which a "
            "remapping method reads padding and windows; use a static method, or another release of transformers"
        )
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)


@contextmanager
def attending(
    model: nn.Module, name: str, function: Callable[..., Any], mask: Callable[..., Any], state: ContextVar[T], value: T
) -> Iterator[None]:
    """Run another attention function in every attention module of a model, inside a `with` block.

    Args:
        model: its configs name the function inside the block, and have their own names again afterwards.
        name: the name of the function in transformers' tables.
        function: the attention function.
        mask: the function that makes its masks.
        state: a variable that the function reads, such as the list in which it records calls.
        value: the value of `state` inside the block.
    """
    register_attention(name, function, mask)
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    token = state.set(value)
    try:
        yield
    finally:
        state.reset(token)
        for key, config in configs.items():
            config._attn_implementation = before[key]


class _AsLoaded:
    """An attention module with another config: the one that the model was loaded with, for attention functions."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module = module
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def run_as_loaded(module: nn.Module, config: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the attention function that a config names, and return its output.

    Args:
        module: the attention module, which the function gets as its first argument.
        config: the config with the name of the function; while the function runs, it is the module's `config`.
        args, kwargs: the other arguments of the function.

    Returns:
        (rows, tokens, heads, head_dim of the values).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # 5.0 has no `get_interface`, which also checks the name.
    look_up = getattr(ALL_ATTENTION_FUNCTIONS, "get_interface", ALL_ATTENTION_FUNCTIONS.get)
    function = look_up(config._attn_implementation, eager)
    out: Tensor = function(_AsLoaded(module, config), *args, **kwargs)[0]
    return out


# --- arguments of mask functions --------------------------------------------------------------------------------------


def places_of_queries(make_mask: Callable[..., Any], past: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell a mask function that its queries stand after `past` tokens."""
    if "cache_position" in inspect.signature(make_mask).parameters:  # in 5.0
        return {"cache_position": torch.arange(past, past + tokens, device=device)}
    return {"q_length": tokens, "q_offset": past}


def tokens_before_queries(kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens before the queries, from the arguments of a mask function."""
    places = kwargs.get("cache_position")  # in 5.0
    return int(kwargs["q_offset"] if places is None else places[0])


def is_sliding(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a mask function is asked for causality and a sliding window of `local_size`, and nothing else.

    `kwargs`: its arguments.
    """
    from transformers.masking_utils import sliding_window_causal_mask_function

    size = kwargs.get("local_size")
    return size is not None and _same_closure(kwargs.get("mask_function"), sliding_window_causal_mask_function(size))


def chunk_size(kwargs: Mapping[str, Any]) -> int | None:
    """Return the size of attention chunks where a mask function is asked for causality inside chunks and nothing else.

    None for every other mask, and with a padding mask, because padding on the left moves the chunks. `kwargs`: the
    arguments of the mask function.
    """
    from transformers.masking_utils import chunked_causal_mask_function

    size: int | None = kwargs.get("local_size")
    if size is None or kwargs.get("attention_mask") is not None:
        return None
    chunked = chunked_causal_mask_function(size, Tensor())
    return size if _same_closure(kwargs.get("mask_function"), chunked, any_tensor=True) else None


def _same_closure(first: Any, second: Any, *, any_tensor: bool = False) -> bool:
    """Return whether two functions are the same code around the same values, as two closures of one factory are.

    transformers builds a mask from such functions, nested in each other; comparing them shows which keys a mask hides.
    Tensors around them count as different, or under `any_tensor` as the same.
    """
    if inspect.isfunction(first) and inspect.isfunction(second):
        cells, other_cells = (
            tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (first, second)
        )
        return first.__code__ is second.__code__ and _same_closure(cells, other_cells, any_tensor=any_tensor)
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return all(_same_closure(*pair, any_tensor=any_tensor) for pair in zip(first, second, strict=True))
    if isinstance(first, Tensor):
        return any_tensor and isinstance(second, Tensor)
    return type(first) is type(second) and bool(first == second)

"""Our names in transformers' two attention tables, and how a model is made to run one of them, in eval mode or not."""

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
"""Arguments of a mask function that are read by their name, so that a padding mask under a new one would be missed."""
PROBE_RECORDS: ContextVar[list[Any] | None] = ContextVar("rope_ext_hf_probe_records", default=None)
"""While a model is probed: what its attention functions were called with (see attention_probe.py)."""


@dataclass(frozen=True)
class Layer:
    """How one attention module attends; it does not change from one forward to the next."""

    rule: AttentionRule
    rotation: Rotation | None
    index: int = 0  # its place among the attention modules of its decoder
    as_loaded: Any = None  # the config that the module was loaded with, which names its attention function


Places = list[tuple[nn.Module, str, nn.Module]]
"""The places of modules in a model: the parent of each, its attribute that holds the module, and the module."""


def places_of_attention(decoder: nn.Module, attention: Collection[nn.Module], name: str) -> Places:
    """Return where these attention modules stand in a decoder, after a look at what stands around them.

    `name`: of the remapping method.

    Raises:
        UnsupportedModelError: a module with weights of its own stands between a layer and its attention, as PEFT's
            AdaptionPrompt puts one there. It would rotate queries of its own by the layer's cos and sin, which under a
            remapping method are only one half of a rotation.
    """
    modules: dict[str, nn.Module] = dict(decoder.named_modules())
    members, places = set(attention), []
    for path, module in modules.items():
        if module not in members:
            continue
        parts = path.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts))]
        lists = [index for index, each in enumerate(around) if isinstance(modules[each], nn.ModuleList)]
        for each in around[lists[-1] + 2 :] if lists else []:  # inside of the layer, which is an item of the last list
            if any(True for _ in modules[each].parameters(recurse=False)):
                raise UnsupportedModelError(
                    f"{type(modules[each]).__name__} stands around the attention of {each} with weights of its own, "
                    f"and the cos and sin that it is given are not all that rotates under {name}: use a frequency "
                    "method, such as yarn, or LoRA in place of this adapter"
                )
        places.append((modules[".".join(parts[:-1])], parts[-1], module))
    return places


def register_attention(name: str, function: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Add an attention function and its mask function to transformers' tables; no existing entry changes."""
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.masking_utils import sdpa_mask

    missing = [name for name in _MASK_ARGUMENTS if name not in inspect.signature(sdpa_mask).parameters]
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
    """Run a function in every attention module of a model; it reads `state`, which has this value inside.

    transformers knows the function, and the one that makes its masks, by `name`.
    """
    register_attention(name, function, mask)
    every: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    configs = {id(config): config for config in every if hasattr(config, "_attn_implementation")}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    token = state.set(value)
    try:
        yield
    finally:
        state.reset(token)
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module of a model is in eval mode; at the end each is back in its own mode."""
    modes = {name: module.training for name, module in model.named_modules()}
    for module in model.modules():
        if module.training:
            module.training = False
    try:
        yield
    finally:
        for name, module in model.named_modules():  # by name: a patch may have put another module in the place
            if module.training != (before := modes.get(name, module.training)):
                module.training = before


class _AsLoaded:
    """An attention module with the config that it was loaded with, which attention functions look into."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module = module
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def run_as_loaded(module: nn.Module, config: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the attention function that a config names; it gives (rows, tokens, heads, head_dim of the values)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    look_up = getattr(
        ALL_ATTENTION_FUNCTIONS, "get_interface", ALL_ATTENTION_FUNCTIONS.get
    )  # 5.0 has no check of names
    function = look_up(config._attn_implementation, eager)
    out: Tensor = function(_AsLoaded(module, config), *args, **kwargs)[0]
    return out


def places_of_queries(make_mask: Callable[..., Any], past: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell a mask function which places its queries have: those after `past` tokens."""
    if "cache_position" in inspect.signature(make_mask).parameters:  # in 5.0
        return {"cache_position": torch.arange(past, past + tokens, device=device)}
    return {"q_length": tokens, "q_offset": past}


def tokens_before_queries(kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens precede the queries by the arguments of a mask function."""
    places = kwargs.get("cache_position")  # in 5.0
    return int(kwargs["q_offset"] if places is None else places[0])


def is_sliding(kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of a mask function ask for causality and a sliding window of `local_size`, and no more."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    size = kwargs.get("local_size")
    return size is not None and _same_closure(kwargs.get("mask_function"), sliding_window_causal_mask_function(size))


def chunk_size(kwargs: Mapping[str, Any]) -> int | None:
    """The size of attention chunks where the arguments of a mask function ask for causality inside chunks, and no more.

    Without a padding mask, because padding on the left moves the chunks. None: another mask.
    """
    from transformers.masking_utils import chunked_causal_mask_function

    size: int | None = kwargs.get("local_size")
    if size is None or kwargs.get("attention_mask") is not None:
        return None
    chunked = chunked_causal_mask_function(size, Tensor())
    return size if _same_closure(kwargs.get("mask_function"), chunked, any_tensor=True) else None


def _same_closure(one: Any, other: Any, *, any_tensor: bool = False) -> bool:
    """Whether two functions are the same code around the same values; tensors are never the same, or all are."""
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return all(_same_closure(*pair, any_tensor=any_tensor) for pair in zip(one, other, strict=True))
        if isinstance(one, Tensor):
            return any_tensor and isinstance(other, Tensor)
        return type(one) is type(other) and bool(one == other)
    cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
    return one.__code__ is other.__code__ and _same_closure(*cells, any_tensor=any_tensor)

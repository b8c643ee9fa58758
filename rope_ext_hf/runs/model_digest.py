"""A digest of everything that a model computes with: configs, modules, parameters and buffers.

Any bit of a weight, any value of the config and any setting of a module changes it. It is the same for the same model
loaded again, from another folder, or in another process, and before and after it was patched: what a patch puts in
stands in a run's settings by itself (`identity.py`). Not seen: hooks and functions that somebody hung onto a model.

Cost: every weight is read once, without a copy of the model, by SHA-256 on all cores: 1.4 GB/s on one core of a server,
2.8 GB/s on two, where 8 billion parameters in bfloat16 take 6 s.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rope_ext_hf.patches.slots import PatchedSlot, patched_slots

BLOCK_BYTES = 2**22  # bytes that one thread reads at a time, and copies where they are on a GPU

_NOT_IN_CONFIGS = frozenset(
    # where it came from
    {"_name_or_path", "_commit_hash", "_auto_class", "auto_map", "transformers_version", "architectures"}
    # every tensor has its own, and every module its class
    | {"dtype", "torch_dtype", "_post_init_done"}
)
_NOT_IN_MODULES = frozenset(
    # where it came from, and where it is
    {"name_or_path", "hf_device_map", "_is_hf_initialized", "is_loaded_in_4bit", "is_loaded_in_8bit", "model_tags"}
    # which warnings were given, and that a trainer had it
    | {"warnings_issued", "_is_accelerate_prepared"}
)
_LEFT_BEHIND = re.compile(r"(?!.*original).*inv_freq|.*max_seq_len_cached")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, children and hooks


def model_digest(model: nn.Module) -> str:
    """A digest, 64 hexadecimal digits, of a model with its weights on any devices; live patches do not count."""
    sha, of_tensor = hashlib.sha256(), WeakTensorKeyDictionary()
    with torch.no_grad():
        values: list[tuple[str, Any]] = [("config", config) for config in _configs(model)]
        for name, module in _modules(model):
            if any(map(attrgetter("is_meta"), module.parameters(recurse=False))):  # accelerate keeps them elsewhere
                from accelerate.utils import align_module_device

                _add(sha, of_tensor, values)
                with align_module_device(module):
                    _add(sha, of_tensor, _values(name, module))
                values = []
            else:
                values += _values(name, module)
        _add(sha, of_tensor, values)
    return sha.hexdigest()


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module with its name, parents first, those in the slots as they were before a patch."""
    modules: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if isinstance(module, PatchedSlot):
            module = module.replaced
        if id(module) not in modules:
            modules[id(module)] = name, module
            for attribute, child in reversed(list(module.named_children())):
                waiting.append((f"{name}.{attribute}", child))
    return list(modules.values())


def _values(name: str, module: nn.Module) -> list[tuple[str, Any]]:
    """A module's class, settings, parameters and buffers, those that are not saved included, with their names."""
    # what the last input left behind in such a module does not count
    follows_the_input = re.search("dynamic|longrope", str(getattr(module, "rope_type", ""))) is not None
    kept: list[tuple[str, Any]] = [(f"module {name}", f"{type(module).__module__}.{type(module).__qualname__}")]
    values = vars(module) | dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for key in sorted(values.keys() - _OF_TORCH - _NOT_IN_MODULES):
        if not (follows_the_input and _LEFT_BEHIND.fullmatch(key)):
            kept.append((key, values[key]))
    return kept


def _configs(model: nn.Module) -> list[dict[str, Any]]:
    """Every config that a module of the model holds: of a patched one the original, with what its user changed."""
    swaps = {id(swap.patched): swap for slot in patched_slots(model) for swap in slot.state.configs}
    changed: dict[int, dict[str, Any]] = {}
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if not hasattr(config, "model_type"):
            continue
        if (swap := swaps.get(id(config))) is not None:
            config = swap.original
            changed[id(config)] = {
                key: value
                for key, value in vars(swap.patched).items()
                if not hasattr(value, "model_type") and (key not in swap.written or swap.written[key] != value)
            }
        configs.setdefault(id(config), config)

    def settings(config: Any) -> dict[str, Any]:
        # which way of loading it leaves model_type in the instance, beside the one of its class, differs
        values = {"model_type": config.model_type} | vars(config) | changed.get(id(config), {})
        return {key: inner(value) for key, value in values.items() if key not in _NOT_IN_CONFIGS}

    def inner(value: Any) -> Any:
        if hasattr(value, "model_type"):
            return settings(value)
        if isinstance(value, Mapping):
            return {key: inner(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [inner(each) for each in value]
        return value.to_dict() if hasattr(value, "to_dict") else value  # of a quantisation

    written: list[dict[str, Any]] = []  # copies of one config count once, wherever a model keeps them
    for config in configs.values():
        if (values := settings(config)) not in written:
            written.append(values)
    return written


class _Bracket(str):
    """The end of a collection."""


def _add(sha: hashlib._Hash, of_tensor: WeakTensorKeyDictionary, values: Sequence[tuple[str, Any]]) -> None:
    """Add named values; objects other than tensors, numbers, texts and collections of these are passed over.

    Each is its name and a text, of a tensor its digest; a collection stands between brackets that carry its name.
    """
    waiting = [*values][::-1]
    while waiting:
        name, value = waiting.pop()
        match value:
            case _Bracket():
                text = str(value)
            case Tensor():
                if value not in of_tensor:  # tied weights are read once
                    of_tensor[value] = _digest_of_tensor(value, of_tensor)
                text = of_tensor[value]
            case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | Enum():
                text = repr(value)
            case Mapping():
                inner = sorted(zip(map(repr, value), value.values(), strict=True), key=itemgetter(0))
                waiting += [(name, _Bracket("}")), *inner[::-1]]
                text = "{"
            case list() | tuple():
                waiting += [(name, _Bracket("]")), *zip(repeat(""), value[::-1])]
                text = "["
            case set() | frozenset():
                text = repr(sorted(map(repr, value)))
            case _:
                continue
        for part in (name, text):
            data = part.encode("utf-8", "surrogatepass")
            sha.update(f"{len(data)}:".encode() + data)


def _digest_of_tensor(tensor: Tensor, of_tensor: WeakTensorKeyDictionary) -> str:
    """A SHA-256 of a shape and of the SHA-256 of each block of bits."""
    sha = hashlib.sha256()
    _add(sha, of_tensor, [("shape", [str(tensor.dtype), *tensor.shape])])
    if "quant_state" in vars(tensor):  # what a quantised parameter carries beside its codes
        _add(sha, of_tensor, [("quant_state", vars(tensor.quant_state))])  # type: ignore[attr-defined]
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        _add(sha, of_tensor, [("context", context), *((name, getattr(tensor, name)) for name in names)])
    elif tensor.numel() and tensor.device.type != "meta":
        dense = tensor.detach()
        if dense.is_quantized:
            dense = dense.dequantize()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        blocks = torch.split(dense.contiguous().reshape(-1).view(torch.uint8), BLOCK_BYTES)
        with ThreadPoolExecutor() as threads:  # hashlib lets other threads run
            for digest in threads.map(lambda block: hashlib.sha256(block.cpu().numpy().data).digest(), blocks):
                sha.update(digest)
    return sha.hexdigest()

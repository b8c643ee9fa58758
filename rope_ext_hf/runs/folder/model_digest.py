"""A digest of everything that a model computes with: configs, settings of modules, parameters and buffers.

The digest changes with any bit of a weight, any value of the config and any setting of a module. It stays the same when
the same model is loaded again, from another folder or in another process. It is also the same before and after the
model is patched, because the settings of a run record patches separately (`identity.py`). Hooks and functions that were
attached to a model are not seen.

SHA-256 reads every weight once, on all cores, without a copy of the model. It reads 1.4 GB/s on one core of a server
and 2.8 GB/s on two, so that 8 billion parameters in bfloat16 take 6 s on two cores.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, patched_slots

BLOCK_BYTES = 2**22  # the bytes that a thread reads at a time, and copies to main memory where they are on a GPU

_NOT_IN_CONFIGS = frozenset(
    # where it came from
    {"_name_or_path", "_commit_hash", "_auto_class", "auto_map", "transformers_version", "architectures", "gguf_file"}
    # covered by the tensors, each with its dtype, and by the modules, each with its class
    | {"dtype", "torch_dtype", "_post_init_done"}
)
_NOT_IN_MODULES = frozenset(
    # where it came from, and where it is
    {"name_or_path", "hf_device_map", "_is_hf_initialized", "is_loaded_in_4bit", "is_loaded_in_8bit", "model_tags"}
    # which warnings were shown, and whether a trainer has prepared the model
    | {"warnings_issued", "_is_accelerate_prepared"}
)
_LEFT_BEHIND = re.compile(r"(?!.*original).*inv_freq|.*max_seq_len_cached")
"""Attributes that the last input leaves behind in a rotary embedding whose frequencies follow the input."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: dicts of parameters, buffers, children and hooks."""


def model_digest(model: nn.Module) -> str:
    """Return the digest of a model, 64 hexadecimal digits; devices of the weights and patches do not change it."""
    from accelerate.utils import align_module_device

    sha, tensor_digests = hashlib.sha256(), WeakTensorKeyDictionary()
    with torch.no_grad():
        _add(sha, tensor_digests, (("config", config) for config in _configs(model)))
        for name, module in _modules("", model, set()):
            with align_module_device(module):  # loads weights that accelerate keeps in main memory or on disk
                _add(sha, tensor_digests, _values(name, module))
    return sha.hexdigest()


def _modules(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once with its name, parents first; for a module that a patch has replaced, the original one."""
    if isinstance(module, PatchedRotaryEmbedding):
        module = module.replaced
    if module not in seen:
        seen.add(module)
        yield name, module
        for attribute, child in module.named_children():
            yield from _modules(f"{name}.{attribute}", child, seen)


def _values(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the class, settings, parameters and buffers of a module by name, also buffers that are not saved."""
    yield f"module {name}", f"{type(module).__module__}.{type(module).__qualname__}"
    follows_the_input = re.search("dynamic|longrope", str(getattr(module, "rope_type", ""))) is not None
    values = vars(module) | dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for key in sorted(values.keys() - _OF_TORCH - _NOT_IN_MODULES):
        if not (follows_the_input and _LEFT_BEHIND.fullmatch(key)):
            yield key, values[key]


def _configs(model: nn.Module) -> list[dict[str, Any]]:
    """Return, as dicts, every config that a module of the model holds.

    For a config that a patch has changed, it is the original, with the changes that its user has made since.
    """
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
        """Return a config as a dict."""
        # some ways of loading a config set model_type in the instance as well as in the class
        values = {"model_type": config.model_type} | vars(config) | changed.get(id(config), {})
        return {key: inner(value) for key, value in values.items() if key not in _NOT_IN_CONFIGS}

    def inner(value: Any) -> Any:
        """Return a value from a config; configs inside it become dicts."""
        if hasattr(value, "model_type"):
            return settings(value)
        if isinstance(value, Mapping):
            return {key: inner(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [inner(item) for item in value]
        if hasattr(value, "to_dict"):  # the config of a quantisation
            return {key: inner(item) for key, item in value.to_dict().items() if key not in _NOT_IN_CONFIGS}
        return value

    distinct: list[dict[str, Any]] = []  # equal configs count once, however many modules have one
    for config in configs.values():
        values = settings(config)
        if values not in distinct:
            distinct.append(values)
    return distinct


def _add(sha: hashlib._Hash, tensor_digests: WeakTensorKeyDictionary, values: Iterable[tuple[str, Any]]) -> None:
    """Add named values to a digest.

    Args:
        sha: the digest.
        tensor_digests: the digests of tensors that were read before, so that tied weights are read once.
        values: names and values.
    """
    for name, value in values:
        for pair in _texts(name, value, tensor_digests):
            for part in pair:
                data = part.encode("utf-8", "surrogatepass")
                sha.update(f"{len(data)}:".encode() + data)


def _texts(name: str, value: Any, tensor_digests: WeakTensorKeyDictionary) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a value, and the digest of a tensor.

    The values in a collection come between an opening and a closing bracket with its name. Objects other than tensors,
    numbers, texts and collections of these are passed over.
    """
    match value:
        case Tensor():
            if value not in tensor_digests:
                tensor_digests[value] = _digest_of_tensor(value, tensor_digests)
            yield name, tensor_digests[value]
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | Enum():
            yield name, repr(value)
        case Mapping():
            yield name, "{"
            for key in sorted(value, key=repr):
                yield from _texts(repr(key), value[key], tensor_digests)
            yield name, "}"
        case list() | tuple():
            yield name, "["
            for item in value:
                yield from _texts("", item, tensor_digests)
            yield name, "]"
        case set() | frozenset():
            yield name, repr(sorted(map(repr, value)))


def _digest_of_tensor(tensor: Tensor, tensor_digests: WeakTensorKeyDictionary) -> str:
    """Return a SHA-256 over the dtype and shape of a tensor, and over the SHA-256 of each block of its bytes."""
    sha = hashlib.sha256()
    _add(sha, tensor_digests, [("shape", [str(tensor.dtype), *tensor.shape])])
    if "quant_state" in vars(tensor):  # scales and more of a parameter that bitsandbytes quantised
        _add(sha, tensor_digests, [("quant_state", vars(tensor.quant_state))])  # type: ignore[attr-defined]
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor made of others, as torchao quantises
        names, context = tensor.__tensor_flatten__()
        _add(sha, tensor_digests, [("context", context), *((name, getattr(tensor, name)) for name in names)])
    elif tensor.numel() and tensor.device.type != "meta":
        dense = tensor.detach()
        if dense.is_quantized:  # PyTorch crashes when such a tensor is viewed as bytes
            dense = dense.dequantize()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        blocks = torch.split(dense.contiguous().reshape(-1).view(torch.uint8), BLOCK_BYTES)
        with ThreadPoolExecutor() as threads:  # hashlib releases the interpreter lock
            for digest in threads.map(lambda block: hashlib.sha256(block.cpu().numpy().data).digest(), blocks):
                sha.update(digest)
    return sha.hexdigest()

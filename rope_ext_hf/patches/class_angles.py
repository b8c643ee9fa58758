"""Frequencies and magnitude that a model's own rotary class computes for a length of input, measured by running it.

The class is run on the CPU, on buffers of its own, so that a model on the meta device can be asked, too. A second
reading of the config may differ from that of the class; this cannot.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.layer_types import LayerType
from rope_ext_hf.rotary.embedding import Layout


class ClassAngles:
    """A rotary module of a model, ready to be run; `layout` is how its angles come out, None: not as pairs."""

    def __init__(self, model: nn.Module, module: nn.Module, layout: Layout | None) -> None:
        self.layout = layout
        self._module = _on_cpu(model, module)

    @torch.no_grad()
    def at(self, layer_type: LayerType, length: int) -> tuple[tuple[float, ...], float]:
        """Return frequencies and magnitude of a layer type for an input of `length` tokens, at least 2.

        They are read from cos and sin at position 1, which float32 holds to its full precision for any frequency up to
        pi, however slow; of a module that arranges its angles in another way, from its buffer, in descending order.
        """
        # A class that follows the length changes its buffers.
        module: Any = copy.deepcopy(self._module)
        positions = torch.tensor([[1, max(1, length - 1)]])
        named = {} if layer_type is None else {"layer_type": layer_type}
        out: Any = module(torch.zeros(1, dtype=torch.float32), positions, **named)
        if self.layout is None:
            return tuple(sorted(module.inv_freq.double().tolist(), reverse=True)), float(module.attention_scaling)
        if isinstance(out, Tensor):
            first = out[0, 0].to(torch.complex128)
            cos, sin = first.real, first.imag
        else:
            cos, sin = (_each_pair_once(part[0, 0].double(), self.layout) for part in out)
        return tuple(torch.atan2(sin, cos).tolist()), float(torch.hypot(cos, sin).mean())


def softmax_multiple(model: nn.Module) -> float:
    """Return what latent attention multiplies its softmax scale by beside the size of a head; 1.0 for other models."""
    for module in model.modules():
        scaling, dim = getattr(module, "scaling", None), getattr(module, "qk_head_dim", None)
        if isinstance(scaling, float) and isinstance(dim, int) and hasattr(module, "kv_lora_rank"):
            return scaling * float(dim**0.5)
    return 1.0


def _each_pair_once(columns: Tensor, layout: Layout) -> Tensor:
    if layout == "bare":
        return columns
    return columns[: len(columns) // 2] if layout == "half" else columns[0::2]


def built_anew(module: nn.Module) -> nn.Module | None:
    """Return a new module of the same class on the CPU; None where it cannot be built.

    Arguments of its class are the attributes of the same name. One that is not kept has its default, so that the result
    may differ in its numbers.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name == "device":
            arguments[name] = "cpu"
        elif hasattr(module, name):
            arguments[name] = getattr(module, name)
        elif parameter.default is parameter.empty:
            return None
    try:
        with torch.device("cpu"), torch.no_grad():
            return type(module)(**arguments)
    except Exception:  # classes raise anything where an attribute is not what its argument was
        return None


def same_frequencies(inv_freq: Tensor, stated: Tensor) -> bool:
    """Return whether the frequencies of a module are those that its config states, up to rounding."""
    # A cast to bfloat16 or float16, perhaps undone since, leaves that much of a difference; another geometry far more.
    # The absolute part is for frequencies near zero, which float16 keeps as multiples of 6e-8.
    return inv_freq.shape == stated.shape and torch.allclose(inv_freq.double().cpu(), stated, rtol=1e-2, atol=6e-8)


def _on_cpu(model: nn.Module, module: nn.Module) -> nn.Module:
    """A copy of a rotary module of a model on the CPU, its buffers filled as loading weights fills them."""
    copied = copy.deepcopy(module)
    if all(buffer.device.type != "meta" for buffer in copied.buffers()):
        return copied.to("cpu")
    copied = copied.to_empty(device="cpu")
    for tensor in (*copied.buffers(), *copied.parameters()):
        tensor.data.fill_(torch.nan)
    from transformers import PreTrainedModel

    owner = [each for each in model.modules() if isinstance(each, PreTrainedModel) and module in each.modules()][-1]
    owner._init_weights(copied)
    if any(tensor.isnan().any() for tensor in (*copied.buffers(), *copied.parameters())):
        raise UnsupportedModelError(f"{type(module).__name__} cannot be run without the weights of its model")
    return copied

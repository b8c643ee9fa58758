"""The frequencies that a model's own rotary class computes, measured by running it.

This package reads frequencies from the config as well, and its reading may differ from that of the class; what the
class computes is what the model does. A copy of the module runs on the CPU, so that this also works for a model on the
meta device.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.layer_types import LayerType
from rope_ext_hf.rotary.embedding import Layout

__all__ = ["ClassAngles", "softmax_multiple"]


class ClassAngles:
    """A copy of a model's rotary module, ready to be run.

    Args:
        model: the model that it belongs to, which fills the copy where its buffers are on the meta device.
        module: the rotary module as the model was loaded with it.
        layout: how it arranges its angles, see `RotaryEmbedding`; None: this package does not know the arrangement.
    """

    def __init__(self, model: nn.Module, module: nn.Module, layout: Layout | None) -> None:
        self.layout = layout
        self._module = _on_cpu(model, module)

    @torch.no_grad()
    def at(self, layer_type: LayerType, length: int) -> tuple[tuple[float, ...], float]:
        """Return the frequencies of a layer type, in radians per token, and the factor of cos and sin.

        The frequencies are those for an input of `length` tokens, at least 2. They are read from cos and sin at
        position 1, which hold any frequency up to pi in the full precision of float32, however slow it is. Where the
        angles are arranged in an unknown way, they are read from the buffer `inv_freq`, in descending order.
        """
        # A class that follows the length changes its buffers, so that each length gets a copy that saw no other.
        module: Any = copy.deepcopy(self._module)
        positions = torch.tensor([[1, max(1, length - 1)]])
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        out: Any = module(torch.zeros(1, dtype=torch.float32), positions, **kwargs)
        if self.layout is None:
            return tuple(sorted(module.inv_freq.double().tolist(), reverse=True)), float(module.attention_scaling)
        if isinstance(out, Tensor):
            first = out[0, 0].to(torch.complex128)
            cos, sin = first.real, first.imag
        else:
            cos, sin = (_each_pair_once(part[0, 0].double(), self.layout) for part in out)
        return tuple(torch.atan2(sin, cos).tolist()), float(torch.hypot(cos, sin).mean())


def softmax_multiple(model: nn.Module) -> float:
    """Return a model's softmax scale times the square root of its head size; mostly 1.0.

    The exception is DeepSeek's multi-head latent attention, which multiplies the usual scale, 1 / sqrt(head size), by a
    factor under YaRN (modeling_deepseek_v3.py).
    """
    for module in model.modules():
        scaling, dim = getattr(module, "scaling", None), getattr(module, "qk_head_dim", None)
        if isinstance(scaling, float) and isinstance(dim, int) and hasattr(module, "kv_lora_rank"):
            return scaling * float(dim**0.5)
    return 1.0


def _each_pair_once(columns: Tensor, layout: Layout) -> Tensor:
    """Return one of the two columns of each pair in a row of cos or sin, as a tensor (dim // 2,)."""
    if layout == "bare":
        return columns
    return columns[: len(columns) // 2] if layout == "half" else columns[0::2]


def built_anew(module: nn.Module) -> nn.Module | None:
    """Return a new module of the same class on the CPU; None where it cannot be built.

    Each argument of the class is the attribute of the same name. An argument that the module does not keep gets its
    default, so the caller must compare the numbers of the new module with those that it expects.
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


def _on_cpu(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return a copy of a model's rotary module on the CPU, its buffers filled as loading the model would fill them.

    Raises:
        UnsupportedModelError: some of its numbers are weights, and the model is on the meta device.
    """
    copied = copy.deepcopy(module)
    if all(buffer.device.type != "meta" for buffer in copied.buffers()):
        return copied.to("cpu")
    copied = copied.to_empty(device="cpu")
    for tensor in (*copied.buffers(), *copied.parameters()):
        tensor.data.fill_(torch.nan)
    from transformers import PreTrainedModel

    around = [part for part in model.modules() if isinstance(part, PreTrainedModel) and module in part.modules()]
    owner = around[-1]  # the innermost model around it, whose class knows how to fill it
    owner._init_weights(copied)
    if any(tensor.isnan().any() for tensor in (*copied.buffers(), *copied.parameters())):
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be run without the weights of its model; load the model with them"
        )
    return copied

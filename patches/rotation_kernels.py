"""Kernels of the Hub in place of transformers' function that rotates queries and keys (`use_kernels=True`).

They multiply by the cos and sin that a patched model gives, and so keep its frequencies. Some rotate every row by the
angles of the first one (kernels-community/aiter-rope, for AMD), which is wrong where each row has angles of its own.
All models of a class share the function, so its kernel may have come with another model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.rotary.embedding import RotaryEmbedding, arrange


class RotationKernels:
    """The functions that rotate queries and keys in a decoder, each kernel compared once with what it replaces."""

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

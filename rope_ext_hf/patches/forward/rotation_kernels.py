"""Fused kernels that may rotate queries and keys of a decoder (`use_kernels=True`), and would do it wrongly.

The kernels library may put a kernel in the place of transformers' own function, which then rotates all rows of a batch
alike.
"""

from __future__ import annotations

import sys
from typing import Any, Self

import torch
from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.rotary.embedding import RotaryEmbedding, arrange

_TOLERANCE = 1e-2
"""The largest difference that counts as rounding; a wrong row differs by about 1."""


class RotationKernels:
    """A check of the fused kernels that may rotate queries and keys in one decoder, before a forward of several rows.

    It compares each kernel once with the function of transformers that it replaces. All models of a class share these
    functions, so that loading another model may bring a kernel at any time.
    """

    def __init__(self, table: RotaryEmbedding) -> None:
        self.table = table  # a rotary module of the decoder, whose size and layout the comparison uses
        self.functions: list[Any] | None = None  # looked up when first needed
        self.compared: dict[Any, Any] = {}  # the kernel that was last compared, by function

    @classmethod
    def in_use(cls, table: RotaryEmbedding) -> Self | None:
        """Return the check of a decoder with this rotary module; None if no kernels can be in use."""
        # transformers has imported the library by now, if any model of this process uses kernels.
        return cls(table) if "kernels" in sys.modules else None

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

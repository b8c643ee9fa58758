"""Find the products in a forward whose operands a rotation reaches first: those of queries and keys.

`watched` runs a model and sees every matrix product, in attention of any class: `matmul`, `bmm`, `einsum`,
`scaled_dot_product_attention`. Two runs that differ only in the angles of the rotary module differ first in the scores
of queries and keys. The second run is given the scores of the first one, so that nothing after them differs, and every
layer shows its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MATMULS = (
    torch.matmul,
    torch.bmm,
    torch.mm,
    Tensor.matmul,
    Tensor.bmm,
    Tensor.mm,
    Tensor.__matmul__,
    torch.baddbmm,
    Tensor.baddbmm,
)
_WITH_A_TERM = (torch.baddbmm, Tensor.baddbmm)


@dataclass(frozen=True)
class Product:
    """One matrix product of a forward.

    Attributes:
        module: the path of the innermost module that computed it.
        left: the first operand, (..., dims), float; the dims are those that are summed over.
        right: the second operand, (..., dims), float; None for a linear layer, whose weight no rotation reaches.
        out: the result, detached; a leaf that requires gradients, if the product was cut.
    """

    module: str
    left: Tensor
    right: Tensor | None
    out: Tensor


class _Watch(TorchFunctionMode):
    """Records every product, and replaces the results of some.

    Args:
        path: returns the path of the module that runs now.
        replaced: the results to give instead, by the number of the product.
        cut: the numbers of products whose results are given without what they were computed from.
    """

    def __init__(self, path: Callable[[], str], replaced: Mapping[int, Tensor], cut: Container[int]) -> None:
        super().__init__()
        self.products: list[Product] = []
        self._path, self._replaced, self._cut = path, replaced, cut

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:  # indexers compute without gradients, which the caller may want
            return None
        operands = _operands(func, args, kwargs)
        if operands is None:
            return func(*args, **kwargs)
        # Copies, because some classes go on to write into a tensor.
        left, right = operands[0].clone(), None if operands[1] is None else operands[1].clone()
        out = func(*args, **kwargs)
        number = len(self.products)
        result = out.detach().clone()
        self.products.append(Product(self._path(), left, right, result))
        if number in self._cut:
            return result.requires_grad_().clone()
        return self._replaced[number].clone() if number in self._replaced else out


def watched(
    model: nn.Module, run: Callable[[], object], replaced: Sequence[Tensor] = (), cut: Container[int] = ()
) -> list[Product]:
    """Return the products that a model computes while `run` runs it.

    Args:
        model: the model.
        run: runs it.
        replaced: results to give instead of those of the first products.
        cut: the numbers of products whose results are given as leaves, on which gradients end.
    """
    path: list[str] = []
    watch = _Watch(lambda: path[-1] if path else "", dict(enumerate(replaced)), cut)
    with _paths(model, path), watch:
        run()
    return watch.products


@contextmanager
def _paths(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep the paths of the modules that run at the moment in `path`, the innermost last."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: path.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """Return the operands of a product with the dims that are summed over last; None for any other function."""
    if func is functional.linear:
        return args[0] if args else kwargs["input"], None
    if func is functional.scaled_dot_product_attention:
        names = ("query", "key")
        query, key = (args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names))
        return query, key
    if func in _MATMULS:
        first = 1 if func in _WITH_A_TERM else 0
        left, right = (*args, *kwargs.values())[first : first + 2]
        return (left, right.mT) if left.ndim > 1 and right.ndim > 1 else None
    if func in (torch.einsum, functional):
        return _operands_of_einsum(*args)
    return None


def _operands_of_einsum(equation: str, *tensors: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the two operands of an einsum with the one dim that is summed over last; None where it is another sum."""
    tensors = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(tensors) != 2 or len(letters) != 2 or "." in equation:
        return None
    summed = [letter for letter in letters[0] if letter in letters[1] and letter not in output]
    if len(summed) != 1:
        return None
    left, right = (x.movedim(names.index(summed[0]), -1) for x, names in zip(tensors, letters, strict=True))
    return left, right

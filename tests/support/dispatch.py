"""Counters of what operators do, by intercepting every one of them.

>>> with LargestTensor() as largest:
...     torch.zeros(4, 5) + 1
>>> largest.elements
20
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NO_KERNEL = frozenset(
    (
        *("alias", "detach", "empty", "empty_like", "empty_permuted", "empty_strided", "lift_fresh", "new_empty"),
        *("new_empty_strided", "_reshape_alias", "_unsafe_view"),
    )
)
"""Operators that launch no kernel on a device, beside views."""


class NarrowRuntime(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Compute as runtimes without 64-bit numbers do: int64 wraps at 32 bits, and float64 is rounded to float32.

    Args:
        floating: the dtype that float32 is rounded to as well, as runtimes do that compute in half precision.
    """

    def __init__(self, floating: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.narrower = {torch.int64: torch.int32, torch.float64: floating, torch.float32: floating}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:  # it writes into its arguments, which have to stay what they are
            return tree_map_only(Tensor, lambda x: x.copy_(self._narrow(x)), func(*args, **kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self._narrow, (args, kwargs or {}))
        return tree_map_only(Tensor, self._narrow, func(*args, **kwargs))

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self.narrower[x.dtype]).to(x.dtype) if x.dtype in self.narrower else x


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Count the operations that make the host wait for a value on the device, copies between devices among them.

    Args:
        refuse: raise AssertionError at the first one, which shows where it was.
    """

    WAITING = frozenset(
        ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2")
    )

    def __init__(self, *, refuse: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse = refuse
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in self.WAITING or _copies_and_waits(func, args, kwargs or {}):
            self.count += 1
            if self.refuse:
                raise AssertionError(f"{func.__name__} makes the host wait")
        return func(*args, **(kwargs or {}))


def _copies_and_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator copies from one kind of device to another and the host waits for it."""
    name = func.__name__.split(".")[0]
    if name == "_to_copy":
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
    elif name == "copy_":
        source, target = args[1].device, args[0].device
    else:
        return False
    blocking = not (kwargs.get("non_blocking") or any(args[2:]))
    return source.type != target.type and blocking


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Note the elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return result


class MemoryAndWork(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Count what operations on meta tensors take.

    Attributes:
        most: bytes alive at a time.
        launches: of kernels.
        products: in flash attention.
        traffic: bytes that all other operations read and write.

    Args:
        *alive: tensors whose bytes are counted from the start.
    """

    def __init__(self, *alive: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.most = self.launches = self.products = self.traffic = 0
        for tensor in alive:
            self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name not in self.sizes:
            self.sizes[name] = storage.nbytes()
            self.most = max(self.most, sum(self.sizes.values()))
            weakref.finalize(storage, self.sizes.pop, name)

    def launch(self, *tensors: Tensor) -> None:
        """Count a kernel that reads or writes these tensors."""
        self.launches += 1
        self.traffic += sum(_bytes_in_memory(x) for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                self.hold(leaf)
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in NO_KERNEL:
            leaves = tree_leaves((args, {key: x for key, x in (kwargs or {}).items() if key != "out"}, result))
            self.launch(*(leaf for leaf in leaves if isinstance(leaf, Tensor) and "attention" not in name))
        if func is torch.ops.aten._scaled_dot_product_flash_attention.default:
            query, key, value, *more = args
            causal = any(more[1:2])  # half of the square
            self.products += query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]) >> causal
        if (
            func is torch.ops.aten._flash_attention_forward.default
        ):  # heads after tokens; by windows, counted from the end
            query, key, value, *_ = args
            (_, queries, _, _), keys, window = query.shape, key.shape[1], kwargs["window_size_left"] + 1
            pairs = sum(min(window, keys - before) for before in range(queries))
            self.products += query[:, 0, :, 0].numel() * pairs * (query.shape[-1] + value.shape[-1])
        return result


def _bytes_in_memory(x: Tensor) -> int:
    """Bytes of a tensor, those that it repeats counted once."""
    counts = (count for count, step in zip(x.shape, x.stride(), strict=True) if step)
    return math.prod(counts) * x.element_size()

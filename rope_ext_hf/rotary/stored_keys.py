"""Keys as a cache stores them, which are rotated when they are read: by attention tile by tile, else all at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rope_ext_hf.rotary.key_rotation import KeyLayout

if TYPE_CHECKING:
    from rope_ext_hf.rotary.reading_rotation import ReadingRotation


class StoredKeys(Tensor):
    """The rotated keys of a cache, (rows, heads, tokens, head_dim), in place of a tensor that holds them.

    `scaled_dot_product_attention` of one new token rotates them tile by tile. Every other operation gets them rotated,
    as a tensor in the dtype of the cache.

    Args:
        stored: the keys as the cache stores them, on the CPU and without gradients.
        rotation: the rotation with which they are read; its positions are consecutive.
        layout: the dims that rotate.
    """

    stored: Tensor
    rotation: ReadingRotation
    key_layout: KeyLayout

    @staticmethod
    def __new__(cls: type[StoredKeys], stored: Tensor, rotation: ReadingRotation, layout: KeyLayout) -> StoredKeys:
        # A tensor without memory of its own: code that reads memory past torch's operators fails instead of reading
        # keys that are not rotated.
        keys = Tensor._make_wrapper_subclass(
            cls, stored.size(), strides=stored.stride(), dtype=stored.dtype, device=stored.device
        )
        keys.stored, keys.rotation, keys.key_layout = stored, rotation, layout
        return keys

    @cached_property
    def rotated(self) -> Tensor:
        """The rotated keys, as a copy of the stored ones."""
        return self.rotation.of_all(self.stored.device).last(self.stored.shape[-2]).apply(self.stored, self.key_layout)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            out = _attend(*args, **(kwargs or {}))
            if out is not None:
                return out
        if func in _READ_MEMORY:
            args, kwargs = tree_map_only(StoredKeys, lambda keys: keys.rotated, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(StoredKeys, lambda keys: keys.rotated, (args, kwargs or {}))
        return func(*args, **kwargs)


_READ_MEMORY = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.share_memory_,
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
}
"""Methods that read the memory of a tensor past torch's operators."""


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention of the queries of one token, (rows, heads, queries, head_dim of value), tile by tile.

    The result is None for a call that needs the rotated keys, such as one with dropout. The arguments are those of
    `scaled_dot_product_attention`; several queries of a head are those of the heads that share a key.
    """
    # Rotated keys that were read before may have been changed since.
    if query.ndim != 4 or type(key) is not StoredKeys or "rotated" in vars(key):
        return None
    if type(value) is not Tensor or type(query) is not Tensor or dropout_p or is_causal:
        return None
    rows, heads, queries, dim = query.shape
    kv_heads, count = key.stored.shape[1], key.stored.shape[2]
    folded = query.reshape(rows, kv_heads, -1, dim)
    tiled = key.rotation.in_tiles(key.stored.device, count)
    scores = tiled.scores(folded, key.stored, key.key_layout, dim**-0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.shape[1] != 1 or attn_mask.shape[2] != 1:
            attn_mask = attn_mask.expand(rows, heads, queries, count).reshape(rows, kv_heads, -1, count)
        if attn_mask.dtype == torch.bool:
            scores.masked_fill_(~attn_mask, torch.finfo(scores.dtype).min)
        else:
            scores += attn_mask
    return (scores.softmax(-1).to(value.dtype) @ value).reshape(rows, heads, queries, value.shape[-1])

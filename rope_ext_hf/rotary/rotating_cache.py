"""Rotation of cached keys to the present frequencies of a length-dependent method, as the input grows.

Where frequencies change in steps, the keys of a row that passes a step are rotated in place, once
(`rotate_cached_keys_`). Where they change with every token, the keys stay as they were stored: the layer returns a
rotated copy, or attention rotates them as it reads them (`StoredKeys`), and new keys are rotated back before they are
stored (`rotate_keys_on_read`). So rounding never accumulates, however long the decoding goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.reading_rotation import ReadingRotation
from rope_ext_hf.rotary.stored_keys import StoredKeys
from rope_ext_hf.rotary.triton_rotation import can_fuse

_ROTATE_CHUNK_TOKENS = 512  # tokens that are rotated in place at a time, so that float32 copies of the keys stay small

Layers = Sequence[tuple[Any, KeyLayout]]
"""Layers of a transformers cache, each with the layout of its keys."""


def rotate_cached_keys_(layers: Layers, rotation: KeyRotation) -> None:
    """Rotate the keys in these layers in place.

    Args:
        layers: layers that hold keys in order; a sliding window holds those of the last tokens.
        rotation: the rotation for all tokens of the input.
    """
    for layer, layout in layers:
        if not layer.is_initialized or not layer.keys.numel():
            continue
        name = "values" if layout.in_values else "keys"
        old = getattr(layer, name)
        new = torch.empty_like(old)
        own = rotation.last(old.shape[-2]).to(old.device)
        # The cache is the largest tensor of a long input; a float32 copy of all of it would double its peak.
        for start in range(0, old.shape[-2], _ROTATE_CHUNK_TOKENS):
            part = (..., slice(start, start + _ROTATE_CHUNK_TOKENS), slice(None))
            new[part] = KeyRotation(own.cos[part], own.sin[part]).apply(old[part], layout)
        setattr(layer, name, new)


@contextmanager
def rotate_keys_on_read(layers: Layers, reading: ReadingRotation, new: int, *, in_attention: bool) -> Iterator[None]:
    """Rotate keys inside the with block: new keys before these layers store them, and all keys when they are read.

    Args:
        layers: the `update` method of each is replaced inside the block.
        reading: the rotation of all keys.
        new: the number of new keys.
        in_attention: whether attention is to rotate the keys that it reads, see `StoredKeys`; else `update` does.
    """
    from transformers.cache_utils import DynamicLayer

    if not in_attention:
        reading.of_all(reading.positions.device)  # the rotation of new keys is a part of it
    before_storing = reading.inverse_of_last(new)

    @cache
    def new_keys_stored(device: torch.device) -> KeyRotation:
        """Return one rotation for all keys: new keys as before they are stored, all others as after they are read."""
        return reading.of_all(device).ending_with(before_storing.to(device))

    def rotating_update(layer: Any, layout: KeyLayout) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a replacement for the `update` method of a layer, which rotates keys before and after."""
        update = layer.update
        rotated = int(layout.in_values)  # index of the rotated one of keys and values
        returns_stored = type(layer) is DynamicLayer  # it returns the very tensors that it stores, the new keys last

        def update_with_rotations(
            key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            states = [key_states, value_states]
            new_keys, device = states[rotated], key_states.device
            # No name is given to the stored keys: it would keep them in memory beside those with the new ones.
            if returns_stored and can_fuse(new_keys) and can_fuse(layer.values if layout.in_values else layer.keys):
                # One launch instead of two: the new keys, stored unrotated, are rotated in the cache and returned as
                # they came, while all others are returned rotated.
                result = list(update(*states, *args, **kwargs))
                rotation = new_keys_stored(device).last(result[rotated].shape[-2])
                result[rotated] = rotation.apply_fused(result[rotated], layout, in_place=new_keys.shape[-2])
                return result[0], result[1]
            states[rotated] = before_storing.to(device).apply(new_keys, layout)
            result = list(update(*states, *args, **kwargs))
            if in_attention and not layout.in_values and device.type == "cpu":
                result[rotated] = StoredKeys(result[rotated], reading, layout)
            else:
                rotation = reading.of_all(device).last(result[rotated].shape[-2])
                result[rotated] = rotation.apply(result[rotated], layout)
            return result[0], result[1]

        return graph_break(update_with_rotations)  # not compiled: the wrapper lives for a single forward

    for layer, layout in layers:
        # An attribute of the instance hides the method of the class, which other caches go on using.
        layer.update = rotating_update(layer, layout)
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.update  # restores the class's method

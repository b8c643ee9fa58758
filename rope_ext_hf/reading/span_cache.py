"""The cache that a span is read into: keys and values in memory allocated once, states of other layers as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache as remembered
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from rope_ext_hf.reading.chunked_attention import NotReadInChunksError

_FULL, _SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"  # keys and values of all tokens, or of the last
_HYBRID = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""Its layers that have a state beside keys and values."""
_STATE = ("LinearAttentionLayer", "DummyLayer")  # no keys: a state of fixed size, or nothing


class _Preallocated:
    """Keys and values of one layer in memory allocated once; `update` hands out views of what is filled.

    In front of one of transformers' layer classes, whose other state stays as it is. Under `offload` that memory is the
    CPU's, and what is handed out is a copy on the device.
    """

    keys: Tensor | None
    values: Tensor | None
    capacity: int
    offload: bool
    filled: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values (rows, kv_heads, tokens, head_dim), and return those of all tokens."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._room(key_states), self._room(value_states)
        stop = self.filled + key_states.shape[-2]
        everything = []
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            if self.offload:  # in the room's order, so that both sides of the copy are one run
                states = states.transpose(1, 2).contiguous().transpose(1, 2)
            room[:, :, self.filled : stop].copy_(states, non_blocking=True)
            everything.append(room[:, :, :stop])
        self.filled = stop
        keys, values = everything
        if self.offload:  # in the order of the device's stream: what was just written is read after that
            return keys.to(key_states.device, non_blocking=True), values.to(value_states.device, non_blocking=True)
        return keys, values

    def _room(self, states: Tensor) -> Tensor:
        rows, heads, _, dim = states.shape
        if not self.offload:
            return states.new_empty(rows, heads, self.capacity, dim)
        # Pinned, so that the device copies it without the host waiting; token by token, so that the tokens of a chunk
        # are one run of memory: the device copies nothing else directly.
        room = torch.empty(
            (rows, self.capacity, heads, dim), dtype=states.dtype, device="cpu", pin_memory=states.is_cuda
        )
        return room.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.filled

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """The keys after the next update, and the tokens that were dropped before them."""
        return self.filled + _count_queries(queries), 0


def _count_queries(queries: int | Tensor) -> int:
    """Return the number of queries that a mask is for: transformers gives it, or in 5.0 the place of each."""
    return len(queries) if isinstance(queries, Tensor) else queries


@remembered
def _preallocated(stock: type) -> Any:
    return type(f"Preallocated{stock.__name__}", (_Preallocated, stock), {})


class StoringCache(DynamicCache):  # type: ignore[misc]
    """A cache whose keys and values go through `stored` before they are kept, e.g. to be rounded; None: they do not."""

    stored: Callable[[Tensor], Tensor] | None = None
    updated = 0  # the index of the layer that keys were added to last

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        if self.stored is not None:
            key_states, value_states = self.stored(key_states), self.stored(value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _span_layer(capacity: int, offload: bool, stock: Any = None) -> Any:
    """Return the layer of a span's cache for one of transformers's, by default for one that keeps all tokens."""
    stock = DynamicLayer() if stock is None else stock
    kind = type(stock)
    if kind.__module__ != cache_utils.__name__ or kind.__name__ not in (_FULL, _SLIDING, *_HYBRID, *_STATE):
        raise NotReadInChunksError(f"its cache has layers of the class {kind.__name__}")
    if kind.__name__ in _STATE:
        return stock
    hybrid = kind.__name__ in _HYBRID
    made = _preallocated(cache_utils.LinearAttentionAndFullAttentionLayer if hybrid else DynamicLayer)
    layer = made.__new__(made)
    layer.__dict__ |= vars(stock if hybrid else DynamicLayer())
    layer.__dict__ |= {"capacity": capacity, "offload": offload, "filled": 0}
    return layer


class SpanCache(StoringCache):
    """A cache for spans of up to `capacity` tokens, used again from span to span.

    Under `offload` keys and values wait in main memory; those of one layer at a time are on its device. The layers of
    `windows`, by index, keep the keys of their window alone; all others keep those of all tokens, whatever the config
    says of them: see `safe_windows`.
    """

    def __init__(
        self, config: Any, capacity: int, *, offload: bool = False, windows: Mapping[int, int] | None = None
    ) -> None:
        try:
            super().__init__(config=config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NotReadInChunksError(f"transformers makes no cache from its config ({error})") from error
        self.capacity, self.offload = capacity, offload
        stocks: list[Any] = vars(self)["layers"]
        self.stated = {i: each.sliding_window for i, each in enumerate(stocks) if type(each).__name__ == _SLIDING}
        self.layers: list[Any] = [
            stock if windows and index in windows else self._layer(stock) for index, stock in enumerate(stocks)
        ]
        # Some decoders have more layers of attention than their config says. The function must not refer to this cache:
        # it would then keep gigabytes of keys until Python looks for cycles, which it does by the number of objects.
        self.layer_class_to_replicate: Callable[[], Any] = partial(_span_layer, capacity, offload)
        self.seen: dict[int, set[int | None]] = {}
        self.empty = self.state()

    def _layer(self, stock: Any) -> Any:
        return _span_layer(self.capacity, self.offload, stock)

    def see(self, reach: int | None) -> None:
        """Note that a query may see so many of the keys that were added last; None: all."""
        self.seen.setdefault(self.updated, set()).add(reach)

    def safe_windows(self) -> dict[int, int]:
        """The windows of layers that the config states, if attention was seen to have exactly these; else none.

        Some classes state a window in their config and attend to everything, and transformers makes one mask for all
        layers with a window, so that all keep it or none does.
        """
        narrow = {index: reaches for index, reaches in self.seen.items() if reaches != {None}}
        return self.stated if narrow == {index: {window} for index, window in self.stated.items()} else {}

    def state(self) -> list[dict[str, Any]]:
        """The state that `restore` goes back to: how many keys and values count, and copies of all other states."""
        states = []
        for layer in self.layers:
            kept = (_CONSTANT, "keys", "values") if isinstance(layer, _Preallocated) else (_CONSTANT,)
            changing = {name: value for name, value in vars(layer).items() if name not in kept}
            states.append(tree_map_only(Tensor, Tensor.clone, changing))
        return states

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go back to a state of this cache; keys and values before it must not have been written over since."""
        del self.layers[len(state) :]
        for layer, saved in zip(self.layers, state, strict=True):
            layer.__dict__ |= tree_map_only(
                Tensor, Tensor.clone, saved
            )  # copied, because transformers updates states in place


_CONSTANT = "_sliding_window_tensor"
"""An attribute of transformers' layers with a window, which goes to the device at first use and then stays there."""

"""The key-value cache for reading spans of text: transformers' own, with memory that is allocated once."""

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

from rope_ext_hf.reading.through.chunked_attention import NotReadInChunksError

# Classes of layers in transformers' caches.
_FULL, _SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"  # keys and values of all tokens, or of the latest ones
_HYBRID = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")  # and a state
_STATE = ("LinearAttentionLayer", "DummyLayer")  # a state of fixed size alone, or nothing


class _KeyMemory:
    """Memory for the keys and values of one layer of a decoder at a time, which all layers of a cache share.

    A layer of a decoder may have several attention modules, each with a layer of the cache.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str, torch.device], Tensor] = {}
        self._taken = 0  # layers of the cache that have memory now

    @property
    def bytes(self) -> int:
        """The bytes that are allocated."""
        return sum(map(len, self._held.values()))

    def free(self) -> None:
        """Take the memory back from all layers of the cache."""
        self._taken = 0

    def take(self, key_states: Tensor, value_states: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Return memory for the keys and values of one more layer, each (rows, kv_heads, capacity, head_dim).

        Args:
            key_states, value_states: those of some tokens, which give the other sizes, the dtypes and the device.
            capacity: the number of tokens.
        """
        self._taken += 1
        return self._room("keys", key_states, capacity), self._room("values", value_states, capacity)

    def _room(self, name: str, states: Tensor, capacity: int) -> Tensor:
        rows, heads, _, dim = states.shape
        size = rows * heads * capacity * dim * states.element_size()
        entry = self._taken, name, states.device
        if entry not in self._held or len(self._held[entry]) < size:
            self._held.pop(entry, None)  # before the new one is allocated
            self._held[entry] = torch.empty(size, dtype=torch.uint8, device=states.device)
        return self._held[entry][:size].view(states.dtype).view(rows, heads, capacity, dim)


class _Preallocated:
    """Keys and values of one layer in memory that is allocated once; `update` returns views of the filled part.

    It is mixed in before one of transformers' layer classes, whose other state stays as it is.

    Attributes:
        keys, values: (rows, kv_heads, capacity, head_dim); None before the first update.
        capacity: the number of tokens that they have room for.
        offload: whether they are in main memory; `update` then returns copies on the device.
        shared: the memory that they are in; None: it is their own.
        filled: the number of tokens that they hold.
    """

    keys: Tensor | None
    values: Tensor | None
    capacity: int
    offload: bool
    shared: _KeyMemory | None
    filled: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return those of all tokens.

        Each tensor is (rows, kv_heads, tokens, head_dim).
        """
        if self.keys is None or self.values is None:
            if self.shared is not None:
                self.keys, self.values = self.shared.take(key_states, value_states, self.capacity)
            else:
                self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        stop = self.filled + key_states.shape[-2]
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            if self.offload:  # in the order of `memory`, so that both sides of the copy are one run of bytes
                states = states.transpose(1, 2).contiguous().transpose(1, 2)
            memory[:, :, self.filled : stop].copy_(states, non_blocking=True)
        self.filled = stop
        keys, values = self.keys[:, :, :stop], self.values[:, :, :stop]
        if self.offload:
            # The device's stream keeps the order: these copies start after those into main memory have finished.
            return keys.to(key_states.device, non_blocking=True), values.to(value_states.device, non_blocking=True)
        return keys, values

    def _allocate(self, states: Tensor) -> Tensor:
        """Return empty memory for `capacity` tokens, with the other sizes and the dtype of these keys or values."""
        rows, heads, _, dim = states.shape
        if not self.offload:
            return states.new_empty(rows, heads, self.capacity, dim)
        # Pinned, so that the host does not wait for copies; token by token, so that the tokens of a chunk are one run
        # of memory, which is all that a device copies directly.
        memory = torch.empty(
            (rows, self.capacity, heads, dim), dtype=states.dtype, device="cpu", pin_memory=states.is_cuda
        )
        return memory.transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return the number of tokens that are cached."""
        return self.filled

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """Return the number of keys after the next update, and the number of tokens that were dropped before them."""
        return self.filled + _count_queries(queries), 0


def _count_queries(queries: int | Tensor) -> int:
    """Return the number of queries for a mask.

    transformers gives that number itself, or in version 5.0 the position of each query.
    """
    return len(queries) if isinstance(queries, Tensor) else queries


@remembered
def _preallocated(stock: type) -> Any:
    """Return a subclass of one of transformers' layer classes whose keys and values are preallocated."""
    return type(f"Preallocated{stock.__name__}", (_Preallocated, stock), {})


class StoringCache(DynamicCache):  # type: ignore[misc]
    """A cache that applies its function `stored`, if it has one, to keys and values before it keeps them."""

    stored: Callable[[Tensor], Tensor] | None = None
    updated = 0  # the index of the layer that keys were added to last

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Add the keys and values of new tokens to a layer, and return those of all its tokens.

        Each tensor is (rows, kv_heads, tokens, head_dim).
        """
        self.updated = layer_idx
        if self.stored is not None:
            key_states, value_states = self.stored(key_states), self.stored(value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _span_layer(capacity: int, offload: bool, shared: _KeyMemory | None, stock: Any = None) -> Any:
    """Return a layer with preallocated keys and values that replaces a layer of transformers' caches.

    Args:
        capacity: the number of tokens that it has room for.
        offload: whether its keys and values are in main memory.
        shared: the memory for its keys and values; None: one of its own.
        stock: the layer to replace; default: one that keeps all tokens.
    """
    stock = DynamicLayer() if stock is None else stock
    kind = type(stock)
    if kind.__module__ != cache_utils.__name__ or kind.__name__ not in (_FULL, _SLIDING, *_HYBRID, *_STATE):
        raise NotReadInChunksError(
            f"the model's cache has layers of the class {kind.__name__}, which this package does not know"
        )
    if kind.__name__ in _STATE:
        return stock
    hybrid = kind.__name__ in _HYBRID
    layer_class = _preallocated(cache_utils.LinearAttentionAndFullAttentionLayer if hybrid else DynamicLayer)
    layer = layer_class.__new__(layer_class)
    layer.__dict__ |= vars(stock if hybrid else DynamicLayer())
    layer.__dict__ |= {"capacity": capacity, "offload": offload, "shared": shared, "filled": 0}
    return layer


class SpanCache(StoringCache):
    """A key-value cache for texts of up to `capacity` tokens, which is emptied and used again for each text.

    Args:
        config: the config of the decoder.
        capacity: the number of tokens that it has room for.
        offload: whether keys and values wait in main memory, and those of one layer at a time are on its device.
        by_layer: whether texts are read layer by layer (`layer_reader`), so that all layers share the memory of one
            layer's keys and values.
        windows: the sliding windows of layers that keep only the keys in their window, by the index of the layer. All
            other layers keep the keys of all tokens, whatever the config says of them, see `safe_windows`.

    Attributes:
        stated: the sliding windows that the config states, by the index of the layer.
        seen: for each layer, by its index, the numbers that `see` has recorded for it.
        empty: the state of the empty cache, for `restore`.
    """

    def __init__(
        self,
        config: Any,
        capacity: int,
        *,
        offload: bool = False,
        by_layer: bool = False,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        try:
            super().__init__(config=config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NotReadInChunksError(f"transformers makes no cache from the model's config ({error})") from error
        self.capacity, self.offload, self.by_layer = capacity, offload, by_layer
        self.shared = shared = _KeyMemory() if by_layer else None
        stocks: list[Any] = vars(self)["layers"]
        self.stated = {
            index: stock.sliding_window for index, stock in enumerate(stocks) if type(stock).__name__ == _SLIDING
        }
        self.layers: list[Any] = [
            stock if windows and index in windows else _span_layer(capacity, offload, shared, stock)
            for index, stock in enumerate(stocks)
        ]
        # For decoders with more layers of attention than their config says. The function must not refer to this cache:
        # a cycle would keep gigabytes of keys until Python's collector runs, which counts objects and not bytes.
        self.layer_class_to_replicate: Callable[[], Any] = partial(_span_layer, capacity, offload, shared)
        self.seen: dict[int, set[int | None]] = {}
        self.empty = self.state()

    def see(self, reach: int | None) -> None:
        """Record how many of the latest keys each query attends to in the layer that was updated last.

        `reach` is this number, which includes the key of the query itself; None: the query attends to all keys.
        """
        self.seen.setdefault(self.updated, set()).add(reach)

    def safe_windows(self) -> dict[int, int]:
        """Return the sliding windows by which keys may be dropped, by the index of the layer.

        They are the windows that the config states, if attention was seen to use exactly these, else none: some classes
        state a window in their config and attend to everything. transformers makes one mask for all layers with a
        window, so that all of them keep it or none does.
        """
        narrow = {index: reaches for index, reaches in self.seen.items() if reaches != {None}}
        return self.stated if narrow == {index: {window} for index, window in self.stated.items()} else {}

    def place(self, tokens: int) -> None:
        """Make every layer report that it holds this number of tokens, so that a decoder makes masks for the next ones.

        The layers are to be restored before they are updated.
        """
        for layer in self.layers:
            for name in ("filled", "cumulative_length"):  # of preallocated layers, of transformers' with a window
                if name in vars(layer):
                    setattr(layer, name, tokens)

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the cache, which `restore` takes.

        It says how many keys and values are filled, and has copies of all other states, such as those of recurrent
        layers.
        """
        states = []
        for layer in self.layers:
            # Layers with a shared memory let go of it, because a larger layer may have it allocated anew.
            own_memory = isinstance(layer, _Preallocated) and layer.shared is None
            kept = (_CONSTANT, "keys", "values") if own_memory else (_CONSTANT,)
            changing = {name: value for name, value in vars(layer).items() if name not in kept}
            states.append(tree_map_only(Tensor, Tensor.clone, changing))
        return states

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go back to an earlier state of this cache, which `state` returned.

        Keys and values that were cached at that time must not have been overwritten since.
        """
        del self.layers[len(state) :]
        for layer, saved in zip(self.layers, state, strict=True):
            # copied, because transformers updates states in place
            layer.__dict__ |= tree_map_only(Tensor, Tensor.clone, saved)
        if self.shared is not None:
            self.shared.free()


_CONSTANT = "_sliding_window_tensor"
"""An attribute of transformers' layers with a window that is part of no state: it goes to the device at first use."""

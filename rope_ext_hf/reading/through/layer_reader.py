"""Read texts layer by layer: every chunk of every text goes through one layer before any goes through the next one.

A decoder that reads chunk by chunk keeps the keys and values of all its layers until the text ends. Layer by layer,
those of one layer are there at a time, and between two layers one hidden state per token waits (`waiting_states`).
Weights that are kept elsewhere (`offloaded_weights`) come to the device once for all chunks of all texts.

The decoder's own forward runs first, once per chunk, with stand-ins in place of its layers. They note what each layer
is given beside the hidden states: masks, positions, cos and sin. Then each layer runs on all chunks. Then the decoder's
forward runs once more on each chunk that is scored, with stand-ins that hand on the outputs of the last layer, for the
computations behind its layers. The numbers are those of the other order, bit for bit: each layer is called with the
same tensors, in another order.

A decoder that does more between its layers than hand on one tensor cannot be read so. `chunk_check` finds that out by
reading a few tokens in both orders.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from rope_ext_hf.patches.forward.forward_call import ForwardCall, current_call
from rope_ext_hf.reading.larger.offloaded_weights import LayersInTurn, loaded_once, offloaded_bytes
from rope_ext_hf.reading.larger.waiting_states import Place, WaitingStates
from rope_ext_hf.reading.through.span_cache import SpanCache

T = TypeVar("T")
_STATES = "hidden_states"  # the argument of a layer that some decoders give by name
_EMBEDDINGS = "inputs_embeds"

_Act = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""A function that takes a layer and its arguments, by position and by name, and returns what its stand-in returns."""


class NotReadByLayerError(Exception):
    """Raised for a decoder that cannot be read layer by layer; the message is the reason."""


class _StandIn(nn.Module):
    """A module in the place of a layer, which has the attributes of the layer, and calls `act` in its forward."""

    def __init__(self, layer: nn.Module, act: _Act) -> None:
        super().__init__()
        self.layer = layer
        self.act = act

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self.layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # decoders ask their layers for a type, for example
            return getattr(super().__getattr__("layer"), name)


class _Call(NamedTuple):
    """A call of a layer: the layer, and its arguments other than the hidden states."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool  # the hidden states are given by name; else they are the first argument by position

    def run(self, states: Tensor) -> Tensor:
        """Call the layer with these hidden states, and return those of its output; both are (1, tokens, ...)."""
        if self.by_name:
            output = self.layer(*self.args, **self.kwargs, **{_STATES: states})
        else:
            output = self.layer(states, *self.args, **self.kwargs)
        out: Tensor = output[0] if isinstance(output, tuple) else output
        return out


@dataclass
class _Chunk:
    """A chunk of a text.

    Attributes:
        start, stop: the position of its first token, and the one after its last.
        calls: the calls of the layers, in order.
        decoder_call: that of the decoder's forward, under a method whose layers read it; else None.
    """

    start: int
    stop: int
    calls: list[_Call] = field(default_factory=list)
    decoder_call: ForwardCall | None = None


@dataclass
class _Text:
    """A text on its way through the layers.

    Attributes:
        ids: (tokens,) int64.
        chunks: its chunks.
        states: the hidden states of all its tokens; each layer overwrites them.
    """

    ids: Tensor
    chunks: list[_Chunk]
    states: WaitingStates

    def run_layer(self, index: int) -> None:
        """Run the layer with this index on all chunks, one after the other."""
        for chunk in self.chunks:
            with chunk.decoder_call or nullcontext():  # as inside the forward, though it has ended
                self.states.put(chunk.start, chunk.calls[index].run(self.states.take(chunk.start)))


class LayerReader:
    """Reads texts through the layers of a decoder, one layer after the other.

    Args:
        decoder: the decoder.

    Attributes:
        by_embeddings: whether the second forward of a chunk gets hidden states in place of embeddings, which are then
            not looked up again.

    Raises:
        NotReadByLayerError: the decoder has no list of layers.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._lists = _outer_lists(decoder)
        self._others: list[tuple[Any, ...] | None] = []
        self.by_embeddings = _EMBEDDINGS in inspect.signature(type(decoder).forward).parameters

    @property
    def outside(self) -> list[nn.Module]:
        """The modules of the decoder outside of its layers."""
        inside = {module for layers in self._lists for module in layers.modules()}
        return [module for module in self._decoder.modules() if module not in inside]

    def coming_bytes(self, *, ahead: bool) -> int:
        """Return the most bytes of offloaded weights that are on the device at the same time while texts are read.

        They are those of all that is outside of the layers, and of two layers, or of one without `ahead`.
        """
        layers = sorted(offloaded_bytes(layer) for layers in self._lists for layer in layers)
        return offloaded_bytes(self._decoder) - sum(layers[: -2 if ahead else -1])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find the layers, and note what they return, in the forwards inside the with block."""
        called: list[nn.Module] = []
        # for each call what the output has beside the hidden states; None: the output is a tensor
        others: list[tuple[Any, ...] | None] = []

        def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = layer(*args, **kwargs)
            called.append(layer)
            others.append(output[1:] if isinstance(output, tuple) else None)
            return output

        with self._standing_in(watch):
            yield
        # A decoder with a vision tower has other lists, which texts do not reach.
        self._lists = [layers for layers in self._lists if not set(layers).isdisjoint(called)]
        self._others = others

    def read(
        self,
        decode: Callable[..., Tensor],
        ids: Sequence[Tensor],
        cache: SpanCache,
        chunk: int,
        place: Place,
        *,
        ahead: bool,
    ) -> list[_Text]:
        """Read texts up to the output of the last layer.

        Args:
            decode: runs the decoder on one chunk: (position of its first token, input_ids=... or inputs_embeds=...) ->
                output (tokens, hidden).
            ids: the token ids of each text, (tokens,) int64.
            cache: a cache whose layers share the memory of one.
            chunk: the number of tokens that go through a layer at a time.
            place: where the hidden states wait between two layers.
            ahead: whether the offloaded weights of the next layer come while one computes.
        """
        texts = []
        with loaded_once(self.outside):
            for ids_of_text in ids:
                texts.append(self._begin(decode, ids_of_text, cache, chunk, place))
        layers = [call.layer for call in texts[0].chunks[0].calls]
        with LayersInTurn(layers, ahead=ahead) as weights:
            for index in range(len(layers)):
                with weights.loaded(index):
                    for text in texts:
                        cache.restore(cache.empty)
                        text.run_layer(index)
        cache.restore(cache.empty)
        return texts

    def _begin(self, decode: Callable[..., Tensor], ids: Tensor, cache: SpanCache, chunk: int, place: Place) -> _Text:
        """Return a text before the first layer, with the arguments that the layers will get."""
        text = _Text(ids, [], WaitingStates(place, len(ids)))

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            here = text.chunks[-1]
            states: Tensor = args[0] if args else kwargs[_STATES]
            if not here.calls:
                text.states.put(here.start, states)
                here.decoder_call = current_call()
            kept = {name: value for name, value in kwargs.items() if args or name != _STATES}
            here.calls.append(_Call(layer, args[1:], kept, by_name=not args))
            return self._output(len(here.calls) - 1, states)

        with self._standing_in(note):
            for start in range(0, len(ids), chunk):
                stop = min(start + chunk, len(ids))
                text.chunks.append(_Chunk(start, stop))
                cache.place(start)
                decode(start, input_ids=ids[None, start:stop])
        return text

    def score_last_layer(
        self,
        decode: Callable[..., Tensor],
        text: _Text,
        cache: SpanCache,
        score: Callable[[int, Tensor], T],
        *,
        first: int = 0,
    ) -> list[T]:
        """Return `score(position, output)` for each chunk of a text that reaches beyond a position.

        Args:
            decode, cache: as in `read`.
            text: the text after its last layer.
            score: a function of the position of the first token of a chunk, and of the decoder's output for the chunk,
                (tokens, hidden).
            first: the position of the first token that is needed.
        """
        results = []

        def hand_on(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.append(None)
            return self._output(len(calls) - 1, states)

        for chunk in text.chunks:
            if chunk.stop <= first:
                continue
            calls: list[None] = []
            states = text.states.take(chunk.start)
            # Embeddings are not needed any more: with these in their place, none are looked up.
            tokens = {"input_ids": text.ids[None, chunk.start : chunk.stop]}
            if self.by_embeddings:
                tokens = {_EMBEDDINGS: states}
            cache.place(chunk.start)
            with self._standing_in(hand_on):
                output = decode(chunk.start, **tokens)
            results.append(score(chunk.start, output))
        cache.restore(cache.empty)
        return results

    def _output(self, index: int, states: Tensor) -> Any:
        """Return hidden states in the form of a layer's output; `index`: that of its call in a forward."""
        others = self._others[index]
        return states if others is None else (states, *others)

    @contextmanager
    def _standing_in(self, act: _Act) -> Iterator[None]:
        """Put stand-ins in the places of the layers inside the with block."""
        layers = [(places._modules, dict(places._modules)) for places in self._lists]
        for places, inside in layers:
            places.update((name, None if layer is None else _StandIn(layer, act)) for name, layer in inside.items())
        try:
            yield
        finally:
            for places, inside in layers:
                places.update(inside)


def _outer_lists(decoder: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of modules in a decoder that are not inside of other lists."""
    lists: list[nn.ModuleList] = []
    pending: list[nn.Module] = [decoder]
    while pending:
        for module in pending.pop().children():
            if isinstance(module, nn.ModuleList):
                lists.append(module)
            else:
                pending.append(module)
    if not lists:
        raise NotReadByLayerError("it has no list of layers")
    return lists

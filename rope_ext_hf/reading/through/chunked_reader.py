"""Read long texts onto a key-value cache, a chunk of tokens at a time, in memory that grows by the cache alone.

A span is a stretch of tokens that are read together. The decoder reads it in chunks, which add their keys and values to
a cache that is allocated once (`span_cache`). A chunk attends to the past without a mask and causally to itself, and
both results are merged by their log-sum-exp: no mask is built, and no key is repeated over the query heads
(`chunked_attention`). The head runs on a few tokens at a time (`head_losses`). So memory beyond weights and cache does
not depend on the length.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.models.decoder_arguments import cache_parameter
from rope_ext_hf.patches.forward.attention_interface import ATTENTION_NAME
from rope_ext_hf.reading.cost.memory import place_of_states
from rope_ext_hf.reading.larger.offloaded_weights import loaded_once
from rope_ext_hf.reading.larger.waiting_states import Place
from rope_ext_hf.reading.through.chunked_attention import reading_in_chunks
from rope_ext_hf.reading.through.head_losses import HeadLosses, LogitScaling
from rope_ext_hf.reading.through.layer_reader import LayerReader
from rope_ext_hf.reading.through.span_cache import SpanCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
ScoreOfOutputs: TypeAlias = Callable[[int, int, Tensor, Tensor], T]
"""A function of the outputs of a decoder that predict scored tokens of a text.

Its arguments are the number of the text, the place of the first of these tokens among all scored tokens of the text,
the outputs (tokens, hidden), and the tokens that they predict, (tokens,) int64. It may be called again from the first
text on, with smaller chunks, where the device ran out of memory.
"""
_MIN_CHUNK = 16  # tokens; below it, smaller chunks hardly need less memory


@dataclass
class ChunkedReader:
    """A model that reads text in chunks of tokens, and the key-value cache that the chunks are added to.

    Attributes:
        model: a causal language model.
        decoder: its decoder, which is run without the head.
        head: the head, as a module.
        chunk: the number of tokens that the decoder reads at a time.
        head_bytes: memory for logits, in bytes.
        offload_cache: whether keys and values wait in main memory, and those of one layer at a time are on the device.
            It is for answers to prompts: losses are read layer by layer, if the decoder can be read so.
        longest: the number of tokens in the longest span (text read at once) to come, for which the cache is allocated
            at once.
        scales_logits: whether to scale or cap the logits as the config says.
        layers: the reader that runs the layers of the decoder one after the other; None: the decoder cannot be read so,
            or was not checked.
        place: where hidden states wait between two layers; None: where they fit.
        windows: the sliding windows of layers that keep only the keys in their window, by the index of the layer.
        stored: a function that keys and values go through before they are cached, to round them for example; None: they
            are cached as they are.
        cache: the cache of the latest span; None before the first one.
        prefix: the number of tokens that prompts have in common, and the state of the cache after them.
    """

    model: PreTrainedModel
    decoder: Any
    head: Any
    chunk: int
    head_bytes: int
    offload_cache: bool = False
    longest: int = 1
    scales_logits: bool = True
    layers: LayerReader | None = None
    place: Place | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    stored: Callable[[Tensor], Tensor] | None = None
    cache: SpanCache | None = None
    prefix: tuple[int, list[dict[str, Any]]] | None = None

    @property
    def head_losses(self) -> HeadLosses:
        """The object that computes logits and losses from the decoder's output, by the head of the model."""
        config = self.model.config.get_text_config()
        scaling = LogitScaling.from_config(config) if self.scales_logits else LogitScaling()
        return HeadLosses(self.head, scaling, config.vocab_size, self.model.dtype, self.head_bytes)

    # --- memory

    def fit(self, work: Callable[[], T]) -> T:
        """Call `work`, which reads some text, and return its result.

        If the device runs out of memory, call it again with chunks of half the size.
        """
        while True:
            try:
                with self.attention():
                    return work()
            except torch.OutOfMemoryError:
                if self.chunk <= _MIN_CHUNK:
                    raise
            # Outside of the except block the failed forward is gone, and with it the tensors that it held.
            failed = self.chunk
            self.chunk, self.head_bytes = self.chunk // 2, max(1, self.head_bytes // 2)
            self.forget()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(f"out of memory with {failed:,} tokens per pass; going on with {self.chunk:,}", stacklevel=3)

    def forget(self) -> None:
        """Free the cache."""
        self.cache = self.prefix = None

    def empty_cache(self, tokens: int, *, by_layer: bool = False) -> SpanCache:
        """Return the emptied cache, with room for this number of tokens.

        `by_layer`: whether its layers share the memory of one, because texts are read layer by layer.
        """
        if self.cache is None or self.cache.capacity < tokens or self.cache.by_layer != by_layer:
            self.forget()  # before the new one is allocated
            # Allocated once for the longest span: growing would hold the old and the new keys at the same time.
            capacity = max(tokens, self.longest)
            offload = self.offload_cache and not by_layer
            self.cache = SpanCache(
                self.decoder.config, capacity, offload=offload, by_layer=by_layer, windows=self.windows
            )
        self.cache.restore(self.cache.empty)
        self.cache.stored = self.stored
        return self.cache

    # --- reading

    @property
    def _has_remapping_attention(self) -> bool:
        """True if the model was patched to run the attention of a remapping method.

        That attention itself needs no masks and little memory.
        """
        return bool(self.decoder.config._attn_implementation == ATTENTION_NAME)

    def attention(self, reach_seen: Callable[[int | None], None] | None = None) -> AbstractContextManager[None]:
        """Make the model compute its attention chunk by chunk inside the with block.

        `reach_seen` is as in `chunked_attention.reading_in_chunks`.
        """
        return nullcontext() if self._has_remapping_attention else reading_in_chunks(self.model, reach_seen)

    def hidden(self, ids: Tensor, cache: SpanCache, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Read tokens in chunks, add their keys and values to a cache, and yield the decoder's output.

        Args:
            ids: the tokens, (tokens,) int64.
            cache: the cache, which holds the `start` tokens before these.
            start: the position of the first token in `ids`.

        Yields:
            For each chunk the position of its first token, and the decoder's output, (tokens, hidden).
        """
        for piece in torch.split(ids, self.chunk) if len(ids) else ():
            yield start, self._decode(cache, start, input_ids=piece[None])
            start += len(piece)

    def _decode(self, cache: SpanCache, start: int, **tokens: Tensor) -> Tensor:
        """Return the decoder's output for a chunk of tokens, (tokens, hidden).

        Args:
            cache: the cache, which holds the `start` tokens before these.
            start: the position of the first token.
            tokens: input_ids=(1, tokens) int64, or inputs_embeds=(1, tokens, hidden).
        """
        [new_tokens] = tokens.values()
        # The attention of remapping methods would compare positions with those in the cache, which waits for the
        # device; it derives them from the cache where none are given.
        positions = None
        if not self._has_remapping_attention:
            positions = torch.arange(start, start + new_tokens.shape[1], device=new_tokens.device)[None]
        arguments: dict[str, Any] = {cache_parameter(self.decoder): cache, "position_ids": positions, "use_cache": True}
        out: Tensor = self.decoder(**tokens, **arguments).last_hidden_state[0]
        return out

    def _read(self, ids: Tensor, cache: SpanCache, start: int = 0) -> None:
        """Read tokens only to add their keys and values to a cache that holds `start` tokens."""
        for _ in self.hidden(ids, cache, start):
            pass

    def losses(self, texts: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Return the negative log-likelihoods of the tokens of texts, each a tensor (tokens,).

        `texts`: each text, (tokens,) int64, and the position of its first token that is scored.
        """
        head = self.head_losses
        parts = self.scored(texts, lambda number, begin, outputs, targets: head.losses(outputs, targets))
        return [torch.cat(parts_of_text) for parts_of_text in parts]

    def scored(self, texts: Sequence[tuple[Tensor, int]], score: ScoreOfOutputs[T]) -> list[list[T]]:
        """Read texts, and return the results of `score` for the outputs that predict scored tokens, by text and chunk.

        They are read layer by layer if the decoder can be read so. Offloaded weights then come to their device once for
        all texts.

        Args:
            texts: each text, (tokens,) int64, and the position of its first token that is scored.
            score: is called with the outputs of each chunk of each text, in order.
        """

        def score_chunk(number: int, start: int, hidden: Tensor) -> T:
            ids, first = texts[number]
            # the output at position p predicts the token at p + 1
            begin, end = max(start, first - 1), start + hidden.shape[0]
            targets = ids[begin + 1 : end + 1].to(hidden.device)
            return score(number, begin + 1 - first, hidden[begin - start :], targets)

        inputs = [ids[:-1] for ids, _ in texts]  # the last token of a text predicts none of it
        if self.layers is not None:
            return self.outputs_by_layer(inputs, score_chunk, [first - 1 for _, first in texts])
        results = []
        for number, (ids, (_, first)) in enumerate(zip(inputs, texts, strict=True)):
            chunks = self.hidden(ids, self.empty_cache(len(ids)))
            results.append([score_chunk(number, start, x) for start, x in chunks if start + len(x) >= first])
        return results

    def outputs_by_layer(
        self, texts: Sequence[Tensor], use: Callable[[int, int, Tensor], T], first: Sequence[int] | None = None
    ) -> list[list[T]]:
        """Read texts layer by layer, and return the results of `use` for the chunks of each text, in order.

        Args:
            texts: the texts, (tokens,) int64 each.
            use: a function of the number of a text, the position of the first token of a chunk, and the decoder's
                output for the chunk, (tokens, hidden).
            first: for each text the position of the first token whose chunk is used; default: all are.
        """
        layers = self.layers
        assert layers is not None
        cache = self.empty_cache(max(map(len, texts)), by_layer=True)
        decode = partial(self._decode, cache)
        place, ahead = self._place(texts, cache, layers)
        read = layers.read(decode, texts, cache, self.chunk, self.place or place, ahead=ahead)
        results = []
        with loaded_once([*layers.outside, *self.head.modules()]):
            for number in range(len(texts)):
                text = read.pop(0)  # its hidden states are freed when its losses are known
                begin = 0 if first is None else first[number]
                results.append(layers.score_last_layer(decode, text, cache, partial(use, number), first=begin))
        return results

    def _place(self, texts: Sequence[Tensor], cache: SpanCache, layers: LayerReader) -> tuple[Place, bool]:
        """Return where hidden states wait between two layers, and whether offloaded weights come one layer ahead.

        `texts`: the texts that are read together, (tokens,) int64 each.
        """
        assert cache.shared is not None  # read layer by layer
        ways = (True, False)
        coming = [layers.coming_bytes(ahead=ahead) - cache.shared.bytes for ahead in ways]
        config, device, tokens = self.model.config.get_text_config(), texts[0].device, sum(map(len, texts))
        place, way = place_of_states(config, tokens, cache.capacity, self.model.dtype, device, coming=coming)
        return place, ways[way]

    def last_logits(self, ids: Tensor, count: int) -> Tensor:
        """Return the logits after each of the last `count` tokens of a text, (count, vocabulary) float32.

        `ids`: the text, (tokens,) int64.
        """
        cache = self.empty_cache(len(ids))
        start = len(ids) - count
        self._read(ids[:start], cache)
        return self.head_losses.logits(torch.cat([hidden for _, hidden in self.hidden(ids[start:], cache, start)]))

    def read_prompt(self, ids: Tensor, room: int, *, shared: int = 0, again: bool = False) -> int:
        """Read a prompt before its answers are scored: all but its last token, which is read with each answer.

        Args:
            ids: the prompt without its last token, (tokens,) int64.
            room: the number of tokens that will follow it in the cache.
            shared: the number of tokens at its beginning that the next prompts have in common; the state after them is
                kept.
            again: take up the state that the previous call kept, instead of reading these tokens.

        Returns:
            The number of tokens of the prompt that were read, its last one included.
        """
        cache, known = self.empty_cache(len(ids) + room), 0
        if again and self.prefix is not None and self.prefix[0] == shared:
            cache.restore(self.prefix[1])
            known = shared
        elif shared:
            self._read(ids[:shared], cache)
            self.prefix = shared, cache.state()
        self._read(ids[shared:], cache, shared)
        return len(ids) + 1 - known

    def answer_logits(self, spans: list[Tensor], known: int) -> Iterator[Tensor]:
        """Yield the logits that predict the tokens of each answer, (tokens, vocabulary); `read_prompt` comes first.

        Args:
            spans: for each answer, the prompt and the answer together, (tokens,) int64.
            known: the number of tokens in the prompt.
        """
        cache = self.cache
        assert cache is not None  # made by read_prompt
        after_prompt = cache.state()
        for span in spans:
            cache.restore(after_prompt)
            # the output at the prompt's last token predicts the first token of the answer
            states = [hidden for _, hidden in self.hidden(span[known - 1 : -1], cache, known - 1)]
            yield self.head_losses.logits(torch.cat(states))

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits for the token that follows a text, (vocabulary,) float32.

        `ids`: the text, (tokens,) int64; all its tokens but the last are in the cache already.
        """
        assert self.cache is not None  # made by read_prompt
        [(_, hidden)] = self.hidden(ids[-1:], self.cache, len(ids) - 1)
        return self.head_losses.logits(hidden)[-1]

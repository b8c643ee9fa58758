"""Score tokens of long texts in fixed memory; every measurement runs on this.

    scorer = TokenScorer(model)
    nats = scorer.losses(ids, first=1024)      # one number per token from the 1024th on

The decoder reads a span in chunks that add their keys and values to a cache allocated once; attention of a chunk is
to the past, without a mask, plus causal within the chunk, merged by their log-sum-exp, so that no mask is built and no
key is repeated over query heads. The head runs over a few tokens at a time. Memory above weights and cache does not
depend on the length. Whether a model can be read like this is checked on a few tokens; one that cannot is read whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from rope_ext_hf.attention.rules import LocalAttention, TokenPositions
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.preflight import budgets
from rope_ext_hf.eval.results import Cost
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.attention_hooks import attend_from_kwargs
from rope_ext_hf.patches.attention_interface import UNSUPPORTED_KWARGS, use_attention
from rope_ext_hf.patches.geometry import check_pairing
from rope_ext_hf.patches.patching import fixed_length, patched_method
from rope_ext_hf.patches.slots import find_slots, patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "TokenScorer",
]

ATTENTION = "rope_ext_hf.chunks"


class UnsupportedAttentionError(Exception):
    """This model's attention needs something that chunked attention does not support."""


class TokenScorer:
    """Per-token losses of a causal language model.

    Args:
        model: patched or not, in any dtype, on any device. Patching and unpatching it later is fine.
        chunk: tokens per pass of the decoder; default: by the free memory, see `preflight.budgets`.
        head_bytes: memory for logits; default: likewise.
        offload_cache: keys and values wait in main memory; those of one layer at a time are on its device.

    Raises:
        CheckpointError: a model whose weights are in a pairing that its class does not run.
        MethodError: chunk or head_bytes is no positive whole number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int | None = None,
        head_bytes: int | None = None,
        offload_cache: bool = False,
    ) -> None:
        check_pairing(model)
        for name, value in (("chunk", chunk), ("head_bytes", head_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise MethodError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.model = model
        config = model.config.get_text_config()
        width = torch.finfo(model.dtype).bits // 8
        widest = max(getattr(config, "intermediate_size", 0) or 0, 4 * config.hidden_size)
        of_chunk, of_head = budgets(model.get_input_embeddings().weight.device)
        self.chunk = chunk or _power_of_two(of_chunk // (4 * width * widest))
        self.head_bytes = head_bytes or of_head
        self.offload_cache = offload_cache
        self.cost = Cost()
        self.devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        self.decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        self.head = model.get_output_embeddings()
        self.cache: _Cache | None = None
        # As loaded, a method that follows the input is run right by transformers in one forward only.
        self.follows_the_input = any(
            rope.method.depends_on_length(rope.plain) for slot in find_slots(model) for rope in slot.as_loaded.values()
        )
        self.chunked = False
        if self.decoder is not None and self.decoder is not model and self.head is not None:
            self.chunked = self._reads_the_same_in_chunks()

    @torch.inference_mode()
    def losses(self, ids: Tensor, first: int, *, length: int | None = None) -> Tensor:
        """Negative log-likelihoods in nats of tokens first..N of one span, given all tokens before each.

        Args:
            ids: (N,) int64.
            first: the first scored token, at least 1.
            length: what length-dependent methods are held at; default N.

        Returns:
            (N - first,) float32 on the CPU.
        """
        device = self.model.get_input_embeddings().weight.device
        ids = ids.to(device)
        with self._timed(len(ids)), _length(self.model, length or len(ids)):
            if self._reads_whole():
                return self._whole(ids, first).cpu()
            return torch.cat(list(self._by_chunks(ids, first))).cpu()

    @torch.inference_mode()
    def candidates(
        self, prompt: Tensor, answers: Tensor, *, length: int | None = None, kept: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Losses of several answers to one prompt, and the greedy prediction at each answer token (teacher forcing).

        The prompt is read once; every answer then starts from its cache, A tokens each. (A model that cannot be read
        in chunks is read whole once per answer.)

        Args:
            prompt: (P,) int64.
            answers: (count, A) int64.
            length: what length-dependent methods are held at; default P + A.
            kept: so many tokens at the beginning are those of the call before, which had the same model and length, and
                are not read again.

        Returns:
            Negative log-likelihoods in nats, float32, and likeliest tokens, int64; both (count, A) on the CPU.
        """
        device = self.model.get_input_embeddings().weight.device
        prompt, answers = prompt.to(device), answers.to(device)
        known, count = len(prompt), answers.shape[1]
        whole = self._reads_whole()
        if whole or self.cache is None or self.cache.capacity < known + count - 1:
            kept = 0
        losses: list[Tensor] = []
        likeliest: list[Tensor] = []
        with self._timed(known - kept + count * len(answers)), _length(self.model, length or known + count):
            for index, answer in enumerate(answers):
                ids = torch.cat([prompt, answer])
                if whole:
                    out = self.model(ids[None], use_cache=False, logits_to_keep=count + 1)
                    logits = out.logits[0, -count - 1 : -1].float()
                else:
                    if index == 0:
                        for _ in self._hidden(ids, kept):  # what stays is the cache
                            pass
                    # the state at the prompt's last token predicts the first token of the answer
                    states = [state for _, state in self._hidden(ids, known - 1)]
                    logits = self._logits(torch.cat(states))
                likeliest.append(logits.argmax(-1).cpu())
                losses.append(_nll_([logits], answer.to(logits.device)).cpu())
        return torch.stack(losses), torch.stack(likeliest)

    def take_cost(self) -> Cost:
        """The cost since the last call, which is set back to nothing."""
        cost, self.cost = self.cost, Cost()
        return cost

    @contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        """Add what happens inside to `cost`; it ends with results on the CPU, so the device has finished then."""
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        yield
        peak = max((torch.cuda.max_memory_allocated(device) for device in self.devices), default=0)
        self.cost = self.cost.plus(Cost(tokens, time.perf_counter() - started, peak))

    def _reads_whole(self) -> bool:
        return not self.chunked or (self.follows_the_input and not patched_slots(self.model))

    def _whole(self, ids: Tensor, first: int) -> Tensor:
        count = len(ids) - first
        logits = self.model(ids[None], use_cache=False, logits_to_keep=count + 1).logits[0, -count - 1 : -1]
        return _nll_([logits.float()], ids[first:])

    def _by_chunks(self, ids: Tensor, first: int) -> Iterator[Tensor]:
        for start, hidden in self._hidden(ids):
            # the state at position p predicts the token at p + 1
            begin, end = max(start, first - 1), start + hidden.shape[0]
            if begin < end:
                yield self._losses_of(hidden[begin - start :], ids[begin + 1 : end + 1].to(hidden.device))

    def _hidden(self, ids: Tensor, kept: int = 0) -> Iterator[tuple[int, Tensor]]:
        """The decoder's output for all but the last token, chunk by chunk: (first position, (tokens, hidden)).

        `kept`: continue after this many tokens, which are in the cache already.
        """
        assert self.decoder is not None
        ids = ids[:-1]
        if self.cache is None or self.cache.capacity < len(ids):
            self.cache = None  # free the old one first
            self.cache = _Cache(len(ids), offload=self.offload_cache)
        self.cache.rewind(kept)
        with _chunked_attention(self.model):
            for start in range(kept, len(ids), self.chunk):
                piece = ids[None, start : start + self.chunk]
                positions = torch.arange(start, start + piece.shape[1], device=ids.device)[None]
                out = self.decoder(input_ids=piece, position_ids=positions, past_key_values=self.cache, use_cache=True)
                yield start, out.last_hidden_state[0]

    def _losses_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods, (tokens,) float32, of what follows each hidden state; (tokens, hidden).

        A plain head is taken apart along the vocabulary, so that each of its weights is read once per chunk of tokens;
        another one runs whole, over a few tokens at a time.
        """
        plain = type(self.head) is nn.Linear and not hasattr(self.head, "_hf_hook")
        if plain and not self.head._forward_pre_hooks and not self.head._forward_hooks:
            room = self.head_bytes // (len(hidden) * _bytes_of_a_logit(self.model.dtype))
            return _nll_(self._parts(hidden, 1 << max(10, room.bit_length() - 1)), targets)
        vocabulary = self.model.config.get_text_config().vocab_size  # a quantised or wrapped head has other shapes
        few = _power_of_two(self.head_bytes // (vocabulary * _bytes_of_a_logit(self.model.dtype)))
        pieces = zip(torch.split(hidden, few), torch.split(targets, few), strict=True)
        return torch.cat([_nll_([self._logits(some)], theirs.to(hidden.device)) for some, theirs in pieces])

    def _parts(self, hidden: Tensor, width: int) -> Iterator[Tensor]:
        """Logits of so much of the vocabulary at a time, (tokens, width)."""
        weight, bias = self.head.weight, self.head.bias
        for at in range(0, len(weight), width):
            part = None if bias is None else bias[at : at + width]
            yield self._finished(nn.functional.linear(hidden.to(weight.device), weight[at : at + width], part))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of all the vocabulary."""
        return self._finished(self.head(hidden))

    def _finished(self, logits: Tensor) -> Tensor:
        """What the common families do to what comes out of the head: a scale or a soft cap; float32."""
        logits = logits.float()
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _reads_the_same_in_chunks(self) -> bool:
        """Whether a few tokens in two chunks, with the head run apart, get the logits of an ordinary forward."""
        ids = torch.arange(3, 15, device=self.model.get_input_embeddings().weight.device)
        chunk, self.chunk = self.chunk, 7
        try:
            with torch.inference_mode(), _length(self.model, len(ids)):
                whole = self.model(ids[None], use_cache=False).logits[0, :-1].float()
                parts = torch.cat([self._logits(hidden) for _, hidden in self._hidden(ids)])
        except (UnsupportedAttentionError, TypeError, ValueError, AttributeError, RuntimeError, KeyError):
            return False
        finally:
            self.chunk, self.cache = chunk, None
        if whole.shape != parts.shape:
            return False
        # NaN in both is agreement: it is the model's, and shows in its losses
        spread = max(1e-3, float(whole.nan_to_num().std()))
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        return torch.allclose(whole, parts, rtol=0, atol=tolerance * spread, equal_nan=True)


def _power_of_two(fitting: int) -> int:
    return 1 << max(4, min(12, fitting.bit_length() - 1))


def _bytes_of_a_logit(dtype: torch.dtype) -> int:
    """In float32, beside what the head makes it from."""
    return 4 if dtype == torch.float32 else 4 + torch.finfo(dtype).bits // 8


def _nll_(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Negative log-likelihoods, (tokens,) float32, from logits (tokens, part of the vocabulary), part after part.

    The parts are float32, in the order of the vocabulary. They are modified in place.
    """
    top = total = chosen = torch.empty(0)
    at = 0
    for logits in parts:
        targets = targets.to(logits.device)
        inside = (targets - at).clamp(0, logits.shape[-1] - 1)[:, None]
        here = logits.gather(-1, inside)
        higher = logits.amax(-1, keepdim=True)
        if at:
            higher = torch.maximum(top, higher)
        sums = logits.sub_(higher).exp_().sum(-1, keepdim=True)
        if at:
            total = total * (top - higher).exp_() + sums
            chosen = torch.where((targets >= at)[:, None], here, chosen)
        else:
            total, chosen = sums, here
        top = higher
        at += logits.shape[-1]
    return (top + total.log() - chosen)[:, 0]


@contextmanager
def _length(model: PreTrainedModel, length: int) -> Iterator[None]:
    if not patched_slots(model):
        yield
        return
    with fixed_length(model, length):
        yield


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in memory allocated once; `update` hands out views of what is filled.

    `offload`: that memory is the CPU's, and what is handed out is a copy on the device.
    """

    def __init__(self, capacity: int, offload: bool) -> None:
        super().__init__()
        self.capacity, self.offload = capacity, offload
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:2], self.capacity, states.shape[-1])
        if self.offload:  # pinned, so that the device copies it without the host waiting
            return torch.empty(shape, dtype=states.dtype, device="cpu", pin_memory=states.is_cuda)
        return states.new_empty(shape)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.filled + key_states.shape[-2]
        self.keys[:, :, self.filled : stop].copy_(key_states, non_blocking=True)
        self.values[:, :, self.filled : stop].copy_(value_states, non_blocking=True)
        self.filled = stop
        keys, values = self.keys[:, :, :stop], self.values[:, :, :stop]
        if self.offload:  # in the order of the device's stream: what was just written is read after that
            return keys.to(key_states.device, non_blocking=True), values.to(value_states.device, non_blocking=True)
        return keys, values

    def get_seq_length(self) -> int:
        return self.filled


class _Cache(Cache):  # type: ignore[misc]
    """A cache for spans of up to `capacity` tokens, used again from span to span."""

    def __init__(self, capacity: int, offload: bool) -> None:
        super().__init__(layer_class_to_replicate=lambda: _Layer(capacity, offload))
        self.capacity = capacity

    def rewind(self, kept: int = 0) -> None:
        for layer in self.layers:
            layer.filled = kept


@contextmanager
def _chunked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Every attention module of this model uses `chunked_attention`, until the end of the block.

    Not under an attention-level method, whose own attention needs neither masks nor more memory for longer texts.
    """
    if isinstance(patched_method(model), RemappingMethod):
        yield
        return
    AttentionInterface.register(ATTENTION, chunked_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)
    with use_attention(model, ATTENTION):
        yield


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Windows are read one at a time and without padding: no mask is needed."""


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the newest queries to a cache that ends with their own keys.

    Args:
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, kv_heads, past + tokens, head_dim); heads share them in groups.
        given: transformers' keywords: `scaling`, `softcap`, `s_aux`, and `sliding_window`, the keys that a query sees,
            itself included.

    Returns:
        (batch, tokens, heads, head_dim), None for the weights.

    Raises:
        UnsupportedAttentionError: masks, position biases or other additions to the scores.
    """
    unknown = [name for name in UNSUPPORTED_KWARGS if given.get(name) is not None]
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(", ".join(unknown) or "a mask, or attention that is not causal")
    positions = torch.arange(key.shape[-2], device=query.device)[None]
    every = TokenPositions(positions[:, -query.shape[-2] :], positions, (0,) * len(query), None)
    given["dropout"] = 0.0  # whatever mode the model is in
    return attend_from_kwargs(
        LocalAttention(given.get("sliding_window")), None, every, query, key, value, None, **given
    )

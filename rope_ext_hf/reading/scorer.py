"""Score tokens of long texts in fixed memory; every measurement runs on this.

    scorer = TokenScorer(model)
    nats = scorer.losses(ids, first=1024)      # one number per token from the 1024th on
    scorer.reading                             # "in chunks of 512 tokens", or "whole: " and the reason

The decoder reads a span in chunks that add their keys and values to a cache allocated once (`span_cache`); attention of
a chunk is to the past, without a mask, plus causal within the chunk, merged by their log-sum-exp, so that no mask is
built and no key is repeated over query heads (chunked_attention.py). The head runs over a few tokens at a time
(`head_losses`). Memory above weights and cache does not depend on the length.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.bounds import whole
from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.patches.attention_hooks import remapped_windows
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME
from rope_ext_hf.patches.decoder_arguments import cache_parameter
from rope_ext_hf.patches.forward_hooks import decoder_of
from rope_ext_hf.patches.geometry import check_pairing
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import Slot, patched_slots
from rope_ext_hf.reading.chunked_attention import NotReadInChunksError, reading_in_chunks
from rope_ext_hf.reading.head_losses import HeadLosses, negative_log_likelihoods_, power_of_two
from rope_ext_hf.reading.memory import budgets, widest_activation
from rope_ext_hf.reading.span_cache import SpanCache, StoringCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Cost(NamedTuple):
    """The cost of a measurement: tokens that went through the model, seconds, and peak GPU memory in bytes."""

    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, max(self.peak, other.peak))


T = TypeVar("T")
_LEAST_CHUNK = 16  # tokens per pass below which less memory is of no use
_CHECKED = 12  # tokens of the check; no window needs more of them, because windows are taken from the masks themselves


def _rounding_tolerance(dtype: torch.dtype) -> float:
    """The root mean square difference of logits that counts as equal, in standard deviations of the logits."""
    # Rounding alone makes 1e-6 of it in float32, and 0.01 to 0.05 in bfloat16 over 32 to 80 layers.
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.15


def check_numbers(values: Tensor, tokens: int) -> None:
    """Check that a model gave numbers after so many tokens, where answers are ranked or decoded by them.

    Raises:
        UnsupportedModelError: some are NaN, which would be counted as a wrong answer or as one by luck.
    """
    if bool(values.isnan().any()):
        raise UnsupportedModelError(
            f"the model gives NaN in place of numbers after {tokens:,} tokens: its weights are damaged, or its dtype "
            "is too narrow for it, as float16 may be; try dtype float32 (--dtype float32)"
        )


class TokenScorer:
    """Per-token losses of a causal language model.

    Args:
        model: patched or not, in any dtype, on any device. Patching and unpatching it later is fine.
        chunk: tokens per pass of the decoder; default: by the free memory, see `memory.budgets`.
        head_bytes: memory for logits; default: likewise.
        offload_cache: keys and values wait in main memory; those of one layer at a time are on its device.
        longest: tokens of the longest span to come, for which the cache is allocated at once; pinned memory that was
            allocated for shorter ones would not be given back.

    Raises:
        CheckpointError: a model whose weights are in a pairing that its class does not run.
        MethodError: chunk, head_bytes or longest is no positive whole number.
        UnsupportedModelError: a model that needs more than token ids, or sees the tokens that it is to predict.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int | None = None,
        head_bytes: int | None = None,
        offload_cache: bool = False,
        longest: int | None = None,
    ) -> None:
        check_pairing(model)
        slots = find_slots(model)
        for name, value in (("chunk", chunk), ("head_bytes", head_bytes), ("longest", longest)):
            if value is not None:
                whole(name, value)
        self.model = model
        width = torch.finfo(model.dtype).bits // 8
        of_chunk, of_head = budgets(self._device)
        self.chunk = chunk or power_of_two(of_chunk // (4 * width * widest_activation(model.config.get_text_config())))
        self.head_bytes = head_bytes or of_head
        self.offload_cache, self.longest = offload_cache, longest or 1
        self.cost = Cost()
        self.devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        self.decoder = _decoder(model, slots[0])
        self.head = model.get_output_embeddings()
        self.finish = True
        self.windows: dict[int, int] = {}
        self.cache: SpanCache | None = None
        self.stored: Callable[[Tensor], Tensor] | None = None  # what keys and values become in the cache, e.g. rounded
        self.prefix: tuple[int, list[dict[str, Any]]] | None = None  # tokens that prompts share, the cache after them
        # As loaded, a method that follows the input is run right by transformers in one forward only.
        self.follows_the_input = any(
            rope.method.depends_on_length(rope.plain) for slot in slots for rope in slot.as_loaded.values()
        )
        self.whole_because = self._why_not_in_chunks()

    @property
    def _device(self) -> torch.device:
        embeddings: Any = self.model.get_input_embeddings()
        device: torch.device = next(embeddings.parameters()).device
        return device

    @property
    def chunked(self) -> bool:
        """Whether the model, as it is patched now, is read in chunks."""
        return self._why_whole() is None

    @property
    def reading(self) -> str:
        """How the model, as it is patched now, is read: in chunks, or whole and why."""
        because = self._why_whole()
        return f"in chunks of {self.chunk:,} tokens" if because is None else f"whole: {because}"

    def _why_whole(self) -> str | None:
        if self.whole_because is None and self.follows_the_input and not patched_slots(self.model):
            return "its own scaling follows the length of each forward; patched with it, it is read in chunks"
        return self.whole_because

    @torch.inference_mode()
    def losses(self, ids: Tensor, first: int, *, length: int | None = None) -> Tensor:
        """Negative log-likelihoods in nats, (N - first,) float32 on the CPU, of tokens first..N of a span, (N,) int64.

        Each is given all tokens before it, so `first` is at least 1. Length-dependent methods are held at `length`, by
        default N.
        """
        ids = ids.to(self._device)
        with self._timed(len(ids)), _length(self.model, length or len(ids)):
            return self._losses(ids, first)

    def _losses(self, ids: Tensor, first: int) -> Tensor:
        if not self.chunked:
            return negative_log_likelihoods_([self._last_logits(ids, len(ids) - first)], ids[first:]).cpu()
        return self._fitting(lambda: torch.cat(list(self._by_chunks(ids, first))).cpu())

    @torch.inference_mode()
    def candidates(
        self, prompt: Tensor, answers: Tensor, *, length: int | None = None, shared: int = 0, again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Losses of several answers to one prompt, and the greedy prediction at each answer token (teacher forcing).

        The prompt, (P,) int64, is read once; every answer, (count, A) int64, then starts from its cache. (A model that
        cannot be read in chunks is read whole once per answer.) Length-dependent methods are held at `length`, by
        default P + A.

        Args:
            shared: so many tokens at the beginning are those of the next prompts too; the state after them is kept.
            again: they are those of the call before, of the same model, length and `shared`, and are not read again.

        Returns:
            Negative log-likelihoods in nats, float32, and likeliest tokens, int64; both (count, A) on the CPU.
        """
        prompt, answers = prompt.to(self._device), answers.to(self._device)
        known, count = len(prompt), answers.shape[1]
        shared = min(shared, known - 1)
        spans = [torch.cat([prompt, answer]) for answer in answers]
        with self._timed(0), _length(self.model, length or known + count):
            if self.chunked:
                read, scores = self._fitting(
                    lambda: (
                        self._read_prompt(prompt[:-1], count, shared, again),
                        _scores(self._answer_logits(spans, known), answers),
                    )
                )
            else:
                read, scores = known, _scores((self._last_logits(span, count) for span in spans), answers)
        self.cost = self.cost.plus(Cost(read + answers.numel(), 0.0, 0))
        return scores

    @torch.inference_mode()
    def generate(self, prompt: Tensor, count: int, *, stop: Container[int] = ()) -> Tensor:
        """Greedy decoding from a prompt, (P,) int64: (at most count,) int64 on the CPU.

        The prompt is read once, then every token from the cache of those before. (A model that cannot be read in chunks
        is read whole once per token.) Length-dependent methods are held at P + count throughout. After one of the token
        ids `stop`, which is left out, nothing is generated.
        """
        ids = prompt.to(self._device)
        with self._timed(0), _length(self.model, len(ids) + count):
            made = self._fitting(lambda: list(self._greedy(ids, count, stop)), chunked=self.chunked)
        self.cost = self.cost.plus(Cost(len(ids) + len(made), 0.0, 0))
        return torch.tensor(made, dtype=torch.int64)

    def _greedy(self, ids: Tensor, count: int, stop: Container[int]) -> Iterator[int]:
        chunked = self.chunked
        if chunked:
            self._read_prompt(ids[:-1], count, 0, False)
        for _ in range(count):
            if chunked:
                assert self.cache is not None
                [(_, state)] = self._hidden(ids[-1:], self.cache, len(ids) - 1)
                logits = self._head.logits(state)
            else:
                logits = self._last_logits(torch.cat([ids, ids[-1:]]), 1)
            likeliest = logits[-1].argmax()
            token = int(likeliest)
            check_numbers(logits[-1, token], len(ids))  # argmax takes what is no number for the largest
            if token in stop:
                return
            yield token
            ids = torch.cat([ids, likeliest[None].to(ids)])

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, count: int) -> Tensor:
        """Logits after each of the last tokens of a span, (count, vocabulary) float32; methods are at its length."""
        ids = ids.to(self._device)

        def read() -> Tensor:
            cache = self._empty_cache(len(ids))
            self._read(ids[:-count], cache)
            return self._head.logits(torch.cat([x for _, x in self._hidden(ids[-count:], cache, len(ids) - count)]))

        with self._timed(len(ids)), _length(self.model, len(ids)):
            return self._fitting(read) if self.chunked else self._last_logits(ids, count, after=True)

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

    # --- whole

    def _last_logits(self, ids: Tensor, count: int, *, after: bool = False) -> Tensor:
        """Logits for each of the last `count` tokens of one span, or after each, (count, vocabulary) float32."""
        accepted = inspect.signature(self.model.forward).parameters
        wanted = "logits_to_keep" in accepted or any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        # One more than asked for: logits predict the next token, so that those of the last one are of no use here.
        kept = count if after else count + 1
        given: dict[str, Any] = {"logits_to_keep": kept} if wanted else {}  # else those of all tokens come
        given["use_cache"] = self.stored is not None
        if self.stored is not None:
            cache = StoringCache(config=self.decoder.config)
            cache.stored = self.stored
            given[cache_parameter(self.model, self.decoder)] = cache
        logits: Tensor = self.model(ids[None], **given).logits[0, -kept:][:count].float()
        return logits

    # --- in chunks

    @property
    def _own_attention(self) -> bool:
        """Whether the model runs the attention of a remapping method, which needs neither masks nor more memory."""
        return bool(self.decoder.config._attn_implementation == ATTENTION_NAME)

    def _in_chunks(self, reach_seen: Callable[[int | None], None] | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self._own_attention else reading_in_chunks(self.model, reach_seen)

    def _fitting(self, work: Callable[[], T], *, chunked: bool = True) -> T:
        """Do some work again and again, in chunks of half as many tokens each time, until it fits into the memory."""
        while True:
            try:
                with self._in_chunks() if chunked else nullcontext():
                    return work()
            except torch.OutOfMemoryError:
                if self.chunk <= _LEAST_CHUNK:
                    raise
            # here the failed forward is gone, and what it held
            failed, self.chunk, self.head_bytes = self.chunk, self.chunk // 2, max(1, self.head_bytes // 2)
            self.cache = self.prefix = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(f"out of memory with {failed:,} tokens per pass; going on with {self.chunk:,}", stacklevel=3)

    def _by_chunks(self, ids: Tensor, first: int) -> Iterator[Tensor]:
        head = self._head
        cache = self._empty_cache(len(ids) - 1)
        # (tokens of the chunk, hidden), one chunk at a time: losses are all that is kept of it.
        for start, hidden in self._hidden(ids[:-1], cache):
            # the state at position p predicts the token at p + 1
            begin, end = max(start, first - 1), start + hidden.shape[0]
            if begin < end:
                yield head.losses(hidden[begin - start :], ids[begin + 1 : end + 1].to(hidden.device))

    def _read_prompt(self, ids: Tensor, count: int, shared: int, again: bool) -> int:
        """Read a prompt but its last token, which answers begin with, and return the tokens that were read."""
        cache, known = self._empty_cache(len(ids) + count), 0
        if again and self.prefix is not None and self.prefix[0] == shared:
            cache.restore(self.prefix[1])
            known = shared
        elif shared:  # the next prompt can go on from where the shared beginning ends
            self._read(ids[:shared], cache)
            self.prefix = shared, cache.state()
        self._read(ids[shared:], cache, shared)
        return len(ids) + 1 - known

    def _answer_logits(self, spans: list[Tensor], known: int) -> Iterator[Tensor]:
        """Logits (answer tokens, vocabulary) of every answer, from the cache of the prompt but its last token."""
        head, cache = self._head, self.cache
        assert cache is not None
        after_prompt = cache.state()
        for span in spans:
            # Cutting the cache back to the prompt costs nothing; reading the prompt again would.
            cache.restore(after_prompt)
            # the state at the prompt's last token predicts the first token of the answer
            states = [state for _, state in self._hidden(span[known - 1 : -1], cache, known - 1)]
            yield head.logits(torch.cat(states))

    def _read(self, ids: Tensor, cache: SpanCache, start: int = 0) -> None:
        for _ in self._hidden(ids, cache, start):  # what stays is the cache
            pass

    def _hidden(self, ids: Tensor, cache: SpanCache, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """The decoder's output for tokens after the `start` tokens of a cache: (first position, (tokens, hidden))."""
        given: dict[str, Any] = {cache_parameter(self.decoder): cache}
        own = self._own_attention  # would compare given positions with those in the cache, which waits for the device
        for piece in torch.split(ids, self.chunk) if len(ids) else ():
            positions = None if own else torch.arange(start, start + len(piece), device=ids.device)[None]
            out = self.decoder(input_ids=piece[None], position_ids=positions, use_cache=True, **given)
            yield start, out.last_hidden_state[0]
            start += len(piece)

    def _empty_cache(self, tokens: int) -> SpanCache:
        """The cache, emptied, with room for so many tokens."""
        if self.cache is None or self.cache.capacity < tokens:
            self.cache = self.prefix = None  # free the old one first
            # Allocated once for the longest span: growing would hold the old and the new keys at the same time.
            capacity = max(tokens, self.longest)
            self.cache = SpanCache(self.decoder.config, capacity, offload=self.offload_cache, windows=self.windows)
        self.cache.restore(self.cache.empty)
        self.cache.stored = self.stored
        return self.cache

    @property
    def _head(self) -> HeadLosses:
        config = self.model.config.get_text_config()
        return HeadLosses(self.head, config, self.model.dtype, self.head_bytes, self.finish)

    # --- whether it can be read in chunks

    def _why_not_in_chunks(self) -> str | None:
        """Why a few tokens in chunks, the head run apart, do not get an ordinary forward's logits; None: they do."""
        tolerance = _rounding_tolerance(self.model.dtype)
        # Spread over the vocabulary: the first and the last ids are special tokens in most models, untrained in some.
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = torch.linspace(vocabulary // 8, 7 * vocabulary // 8, _CHECKED, device=self._device).long()
        with torch.inference_mode(), _length(self.model, _CHECKED):
            wanted = self._ordinary_logits(ids, tolerance)
            if self.decoder is self.model or self.head is None:
                return "its class has no decoder and head apart"
            chunk, longest = self.chunk, self.longest
            self.chunk, self.longest = 5, 1  # several tokens onto a cache, and a single one
            try:
                cache = self._empty_cache(_CHECKED - 1)
                with self._in_chunks(cache.see):
                    hidden = torch.cat([each for _, each in self._hidden(ids[:-1], cache)])
                for index, window in remapped_windows(self.model):
                    cache.seen.setdefault(index, set()).add(window)
            except NotReadInChunksError as error:
                return str(error)
            except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
                # a class that takes no such cache; too little memory and failed kernels are RuntimeErrors
                return f"its decoder does not read onto a cache: {one_line(error)}"
            finally:
                self.chunk, self.longest, self.cache = chunk, longest, None
            differences = []
            for self.finish in (True, False):  # some classes for images and text leave out what their text part does
                differences.append(_difference(self._head.logits(hidden), wanted))
                if differences[-1] <= tolerance:
                    self.windows = cache.safe_windows()
                    return None
        return (
            f"in chunks its logits are off by {min(differences):.2g} standard deviations, more than the {tolerance:g} "
            "that rounding may make"
        )

    def _ordinary_logits(self, ids: Tensor, tolerance: float) -> Tensor:
        """Logits (tokens - 1, vocabulary) of an ordinary forward, checked not to depend on later tokens."""
        name = type(self.model).__name__
        # The same tokens but for the last: in a causal model nothing before it may change.
        other = torch.cat([ids[:-1], ids[:1]])
        try:
            logits, others = [self._last_logits(each, len(each) - 1) for each in (ids, other)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"{name} cannot be measured, because it does not run on token ids alone: {one_line(error)}"
            ) from error
        if _difference(others, logits) > tolerance:
            raise UnsupportedModelError(
                f"{name} cannot be measured, because it sees the tokens that it is to predict (another last token "
                "changes the logits before it); load a causal language model, with is_decoder=True where its config "
                "has that"
            )
        return logits


def _decoder(model: PreTrainedModel, slot: Slot) -> Any:
    """The decoder without its head; some classes call a layer or the model itself by that name."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    has_head = getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    usable = decoder is not model and hasattr(decoder, "config") and not has_head
    return decoder if usable else decoder_of(model, slot.parent)


def _scores(of_answers: Iterable[Tensor], answers: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and likeliest tokens, (count, A) on the CPU, from logits (A, vocabulary) of each answer, one at a time."""
    likeliest, losses = [], []
    for logits, answer in zip(of_answers, answers, strict=True):
        likeliest.append(logits.argmax(-1))
        losses.append(negative_log_likelihoods_([logits], answer))
    return torch.stack(losses).cpu(), torch.stack(likeliest).cpu()  # the device is waited for here alone


def _difference(some: Tensor, others: Tensor) -> float:
    """The root mean square difference of logits, in standard deviations of the second ones."""
    some = some.to(others.device)  # a device map runs the head elsewhere, and brings an ordinary forward's logits back
    # NaN in both at the same place is agreement: it is the model's, and shows in its losses.
    if some.shape != others.shape or not torch.equal(some.isfinite(), others.isfinite()):
        return float("inf")
    some, others = [x.nan_to_num(posinf=0.0, neginf=0.0) for x in (some, others)]
    # In standard deviations, because a class may scale its logits; 1e-3 keeps a model with constant logits from
    # dividing by zero.
    return float((some - others).square().mean().sqrt()) / max(1e-3, float(others.std()))


def _length(model: PreTrainedModel, length: int) -> AbstractContextManager[Any]:
    return fixed_length(model, length) if patched_slots(model) else nullcontext()

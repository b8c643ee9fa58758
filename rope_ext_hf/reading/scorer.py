"""Score the tokens of long texts; every measurement that runs a model runs on this.

    scorer = TokenScorer(model)
    nats = scorer.losses(ids, first=1024)      # one number per token from the 1024th on
    scorer.reading                             # "in chunks of 512 tokens", or "whole: " and the reason

| way | texts | attention |
|---|---|---|
| one forward of the decoder (`decoder_outputs`) | losses of at most 1,024 tokens, one chunk | the model's own |
| in chunks, layer by layer if its layers allow it (`chunked_reader`) | all others | that of `chunked_attention` |
| one forward of the model (`whole_reader.whole_logits`) | where these give other logits | the model's own |

The first two are tried on a few tokens (`chunk_check`) against the logits of an ordinary forward. Both give outputs of
the decoder, and that at a position predicts the next token. `head_losses` makes losses of them, a part of the tokens or
of the vocabulary at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.bounds import check_int
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.forward.decoders import decoder_of
from rope_ext_hf.patches.model_rope import ModelRope, check_pairing
from rope_ext_hf.patches.patching import fixed_length, patched
from rope_ext_hf.patches.slots.patched_slot import Slot, patched_slots, tables_of
from rope_ext_hf.reading.cost.memory import available, budgets, waiting_bytes, widest_activation
from rope_ext_hf.reading.larger.offloaded_weights import device_of_ids, is_offloaded
from rope_ext_hf.reading.through.chunk_check import (
    CHECKED_TOKENS,
    MOST_AT_ONCE,
    checked_logits,
    try_at_once,
    try_in_chunks,
)
from rope_ext_hf.reading.through.chunked_reader import ChunkedReader, ScoreOfOutputs
from rope_ext_hf.reading.through.head_losses import HeadLosses, negative_log_likelihoods_, power_of_two
from rope_ext_hf.reading.through.whole_reader import decoder_outputs, whole_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Cost", "TokenScorer", "check_numbers"]

T = TypeVar("T")

_SHARE_OF_TEXTS = 4  # texts that are read together get a quarter of the free memory, because weights of layers come too


class Cost(NamedTuple):
    """The cost of a measurement: tokens that the model read, seconds, and peak GPU memory in bytes."""

    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0

    def plus(self, other: Cost) -> Cost:
        """Return the cost of two measurements, one after the other."""
        return Cost(self.tokens + other.tokens, self.seconds + other.seconds, max(self.peak, other.peak))

    def shares(self, tokens: Sequence[int]) -> list[Cost]:
        """Return the cost of each of several texts that were read together, by their numbers of tokens."""
        if len(tokens) == 1:
            return [self]
        return [Cost(count, self.seconds * count / self.tokens, self.peak) for count in tokens]


def check_numbers(values: Tensor, tokens: int) -> None:
    """Raise an error if there is a NaN among the numbers by which answers are ranked or decoded.

    Args:
        values: logits or log-probabilities, of any shape.
        tokens: the length of the input, for the message.

    Raises:
        UnsupportedModelError: some are NaN, and would count as a wrong answer, or by luck as a right one.
    """
    if bool(values.isnan().any()):
        raise UnsupportedModelError(
            f"the model gives NaN in place of numbers after {tokens:,} tokens: its weights are damaged, or its dtype "
            "is too narrow for it, as float16 may be; try dtype float32 (--dtype float32)"
        )


class TokenScorer:
    """Computes losses, logits and greedy answers of a causal language model for texts of any length.

    Args:
        model: patched or not, in any dtype, on any device. Patching and unpatching it later is fine.
        chunk: the number of tokens that the decoder reads at a time; default: by the free memory, see `memory.budgets`.
        head_bytes: memory for logits, in bytes; default: likewise.
        offload_cache: whether keys and values wait in main memory, and those of one layer at a time are on the device.
            Losses that are read layer by layer need the keys and values of one layer in any case.
        longest: the number of tokens in the longest span (text read at once) to come, for which the cache is allocated
            at once. A cache that grows from span to span would pin memory anew each time, and pinned memory is not
            given back.

    Raises:
        CheckpointError: a model whose weights are in a pairing that its class does not run.
        MethodError: chunk, head_bytes or longest is not a positive whole number.
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
        slots = ModelRope.of_model(model).slots
        for name, value in (("chunk", chunk), ("head_bytes", head_bytes), ("longest", longest)):
            if value is not None:
                check_int(name, value)
        self.model = model
        chunk_bytes, default_head_bytes = budgets(self._device)
        if chunk is None:
            width = torch.finfo(model.dtype).bits // 8
            chunk = power_of_two(chunk_bytes // (4 * width * widest_activation(model.config.get_text_config())))
        self.reader = ChunkedReader(
            model,
            decoder=_decoder(model, slots[0]),
            head=model.get_output_embeddings(),
            chunk=chunk,
            head_bytes=head_bytes or default_head_bytes,
            offload_cache=offload_cache,
            longest=longest or 1,
        )
        self._cost = Cost()
        self._gpus = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        own = [rope for slot in slots for rope in slot.as_loaded.values()]
        self._follows_the_input = any(rope.method.depends_on_length(rope.plain) for rope in own)
        # transformers runs a scaling that follows the length of the input rightly in a single forward only. A patch
        # with the same method can be held at a length, so that the model is read in chunks as other patches are.
        self._own_method = own[0].method if self._follows_the_input and len(own) == 1 else None
        with torch.inference_mode(), self._held_length(CHECKED_TOKENS):
            expected = None
            if not is_offloaded(self.reader.decoder):
                expected = checked_logits(self.reader, self._device)
            self._at_once = expected is not None and try_at_once(self.reader, self._device, expected)
            if not self.reads_at_once(longest or 1):
                self.whole_because = try_in_chunks(self.reader, self._device, expected)

    @cached_property
    def whole_because(self) -> str | None:
        """The reason why texts cannot be read in chunks; None: they can. It is found out when a text needs it."""
        with torch.inference_mode(), self._held_length(CHECKED_TOKENS):
            return try_in_chunks(self.reader, self._device)

    @property
    def _device(self) -> torch.device:
        """The device on which the embeddings of tokens are computed, where token ids have to be."""
        return device_of_ids(self.model)

    # --- settings

    @property
    def chunk(self) -> int:
        """The number of tokens that the decoder reads at a time; it falls when the device runs out of memory."""
        return self.reader.chunk

    @chunk.setter
    def chunk(self, tokens: int) -> None:
        self.reader.chunk = tokens

    @property
    def head_bytes(self) -> int:
        """The memory for logits, in bytes; it falls when the device runs out of memory."""
        return self.reader.head_bytes

    @head_bytes.setter
    def head_bytes(self, size: int) -> None:
        self.reader.head_bytes = size

    def store_through(self, stored: Callable[[Tensor], Tensor] | None) -> None:
        """Pass keys and values through a function before they are cached, from now on; None: cache them as they are.

        The function takes and returns (rows, kv_heads, tokens, head_dim), and may round them for example. The cache is
        allocated anew, so that the model may have another dtype from now on too.
        """
        self.reader.stored = stored
        self.reader.forget()

    @property
    def chunked(self) -> bool:
        """True if the model, with the method it is patched with now, is read in chunks of tokens."""
        return self._why_whole() is None

    @property
    def reading(self) -> str:
        """The way in which the model is read now: "in chunks of 512 tokens", or "whole: " and the reason.

        "in chunks of 512 tokens, layer by layer": losses are computed with the keys and values of one layer at a time.
        """
        because = self._why_whole()
        if because is not None:
            return f"whole: {because}"
        return f"in chunks of {self.chunk:,} tokens{', layer by layer' if self.by_layer else ''}"

    def reads_at_once(self, tokens: int) -> bool:
        """Return whether the losses of a text of this many tokens come from one forward of the decoder."""
        short = tokens <= min(self.chunk, MOST_AT_ONCE)
        return self._at_once and short and self.reader.stored is None and not self._scales_by_forward

    @property
    def by_layer(self) -> bool:
        """True if losses are computed layer by layer, so that keys and values of one layer are held at a time."""
        return self.chunked and self.reader.layers is not None

    @property
    def tokens_together(self) -> int:
        """The best number of tokens in all texts of one call of `losses_together`.

        It is 0, so that texts are given one at a time, unless weights are offloaded. Then it is as many as a part of
        the free memory holds between two layers.
        """
        if not (is_offloaded(self.reader.decoder) and self.by_layer):
            return 0
        config = self.model.config.get_text_config()
        per_token = waiting_bytes(config, 1, torch.finfo(self.model.dtype).bits // 8)
        return available(self._device) // (_SHARE_OF_TEXTS * per_token)

    @property
    def depends_on_total_length(self) -> bool:
        """True if the output for a token, with the present patch, depends on the length of the whole input."""
        slots = patched_slots(self.model)
        if not slots:
            return self._follows_the_input
        return any(table.method.depends_on_length(table.rotary) for table in tables_of(slots))

    @property
    def unpatched(self) -> bool:
        """True if the model is as it was loaded."""
        return not patched_slots(self.model)

    @property
    def _scales_by_forward(self) -> bool:
        """True if the model's own scaling follows the length of each forward, and cannot be held at a length."""
        return self._follows_the_input and self._own_method is None and self.unpatched

    def _why_whole(self) -> str | None:
        """Return why texts are read whole by the model as it is patched now.

        None: they are read in chunks.
        """
        if self.whole_because is None and self._scales_by_forward:
            return "its own scaling follows the length of each forward, and differs between layers"
        return self.whole_because

    @contextmanager
    def _held_length(self, length: int) -> Iterator[None]:
        """Hold all frequencies that follow the length of the input at this length inside the with block.

        A patched model has the length-dependent methods of its patches; an unpatched one may have a scaling of its own
        that follows the length.
        """
        with ExitStack() as held:
            if self.unpatched and self._own_method is not None:
                held.enter_context(patched(self.model, self._own_method, over="original"))
            if not self.unpatched:
                held.enter_context(fixed_length(self.model, length))
            yield

    # --- scores

    @torch.inference_mode()
    def losses(self, ids: Tensor, first: int, *, length: int | None = None) -> Tensor:
        """Return the negative log-likelihood of each token of a text from `first` on, given all tokens before it.

        Args:
            ids: the text, (tokens,) int64.
            first: the position of the first scored token, at least 1.
            length: the length at which length-dependent methods are held; default: the length of the text.

        Returns:
            (tokens - first,) float32 on the CPU, in nats.
        """
        return self.losses_together([(ids, first)], length=length)[0]

    @torch.inference_mode()
    def losses_together(self, texts: Sequence[tuple[Tensor, int]], *, length: int | None = None) -> list[Tensor]:
        """Return the losses of several texts, each as `losses` returns them.

        If the model is read layer by layer, its texts go through each layer one after the other, and offloaded weights
        come to the device once for all of them.

        Args:
            texts: each text, (tokens,) int64, and the position of its first token that is scored.
            length: the length at which length-dependent methods are held; default: the length of the longest text.
        """
        texts = [(ids.to(self._device), first) for ids, first in texts]
        lengths = [len(ids) for ids, _ in texts]
        held = length or max(lengths)
        if self.reads_at_once(max(lengths)):
            try:
                with self._timed(sum(lengths)), self._held_length(held):
                    return [self._losses_at_once(ids, first) for ids, first in texts]
            except torch.OutOfMemoryError:
                self._at_once = False  # chunks take less
        chunked = self.chunked
        with self._timed(sum(lengths)), self._held_length(held):
            if chunked:
                return self.reader.fit(lambda: [losses.cpu() for losses in self.reader.losses(texts)])
            logits = ([self._whole_logits(ids, len(ids) - first)] for ids, first in texts)
            return [
                negative_log_likelihoods_(parts, ids[first:]).cpu()
                for parts, (ids, first) in zip(logits, texts, strict=True)
            ]

    def _losses_at_once(self, ids: Tensor, first: int) -> Tensor:
        """Return the losses of a text that the decoder reads in one forward; the arguments are those of `losses`.

        The output of the decoder for a token predicts the next one: the head makes logits of it in float32, and the
        loss is their logsumexp less the logit of the token that follows.
        """
        outputs = decoder_outputs(self.reader.decoder, ids[:-1])[first - 1 :]
        return self.head.losses(outputs, ids[first:].to(outputs.device)).cpu()

    @property
    def head(self) -> HeadLosses:
        """The head of the model, which makes logits and losses of the decoder's outputs."""
        return self.reader.head_losses

    def check_outputs(self) -> None:
        """Raise UnsupportedModelError if the model is read whole now, so that `outputs_together` has no outputs."""
        because = self._why_whole()
        if because is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives no last hidden states to store or to compare, because it is read "
                f"whole: {because}. Its perplexity alone can be measured"
            )

    @torch.inference_mode()
    def outputs_together(
        self, texts: Sequence[tuple[Tensor, int]], use: ScoreOfOutputs[T], *, length: int | None = None
    ) -> list[list[T]]:
        """Read several texts, and return the results of `use` for the decoder's outputs that predict scored tokens.

        A decoder's output is the input of the head: the hidden state after the last norm. The outputs come one chunk
        at a time, and are not kept. Texts are read in the order of `losses_together`.

        Args:
            texts: each text, (tokens,) int64, and the position of its first token that is scored.
            use: a function that takes the number of the text, the place of the first of some scored tokens among all
                scored tokens of the text, the outputs that predict them (tokens, hidden), and these tokens, (tokens,)
                int64. It runs on the model's device, and should return a result on the CPU, so that the time of the
                device is counted. If the device runs out of memory, it is called again from the first text on.
            length: the length at which length-dependent methods are held; default: the length of the longest text.

        Returns:
            For each text the results of `use`, in the order of the text.

        Raises:
            UnsupportedModelError: as for `check_outputs`.
        """
        self.check_outputs()
        texts = [(ids.to(self._device), first) for ids, first in texts]
        lengths = [len(ids) for ids, _ in texts]
        with self._timed(sum(lengths)), self._held_length(length or max(lengths)):
            return self.reader.fit(lambda: self.reader.scored(texts, use))

    @torch.inference_mode()
    def candidates(
        self, prompt: Tensor, answers: Tensor, *, length: int | None = None, shared: int = 0, again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of several answers to one prompt, and the likeliest token at each position of the answers.

        The prompt is read once, and every answer is read from its cache. A model that cannot be read in chunks reads
        prompt and answer whole for every answer.

        Args:
            prompt: the token ids of the prompt, (prompt tokens,) int64.
            answers: the token ids of the answers, (answers, tokens) int64.
            length: the length at which length-dependent methods are held; default: the length of prompt and answer.
            shared: the number of tokens at the beginning of the prompt that the next prompts have in common; the state
                of the cache after them is kept.
            again: take up the state that the previous call kept instead of reading these tokens. Model, length and
                `shared` must be the same as in the previous call.

        Returns:
            Negative log-likelihoods in nats, float32, and token ids, int64; both (answers, tokens) on the CPU.
        """
        prompt, answers = prompt.to(self._device), answers.to(self._device)
        known, count = len(prompt), answers.shape[1]
        shared = min(shared, known - 1)
        spans = [torch.cat([prompt, answer]) for answer in answers]

        def read_in_chunks() -> tuple[int, tuple[Tensor, Tensor]]:
            read = self.reader.read_prompt(prompt[:-1], count, shared=shared, again=again)
            return read, _scores(self.reader.answer_logits(spans, known), answers)

        chunked = self.chunked
        with self._timed(0), self._held_length(length or known + count):
            if chunked:
                read, scores = self.reader.fit(read_in_chunks)
            else:
                read, scores = known, _scores((self._whole_logits(span, count) for span in spans), answers)
        self._cost = self._cost.plus(Cost(read + answers.numel()))
        return scores

    @torch.inference_mode()
    def generate(self, prompt: Tensor, count: int, *, stop: Container[int] = ()) -> Tensor:
        """Continue a prompt by greedy decoding.

        The prompt is read once, and each token from the cache of those before it. A model that cannot be read in chunks
        reads everything whole for every token. Length-dependent methods are held at the length of prompt and answer.

        Args:
            prompt: the token ids of the prompt, (prompt tokens,) int64.
            count: the largest number of tokens to generate.
            stop: token ids that end the answer, and are not part of it.

        Returns:
            The generated token ids, (at most count,) int64 on the CPU.
        """
        ids = prompt.to(self._device)

        def decode_in_chunks() -> list[int]:
            self.reader.read_prompt(ids[:-1], count)
            return _greedy(self.reader.next_logits, ids, count, stop)

        def next_of_whole(ids: Tensor) -> Tensor:
            return self._whole_logits(torch.cat([ids, ids[-1:]]), 1)[-1]

        chunked = self.chunked
        with self._timed(0), self._held_length(len(ids) + count):
            generated = self.reader.fit(decode_in_chunks) if chunked else _greedy(next_of_whole, ids, count, stop)
        self._cost = self._cost.plus(Cost(len(ids) + len(generated)))
        return torch.tensor(generated, dtype=torch.int64)

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, count: int) -> Tensor:
        """Return the logits after each of the last `count` tokens of a text, (count, vocabulary) float32.

        `ids`: the text, (tokens,) int64. Length-dependent methods are held at the length of the text.
        """
        ids, chunked = ids.to(self._device), self.chunked
        with self._timed(len(ids)), self._held_length(len(ids)):
            if chunked:
                return self.reader.fit(lambda: self.reader.last_logits(ids, count))
            return self._whole_logits(ids, count, after=True)

    def _whole_logits(self, ids: Tensor, count: int, *, after: bool = False) -> Tensor:
        """Return logits at the end of a text that is read in one forward; the arguments are as in `whole_logits`."""
        return whole_logits(self.model, self.reader.decoder, ids, count, after=after, stored=self.reader.stored)

    # --- cost

    def take_cost(self) -> Cost:
        """Return the cost of everything since the last call of this method."""
        cost, self._cost = self._cost, Cost()
        return cost

    @contextmanager
    def without_cost(self) -> Iterator[None]:
        """Leave what is read inside the with block out of the cost."""
        cost = self._cost
        yield
        self._cost = cost

    @contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        """Add the cost of the with block to the cost so far.

        The block must end with results on the CPU, so that the device has finished. `tokens`: the tokens that it reads.
        """
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        started = time.perf_counter()
        yield
        peak = max((torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus), default=0)
        self._cost = self._cost.plus(Cost(tokens, time.perf_counter() - started, peak))


def _decoder(model: PreTrainedModel, slot: Slot) -> Any:
    """Return the decoder without its head; `get_decoder` of some classes returns a layer or the model itself."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    has_head = getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    is_usable = decoder is not model and hasattr(decoder, "config") and not has_head
    return decoder if is_usable else decoder_of(model, slot.parent)


def _greedy(next_logits: Callable[[Tensor], Tensor], ids: Tensor, count: int, stop: Container[int]) -> list[int]:
    """Return the tokens with which greedy decoding continues `ids`.

    `next_logits` returns the logits for the token after given tokens, (vocabulary,).
    """
    generated: list[int] = []
    for _ in range(count):
        logits = next_logits(ids)
        likeliest = logits.argmax()
        token = int(likeliest)
        check_numbers(logits[token], len(ids))  # argmax takes NaN for the largest number
        if token in stop:
            break
        generated.append(token)
        ids = torch.cat([ids, likeliest[None].to(ids)])
    return generated


def _scores(logits_of_answers: Iterable[Tensor], answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of answers, and the likeliest token at each position; both (answers, tokens) on the CPU.

    The logits, (tokens, vocabulary), come one answer at a time, so that only those of one answer are in memory.
    """
    likeliest, losses = [], []
    for logits, answer in zip(logits_of_answers, answers, strict=True):
        likeliest.append(logits.argmax(-1))
        losses.append(negative_log_likelihoods_([logits], answer))
    return torch.stack(losses).cpu(), torch.stack(likeliest).cpu()  # the host waits for the device here alone

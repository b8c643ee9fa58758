"""How well a model predicts held-out text, by context length.

    from rope_ext_hf.eval import perplexity
    for result in perplexity(model, "stdlib", lengths=[256, 1024]):
        print(result.length, result.perplexity)

One forward of the decoder per window; the language-model head runs over the scored tokens alone, a few hundred at a
time, in float32; sums are float64. No tensor of shape (length, vocabulary) exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.corpora import Document, load
from rope_ext_hf.eval.results import DocumentLoss, Result
from rope_ext_hf.eval.windows import Window, check_lengths, matched
from rope_ext_hf.patches.patching import describe, fixed_length
from rope_ext_hf.patches.slots import patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Tokens", "count_windows", "finite", "perplexity", "tokenize"]

HEAD_CHUNK = 512  # scored tokens per pass of the language-model head


@dataclass(frozen=True)
class Tokens:
    """A tokenised document: ids (tokens,) int64 and, per token, where it ends in the text, in UTF-8 bytes."""

    name: str
    ids: Tensor
    ends: tuple[int, ...]

    def bytes_between(self, start: int, stop: int) -> int:
        """UTF-8 bytes of tokens start..stop."""
        return self.ends[stop - 1] - (self.ends[start - 1] if start else 0)


def tokenize(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Documents as token ids, no special tokens added."""
    return [_tokenize(document, tokenizer) for document in documents]


def _tokenize(document: Document, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    text = document.text
    total = len(text.encode("utf-8"))
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
        return_attention_mask=False,
    )
    ids: list[int] = encoded["input_ids"]
    if not tokenizer.is_fast:  # no offsets; exact for byte tokenizers, where tokens and bytes are as many
        ends = [round(total * (i + 1) / len(ids)) for i in range(len(ids))]
    else:
        bytes_before = range(total + 1) if text.isascii() else [0, *accumulate(len(c.encode("utf-8")) for c in text)]
        ends = list(accumulate((bytes_before[end] for _, end in encoded["offset_mapping"]), max))
    return Tokens(document.name, torch.tensor(ids, dtype=torch.int64), tuple(ends))


def perplexity(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    lengths: Sequence[int],
    protocol: str = "matched",
    targets: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_windows: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Perplexity at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        corpus: "stdlib", the path of a text file, documents, or documents already tokenised.
        lengths: context lengths in tokens.
        protocol: "matched", the one there is so far; see `rope_ext_hf.eval.windows`.
        targets: tokens scored per window; default half the shortest length.
        tokenizer: default: the one beside the model's weights.
        bos: begin every window with the tokenizer's BOS token; default: if the tokenizer itself does so.
        max_windows: at most this many windows per length, taken evenly over the corpus.
        progress: called with the number of tokens read, after each window.

    Returns:
        One Result per length, shortest first. A window with a loss that is not finite makes its whole result
        non-finite, and is named in it.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown protocol, or lengths and targets that do not fit.

    Length-dependent methods run under `fixed_length` of each context length.
    """
    if protocol != "matched":
        raise MethodError(f"unknown protocol {protocol!r}; known: matched")
    ordered, scored = _lengths(lengths, targets)
    documents = _documents(model, corpus, tokenizer)
    first_token = _bos_token(model, tokenizer, bos)
    largest = max((int(document.ids.max()) for document in documents if len(document.ids)), default=0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if largest >= vocabulary:
        raise CorpusError(f"token id {largest} is outside the model's vocabulary of {vocabulary}; wrong tokenizer?")

    windows = _plan(documents, ordered, scored, max_windows)
    description = describe(model)
    score = _scorer(model)
    results = []
    for length in ordered:
        losses: dict[str, DocumentLoss] = {}
        with _as_long_as(model, length), torch.inference_mode():
            for document, window in windows[length]:
                total = score(_read(document, window, first_token, model.device), window.stop - window.score_from)
                size = document.bytes_between(window.score_from, window.stop)
                before = losses.get(document.name, DocumentLoss(document.name, 0.0, 0, 0, 0))
                losses[document.name] = before.plus(total, window.stop - window.score_from, size)
                if progress is not None:
                    progress(length)
        results.append(Result.of(description, protocol, length, scored, first_token is not None, list(losses.values())))
    return results


def count_windows(
    corpus: Sequence[Tokens], lengths: Sequence[int], targets: int | None = None, max_windows: int | None = None
) -> int:
    """How many windows `perplexity` reads per length.

    Raises:
        CorpusError, MethodError: as `perplexity` does.
    """
    ordered, scored = _lengths(lengths, targets)
    return len(_plan(corpus, ordered, scored, max_windows)[ordered[0]])


def _lengths(lengths: Sequence[int], targets: int | None) -> tuple[list[int], int]:
    try:
        return check_lengths(lengths, targets)
    except ValueError as error:
        raise MethodError(str(error)) from error


def _documents(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Tokens]:
    given = load(corpus) if isinstance(corpus, str) else list(corpus)
    raw = [document for document in given if isinstance(document, Document)]
    ready = [document for document in given if isinstance(document, Tokens)]
    if not raw:
        return ready
    return tokenize(raw, tokenizer or _own_tokenizer(model))


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if not model.name_or_path:
        raise CorpusError("this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=...")
    return AutoTokenizer.from_pretrained(model.name_or_path)


def _bos_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, bos: bool | None) -> int | None:
    if bos is False or (bos is None and tokenizer is None and not model.name_or_path):
        return None
    tokenizer = tokenizer or _own_tokenizer(model)
    token: int | None = tokenizer.bos_token_id
    if bos is None:
        encoded = tokenizer("a")["input_ids"]
        return token if token is not None and encoded[:1] == [token] else None
    if token is None:
        raise MethodError(f"bos=True, but {type(tokenizer).__name__} has no BOS token")
    return token


def _plan(
    documents: Sequence[Tokens], lengths: Sequence[int], targets: int, max_windows: int | None
) -> dict[int, list[tuple[Tokens, Window]]]:
    """The windows of each length; the same targets in each."""
    planned: dict[int, list[tuple[Tokens, Window]]] = {length: [] for length in lengths}
    for document in documents:
        for window in matched(len(document.ids), lengths, targets):
            planned[window.length].append((document, window))
    count = len(planned[lengths[0]])
    if not count:
        longest = max((len(document.ids) for document in documents), default=0)
        raise CorpusError(
            f"no document has {lengths[-1]} tokens, the longest length asked for; "
            f"the longest of {len(documents)} has {longest}. Give longer text or shorter lengths"
        )
    if max_windows is not None and count > max_windows:
        chosen = [(2 * i + 1) * count // (2 * max_windows) for i in range(max_windows)]
        planned = {length: [found[i] for i in chosen] for length, found in planned.items()}
    return planned


def _read(document: Tokens, window: Window, first_token: int | None, device: torch.device) -> Tensor:
    """The window's ids, (1, length); BOS takes the place of its first token."""
    ids = document.ids[window.start : window.stop].clone()
    if first_token is not None:
        ids[0] = first_token
    return ids.unsqueeze(0).to(device)


@contextmanager
def _as_long_as(model: PreTrainedModel, length: int) -> Iterator[None]:
    """`fixed_length` where there is something to fix; an unpatched model runs as it is, whatever it does."""
    if not patched_slots(model):
        yield
        return
    with fixed_length(model, length):
        yield


def _scorer(model: PreTrainedModel) -> Callable[[Tensor, int], float]:
    """A function of ids (1, length) and n: the summed negative log-likelihood of the last n tokens, in nats.

    Where decoder and head can be run apart (checked once, on a few tokens), the head runs in chunks.
    """
    decoder, head = _decoder(model), model.get_output_embeddings()
    probe = torch.arange(4, device=model.device).unsqueeze(0) + 3
    apart = False
    if decoder is not None and head is not None:
        with torch.inference_mode():
            whole = model(probe, use_cache=False).logits.float()
            pieces = _logits(model, head, decoder(input_ids=probe, use_cache=False).last_hidden_state)
        apart = whole.shape == pieces.shape and torch.allclose(whole, pieces, rtol=1e-3, atol=1e-3)

    def by_chunks(ids: Tensor, count: int) -> float:
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -count - 1 : -1]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for states, targets in zip(
            torch.split(hidden, HEAD_CHUNK), torch.split(ids[0, -count:], HEAD_CHUNK), strict=True
        ):
            total += _nll(_logits(model, head, states), targets.to(hidden.device))
        return total.item()

    def at_once(ids: Tensor, count: int) -> float:
        logits = model(ids, use_cache=False, logits_to_keep=count + 1).logits[0, -count - 1 : -1].float()
        return _nll(logits, ids[0, -count:].to(logits.device)).item()

    return by_chunks if apart else at_once


def _decoder(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return None if decoder is model else decoder


def _logits(model: PreTrainedModel, head: Any, hidden: Tensor) -> Tensor:
    """Logits as the common families form them from hidden states: a head, then a scale or a soft cap; float32."""
    logits: Tensor = head(hidden).float()
    config = model.config.get_text_config()
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood, float64; logits (tokens, vocabulary) float32."""
    picked = logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1))
    return -picked.to(torch.float64).sum()


def finite(results: Sequence[Result]) -> bool:
    """Whether every loss is a finite number."""
    return all(math.isfinite(result.loss) for result in results)

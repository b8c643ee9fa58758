"""How well a model predicts held-out text, by context length.

    from rope_ext_hf.eval import perplexity
    for result in perplexity(model, "stdlib", lengths=[256, 1024]):
        print(result.length, result.perplexity)

A protocol says which windows are read and what of them is scored (`windows.py`), a reader reads them in fixed memory
(`reading.py`), and sums per document make a result with its confidence interval (`results.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.plan import Reading, Tokens, prepare
from rope_ext_hf.eval.results import DocumentLoss, Effort, Result
from rope_ext_hf.eval.scorer import Reader
from rope_ext_hf.patches.patching import patched_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["collect", "finite", "perplexity"]


def perplexity(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    lengths: Sequence[int],
    protocol: str = "matched",
    targets: int | None = None,
    stride: int = 256,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_windows: int | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Perplexity at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        corpus: what `rope_ext_hf.eval.corpora.load` takes, documents, or documents already tokenised.
        lengths: context lengths in tokens.
        protocol: a name of `rope_ext_hf.eval.windows.PROTOCOLS`.
        targets: tokens scored per window under "matched"; default half the shortest length.
        stride: tokens between windows under "sliding" and "stream".
        tokenizer: default: the one beside the model's weights.
        bos: begin every window with the tokenizer's BOS token; default: if the tokenizer itself does so.
        max_windows: at most this many windows per length, taken evenly over the corpus.
        chunk: tokens per pass of the decoder; default: by the free memory, within a fixed budget.
        offload_cache: keep keys and values in main memory, and on the model's device only those of one layer.
        progress: called with the number of tokens read, after each window.

    Returns:
        One Result per length, shortest first. A window with a loss that is not finite makes its whole result
        non-finite, and is named in it.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown protocol, or lengths, targets and stride that do not fit.

    Length-dependent methods are held at each context length (`fixed_length`). A warning says how many layers see less
    than the longest window.
    """
    reading = prepare(
        model,
        corpus,
        lengths=lengths,
        protocol=protocol,
        targets=targets,
        stride=stride,
        tokenizer=tokenizer,
        bos=bos,
        max_windows=max_windows,
    )
    method = patched_method(model)
    reader = Reader(model, chunk=chunk, offload_cache=offload_cache)
    return collect(method.to_dict() if method else None, reading, reading.measure(reader, progress))


def collect(
    method: dict[str, Any] | None, reading: Reading, measured: Iterable[tuple[int, DocumentLoss, Effort]]
) -> list[Result]:
    """One result per length from what `Reading.measure` yields."""
    losses: dict[int, list[DocumentLoss]] = {length: [] for length in reading.lengths}
    efforts = dict.fromkeys(reading.lengths, Effort())
    for length, loss, effort in measured:
        losses[length].append(loss)
        efforts[length] = efforts[length].plus(effort)
    return [Result.of(method, reading.setting, length, losses[length], efforts[length]) for length in reading.lengths]


def finite(results: Sequence[Result]) -> bool:
    """Whether every loss is a finite number."""
    return all(math.isfinite(result.loss) for result in results)

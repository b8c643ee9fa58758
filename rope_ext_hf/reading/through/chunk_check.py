"""Check which ways to read a model give the logits of an ordinary forward, on a few tokens.

Short texts are read at once: one forward of the decoder, then the head. Longer ones are read in chunks; for them the
check also finds out whether the layers can be read one after the other (`layer_reader`). Offloaded weights come to the
device for each forward, so that a model with such weights is read layer by layer first: if that gives the logits of an
ordinary forward, its weights have come twice, and nothing else is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.models.decoder_arguments import cache_parameter
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.patches.forward.remapping_forward import remapped_windows
from rope_ext_hf.reading.larger.offloaded_weights import is_offloaded
from rope_ext_hf.reading.through.chunked_attention import NotReadInChunksError
from rope_ext_hf.reading.through.chunked_reader import ChunkedReader
from rope_ext_hf.reading.through.layer_reader import LayerReader, NotReadByLayerError
from rope_ext_hf.reading.through.span_cache import SpanCache
from rope_ext_hf.reading.through.whole_reader import decoder_outputs, whole_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 12
"""Tokens of the check. No window needs more of them, because windows are taken from the masks themselves."""
MOST_AT_ONCE = 1024
"""Tokens that are read in one forward at most, because the attention of some classes makes the scores of all pairs."""
_UNUSUAL_CLASS = (TypeError, ValueError, AttributeError, KeyError, IndexError)
"""Errors of a class that takes other arguments, or returns something else; too little memory is a RuntimeError."""
_CHUNK = 5  # puts several tokens onto an empty cache, several onto one that is not empty, and a single one


def checked_logits(reader: ChunkedReader, device: torch.device) -> Tensor:
    """Return the logits of an ordinary forward for the tokens of the check, (tokens - 1, vocabulary).

    Raises:
        UnsupportedModelError: the model does not run on token ids alone, or sees the tokens that it is to predict.
    """
    ids = _checked_ids(reader.model, device)
    expected = _ordinary_logits(reader, ids)
    _check_causal(reader, ids, expected)
    return expected


def try_at_once(reader: ChunkedReader, device: torch.device, expected: Tensor) -> bool:
    """Try whether one forward of the decoder, and then its head on a part of the tokens, give the model's logits.

    If so, the result is true, and `scales_logits` of the reader is set to the value with which the logits were equal.
    Layers with a cache of an unknown kind, which may choose keys by the number of tokens, are left to the other ways.

    Args:
        reader: the reader; its weights are on the device.
        device: the device on which it takes token ids.
        expected: the result of `checked_logits`.
    """
    model, decoder = reader.model, reader.decoder
    if decoder is model or reader.head is None:
        return False
    try:
        SpanCache(decoder.config, 1)
        hidden = decoder_outputs(decoder, _checked_ids(model, device)[:-1])
    except (NotReadInChunksError, *_UNUSUAL_CLASS):
        return False
    for scales_logits in (True, False):
        reader.scales_logits = scales_logits
        if _difference(reader.head_losses.logits(hidden), expected) <= _bounds(model.dtype)[0]:
            return True
    reader.scales_logits = True
    return False


def _checked_ids(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Return the tokens of a check, (tokens,) int64.

    They are spread over the vocabulary: the first and the last ids are special tokens in most models, untrained in
    some.
    """
    vocabulary = vocabulary_size(model)
    return torch.linspace(vocabulary // 8, 7 * vocabulary // 8, CHECKED_TOKENS, device=device).long()


def try_in_chunks(reader: ChunkedReader, device: torch.device, expected: Tensor | None = None) -> str | None:
    """Try to read a model in chunks, and return why it cannot be done; None: it can.

    If it can, `scales_logits` and `windows` of the reader are set to the values with which the logits were equal, and
    `layers` if the decoder can be read layer by layer.

    Args:
        reader: the reader.
        device: the device on which it takes token ids.
        expected: the result of `checked_logits`; None: it is not known yet.

    Raises:
        UnsupportedModelError: as `checked_logits`.
    """
    model = reader.model
    ids = _checked_ids(model, device)
    first_trial = None
    if is_offloaded(reader.decoder):
        expected, first_trial = _trial_by_layer(reader, ids)
        if first_trial is not None and first_trial.difference <= _bounds(model.dtype)[0]:
            first_trial.settle(reader)
            return None
        if expected is not None:
            _check_causal(reader, ids, expected)
    if expected is None:
        expected = checked_logits(reader, device)
    if first_trial is not None and first_trial.difference <= _rounding_tolerance(reader, ids, expected):
        first_trial.settle(reader)
        return None
    if reader.decoder is model or reader.head is None:
        return "the model's class does not separate its decoder from its head"

    trial = replace(reader, chunk=_CHUNK, longest=1, layers=None)
    layers = _layers(reader)
    try:
        cache = trial.empty_cache(CHECKED_TOKENS - 1)
        with trial.attention(cache.see), nullcontext() if layers is None else layers.watched():
            hidden = torch.cat([states for _, states in trial.hidden(ids[:-1], cache)])
    except NotReadInChunksError as error:
        return str(error)
    except _UNUSUAL_CLASS as error:
        return f"the model's decoder does not read onto a cache: {one_line(error)}"
    windows = _safe_windows(model, cache)
    differences, tolerance = [], _bounds(model.dtype)[0]
    # Some classes for images and text leave out the scale or cap that their text part has.
    for scales_logits in (True, False):
        trial.scales_logits = scales_logits
        differences.append(_difference(trial.head_losses.logits(hidden), expected))
        if differences[-1] > tolerance and scales_logits:  # a fixed bound may be too narrow for rounding
            tolerance = _rounding_tolerance(reader, ids, expected)
        if differences[-1] <= tolerance:
            reader.scales_logits, reader.windows = scales_logits, windows
            if layers is not None and _equal_by_layer(
                replace(trial, layers=layers, windows=reader.windows), ids, hidden
            ):
                reader.layers = layers
            return None
    return (
        f"in chunks the model's logits are off by {min(differences):.2g} standard deviations, more than the "
        f"{tolerance:.2g} that rounding makes"
    )


def _layers(reader: ChunkedReader) -> LayerReader | None:
    """Return a reader that runs the layers of a decoder one after the other; None: it has no list of layers."""
    try:
        return LayerReader(reader.decoder)
    except NotReadByLayerError:
        return None


def _equal_by_layer(reader: ChunkedReader, ids: Tensor, expected: Tensor) -> bool:
    """Return whether a decoder gives the same output layer by layer as with all layers on each chunk.

    Args:
        reader: the reader, which has `layers`.
        ids: the tokens of the check, (tokens,) int64.
        expected: the output with all layers on each chunk, (tokens - 1, hidden).
    """
    # The order changes no number; but some kernels of GPUs add in another order at each call.
    bound = _bounds(reader.model.dtype)[0]
    return any(_difference(output.float(), expected.float()) <= bound for output, _ in _outputs_by_layer(reader, ids))


def _outputs_by_layer(reader: ChunkedReader, ids: Tensor) -> Iterator[tuple[Tensor, SpanCache]]:
    """Yield a decoder's output layer by layer, (tokens - 1, hidden), and the cache, for each way to give it tokens.

    A decoder that does more between its layers than hand on one tensor raises an error with the stand-ins of
    `layer_reader`, for which nothing is yielded, or has another output.

    Args:
        reader: the reader, which has `layers`; they are set to read in the way that was yielded last.
        ids: the tokens of the check, (tokens,) int64.
    """
    assert reader.layers is not None
    another = ids.flip(0)  # a second text, whose keys take the place of those that a layer might still look for
    for by_embeddings in sorted({reader.layers.by_embeddings, False}, reverse=True):
        reader.layers.by_embeddings = by_embeddings  # some classes need ids in any case
        reader.forget()
        try:
            cache = reader.empty_cache(len(another), by_layer=True)
            with reader.attention(cache.see):
                outputs, _ = reader.outputs_by_layer([ids[:-1], another], lambda number, start, hidden: hidden)
                output = torch.cat(outputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:  # whatever the class does with stand-ins
            continue
        yield output, cache


class _Trial(NamedTuple):
    """A way to read a model layer by layer that was tried.

    Attributes:
        difference: how far its logits are from those of an ordinary forward, in standard deviations.
        scales_logits, windows, layers: the settings of the reader.
    """

    difference: float
    scales_logits: bool
    windows: dict[int, int]
    layers: LayerReader

    def settle(self, reader: ChunkedReader) -> None:
        """Have a reader read in this way."""
        reader.scales_logits, reader.windows, reader.layers = self.scales_logits, self.windows, self.layers


def _trial_by_layer(reader: ChunkedReader, ids: Tensor) -> tuple[Tensor | None, _Trial | None]:
    """Return the logits of an ordinary forward, and the first way to read layer by layer that gives nearly the same.

    If one does, no logits depend on later tokens, because chunks do not see the chunks after them. The logits are None
    if the model does not run with its layers watched.

    Args:
        reader: the reader, without `layers`.
        ids: the tokens of the check, (tokens,) int64.
    """
    model, layers = reader.model, _layers(reader)
    if reader.decoder is model or reader.head is None or layers is None:
        return None, None
    try:
        with layers.watched():
            expected = _ordinary_logits(reader, ids)
    except UnsupportedModelError:
        return None, None
    trial = replace(reader, chunk=_CHUNK, longest=1, layers=layers)
    least, most = _bounds(model.dtype)
    for hidden, cache in _outputs_by_layer(trial, ids):
        differences: dict[bool, float] = {}
        for scales_logits in (True, False):
            trial.scales_logits = scales_logits
            differences[scales_logits] = _difference(trial.head_losses.logits(hidden), expected)
            if differences[scales_logits] <= least:
                break  # the weights of the head need not come again
        scales_logits = min(differences, key=lambda each: differences[each])
        if differences[scales_logits] <= most:
            return expected, _Trial(differences[scales_logits], scales_logits, _safe_windows(model, cache), layers)
    return expected, None


def _safe_windows(model: PreTrainedModel, cache: SpanCache) -> dict[int, int]:
    """Return the sliding windows by which keys may be dropped, by the index of the layer; see `SpanCache`.

    `cache` has seen the attention of the model's layers, except under a remapping method.
    """
    for index, window in remapped_windows(model):
        cache.seen.setdefault(index, set()).add(window)
    return cache.safe_windows()


def _ordinary_logits(reader: ChunkedReader, ids: Tensor) -> Tensor:
    """Return the logits of an ordinary forward, (tokens - 1, vocabulary)."""
    try:
        return whole_logits(reader.model, reader.decoder, ids, len(ids) - 1)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (*_UNUSUAL_CLASS, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(reader.model).__name__} cannot be measured, because it does not run on token ids alone: "
            f"{one_line(error)}"
        ) from error


def _check_causal(reader: ChunkedReader, ids: Tensor, expected: Tensor) -> None:
    """Raise UnsupportedModelError if another last token changes the logits before it; `expected` are those logits."""
    others = _ordinary_logits(reader, torch.cat([ids[:-1], ids[:1]]))
    if _difference(others, expected) > _bounds(reader.model.dtype)[1]:
        raise UnsupportedModelError(
            f"{type(reader.model).__name__} cannot be measured, because it sees the tokens that it is to predict "
            "(another last token changes the logits before it); load a causal language model, with is_decoder=True if "
            "its config has that key"
        )


def _rounding_tolerance(reader: ChunkedReader, ids: Tensor, expected: Tensor) -> float:
    """Return the difference of logits that counts as rounding: twice that of the model's own code, within bounds.

    Two ways of reading that are known to be right are compared with an ordinary forward: the same tokens with as many
    behind them, and the same pieces onto a cache of transformers. Both may sum in another order, as reading in chunks
    does. How much that changes depends on the model, its dtype and the device: on one processor the first way changes
    nothing, on another the second. No fixed number would do: in bfloat16, the worst rounding on one processor is as
    large as the effect, on another processor, of positions that are off by one.

    Args:
        reader: the reader, with the model.
        ids: the tokens of the check, (tokens,) int64.
        expected: the logits of an ordinary forward, (tokens - 1, vocabulary).
    """
    least, most = _bounds(reader.model.dtype)
    if least == most:
        return most
    longer = _ordinary_logits(reader, torch.cat([ids, ids.flip(0)]))[: len(expected)]
    noise = _difference(longer, expected)
    try:
        cache = DynamicCache(config=reader.decoder.config)
        name = cache_parameter(reader.model, reader.decoder)
        pieces = torch.split(ids[:-1], _CHUNK)
        logits = [reader.model(piece[None], use_cache=True, **{name: cache}).logits[0] for piece in pieces]
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (UnsupportedModelError, *_UNUSUAL_CLASS, RuntimeError):
        return most  # a class with a cache of its own
    return min(most, max(least, 2 * noise, 2 * _difference(torch.cat(logits).float(), expected)))


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds of what counts as rounding: root mean squares, in standard deviations of the logits.

    Reading in chunks was measured to change up to 2e-6 in float32, 0.004 in float16 and 0.05 in bfloat16, over 2 to 80
    layers. The lower bound is for models whose cache makes no difference by chance.
    """
    if dtype in (torch.float32, torch.float64):
        return 1e-4, 1e-4
    return (0.02 if dtype == torch.bfloat16 else 0.005), 0.15


def _difference(logits: Tensor, expected: Tensor) -> float:
    """Return the root mean square difference of logits, in standard deviations of the expected ones."""
    # A device map may run the head on another device than an ordinary forward returns its logits on.
    logits = logits.to(expected.device)
    # NaN at the same place in both counts as equal: it comes from the model, and shows in its losses.
    if logits.shape != expected.shape or not torch.equal(logits.isfinite(), expected.isfinite()):
        return float("inf")
    logits, expected = (x.nan_to_num(posinf=0.0, neginf=0.0) for x in (logits, expected))
    # In standard deviations, because a class may scale its logits; 1e-3 keeps a model with constant logits from
    # dividing by zero.
    return float((logits - expected).square().mean().sqrt()) / max(1e-3, float(expected.std()))

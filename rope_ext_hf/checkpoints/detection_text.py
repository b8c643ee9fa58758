"""Pairing detection by the loss on a text, with the rows in either order."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.detection_sources import AttentionWeights
from rope_ext_hf.checkpoints.live_model import reordered
from rope_ext_hf.errors import CheckpointError, CorpusError, UnsupportedModelError
from rope_ext_hf.hub import leading_token, load_tokenizer
from rope_ext_hf.patches.evaluating import evaluating
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.patches.slots import patched_slots
from rope_ext_hf.rotary.pairing import other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SPAN_TOKENS, SPANS = 256, 8  # tokens read at a time, and how many times
TEXT_CHARACTERS = 20 * SPAN_TOKENS * SPANS  # of a text that are tokenised: a whole book would take long
_MARGIN = 0.1  # nats per token by which the better loss must beat the other, and the loss of a uniform guess
MIN_SIGMA = 4.5  # standard errors; chance alone exceeds them 7 times in a million


@dataclass(frozen=True)
class TextLosses:
    """The loss on a text with the weights read as either pairing.

    Attributes:
        half, interleaved: nats per token.
        error: standard error of their difference, over spans.
        tokens: predicted tokens.
        pairing: the clearly better one; None: neither is, or the model cannot predict such text.
    """

    half: float
    interleaved: float
    error: float
    tokens: int
    pairing: str | None


def compare_losses(weights: AttentionWeights, text: str, tokenizer: PreTrainedTokenizerBase | None) -> TextLosses:
    """Measure the loss on a text with the rows as they are and in the other order.

    Raises:
        CorpusError: a text that is too short, or no tokenizer.
        CheckpointError, UnsupportedModelError: a model that cannot be run, or whose rows cannot be moved.
    """
    model = weights.load()
    runs = class_pairing(model.config)
    if runs is None:
        raise UnsupportedModelError(f"the family table has no pairing for {weights.tensors.model_type!r}")
    spans = _spans(text, tokenizer or _load_tokenizer(model, weights.path), weights.rotary.trained_length)
    with evaluating(model), torch.no_grad():
        losses = {runs: _losses(model, spans)}
        with reordered(model, weights.tensors, runs):
            losses[other_pairing(runs)] = _losses(model, spans)
    half, interleaved = float(losses["half"].mean()), float(losses["interleaved"].mean())
    differences = losses["half"] - losses["interleaved"]
    error = float(differences.std()) / math.sqrt(len(differences))
    clear = abs(half - interleaved) >= max(_MARGIN, MIN_SIGMA * error)
    uniform = math.log(model.get_input_embeddings().weight.shape[0])
    learned = min(half, interleaved) <= uniform - _MARGIN
    better = "half" if half < interleaved else "interleaved"
    return TextLosses(half, interleaved, error, spans[:, 1:].numel(), better if clear and learned else None)


def _load_tokenizer(model: PreTrainedModel, path: str) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(model.name_or_path)
    except CheckpointError as error:
        raise CorpusError(f"no tokenizer for the text beside {path!r}; give one (tokenizer=...)") from error


def _spans(text: str, tokenizer: PreTrainedTokenizerBase, trained_length: int) -> Tensor:
    """Tokenise the beginning of a text: (spans, tokens), with a BOS token if the tokenizer puts one before texts."""
    ids = tokenizer(text[:TEXT_CHARACTERS], add_special_tokens=False, return_tensors="pt").input_ids[0]
    length = min(SPAN_TOKENS, trained_length)
    spans: Tensor = ids[: len(ids) // length * length].view(-1, length)[:SPANS]
    if len(spans) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least {2 * length} are needed")
    first = leading_token(tokenizer)
    return spans if first is None else torch.cat([spans.new_full((len(spans), 1), first), spans], 1)


def _losses(model: PreTrainedModel, spans: Tensor) -> Tensor:
    """Nats per token of each span (spans, tokens), without its first token: (spans,), float64."""
    device = model.get_input_embeddings().weight.device
    with fixed_length(model, spans.shape[1]) if patched_slots(model) else nullcontext():
        logits = (model(input_ids=span[None].to(device), use_cache=False).logits[0, :-1] for span in spans)
        pairs = zip(logits, spans, strict=True)
        losses = [nn.functional.cross_entropy(made.float(), ids[1:].to(made.device)) for made, ids in pairs]
    return torch.stack([loss.cpu().double() for loss in losses])

"""Compare the losses of a model on a text with its rows in either order."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.pairing.pairing_report import TextLosses
from rope_ext_hf.checkpoints.pairing.query_key_weights import RotatedWeights
from rope_ext_hf.checkpoints.rows.loaded_rows import reordered
from rope_ext_hf.errors import CheckpointError, CorpusError, UnsupportedModelError
from rope_ext_hf.files.model_files import loaded_from
from rope_ext_hf.hub import leading_tokens, load_tokenizer
from rope_ext_hf.models.family_settings import class_pairing
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.models.temporary import evaluating
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.patches.slots.patched_slot import patched_slots
from rope_ext_hf.rotary.pairing_names import other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPANS, SPAN_TOKENS = 8, 256  # spans that are read, and tokens of each
TEXT_CHARACTERS = 20 * SPANS * SPAN_TOKENS
"""The characters of a text that are tokenised at most: a whole book would take long."""
_MIN_SIGMA = 4.5  # standard errors by which a loss must be better than the other one
_MARGIN = 0.1  # nats per token by which it must be better than the other one, and than a uniform guess


def compare_losses(weights: RotatedWeights, text: str, tokenizer: PreTrainedTokenizerBase | None) -> TextLosses:
    """Measure the loss on a text with the rotated rows as they are, and in the order of the other pairing.

    The weights are put back afterwards.

    Raises:
        CorpusError: the text is too short, or there is no tokenizer for it.
        UnsupportedModelError: the family table does not say which pairing the model's class runs.
    """
    model = weights.load()
    runs = class_pairing(model.config) or weights.tensors.pairing
    if runs is None:
        raise UnsupportedModelError(f"the family table has no pairing for {weights.tensors.model_type!r}")
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(loaded_from(model))
        except CheckpointError as missing:
            raise CorpusError(
                f"no tokenizer for the text beside {weights.path!r}; give one (tokenizer=...)"
            ) from missing
    ids = tokenizer(text[:TEXT_CHARACTERS], add_special_tokens=False, return_tensors="pt").input_ids[0]
    length = min(SPAN_TOKENS, weights.trained_length())
    spans: Tensor = ids[: len(ids) // length * length].view(-1, length)[:SPANS]
    if len(spans) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least {2 * length} are needed")
    leading = spans.new_tensor(leading_tokens(tokenizer)).expand(len(spans), -1)
    spans = torch.cat([leading, spans], 1)
    first = max(1, leading.shape[1])
    with evaluating(model), torch.no_grad():
        losses = {runs: _span_losses(model, spans, first)}
        with reordered(model, runs):
            losses[other_pairing(runs)] = _span_losses(model, spans, first)

    half, interleaved = float(losses["half"].mean()), float(losses["interleaved"].mean())
    differences = losses["half"] - losses["interleaved"]
    error = float(differences.std()) / math.sqrt(len(differences))
    is_clear = abs(half - interleaved) >= max(_MARGIN, _MIN_SIGMA * error)
    uniform = math.log(vocabulary_size(model))
    has_learned = min(half, interleaved) <= uniform - _MARGIN
    pairing = None
    if is_clear and has_learned:
        pairing = "half" if half < interleaved else "interleaved"
    return TextLosses(half, interleaved, error, spans[:, first:].numel(), pairing)


def _span_losses(model: PreTrainedModel, spans: Tensor, first: int) -> Tensor:
    """Return the mean loss on each span, a tensor (spans,) float64 in nats per token.

    Args:
        model: the model.
        spans: the token ids of each span, (spans, tokens) int64.
        first: the position in a span of the first token that counts.
    """
    device = model.get_input_embeddings().weight.device
    losses = []
    with fixed_length(model, spans.shape[1]) if patched_slots(model) else nullcontext():
        for ids in spans:
            logits = model(input_ids=ids[None].to(device), use_cache=False).logits[0, first - 1 : -1].float()
            loss = nn.functional.cross_entropy(logits, ids[first:].to(logits.device))
            losses.append(loss.cpu().double())
    return torch.stack(losses)

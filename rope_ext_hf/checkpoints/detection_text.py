"""Pairing detection by the loss on text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.detection import SURE, _other
from rope_ext_hf.checkpoints.detection_sources import _Weights
from rope_ext_hf.checkpoints.row_layouts import Blocks, Layout, RotatingRows
from rope_ext_hf.errors import CheckpointError, CorpusError, UnsupportedModelError
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.patches.slots import patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MARGIN", "WINDOW", "WINDOWS", "TextLosses"]
WINDOW, WINDOWS = 256, 8  # tokens of text that are read at a time, and how many times
MARGIN = 0.1  # nats per token: how much better than the other reading, and than knowing nothing, the better one must be


@dataclass(frozen=True)
class TextLosses:
    """What a text says: nats per token under either reading.

    Attributes:
        error: standard error of their difference, over windows.
        tokens: that were predicted.
        pairing: the one that is clearly better; None where neither is, or the model knows nothing of such text.
    """

    half: float
    interleaved: float
    error: float
    tokens: int
    pairing: str | None


def _by_text(weights: _Weights, text: str, tokenizer: PreTrainedTokenizerBase | None) -> TextLosses:
    from rope_ext_hf.eval.plan import own_tokenizer, prefix_token

    model = weights.load()
    runs = class_pairing(model.config)
    if runs is None:
        raise UnsupportedModelError(f"which pairing {weights.rows.model_type!r} runs is not in the family table")
    try:
        tokenizer = tokenizer or own_tokenizer(model, needed=True)
    except (OSError, ValueError) as missing:
        raise CorpusError(f"no tokenizer for the text beside {weights.path!r}; give one (tokenizer=...)") from missing
    assert tokenizer is not None  # it was needed
    enough = text[: 20 * WINDOW * WINDOWS]  # no need to take a whole book apart
    ids = tokenizer(enough, add_special_tokens=False, return_tensors="pt").input_ids[0]
    length = min(WINDOW, weights.rotary.trained_length)
    windows = ids[: len(ids) // length * length].view(-1, length)[:WINDOWS]
    if len(windows) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least {2 * length} are needed")
    first = prefix_token(tokenizer, None)
    if first is not None:
        windows = torch.cat([windows.new_full((len(windows), 1), first), windows], 1)
    with _evaluating(model), torch.no_grad():
        losses = {runs: _losses(model, windows)}
        with _reordered(model, weights.rows, runs):
            losses[_other(runs)] = _losses(model, windows)
    half, interleaved = float(losses["half"].mean()), float(losses["interleaved"].mean())
    apart = losses["half"] - losses["interleaved"]
    error = float(apart.std()) / math.sqrt(len(apart))
    clear = abs(half - interleaved) >= max(MARGIN, SURE * error)
    learned = min(half, interleaved) <= math.log(model.get_input_embeddings().weight.shape[0]) - MARGIN
    better = "half" if half < interleaved else "interleaved"
    return TextLosses(half, interleaved, error, windows[:, 1:].numel(), better if clear and learned else None)


def _losses(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """(windows, length) -> (windows,) float64: nats per token, of all but the first token."""
    device = model.get_input_embeddings().weight.device
    held = fixed_length(model, windows.shape[1]) if patched_slots(model) else nullcontext()
    with held:
        logits = (model(input_ids=window[None].to(device), use_cache=False).logits[0, :-1] for window in windows)
        pairs = zip(logits, windows, strict=True)
        found = [nn.functional.cross_entropy(made.float(), ids[1:].to(made.device)) for made, ids in pairs]
    return torch.stack([loss.cpu().double() for loss in found])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _reordered(model: nn.Module, rows: RotatingRows, runs: str) -> Iterator[None]:
    """With weights as if they had been in the pairing that the model does not run, and were mended."""
    moving = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layout = rows.find(name, tensor.shape)
        if layout is not None:
            if tensor.is_meta or hasattr(tensor, "quant_state"):
                raise CheckpointError(
                    f"{name!r} is packed or offloaded; its rows cannot be moved to try them on a text"
                )
            moving.append((tensor, layout))
    moved: list[tuple[Tensor, Layout | Blocks]] = []
    try:
        for tensor, layout in moving:
            moved.append((tensor, layout))
            tensor.copy_(layout.repaired(tensor.detach(), runs))
        yield
    finally:
        for tensor, layout in moved:
            tensor.copy_(layout.repaired(tensor.detach(), _other(runs)))

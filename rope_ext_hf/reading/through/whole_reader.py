"""Read a text in one ordinary forward: of its model, as every class can, or of its decoder, for losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rope_ext_hf.models.decoder_arguments import cache_parameter
from rope_ext_hf.reading.through.span_cache import StoringCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_outputs(decoder: Any, ids: Tensor) -> Tensor:
    """Return the outputs of a decoder for a text that is read in one forward, (tokens, hidden); `ids` are (tokens,)."""
    outputs: Tensor = decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return outputs


def whole_logits(
    model: PreTrainedModel,
    decoder: Any,
    ids: Tensor,
    count: int,
    *,
    after: bool = False,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the logits for the last tokens of a text that is read in one forward, (count, vocabulary) float32.

    Args:
        model: a causal language model.
        decoder: its decoder.
        ids: the text, (tokens,) int64.
        count: the number of tokens at its end.
        after: return the logits after each of the last `count` tokens; else those that predict each of them.
        stored: a function that keys and values go through before attention reads them; None: they stay as they are.
    """
    # Logits predict the next token: those that predict the last `count` tokens begin one token earlier.
    kept = count if after else count + 1
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"use_cache": stored is not None}
    if "logits_to_keep" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments["logits_to_keep"] = kept  # other classes return the logits of all tokens
    if stored is not None:
        cache = StoringCache(config=decoder.config)
        cache.stored = stored
        arguments[cache_parameter(model, decoder)] = cache
    logits: Tensor = model(ids[None], **arguments).logits[0, -kept:][:count].float()
    return logits

"""The estimated memory of a cache, against the bytes that the scorer holds after it has read a span."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from checks.losses import RESULT
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.reading.cost.memory import cached_bytes, estimate_memory
from rope_ext_hf.reading.cost.operations import estimate_flops
from rope_ext_hf.reading.scorer import TokenScorer
from tests.support.every_model import build, data, entries, inputs, tiny

TOKENS = 160
TYPES = [
    "bailing_hybrid",
    "bamba",
    "deepseek_v3",
    "falcon_h1",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "granitemoehybrid",
    "lfm2_moe",
    "lfm3",
    "llama",
    "llama4_text",
    "mimo_v2_flash",
    "olmo_hybrid",
    "phimoe",
    "qwen3_next",
    "zamba2",
    "zaya",
]
WIDER = {"moshi", "qwen3_omni_moe_thinker"}
"""Model types whose config states a window that their attention does not have, so that the scorer keeps all keys."""


def held(scorer: TokenScorer) -> tuple[int, int]:
    """Return the bytes of keys and values, and those of other states, after the scorer has read a span."""
    assert scorer.reader.cache is not None
    keys = states = 0
    for layer in scorer.reader.cache.layers:
        kept = [each for each in (getattr(layer, "keys", None), getattr(layer, "values", None)) if each is not None]
        # a layer with a window has dropped the token that the next token would push out
        left_out = 1 if getattr(layer, "sliding_window", None) else 0
        keys += sum(each.nbytes // each.shape[2] * (each.shape[2] + left_out) for each in kept)
        for name in ("conv_states", "recurrent_states"):
            states += sum(each.nbytes for each in getattr(layer, name, {}).values() if isinstance(each, Tensor))
    return keys, states


def check(model: Any, ids: Tensor) -> None:
    scorer = TokenScorer(model, chunk=37, longest=TOKENS)
    if not scorer.chunked:
        return
    scorer.last_logits(ids[:-1], 1)  # with the keys and values of all layers, as answers to prompts need them
    keys, states = held(scorer)
    estimate = estimate_memory(model, TOKENS).cache
    # the estimate leaves out the states of convolutions, and recurrent states whose sizes are in no config
    assert keys <= estimate <= keys + states
    if "linear_num_value_heads" in vars(model.config.get_text_config()):
        assert estimate - keys > states / 2


@pytest.mark.slow
@pytest.mark.parametrize("of_type", TYPES)
def test_the_estimate_is_what_the_scorer_holds(of_type: str) -> None:
    model = tiny(of_type)
    assert TokenScorer(model).chunked
    check(model, torch.arange(3, 3 + TOKENS) % 90)
    assert cached_bytes(model.config, TOKENS, width=4) == estimate_memory(model, TOKENS).cache


@pytest.mark.thorough
def test_the_estimate_of_every_class() -> None:
    rotating = {(row["model_type"], row["class"]) for row in json.loads(RESULT.read_text())["rows"] if row["rope"]}
    wrong = {}
    for entry in entries():
        apart = entry.model_type in {*WIDER, *data()["not_measured"], *data()["measured_as"]}
        if (entry.model_type, entry.name) not in rotating or apart:
            continue
        model = build(entry)
        try:
            estimate_memory(model, TOKENS)
            estimate_flops(model, [TOKENS], TOKENS)
            check(model, inputs(entry, TOKENS).get("input_ids", torch.arange(TOKENS)[None])[0])
        except RopeExtError:
            continue  # refused by name
        except Exception as error:
            wrong[entry.model_type, entry.name] = repr(error)[:200]
    assert not wrong

"""Rules of length-dependent methods, and models under them, for the tests of lengths and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from tests.support.models import TRAINED, build

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("dynamic-ntk", {}),
    "hf": ("dynamic-ntk", {"growth": "hf", "factor": 4.0}),
    "even": ("dynamic-ntk", {"growth": "even"}),
    "pow2": ("dynamic-ntk", {"growth": "pow2"}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "longrope": (
        "longrope",
        {
            "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
            "attention_factor": 1.2,
        },
    ),
}
every_rule = pytest.mark.parametrize("rule", RULES)
each_kind_of_rule = pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.thorough] * (rule in ("hf", "pow2"))) for rule in RULES]
)
"""For dear tests: rules in which the base grows with every token, in steps, or is one of two."""
LONG = 4 * TRAINED


def patched(name: str, rule: str, **overrides: Any) -> Any:
    method, params = RULES[rule]
    layers = "sliding_attention" if overrides.get("sliding_window") else None  # refused unless it is asked for
    return rope.patch(build(name, **overrides), method, layers=layers, **params)


def stock(rule: str = "hf", **overrides: Any) -> Any:
    """transformers' own form of a rule."""
    if rule == "hf":
        return build("llama", {"rope_type": "dynamic", "factor": 4.0}, **overrides)
    form = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": TRAINED} | RULES["longrope"][1]
    return build("llama", form, max_position_embeddings=LONG, **overrides)


def one_layer(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name in ("gemma2", "gemma3", "gpt_oss", "olmo3", "llama4"):
        options["layer_types"] = ["full_attention"]
    if name == "llama4":
        options["no_rope_layers"] = [1]
    if name.startswith("deepseek"):
        options["first_k_dense_replace"] = 0
    return options


def in_parts(model: Any, ids: Tensor, sizes: Sequence[int], **kwargs: Any) -> Tensor:
    """The logits of ids, fed into a cache in parts of these sizes, the rest token by token."""
    cache, found, at = None, [], 0
    sizes = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    with torch.no_grad():
        for size in sizes:
            out = model(ids[:, at : at + size], past_key_values=cache, use_cache=True, **kwargs)
            cache, at = out.past_key_values, at + size
            found.append(out.logits)
    return torch.cat(found, 1)


def keys_that_stay(patch: pytest.MonkeyPatch) -> None:
    """From here on no key is turned in a model patched anew: what the tests would miss if they missed that."""
    patch.setattr("rope_ext_hf.patches.forward.cached_keys.find_key_layouts", lambda *_: [None] * 8)

"""Tiny random causal language models, one per family, built from configs: seeded, nothing is downloaded.

>>> model = build("llama")
>>> model.config.max_position_embeddings
64
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 97
TRAINED = 64
THETA = 10_000.0
LAYERS = 2
# Large enough that attention looks at some tokens more than at others; logits then spread over a few units.
SPREAD = 0.3


@dataclass(frozen=True)
class Family:
    """What it takes to build one family's smallest model.

    Attributes:
        config: name of its config class in transformers.
        rotated: rotated dims per head.
        settings: what it needs beyond the common sizes.
        nested: its rope_parameters hold one dict per layer type; the method goes to "full_attention".
        forms: transformers' rope types its config accepts.
        partial: its partial rotary factor, where it rotates a part of a head.
    """

    config: str
    rotated: int = 16
    settings: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    forms: tuple[str, ...] = ("default", "linear", "yarn", "llama3", "longrope")
    partial: float | None = None


_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_GQA: dict[str, Any] = {"num_key_value_heads": 2}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", settings=_GQA),
    "qwen2": Family("Qwen2Config", settings=_GQA),
    "qwen3": Family("Qwen3Config", settings=_GQA | {"head_dim": 16}),
    "qwen2_moe": Family("Qwen2MoeConfig", settings=_GQA | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": Family("Qwen3MoeConfig", settings=_GQA | _EXPERTS | {"head_dim": 16}),
    "mistral": Family("MistralConfig", settings=_GQA | {"sliding_window": None}),
    "mixtral": Family("MixtralConfig", settings=_GQA | {"num_local_experts": 4, "sliding_window": None}),
    "phi3": Family(
        "Phi3Config",
        settings=_GQA | {"original_max_position_embeddings": TRAINED, "sliding_window": None},
        forms=("default", "longrope"),
    ),
    "gemma2": Family("Gemma2Config", settings=_GQA | {"head_dim": 16, "sliding_window": 32}),
    "gemma3": Family(
        "Gemma3TextConfig",
        settings=_GQA | {"head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
        nested=True,
    ),
    "olmo": Family("OlmoConfig", settings=_GQA),
    "olmo2": Family("Olmo2Config", settings=_GQA),
    "gpt_neox": Family("GPTNeoXConfig", rotated=8, partial=0.5),
    "glm": Family("GlmConfig", rotated=8, settings=_GQA | {"head_dim": 16}, partial=0.5),
    "cohere": Family("CohereConfig", settings=_GQA | {"logit_scale": 1.0}),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        rotated=8,
        settings={
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}


def rope_parameters(name: str, form: dict[str, Any] | None = None) -> dict[str, Any]:
    """The rope_parameters of a family's config with one of transformers' forms; None: as trained."""
    family = FAMILIES[name]
    flat = {"rope_type": "default", "rope_theta": THETA} | (form or {})
    if family.partial is not None:
        flat["partial_rotary_factor"] = family.partial
    if not family.nested:
        return flat
    nested = {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0}}
    return nested | ({"truncate": flat["truncate"]} if "truncate" in flat else {})


def build_config(name: str, form: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A family's config.

    Args:
        name: a key of FAMILIES.
        form: rope settings in transformers' own words, for loading the same weights natively.
        **overrides: any other key of the config.
    """
    family = FAMILIES[name]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": TRAINED,
        "initializer_range": SPREAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": rope_parameters(name, form),
    }
    return getattr(transformers, family.config)(**copy.deepcopy(sizes | family.settings | overrides))


def build(name: str, form: dict[str, Any] | None = None, *, seed: int = 0, **overrides: Any) -> Any:
    """A family's model in float32, in eval mode; the same weights for the same seed whatever the rope settings."""
    return from_config(build_config(name, form, **overrides), seed)


def from_config(config: Any, seed: int = 0) -> Any:
    """A model that holds this very config object, as models built by their class do."""
    cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        return cls(config).eval()


def tokens(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    """Random token ids (batch, length), no special ones among them."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """(batch, length, vocabulary) of one forward without a cache."""
    out: Tensor = model(input_ids=ids, use_cache=False, **kwargs).logits
    return out

"""Tiny random causal language models, one per family, built from configs: seeded, nothing is downloaded.

>>> model = build("llama")
>>> model.config.max_position_embeddings
64
"""

from __future__ import annotations

import copy
import importlib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rope_ext_hf.models.families import families, family
from tests.support import every_model
from tests.support.oracles import faded, mrrope, plain, slower_than
from tests.support.tiers import OLDER, needs_family

VOCABULARY = 97
TRAINED = 64
THETA = 10_000.0
LAYERS = 2
# Large enough that attention looks at some tokens more than at others; much larger, and float32 rounding shows.
SPREAD = 0.15


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
_LATENT: dict[str, Any] = {
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
}

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
    "gemma2": Family(
        "Gemma2Config", settings=_GQA | {"head_dim": 16, "sliding_window": 32, "tie_word_embeddings": False}
    ),
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
    "olmo3": Family(
        "Olmo3Config",
        settings=_GQA | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
        nested=True,
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        settings=_GQA | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "llama4": Family(
        "Llama4TextConfig",
        settings=_GQA
        | {
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 1],
            "interleave_moe_layer_step": 1,
        },
    ),
    "deepseek_v2": Family("DeepseekV2Config", rotated=8, settings=_LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": Family("DeepseekV3Config", rotated=8, settings=_LATENT),
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
    if name == "mixtral" and form:  # its head_dim is None, with which transformers' yarn and longrope cannot reckon
        sizes["head_dim"] = 16
    return getattr(transformers, family.config)(**copy.deepcopy(sizes | family.settings | overrides))


def build(name: str, form: dict[str, Any] | None = None, *, seed: int = 0, **overrides: Any) -> Any:
    """A family's model in float32, in eval mode; the same weights for the same seed whatever the rope settings."""
    return from_config(build_config(name, form, **overrides), seed)


def from_config(config: Any, seed: int = 0) -> Any:
    """A model that holds this very config object, as models built by their class do."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    """Random token ids (batch, length), no special ones among them."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """(batch, length, vocabulary) of one forward without a cache."""
    out: Tensor = model(input_ids=ids, use_cache=False, **kwargs).logits
    return out


def rotary_of(model: Any) -> Any:
    """The one rotary module of a model's decoder."""
    (found,) = [module for path, module in model.named_modules() if path.endswith("rotary_emb")]
    return found


# --- methods, in our words and in transformers' -------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One method on one family, and how transformers is told the same thing, written here by hand."""

    method: str
    params: dict[str, Any]
    form: dict[str, Any]


def static_cases(name: str, factor: float = 4.0) -> dict[str, Case]:
    """Every static method on a family, with a native form that its config accepts."""
    family = FAMILIES[name]
    pairs = family.rotated // 2
    lists = {"short_factor": [1.0 + i / 2 for i in range(pairs)], "long_factor": [1.0 + i / 2 for i in range(pairs)]}
    original = {"original_max_position_embeddings": TRAINED}
    yarn = {"rope_type": "yarn", "factor": factor} | original
    llama3 = {"rope_type": "llama3", "factor": factor} | original
    longrope = {"rope_type": "longrope"} | original | lists
    cases = {
        "default": Case("default", {}, {}),
        "linear": Case("linear", {"factor": factor}, {"rope_type": "linear", "factor": factor}),
        "ntk": Case(
            "ntk", {"factor": factor}, {"rope_theta": THETA * factor ** (family.rotated / (family.rotated - 2))}
        ),
        "theta": Case("theta", {"theta": 300_000.0}, {"rope_theta": 300_000.0}),
        "yarn": Case("yarn", {"factor": factor}, yarn),
        "yarn, own ramp": Case(
            "yarn",
            {"factor": factor, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.1},
            yarn | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.1},
        ),
        "yarn, mscale": Case(
            "yarn",
            {"factor": factor, "beta_fast": 8.0, "mscale": 1.4, "mscale_all_dim": 0.6},
            yarn | {"beta_fast": 8.0, "mscale": 1.4, "mscale_all_dim": 0.6},
        ),
        "by-parts": Case(
            "by-parts", {"factor": factor, "beta_fast": 8.0}, yarn | {"beta_fast": 8.0, "attention_factor": 1.0}
        ),
        "by-parts, cycles": Case(
            "by-parts",
            {"factor": factor, "beta_fast": 8.0, "ramp": "cycles"},
            llama3 | {"low_freq_factor": 1.0, "high_freq_factor": 8.0},
        ),
        "llama3": Case(
            "llama3",
            {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 6.0},
            llama3 | {"low_freq_factor": 1.0, "high_freq_factor": 6.0},
        ),
        "mrrope": Case(
            "mrrope",
            {"factor": factor, "beta_fast": 8.0},
            longrope
            | {"attention_factor": 0.1 * math.log(factor) + 1}
            | dict.fromkeys(("short_factor", "long_factor"), _mrrope_divisors(family.rotated, factor)),
        ),
        "longrope": Case(
            "longrope",
            {"factor": factor} | lists,
            longrope | {"attention_factor": (1 + math.log(factor) / math.log(TRAINED)) ** 0.5},
        ),
        "factors": Case(
            "factors",
            {"factors": lists["long_factor"], "attention_factor": 1.2},
            longrope | {"attention_factor": 1.2},
        ),
        "cope": Case(
            "cope",
            {},
            longrope
            | {"attention_factor": 1.0}
            | dict.fromkeys(("short_factor", "long_factor"), _cope_divisors(family.rotated)),
        ),
        "nope": Case(
            "nope",
            {"recalibrated": 1},
            longrope | {"attention_factor": 1.0} | dict.fromkeys(("short_factor", "long_factor"), [STOPPED] * pairs),
        ),
    }
    if name.startswith("deepseek"):  # its attention is built for one mscale_all_dim; another cannot be patched in
        del cases["yarn, mscale"]
    return {key: Case(case.method, case.params, _accepted(name, case.form)) for key, case in cases.items()}


def _mrrope_divisors(dim: int, factor: float) -> list[float]:
    geometry = SimpleNamespace(dim=dim, theta=THETA, trained_length=TRAINED)
    divided, original = mrrope(geometry, factor, fast=8.0), plain(geometry)
    assert divided is not None
    return [before / after for before, after in zip(original, divided, strict=True)]


STOPPED = 2.0**127  # a divisor that leaves nothing of a frequency in float32


def _cope_divisors(dim: int) -> list[float]:
    """The divisor of each plain frequency under CoPE; it is `STOPPED` for the pair that does not rotate."""
    frequencies = plain(SimpleNamespace(dim=dim, theta=THETA, trained_length=TRAINED))
    slowed = faded(frequencies, slower_than(frequencies, TRAINED))
    return [before / after if after else STOPPED for before, after in zip(frequencies, slowed, strict=True)]


def _accepted(name: str, form: dict[str, Any]) -> dict[str, Any]:
    """The form, or the frequencies transformers computes from it written out as longrope, where it is not accepted."""
    family = FAMILIES[name]
    if form.get("rope_type", "default") not in family.forms:
        plain, scaled = (
            transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
                transformers.LlamaConfig(
                    hidden_size=4 * family.rotated,
                    num_attention_heads=4,
                    max_position_embeddings=4 * TRAINED,
                    rope_parameters={"rope_type": "default", "rope_theta": THETA} | parameters,
                )
            )
            for parameters in ({}, copy.deepcopy(form))
        )
        divisors = (plain.inv_freq / scaled.inv_freq).tolist()
        form = {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": scaled.attention_scaling,
            "original_max_position_embeddings": TRAINED,
        }
    return form | ({"factor": 4.0} if form.get("rope_type") == "longrope" else {})


def dynamic_cases(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every length-dependent method on a family: name and parameters."""
    pairs = FAMILIES[name].rotated // 2
    return {
        "paper": ("dynamic-ntk", {}),
        "hf": ("dynamic", {"factor": 4.0}),
        "even": ("dynamic-ntk", {"growth": "even"}),
        "pow2": ("dynamic-ntk", {"growth": "pow2"}),
        "dynamic-yarn": ("dynamic-yarn", {}),
        "longrope": (
            "longrope",
            {"factor": 4.0, "short_factor": [1.0] * pairs, "long_factor": [1.0 + i for i in range(pairs)]},
        ),
    }


# --- every family that can be converted, by families.toml or by a probe -----------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TRAINED,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 32,
    "logit_scale": 1.0,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
} | {key: value for key, value in _LATENT.items() if key != "num_key_value_heads"}
_SECOND_IS_FULL: dict[str, Any] = {
    name: {"layer_types": [first, "full_attention"]}
    for first, names in {
        "sliding_attention": ("gemma3_text", "olmo3", "mellum", "flint", "kolibri1", "beam", "lfm3"),
        "linear_attention": ("minimax", "qwen3_next", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text"),
        "conv": ("lfm2", "lfm2_moe"),
    }.items()
    for name in names
}
_OF_ITS_OWN: dict[str, dict[str, Any]] = _SECOND_IS_FULL | {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "dots1": {"n_shared_experts": 1},
    "mimo_v2_flash": {"head_dim": 48, "v_head_dim": 16},
    "gemma4_text": {"per_layer_config": {1: {"head_dim": 32}}},
    "longcat_flash": {"num_layers": LAYERS, "zero_expert_num": 1, "head_dim": 8},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "cohere": {"use_qk_norm": True},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "gptj": {"rotary_dim": 8},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "roformer": {"is_decoder": True},
    "codegen": {"rotary_dim": 4, "num_attention_heads": 8},
    "modernbert-decoder": {"attention_bias": True, "cls_token_id": 3, "sep_token_id": 4},
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": THETA},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "hy_v4_vl_text": {  # with one pair for height and one for width, of the four that its small heads rotate
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "mrope_section": [2, 1, 1]},
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "bias_max_distance": 10,
        },
    },
}


PAIRINGS: dict[str, str] = {
    name: pairing
    for pairing, names in tomllib.loads(Path(__file__).with_name("pairings.toml").read_text(encoding="utf-8")).items()
    for name in names
}
"""The pairing that the class of each family runs that can be converted, by the code of transformers."""
WITH_A_CLASS = [
    name
    for name in dict.fromkeys([*families(), *PAIRINGS])
    if not family(name).remote and (name in transformers.CONFIG_MAPPING or not OLDER)
]
"""Families that transformers has a class of; the others are in test_row_layouts_chatglm.py."""
ROTATING = [name for name in WITH_A_CLASS if name in PAIRINGS and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
"""Those that can be converted and have a causal language model; patches/test_slots_multimodal.py has the others."""

_OWN_CODE: dict[str, dict[str, Any]] = {  # the keys that decide, as they stand in the config.json of ChatGLM2-6B
    "chatglm": {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "auto_map": {
            "AutoConfig": "configuration_chatglm.ChatGLMConfig",
            "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
        },
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "ffn_hidden_size": 96,
        "hidden_size": 64,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-05,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 4,
        "num_layers": LAYERS,
        "original_rope": True,
        "padded_vocab_size": VOCABULARY,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": TRAINED,
        "torch_dtype": "float32",
    }
}


def own_config(family: str, /, **overrides: Any) -> dict[str, Any]:
    """A small config.json of a family with code of its own; a key that is None is left out."""
    said = copy.deepcopy(_OWN_CODE[family] | overrides)
    return {key: value for key, value in said.items() if value is not None}


def modeling(model_type: str) -> Any:
    """The module of a family's causal language model."""
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    return importlib.import_module(cls.__module__)


def known_config(model_type: str, **overrides: Any) -> Any:
    """A small config of any family of the table; keys that it does not know are left out."""
    if family(model_type).remote:
        return transformers.PreTrainedConfig(**own_config(model_type, **overrides))
    needs_family(model_type)
    cls = transformers.CONFIG_MAPPING[model_type]
    known = every_model.fields_of(cls) | set(cls.attribute_map)
    keys = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    sizes = {key: value for key, value in (_SIZES | keys).items() if key in known}
    return cls(**copy.deepcopy(sizes | _OF_ITS_OWN.get(model_type, {}) | overrides))


_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
}
"""Patterns of layers that engines take for given."""


def without_window(model_type: str) -> dict[str, Any]:
    """Settings of a family whose layers would all have a sliding window, as few published models have them."""
    config = known_config(model_type)
    alike = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    return {"sliding_window": None} if alike else {}


def small_config(model_type: str) -> Any:
    """`known_config`, or where that misses sections of multimodal RoPE, the one of tests/support/every_model.py."""
    needs_family(model_type)
    if model_type not in every_model.data()["sections"]:
        return known_config(model_type, **without_window(model_type) | _AS_PUBLISHED.get(model_type, {}))
    cls = transformers.CONFIG_MAPPING[model_type]
    return cls(**every_model.settings(cls))


def build_known(model_type: str, **overrides: Any) -> Any:
    """A model of `known_config`, every parameter of it random: norms that are not one, biases that are not zero."""
    model = from_config(known_config(model_type, **overrides))
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):  # not a table of angles
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=draws))
    return model


def plant_pairs(queries: Tensor, keys: Tensor, pairing: str) -> None:
    """Give the members of each pair a direction in common, written out from the definition.

    Args:
        queries: a view (groups, heads, dims, width), changed in place; so is keys: (groups, dims, width).
        pairing: of the pairs.
    """
    draws = torch.Generator().manual_seed(11)
    dims, width = keys.shape[-2:]
    scale = 3 * float(queries.std())
    for group in range(len(keys)):
        for pair in range(dims // 2):
            direction = scale * torch.randn(width, generator=draws)
            members = (2 * pair, 2 * pair + 1) if pairing == "interleaved" else (pair, pair + dims // 2)
            for member in members:
                queries[group, :, member] += direction
                keys[group, member] += direction

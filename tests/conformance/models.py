"""The tiny models of conformance/models: weights from a seed, configs with a scaling, and what they compute.

The weights are numbers of numpy's frozen generator, rounded to bfloat16, so that a program in any dtype starts from the
same ones. The logits are those of the package's exact rotations in float64; tests/conformance/test_models.py computes
them again, in numpy alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.tools.servers.mistakes import AS_MEASURED, configurations
from rope_ext_hf.tools.serving.configs import open_model
from tests.conformance.generate import KIT, PUBLISHED, Json, rounded

FOLDER = KIT / "models"
ORIGINAL, LENGTH, VOCABULARY = 64, 256, 64
POSITIONS = (1, 32, 48, 64, 65, 80, 100, 128, 160, 192, 224, 254)
TOKENS = 255  # and one that a server generates

"""Lengths of prefixes after which the logits are stated; the first four are within the original length."""
SIZES: Json = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True}
SIZES |= {"rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
LATENT: Json = {"num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
LATENT |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 32, "first_k_dense_replace": 2, "n_routed_experts": 2}
LATENT |= {
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}
WINDOWS: Json = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
FAMILIES: dict[str, Json] = {
    "llama": {},
    "qwen3": {},
    "phi3": {"original_max_position_embeddings": ORIGINAL, "partial_rotary_factor": 0.75, "num_attention_heads": 1},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 64, "sliding_window_pattern": 2},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": False, "tie_word_embeddings": False},
    "gpt_oss": WINDOWS | {"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 16},
    "deepseek_v3": LATENT,
}
"""Family -> what its config has beside SIZES; the order is that of the seeds."""
YARN: Json = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3: Json = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS: Json = {"short_factor": [1 + i / 48 for i in range(24)], "long_factor": [1 + i / 8 for i in range(24)]}
PHI3: Json = {"type": "longrope"} | LISTS
MODELS: dict[str, tuple[str, int, float, Json | None]] = {
    "llama": ("llama", ORIGINAL, 1e4, None),
    "llama-linear": ("llama", ORIGINAL, 1e4, {"rope_type": "linear", "factor": 4.0}),
    "llama-dynamic": ("llama", ORIGINAL, 1e4, {"rope_type": "dynamic", "factor": 4.0}),
    "llama-yarn": ("llama", LENGTH, 1e4, YARN),
    "llama-llama3": ("llama", LENGTH, 1e4, LLAMA3),
    "qwen3-yarn": ("qwen3", LENGTH, 1e6, YARN | {"attention_factor": 1.0}),
    "phi3-longrope": ("phi3", LENGTH, 1e4, PHI3),
    "gemma3-linear": ("gemma3_text", LENGTH, 1e6, {"rope_type": "linear", "factor": 4.0}),
    "glm4": ("glm4", LENGTH, 1e4, None),
    "gpt-oss-yarn": ("gpt_oss", LENGTH, 150_000.0, YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 1.0}),
    "deepseek-v3-yarn": ("deepseek_v3", LENGTH, 1e4, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
}
"""Name -> family, max_position_embeddings, theta, scaling."""


def config_json(name: str) -> Json:
    """The config.json of a model."""
    family, most, theta, scaling = MODELS[name]
    made = {"model_type": family, **SIZES, **FAMILIES[family], "max_position_embeddings": most, "rope_theta": theta}
    made |= {"rope_local_base_freq": 1e4} if family == "gemma3_text" else {}
    made |= {} if scaling is None else {"rope_scaling": scaling}
    made = {key: value for key, value in made.items() if value is not None}
    given = copy.deepcopy(made)  # which the config class changes
    config = AutoConfig.for_model(family, **{key: value for key, value in given.items() if key != "model_type"})
    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__  # some programs choose by it
    return {"architectures": [architecture]} | made


def empty_model(config: Json) -> Any:
    given = copy.deepcopy(config)
    made = AutoConfig.for_model(given.pop("model_type"), **given)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager", experts_implementation="eager").eval()


def weights(family: str) -> dict[str, Tensor]:
    """Every parameter, in bfloat16."""
    seed = list(FAMILIES).index(family)
    name = next(name for name, (each, *_) in MODELS.items() if each == family)
    config, draws = config_json(name), np.random.RandomState(seed)
    made = {}
    for key, value in sorted(empty_model(config).state_dict().items()):
        if (key == "lm_head.weight" and config["tie_word_embeddings"]) or "e_score_correction_bias" in key:
            continue
        drawn = torch.from_numpy(draws.standard_normal(tuple(value.shape)))
        if "norm" in key:
            drawn = 0.1 * drawn + (0.0 if family == "gemma3_text" else 1.0)
        elif value.ndim == 1 or "bias" in key or "embed" in key:
            drawn = 0.5 * drawn
        else:  # queries and keys so large that attention depends on positions
            across = value.shape[-2] if "experts" in key else value.shape[-1]
            drawn = drawn * (2.0 if any(part in key for part in ("q_", "k_", "qkv", "kv_a")) else 1.0) / across**0.5
        made[key] = drawn.to(torch.bfloat16)
    return made


def tokens(name: str) -> list[int]:
    """The text that a model reads."""
    return [int(each) for each in np.random.RandomState(100 + list(MODELS).index(name)).randint(3, VOCABULARY, TOKENS)]


def load(config: Json, dtype: torch.dtype) -> Any:
    """A model of the kit, as transformers has it."""
    model = empty_model(config)
    stored = {key: value.float() for key, value in load_file(FOLDER / f"{config['model_type']}.safetensors").items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected
    assert all("lm_head" in key or "e_score_correction_bias" in key for key in missing), missing
    model.tie_weights()
    return model.to(dtype)


@torch.no_grad()
def last_logits(model: Any, ids: list[int]) -> Tensor:
    """Of the token after each prefix, (positions, vocabulary) float64, each prefix read by itself."""
    rows = [model(torch.tensor([ids[:at]]), use_cache=False).logits[0, -1] for at in POSITIONS]
    return torch.stack(rows).double()


@torch.no_grad()
def whole_logits(model: Any, ids: list[int]) -> Tensor:
    """The same, of one text of all tokens."""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits[[at - 1 for at in POSITIONS]].double()


def next_logprobs(logits: Tensor, ids: list[int]) -> Tensor:
    """The log-probability of the token that follows each prefix, in nats."""
    following = torch.tensor([ids[at] for at in POSITIONS])
    return logits.log_softmax(-1).gather(1, following[:, None])[:, 0]


def exact(config: Json, dtype: torch.dtype = torch.float64) -> Any:
    """A model with the rotations of this package in place of float32 ones."""
    model = load(config, dtype)
    scaling = config.get("rope_scaling") or {}
    dynamic = scaling.get("rope_type") == "dynamic"
    return rope.patch(model, "dynamic", factor=scaling["factor"]) if dynamic else rope.patch(model, "default")


READS = {"logprobs": whole_logits, "alone": last_logits}
"""How a text is read: as one, or each prefix by itself."""


def wrong(config: Json, ids: list[int], right: dict[str, Tensor]) -> Iterator[Json]:
    """The log-probabilities under each mistake of check-server that changes them, for each way to read of `right`."""
    model = load(config, torch.float32)
    made = [
        (name, model, each) for name, each in configurations(model, open_model(model).rope.embedding.rotary).items()
    ]
    if (config.get("rope_scaling") or {}).get("rope_type") == "dynamic":
        made.insert(0, ("no scaling at all", load(config | {"rope_scaling": None}, torch.float32), nullcontext))
    for name, changed, mistaken in made:
        if name == AS_MEASURED or (" in place of " in name and name.split()[1] not in {*PUBLISHED, "the"}):
            continue
        with mistaken():
            found = {key: next_logprobs(READS[key](changed, ids), ids) for key in right}
        if any(float((found[key] - right[key]).square().mean().sqrt()) > 0.005 for key in right):
            yield {"name": name.removeprefix("with ")} | {
                key: [round(float(each), 5) for each in found[key]] for key in found
            }


def model_file(name: str) -> Json:
    """The content of conformance/models/NAME.json."""
    config, ids = config_json(name), tokens(name)
    model = exact(config)
    logits, whole = last_logits(model, ids), whole_logits(model, ids)
    right = {"logprobs": next_logprobs(whole, ids)}
    if name in ("llama-dynamic", "phi3-longrope"):  # whose frequencies follow the length
        right["alone"] = next_logprobs(logits, ids)
    rounding = {}
    for dtype in (torch.float16, torch.bfloat16):
        off = last_logits(load(config, dtype), ids) - last_logits(load(config, torch.float32), ids)
        rounding[str(dtype).removeprefix("torch.")] = float(f"{float(off.square().mean().sqrt() / logits.std()):.2g}")
    made: Json = {"weights": f"{config['model_type']}.safetensors", "config": config, "ids": ids}
    made |= {
        "positions": POSITIONS,
        "logits": [rounded(row) for row in logits],
        "std": rounded([float(logits.std())])[0],
    }
    made |= {"logprobs": rounded(right["logprobs"]), "rounding": rounding, "mistakes": list(wrong(config, ids, right))}
    return made


def write_weights() -> None:
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        save_file(weights(family), FOLDER / f"{family}.safetensors", {"format": "pt"})


def written(entry: Json) -> str:
    """JSON with a line for each key."""
    lines = [f' "{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in entry.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def paths() -> list[Path]:
    return [FOLDER / f"{name}.json" for name in MODELS]

"""ibm-fms: its registry maps a config of transformers to its own classes, and the rotary module of a small model says
the frequencies."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version as installed
from typing import Any

import torch
import transformers
from fms.models import get_model
from fms.models.hf.config_utils import _FMS_MODEL_CONFIG_REGISTRY as REGISTRY
from transformers import AutoConfig

transformers.logging.set_verbosity_error()
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def version() -> str:
    return f"ibm-fms {installed('ibm-fms')}, transformers {transformers.__version__}"


@cache
def _module(written: str) -> Any:
    config = json.loads(written)
    family = config.pop("model_type")
    if family not in CLASSES:
        raise NotImplementedError
    loaded = AutoConfig.for_model(family, **config)
    loaded.architectures, loaded.num_hidden_layers, loaded.vocab_size = [CLASSES[family]], 1, 32
    if getattr(loaded, "layer_types", None):
        loaded.layer_types = loaded.layer_types[:1]
    arguments = REGISTRY.hf_config_to_fms_config_params(loaded, None) | {"nlayers": 1}
    architecture, variant = arguments.pop("architecture"), arguments.pop("variant")
    arguments.pop("model_path")
    model = get_model(architecture, variant, **arguments)
    return getattr(model, "base_model", model).rot_emb


def inv_freq(config: dict[str, Any], length: int | None = None) -> Any:
    scaling = _module(json.dumps(config)).rope_scaling
    return scaling.compute_scaled_freqs("cpu", scaling.get_alpha(length or 1)).double().tolist()


def magnitude(config: dict[str, Any], length: int | None = None) -> float:
    module = _module(json.dumps(config))
    used = module.compute_freqs_cis(torch.device("cpu"), length or 1)
    table = module.cached_freqs[None][used]
    cos = table[0] if isinstance(table, tuple) else table[..., 0, 0]
    return float(cos[0, 0])

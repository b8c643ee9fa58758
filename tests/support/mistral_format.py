"""A small Mistral in Mistral's own format, written by hand from a Hugging Face model: the inverse of what is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

HEADS, KEY_HEADS, WIDTH, FFN, VOCABULARY = 4, 2, 64, 96, 100
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def mistral(head_dim: int = 32, **settings: Any) -> Any:
    """A random Mistral of two layers in evaluation mode."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": head_dim}
    usual: dict[str, Any] = {"max_position_embeddings": 256, "sliding_window": None, "initializer_range": 0.2}
    usual["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**{**sizes, **usual, **settings})).eval()


def write_mistral_format(model: Any, folder: Path, shards: int = 1, **params: Any) -> Path:
    """Write params.json and consolidated*.safetensors of a model into a folder."""
    folder.mkdir(exist_ok=True)
    config, state = model.config, model.state_dict()
    tensors = {"tok_embeddings": state["model.embed_tokens.weight"], "norm": state["model.norm.weight"]}
    tensors["output"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _NAMES.items():
            tensors[f"layers.{layer}.{ours}"] = state[f"model.layers.{layer}.{theirs}.weight"]
        for name, heads in (("wq", HEADS), ("wk", KEY_HEADS)):
            key = f"layers.{layer}.attention.{name}"
            tensors[key] = _interleaved(tensors[key], heads)
    named = {f"{name}.weight": tensor.clone().contiguous() for name, tensor in tensors.items()}
    parts = [dict(list(named.items())[part::shards]) for part in range(shards)]
    names = [f"consolidated-{part + 1:05}-of-{shards:05}.safetensors" for part in range(shards)]
    names = names if shards > 1 else ["consolidated.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    if shards > 1:
        index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "consolidated.safetensors.index.json").write_text(text, encoding="utf-8")
    sizes = {"dim": WIDTH, "n_layers": config.num_hidden_layers, "head_dim": config.head_dim, "hidden_dim": FFN}
    sizes |= {"n_heads": HEADS, "n_kv_heads": KEY_HEADS, "norm_eps": config.rms_norm_eps, "vocab_size": VOCABULARY}
    theta = {"rope_theta": config.rope_parameters["rope_theta"]}
    (folder / "params.json").write_text(json.dumps(sizes | theta | params), encoding="utf-8")
    return folder


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_both_formats(folder: Path) -> Path:
    """Write a model in both formats, as the folders of Mistral's repositories have it; the folder again."""
    model = mistral()
    model.save_pretrained(folder)
    return write_mistral_format(model, folder, 3, max_position_embeddings=256)

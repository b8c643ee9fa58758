"""Small Llamas in GGUF files, written as llama.cpp's converter writes them: its names, its order of rows, its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import plant_pairs

LENGTH, THETA, WIDTH, HEADS, KEY_HEADS, LAYERS = 64, 50_000.0, 64, 4, 2, 4
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def words() -> list[str]:
    """A vocabulary of bytes, in the spelling of GPT-2, and a few special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "th"]


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows as llama.cpp stores those of a Llama's queries and keys: members of a pair side by side."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_llama(
    path: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    quantized: bool = True,
) -> LlamaForCausalLM:
    """Write a random Llama with an untied head as a GGUF file, and return the same model, unquantised from the file.

    Args:
        path: the file to write.
        keys: further keys, without the architecture in front.
        tensors: further float32 tensors, such as divisors of frequencies.
        seed: of the weights.
        quantized: whether matrices are written as Q8_0; else as float32.
    """
    import gguf

    torch.manual_seed(seed)
    vocabulary = words()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=256,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            queries = attention.q_proj.weight.view(KEY_HEADS, HEADS // KEY_HEADS, WIDTH // HEADS, WIDTH)
            plant_pairs(queries, attention.k_proj.weight.view(KEY_HEADS, WIDTH // HEADS, WIDTH), "half")

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(LENGTH)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    for name, value in (keys or {}).items():
        write_key = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        write_key(name if name.startswith("split.") else f"llama.{name}", value)

    def add(name: str, parameter: torch.Tensor, heads: int = 0) -> None:
        values = parameter.detach().numpy()
        if values.ndim > 1 and quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(permuted(values, heads) if heads else values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            with torch.no_grad():  # a row is quantised alone, so its place does not matter
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)))
        else:
            writer.add_tensor(name, permuted(values, heads) if heads else values)

    add("token_embd.weight", model.model.embed_tokens.weight)
    add("output_norm.weight", model.model.norm.weight)
    add("output.weight", model.lm_head.weight)
    for index, layer in enumerate(model.model.layers):
        for own, theirs in _NAMES.items():
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(theirs, 0)
            add(f"blk.{index}.{theirs}.weight", layer.get_submodule(own).weight, heads)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model

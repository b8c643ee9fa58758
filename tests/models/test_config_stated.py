"""Configs that state what transformers does not run: dual chunk attention (Qwen2.5-1M), attn_factor of a yarn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from tests.support.commands import run_json
from tests.support.models import build

pytestmark = pytest.mark.filterwarnings("ignore")
STATED = {"chunk_size": 256, "local_size": 8, "original_max_position_embeddings": 256}
FAMILIES = ("qwen2", "qwen2_moe", "qwen3", "llama")


def stating(family: str, stated: Any = STATED) -> Any:
    return build(family, max_position_embeddings=1000, dual_chunk_attention_config=stated)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trained_length_is_that_of_the_dual_chunks(family: str) -> None:
    model = stating(family)
    described = rope.describe(model)
    assert (described.trained_length, described.context_length, described.extended_length) == (256, 256, 256)
    assert "which transformers does not run" in described.context_rule
    assert rope.describe(rope.patch(model, "yarn", target_length=1024)).params["factor"] == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_dca_takes_the_chunks_that_are_stated(family: str) -> None:
    model = rope.patch(stating(family), "dca", target_length=1000)
    assert rope.describe(model).params | {"chunk": 248, "window": 8} == rope.describe(model).params
    with_chunk = rope.patch(stating(family), "dca", target_length=1000, chunk=64)
    assert rope.describe(with_chunk).params["chunk"] == 64
    without = rope.patch(build(family, max_position_embeddings=256), "dca", target_length=1000)
    assert rope.describe(without).params["chunk"] == 192


def write_qwen_1m(folder: Path) -> Path:
    """Write a small Qwen2.5-1M with its published lengths, 262,144 tokens, 8,192 of them local; return the folder."""
    stated = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    sizes: dict[str, Any] = {"max_position_embeddings": 1010000, "dual_chunk_attention_config": stated}
    build("qwen2", {"rope_type": "default", "rope_theta": 1e7}, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_commands_take_the_trained_length_of_qwen_1m(tmp_path: Path) -> None:
    folder = write_qwen_1m(tmp_path / "qwen")
    described = run_json("describe", folder)
    assert (described["trained_length"], described["context_length"]) == (262144, 262144)
    chosen = ("--method", "dca", "--target-length", "1010000", "--out", tmp_path / "new")
    patched = run_json("patch", folder, *chosen)
    sizes = {"chunk": 262144 - 8192, "window": 8192}
    assert patched["context_length"] == 262144
    assert patched["params"] | sizes == patched["params"]
    assert rope.describe(rope.from_pretrained(tmp_path / "new")).params | sizes == patched["params"]


@pytest.mark.parametrize(
    "stated", [None, {}, 5, {"original_max_position_embeddings": "long"}, STATED | {"local_size": 0}]
)
def test_other_values_leave_the_model_as_it_is(stated: Any) -> None:
    model = stating("qwen2", stated)
    whole = 256 if isinstance(stated, dict) and stated.get("local_size") == 0 else 1000
    assert rope.describe(model).trained_length == whole
    assert rope.describe(rope.patch(model, "dca", target_length=2000)).params["chunk"] == 3 * whole // 4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3", "gemma3"])
def test_an_attn_factor_that_transformers_drops_is_named(family: str) -> None:
    model = build(family, YARN | {"attn_factor": 2.0})
    notes = [note for note in rope.describe(model).notes if "attn_factor 2.0 of its yarn" in note]
    assert len(notes) == 1
    patched = rope.describe(rope.patch(model, "linear", factor=2)).notes
    assert [note for note in patched if "attn_factor 2.0 of its yarn" in note] == notes
    for harmless in ({}, {"attn_factor": 1}, {"attn_factor": 2.0, "attention_factor": 1.1}):
        assert not any("attn_factor" in note for note in rope.describe(build(family, YARN | harmless)).notes)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_model_out_of_a_gguf_file_says_that_its_scaling_was_dropped(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(256)
    for name, value in {"embedding_length": 64, "feed_forward_length": 96, "block_count": 1, "vocab_size": 8}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_string("llama.rope.scaling.type", kind)
    writer.add_float32("llama.rope.scaling.factor", 4.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{number}" for number in range(8)])
    shapes = {"token_embd": (8, 64), "output_norm": (64,), "output": (8, 64), "blk.0.attn_norm": (64,)}
    shapes |= {
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
    }
    shapes |= {
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
        "blk.0.ffn_norm": (64,),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert model.config.rope_parameters["rope_type"] == "default"  # the fact itself
    assert any("m.gguf" in note for note in rope.describe(rope.patch(model, "ntk", factor=2)).notes)
    model = build("llama")
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "m.gguf").touch()
    loaded = rope.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "other"), "ntk", factor=2)
    assert not any("GGUF" in note for note in rope.describe(loaded).notes)

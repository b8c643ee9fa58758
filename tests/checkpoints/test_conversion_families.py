"""A conversion of every family has equal logits under the other rotation, and back again equal bytes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.models.families import family
from tests.support.checkpoint_folders import (
    OTHER,
    content,
    convert,
    load,
    rotate_otherwise,
    unstated,
)
from tests.support.models import PAIRINGS, ROTATING, build_known, logits, tokens

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, a key for each query": ("falcon", {"multi_query": False, "bias": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "phi without norms": ("phi", {"qk_layernorm": False}),
    "stablelm without norms": ("stablelm", {"qk_layernorm": False, "use_qkv_bias": False}),
    "cohere without norms": ("cohere", {"use_qk_norm": False}),
    "glm4_moe without norms": ("glm4_moe", {"use_qk_norm": False}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "glm with biases": ("glm", {"attention_bias": True}),
    "ernie with biases": ("ernie4_5", {"use_bias": True}),
    "deepseek_v2 without a query latent": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3 without a query latent": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3 with biases": ("deepseek_v3", {"attention_bias": True}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("gemma", {"head_dim": 32}),
    "codegen with one head in each part": ("codegen", {"num_attention_heads": 4, "rotary_dim": 12}),
    "gptj with heads that rotate whole": ("gptj", {"rotary_dim": 16}),
    "dbrx, a key for each query": ("dbrx", {"attn_config": {"kv_n_heads": 4, "clip_qkv": 9.0, "rope_theta": 10_000.0}}),
    "qwen3_5 with heads that rotate by half": (
        "qwen3_5_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "glm_moe_dsa with an indexer shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}),
}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ROTATING} | VARIANTS


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_logits_are_equal_under_the_other_rotation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, overrides = KNOWN[name]
    build_known(model_type, **overrides).save_pretrained(tmp_path / "source")
    source = load(tmp_path / "source")
    expected = logits(source, tokens(24))
    now = PAIRINGS[model_type]
    report = convert(tmp_path / "source", tmp_path / "converted", OTHER[now], verify=True)
    assert (report.source, report.to) == (now, OTHER[now])
    assert "logits of both folders: " in str(report.verified)
    converted = load(tmp_path / "converted")
    assert converted.config.rope_pairing == OTHER[now]
    switch = family(model_type).pairing_switch
    assert report.loads_natively == (switch is not None)
    with monkeypatch.context() as other:
        if switch is not None:
            assert getattr(converted.config, switch) is (OTHER[now] == "interleaved")
        else:
            # under the rotation of the class its logits are noise
            assert (logits(converted, tokens(24)) - expected).abs().max() > 1e-2
            rotate_otherwise(other, model_type, OTHER[now])
        torch.testing.assert_close(logits(converted, tokens(24)), expected, atol=1e-4, rtol=0)
    assert convert(tmp_path / "converted", tmp_path / "back", now).loads_natively
    assert content(tmp_path / "back").keys() == content(tmp_path / "source").keys()
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()


def test_a_patched_folder_with_a_switch_states_its_new_pairing(tmp_path: Path) -> None:
    rope.patch(build_known("deepseek_v3"), "yarn", factor=4).save_pretrained(tmp_path / "source")
    expected = logits(rope.from_pretrained(tmp_path / "source"), tokens(24))
    convert(tmp_path / "source", tmp_path / "converted", "half")
    converted = rope.from_pretrained(tmp_path / "converted")
    assert rope.fingerprint(converted).pairing == "half"
    torch.testing.assert_close(logits(converted, tokens(24)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "forgotten"),
    [
        ("qwen2", "q_proj.bias"),
        ("qwen3", "q_norm.weight"),
        ("gemma3_text", "k_norm.weight"),
        ("cohere", "k_norm.weight"),
        ("olmo2", "q_norm.weight"),
        ("phi", "k_layernorm.bias"),
        ("stablelm", "q_layernorm.norms.1.weight"),
        ("falcon", "query_key_value.weight"),
        ("gptj", "k_proj.weight"),
        ("codegen", "qkv_proj.weight"),
        ("dbrx", "Wqkv.weight"),
        ("glm_moe_dsa", "kv_a_proj_with_mqa.weight"),
        ("glm_moe_dsa", "indexer.wq_b.weight"),
        ("glm_moe_dsa", "indexer.k_norm.bias"),
    ],
)
def test_one_forgotten_tensor_shows(
    model_type: str, forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above notice a mistake in each kind of tensor, and so does verify."""
    build_known(model_type).save_pretrained(tmp_path / "source")
    expected = logits(load(tmp_path / "source"), tokens(24))
    now = PAIRINGS[model_type]
    known = Source.layouts
    monkeypatch.setattr(
        Source, "layouts", lambda self: {n: layout for n, layout in known(self).items() if not n.endswith(forgotten)}
    )
    with pytest.raises(rope.CheckpointError, match=r"verification failed: the scores of '(layers|h|blocks)\.\d\."):
        convert(tmp_path / "source", tmp_path / "checked", OTHER[now], verify=True)
    assert not (tmp_path / "checked").exists()
    convert(tmp_path / "source", tmp_path / "converted", OTHER[now])
    rotate_otherwise(monkeypatch, model_type, OTHER[now])
    assert (logits(load(tmp_path / "converted"), tokens(24)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("model_type", ["glm", "cohere", "llama4_text", "deepseek_v2", "ernie4_5"])
def test_an_interleaved_family_loads_as_it_is(model_type: str, tmp_path: Path) -> None:
    """Half weights of such a family, from another engine, get the pairing that its transformers class runs."""
    build_known(model_type).save_pretrained(tmp_path / "source")
    expected = logits(load(tmp_path / "source"), tokens(24))
    convert(tmp_path / "source", tmp_path / "half", "half")
    unstated(tmp_path / "half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = rope.convert_checkpoint(
            tmp_path / "half", tmp_path / "converted", "interleaved", source_pairing="half"
        )
    assert report.loads_natively
    assert "note" not in str(report)
    torch.testing.assert_close(logits(load(tmp_path / "converted"), tokens(24)), expected, atol=0, rtol=0)

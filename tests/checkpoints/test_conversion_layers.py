"""Conversion of models whose layers differ: in the number or size of heads, by indexers, or as layers without RoPE."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.models.families import families
from rope_ext_hf.patches.model_rope import ModelRope
from tests.support.checkpoint_folders import OTHER, rotate_otherwise
from tests.support.every_model import tiny
from tests.support.models import PAIRINGS, logits, plant_pairs, tokens

BOTH = ["full_attention", "sliding_attention"]
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WHOLE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "laguna": ("laguna", {"layer_types": BOTH, "num_attention_heads_per_layer": [4, 8]}),
    "mimo_v2_flash": ("mimo_v2_flash", {}),
    "step3p7": (
        "step3p7",
        {
            "text_config": {
                "layer_types": BOTH,
                "rope_parameters": {"full_attention": HALF, "sliding_attention": WHOLE},
                "per_layer_config": {1: {"num_attention_heads": 8}},
            }
        },
    ),
    "gemma4_text": ("gemma4_text", {}),
    "gemma4": ("gemma4", {}),
    "gemma4_unified": ("gemma4_unified", {}),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {"text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"], "rope_parameters": HALF}},
    ),
    "qwen4_exp_text": ("qwen4_exp_text", {}),
    "mistral_large4": (
        "mistral_large4",
        {
            "text_config": {
                "num_hidden_layers": 3,
                "layer_types": ["indexed_attention"] * 3,
                "no_rope_layers": [1, 0, 1],
                "index_topk": 8,
            }
        },
    ),
    "dots3_note_text": ("dots3_note_text", {"index_topk": 8}),
}
MODELS = {name: each for name, each in MODELS.items() if each[0] in CONFIG_MAPPING}


def made(name: str) -> Any:
    model_type, overrides = MODELS[name]
    return tiny(model_type, **overrides)


def converted(model: Any, to: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its class runs the other pairing
        rope.convert(model, to)


def text_type(model: Any) -> str:
    return str(model.config.get_text_config().model_type)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_under_the_other_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name), tokens(24)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    expected, now = logits(model, ids), PAIRINGS[text_type(model)]
    converted(model, OTHER[now])
    assert (logits(model, ids) - expected).abs().max() > 1e-2  # under the rotation of the class its logits are noise
    with monkeypatch.context() as other:
        rotate_otherwise(other, text_type(model), OTHER[now], importlib.import_module(type(model).__module__))
        torch.testing.assert_close(logits(model, ids), expected, atol=2e-4, rtol=0)
    converted(model, now)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_as_published_is_converted_like_the_model(name: str, tmp_path: Path) -> None:
    """transformers writes the names of published checkpoints, which are not always those of its classes."""
    model = made(name)
    model.save_pretrained(tmp_path / "source")
    now = PAIRINGS[text_type(model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = rope.convert_checkpoint(tmp_path / "source", tmp_path / "converted", OTHER[now], verify=True)
    assert "logits of both folders: " in str(report.verified)
    converted(model, OTHER[now])
    loaded = type(model).from_pretrained(tmp_path / "converted")
    for (key, value), (other, expected) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(value, expected), key


@pytest.mark.slow
@pytest.mark.parametrize("pairing", OTHER)
def test_the_pairing_is_detected_from_the_layers_that_attend_to_everything(pairing: str, tmp_path: Path) -> None:
    model = made("laguna")
    attention = model.model.layers[0].self_attn
    queries, keys = (module.weight.data.view(2, -1, 16, 64) for module in (attention.q_proj, attention.k_proj))
    plant_pairs(queries[:, :, :8], keys[:, 0, :8], pairing)
    model.save_pretrained(tmp_path / "source")
    found = rope.detect_pairing(tmp_path / "source")
    assert found.pairing == pairing
    assert [layer.name for layer in found.layers] == ["model.layers.0.self_attn"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_read_for_detection(name: str, tmp_path: Path) -> None:
    """Random weights are undecided, but every layer that is read has queries and keys of the stated sizes."""
    made(name).save_pretrained(tmp_path / "source")
    assert rope.detect_pairing(tmp_path / "source").layers


def names(model: Any) -> RotaryTensors:
    return RotaryTensors(model.config, ModelRope.of_checkpoint(model.config, model).rotary.dim)


def rotated(tensors: RotaryTensors, name: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return heads and rotated rows per head of each block of a tensor."""
    layout: Any = tensors.find(name, shape)
    return [] if layout is None else [(block.count, block.rotary) for block in layout.blocks]


def test_layers_have_heads_and_rotated_rows_of_their_own() -> None:
    laguna = names(made("laguna"))
    assert rotated(laguna, "model.layers.0.self_attn.q_proj.weight", (64, 64)) == [(4, 8)]
    assert rotated(laguna, "model.layers.1.self_attn.q_proj.weight", (128, 64)) == [(8, 16)]
    mimo = names(made("mimo_v2_flash"))
    assert rotated(mimo, "model.layers.0.self_attn.k_proj.weight", (192, 64)) == [(4, 16)]
    assert rotated(mimo, "model.layers.1.self_attn.k_proj.weight", (96, 64)) == [(2, 16)]
    with pytest.raises(CheckpointError, match="config and weights disagree"):
        mimo.find("model.layers.1.self_attn.k_proj.weight", (192, 64))


def test_a_layer_without_rope_stays() -> None:
    large = names(made("mistral_large4"))
    assert rotated(large, "layers.0.attention.wq.weight", (64, 64)) == [(4, 8)]
    assert large.find("layers.1.attention.wq.weight", (64, 64)) is None
    assert large.locate("layers.1.attention.wq.weight") is None
    assert large.find("layers.1.attention.wkv_a_with_mqa.weight", (16, 64)) is None


def test_a_further_layer_is_like_one_of_as_many_rows() -> None:
    """They belong to layers that predict further tokens, which no config counts."""
    mimo = names(made("mimo_v2_flash"))
    assert rotated(mimo, "model.mtp.layers.0.self_attn.k_proj.weight", (96, 64)) == [(2, 16)]
    assert rotated(mimo, "model.mtp.layers.1.self_attn.k_proj.weight", (192, 64)) == [(4, 16)]
    laguna = tiny("laguna", layer_types=BOTH, num_attention_heads_per_layer=[4, 4])
    with pytest.raises(CheckpointError, match="the layers of 'laguna' rotate in different ways"):
        names(laguna).find("model.layers.2.self_attn.q_proj.weight", (64, 64))


def test_keys_that_are_values_are_refused() -> None:
    """The order of their rows matters to the weights after the attention as well."""
    gemma = tiny("gemma4_text", attention_k_eq_v=True)
    with pytest.raises(UnsupportedModelError, match=r"projection of the keys \('attention_k_eq_v' in its config\)"):
        converted(gemma, "interleaved")
    with pytest.raises(UnsupportedModelError, match="'deepseek_v4' rotate could not be found out: the rotation"):
        rope.convert(tiny("deepseek_v4"), "half", source_pairing="interleaved")


@pytest.mark.slow
def test_every_family_of_layers_that_differ_is_tested_here() -> None:
    tested = {text_type(made(name)) for name in MODELS}
    known = {name for name, each in families().items() if each.renamed}
    assert known <= tested

"""Detection beside the attention of a model's own layers: indexers, layers that predict further tokens, EAGLE heads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.rotary.pairing_names import PAIRINGS
from tests.support.models import build, build_known, plant_pairs

CLASS_ROTATES = {"deepseek_v32": "half", "glm_moe_dsa": "interleaved"}
"""The pairing of the indexers in the classes of transformers; the attentions of both are interleaved."""
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "qk_rope_head_dim": 16, "index_n_heads": 4, "index_head_dim": 24}


def plant_in_indexers(model: Any, pairing: str) -> None:
    """Plant pairs in the first 16 of 24 dims of each head; the queries read a latent."""
    for layer in model.model.layers:
        attention = layer.self_attn
        width, hidden = attention.q_a_proj.weight.shape
        down = torch.linalg.qr(attention.q_a_proj.weight.T).Q.T
        attention.q_a_proj.weight.copy_(down)
        attention.indexer.k_norm.weight.uniform_(0.5, 1.5)
        queries = attention.indexer.wq_b.weight.view(1, 4, 24, width)[:, :, :16]
        shared = torch.zeros(1, 16, width)
        plant_pairs(queries, shared, pairing)
        attention.indexer.wk.weight[:16] += (0.5 * shared @ down).view(16, hidden)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("model_type", CLASS_ROTATES)
@torch.no_grad()
def test_the_pairing_of_indexers_shows(model_type: str, pairing: str, tmp_path: Path) -> None:
    model = build_known(model_type, **SIZES)
    plant_in_indexers(model, pairing)
    model.save_pretrained(tmp_path / "source")
    for report in (rope.detect_pairing(model), rope.detect_pairing(tmp_path / "source")):
        assert report.stated == "interleaved"
        [indexers] = report.consumers
        assert (indexers.pairing, indexers.stated) == (pairing, CLASS_ROTATES[model_type])
        assert ("contradiction" in str(report)) == (pairing != CLASS_ROTATES[model_type])
        assert "indexers" in str(report)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = rope.convert_checkpoint(tmp_path / "source", tmp_path / "half", "half")
    told = [note for note in written.notes if f"indexers of {str(tmp_path / 'source')!r} are {pairing}" in note]
    assert bool(told) == (pairing != CLASS_ROTATES[model_type])
    assert set(told) <= {str(warning.message) for warning in caught}
    stays = CLASS_ROTATES[model_type] == "half"
    assert ("indexers stay half, in which their class rotates them" in written.notes) == stays
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("source", "half"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("kv_a_proj_with_mqa" in name for name in moved)
    assert any("indexer" in name for name in moved) != stays
    [indexers] = rope.detect_pairing(tmp_path / "half").consumers
    assert indexers.pairing == (pairing if stays else {"interleaved": "half"}.get(pairing))


SPARSE: dict[str, dict[str, Any]] = {"minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]}}


@pytest.mark.parametrize("model_type", [*CLASS_ROTATES, "minimax_m3_vl_text", "qwen4_exp_text"])
def test_random_indexers_do_not_tell(model_type: str) -> None:
    report = rope.detect_pairing(build_known(model_type, **SPARSE.get(model_type, {})))
    assert [each.path for each in report.consumers] == ["indexers"]
    [indexers] = report.consumers
    assert indexers.pairing is None
    assert indexers.reason is not None
    assert indexers.layers, indexers.reason


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_models_without_either_have_no_further_lines(name: str) -> None:
    assert not rope.detect_pairing(build(name)).consumers


def planted(rows: int, keys: int, width: int, pairing: str) -> dict[str, Tensor]:
    """Return the projections of one attention module with heads of 16 dims."""
    draws = torch.Generator().manual_seed(3)
    query, key = (0.1 * torch.randn(count, width, generator=draws) for count in (rows, keys))
    plant_pairs(query.view(keys // 16, rows // keys, 16, width), key.view(keys // 16, 16, width), pairing)
    return {"q_proj": query, "k_proj": key, "v_proj": torch.zeros(keys, width), "o_proj": torch.zeros(64, rows)}


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("prefix", ["model.layers.2.self_attn", "mtp.layers.0.self_attn", "model.nextn.0.self_attn"])
def test_the_pairing_of_layers_that_predict_further_tokens_shows(prefix: str, pairing: str, tmp_path: Path) -> None:
    build("llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"{prefix}.{name}.weight": weight for name, weight in planted(64, 32, 64, pairing).items()}
    save_file(load_file(file) | more, file, {"format": "pt"})
    report = rope.detect_pairing(tmp_path)
    assert report.pairing is None
    [further] = report.consumers
    assert further.path == "layers that predict further tokens"
    assert (further.pairing, further.stated) == (pairing, "half")
    assert [layer.name for layer in further.layers] == [prefix]


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_an_eagle_head_is_read(pairing: str, tmp_path: Path) -> None:
    """Its one layer reads embeddings and states of the model side by side, each after a norm of its own."""
    config = build("llama", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    attention = planted(64, 32, 128, pairing)
    weights = {f"midlayer.self_attn.{name}.weight": weight for name, weight in attention.items()}
    weights |= {f"midlayer.{name}.weight": torch.rand(64) + 0.5 for name in ("input_layernorm", "hidden_norm")}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    report = rope.detect_pairing(tmp_path)
    assert (report.pairing, report.stated, report.consumers) == (pairing, "half", ())

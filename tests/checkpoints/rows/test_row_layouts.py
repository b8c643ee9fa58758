"""The rows that rotate, by name and shape; unknown tensors are refused. Logits: test_conversion_families.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.head_blocks import HeadBlock, RowLayout, ScaleBlocks, evenly_spaced
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.models.families import families
from rope_ext_hf.models.family_settings import class_pairing, config_pairing, stated_rotary
from tests.support.models import known_config


def rows(quantization: dict[str, Any] | None = None, **overrides: Any) -> RotaryTensors:
    """Return the row layouts of a Llama with 8 query and 2 key heads of 16 dims."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16} | overrides
    config = transformers.LlamaConfig(**sizes)
    if quantization is not None:
        config.quantization_config = quantization
    return RotaryTensors(config, sizes["head_dim"])


QUERIES, KEYS = RowLayout(1, (HeadBlock(8, 16, 16),)), RowLayout(1, (HeadBlock(2, 16, 16),))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "base_model.model.model.", "model.mtp_"])
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("q_proj.weight", (128, 128), QUERIES),
        ("k_proj.weight", (32, 128), KEYS),
        ("k_proj.bias", (32,), KEYS),
        ("k_proj.base_layer.weight", (32, 128), KEYS),
        ("k_proj.lora_B.weight", (32, 4), KEYS),
        ("k_proj.lora_B.default.weight", (32, 4), KEYS),
        ("k_proj.lora_B.default.bias", (32,), KEYS),
        ("k_proj.lora_magnitude_vector", (32,), KEYS),
        ("k_proj.lora_magnitude_vector.default.weight", (32,), KEYS),
        ("k_proj.SCB", (32,), KEYS),
        ("k_proj.weight_scale", (32, 1), KEYS),
        ("k_proj.weight_scale", (32, 8), KEYS),
        ("k_proj.weight_packed", (32, 16), KEYS),
        ("k_proj.weight_scale", (), None),
        ("k_proj.weight_scale", (1,), None),
        ("k_proj.weight_scale_inv", (), None),
        ("k_proj.weight_global_scale", (1,), None),
        ("k_proj.weight_shape", (2,), None),
        ("k_proj.weight_format", (1,), None),
        ("k_proj.input_scale", (1,), None),
        ("k_proj.lora_A.weight", (4, 128), None),
        ("k_proj.k_scale", (), None),
        ("k_scale", (), None),
        ("rotary_emb.inv_freq", (8,), None),
        ("v_proj.weight", (32, 128), None),
        ("o_proj.qweight", (16, 128), None),
    ],
)
def test_what_rotates_in_an_attention(
    prefix: str, name: str, shape: tuple[int, ...], expected: RowLayout | None
) -> None:
    assert rows().find(f"{prefix}layers.3.self_attn.{name}", shape) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.linear_attn.q_proj.weight",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "visual.blocks.0.attn.qkv.weight",
        "vpm.encoder.layers.0.self_attn.q_proj.weight",
        "model.multi_modal_projector.layers.0.self_attn.q_proj.weight",
        "audio_tower.layers.0.self_attn.k_proj.weight",
    ],
)
def test_what_is_no_attention_of_the_language_model_passes_by(name: str) -> None:
    assert rows().find(name, (128, 128)) is None


PACKED = "packs several rows into one number"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q_norm.weight", (16,), "whether its rows rotate; known: q_proj, k_proj, v_proj, o_proj"),
        ("W_pack.weight", (384, 128), "neither its class nor the family table has such a tensor"),
        ("q_proj.vera_lambda_b", (128,), "'vera_lambda_b' is not a known kind of parameter"),
        ("k_proj.ia3_l", (32, 1), "'ia3_l' is not a known kind of parameter"),
        ("k_proj.weight", (128, 128), "by the config 32 rows; config and weights disagree"),
        ("k_proj.weight", (), "disagree"),
        ("k_proj.weight", (4, 8), "disagree"),
        ("k_proj.weight_zero_point", (4, 8), "disagree"),
        ("k_proj.weight_scale", (8, 4), "disagree"),
        ("k_proj.qweight", (16, 32), PACKED),
        ("k_proj.qzeros", (1, 4), PACKED),
        ("k_proj.weight.absmax", (64,), PACKED),
        ("k_proj.weight.quant_state.bitsandbytes__nf4", (100,), PACKED),
        ("k_proj.weight", (2048, 1), PACKED),
        ("k_proj.weight_scale_inv", (2, 1), "by the config 32 rows; config and weights disagree"),
    ],
)
def test_what_is_not_known_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(rope.CheckpointError, match=message) as caught:
        rows().find(f"model.layers.0.self_attn.{name}", shape)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["model.attn.w_q.weight", "encoder.block.1.attention.self.query.weight", "model.blocks.0.attn.Wqkv.weight"],
)
def test_no_attention_is_passed_by_silently(name: str) -> None:
    with pytest.raises(rope.CheckpointError, match="neither its class nor the family table has such a tensor"):
        rows().find(name, (128, 128))


BLOCKS_OF_32 = [
    {"quant_method": "fp8", "weight_block_size": [32, 32]},
    {"config_groups": {"group_0": {"weights": {"block_structure": [32, 32], "strategy": "block"}}}},
]


@pytest.mark.parametrize("quantization", BLOCKS_OF_32)
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_scales_of_blocks(quantization: dict[str, Any], name: str) -> None:
    """With two heads of 16 in a block, rows move within the block and its scale stays."""
    found = rows(quantization).find(f"layers.0.self_attn.q_proj.{name}", (4, 4))
    assert found == ScaleBlocks(QUERIES, 32)
    scales = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(found.to_pairing(scales, "interleaved"), scales)
    with pytest.raises(rope.CheckpointError, match=r"shape \(5, 4\), but by the config 128 rows in blocks of 32"):
        rows(quantization).find(f"layers.0.self_attn.q_proj.{name}", (5, 4))


@pytest.mark.parametrize("size", [3, 4, 6, 8, 10])
def test_rows_that_leave_their_block_are_refused(size: int) -> None:
    with pytest.raises(rope.CheckpointError, match=r"cannot be converted exactly: rows of one block .* several"):
        rows({"weight_block_size": [size, size]}).find(
            "layers.0.self_attn.k_proj.weight_scale_inv", (-(-32 // size), 4)
        )


def test_blocks_that_move_whole_take_their_scales_along() -> None:
    """With one row in a block, every scale moves with its row."""
    found = rows({"weight_block_size": [1, 128]}).find("layers.0.self_attn.k_proj.weight_scale_inv", (32, 1))
    assert found == KEYS
    layout = RowLayout(1, (HeadBlock(1, 8, 4, 4),))  # the last four rows turn; in blocks of two, pairs are split
    with pytest.raises(ValueError, match="several"):
        ScaleBlocks(layout, 2)
    assert ScaleBlocks(layout, 4).to_pairing(torch.tensor([1.0, 2.0]), "half").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("module", "blocks"), [("q_b_proj", 192), ("kv_a_proj_with_mqa", 5)])
def test_latent_attention_in_blocks_of_128(module: str, blocks: int) -> None:
    """DeepSeek-V3 has 128 heads of 128 + 64 dims and a latent of 512 + 64, whose last block is half full."""
    config = transformers.DeepseekV3Config()
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    known = RotaryTensors(config, 64)
    found = known.find(f"model.layers.0.self_attn.{module}.weight_scale_inv", (blocks, 56))
    assert isinstance(found, ScaleBlocks)
    scales = torch.randn(blocks, 56)
    assert torch.equal(found.to_pairing(scales, "half"), scales)
    assert known.find("model.layers.0.self_attn.kv_b_proj.weight_scale_inv", (256, 4)) is None


@pytest.mark.parametrize(
    "quantization",
    [[], "fp8", {"weight_block_size": 128}, {"config_groups": {"a": None}}, {"weight_block_size": ["128", 1]}],
)
def test_strange_words_about_quantisation_are_no_blocks(quantization: Any) -> None:
    assert rows(quantization).scale_rows is None


def test_the_places_of_what_rotates() -> None:
    known = rows()
    assert known.locate("model.language_model.layers.3.self_attn.q_proj.weight") == (
        "model.language_model",
        "layers.3.self_attn.q_proj",
    )
    assert known.locate("layers.3.self_attn.k_proj.lora_B.weight") == ("", "layers.3.self_attn.k_proj")
    for name in ("v_proj.weight", "o_proj.weight", "q_norm.weight"):
        assert known.locate(f"model.layers.3.self_attn.{name}") is None
    for prefix in ("mtp.layers", "model.mtp_layers", "model.nextn_predict_layers"):
        assert known.locate(f"{prefix}.0.self_attn.q_proj.weight") is None


def test_fused_rows_by_hand() -> None:
    """Each of two key heads has its two queries, its key and its value; heads have four rows."""
    grouped = RowLayout(2, (HeadBlock(2, 4, 4), HeadBlock(1, 4, 4), HeadBlock(1, 4)))
    found = grouped.to_pairing(torch.arange(32), "half").tolist()
    turned = [0, 2, 1, 3]
    assert found == [8 * 2 * g + 4 * h + i for g in range(2) for h in range(4) for i in (turned if h < 3 else range(4))]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_the_three_fused_layouts_of_falcon(overrides: dict[str, Any], keys: int) -> None:
    config = known_config("falcon", **overrides)
    expected = RowLayout(keys, (HeadBlock(4 // keys, 16, 16), HeadBlock(1, 16, 16), HeadBlock(1, 16)))
    assert RotaryTensors(config, 16).layers[0]["query_key_value"] == expected


def test_the_four_parts_of_codegen() -> None:
    """Each has a quarter of the queries, then of the values, then of the keys."""
    rows = RotaryTensors(known_config("codegen"), 4)
    expected = RowLayout(4, (HeadBlock(2, 8, 4), HeadBlock(2, 8), HeadBlock(2, 8, 4)))
    assert rows.find("transformer.h.3.attn.qkv_proj.weight", (192, 64)) == expected


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_the_buffers_of_old_checkpoints_pass_by(model_type: str) -> None:
    rows = RotaryTensors(known_config(model_type), 4)
    for name in ("bias", "masked_bias", "embed_positions"):
        assert rows.find(f"transformer.h.3.attn.{name}", (1, 1, 64, 64)) is None


@pytest.mark.parametrize(
    ("dims", "message"), [(7, "by the config, 7 of the 16"), (18, "18 of the 16"), (0, "'rotary_dim' in")]
)
def test_rotated_dims_that_cannot_be(dims: int, message: str) -> None:
    with pytest.raises(rope.CheckpointError, match=message):
        stated_rotary(known_config("gptj", rotary_dim=dims))


def test_the_index_of_latent_attention() -> None:
    """GLM-5 has 32 index heads of 128 dims, of which the first 64 rotate as in the attention itself."""
    rows = RotaryTensors(transformers.GlmMoeDsaConfig(), 64)
    found = rows.find("model.layers.0.self_attn.indexer.wq_b.weight", (4096, 2048))
    assert found == RowLayout(1, (HeadBlock(32, 128, 64),))
    assert rows.find("model.layers.0.self_attn.indexer.k_norm.bias", (128,)) == RowLayout(1, (HeadBlock(1, 128, 64),))
    assert rows.find("model.layers.0.self_attn.indexer.weights_proj.weight", (32, 6144)) is None


def test_the_attention_of_dbrx_has_a_place() -> None:
    """It is one level deeper in its layer than in other families."""
    rows = RotaryTensors(known_config("dbrx"), 16)
    name = "transformer.blocks.1.norm_attn_norm.attn.Wqkv"
    assert rows.split_name(f"{name}.weight") == ("transformer", "blocks.1.norm_attn_norm.attn", "Wqkv")
    assert rows.locate(f"{name}.weight") == ("transformer", "blocks.1.norm_attn_norm.attn.Wqkv")


def test_a_family_that_does_not_rotate_is_refused() -> None:
    with pytest.raises(rope.UnsupportedModelError, match="'gpt2' rotate could not be found out: GPT2LMHeadModel"):
        RotaryTensors(transformers.GPT2Config(), 64)


@pytest.mark.parametrize("model_type", [name for name, known in families().items() if known.pairing])
def test_a_pairing_comes_with_what_rotates(model_type: str) -> None:
    known = families()[model_type]
    assert known.rotated
    assert known.unrotated
    assert not set(known.rotated) & set(known.unrotated)
    config = known_config(model_type)
    assert class_pairing(config) == known.pairing
    if known.pairing_switch:
        other = known_config(model_type, **{known.pairing_switch: False})
        assert config_pairing(other) == "half"
        assert class_pairing(other) == (None if known.remote else "half")  # some of that code ignores the key


@pytest.mark.parametrize(
    ("count", "most", "picked"),
    [(3, 5, [0, 1, 2]), (5, 5, [0, 1, 2, 3, 4]), (9, 5, [0, 2, 4, 6, 8]), (10, 4, [0, 3, 6, 9]), (32, 2, [0, 31])],
)
def test_evenly_spaced(count: int, most: int, picked: list[int]) -> None:
    assert evenly_spaced(range(count), most) == picked

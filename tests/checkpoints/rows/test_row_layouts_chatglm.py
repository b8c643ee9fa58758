"""Families with code of their own: ChatGLM2, ChatGLM3 and GLM-4, converted by their config.json alone.

What their code computes is written out here a second time, small; where it can be, it is compared with transformers'
class of the same models (Glm).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.head_blocks import HeadBlock, RowLayout
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.models.families import families
from rope_ext_hf.models.family_settings import stated_rotary
from rope_ext_hf.rotary.pairing_names import PAIRINGS
from tests.support.models import WITH_A_CLASS, logits, own_config, plant_pairs, tokens

LAYER = "transformer.encoder.layers.{}."
QKV = LAYER + "self_attention.query_key_value."


def test_every_family_with_code_of_its_own_is_tested_here() -> None:
    assert set(families()) - set(WITH_A_CLASS) == {"chatglm"}


# --- the model, by its definition ------------------------------------------------------------------------------------


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return every tensor of a ChatGLM2 by its name on disk."""
    draws = torch.Generator().manual_seed(seed)
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["kv_channels"]
    keys = config["multi_query_group_num"] if config["multi_query_attention"] else heads

    def some(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=draws)

    tensors = {
        "transformer.embedding.word_embeddings.weight": some(config["padded_vocab_size"], hidden),
        "transformer.rotary_pos_emb.inv_freq": 10_000.0 ** (-torch.arange(0, dim // 2, 2) / (dim // 2)),
    }
    for index in range(config["num_layers"]):
        layer = LAYER.format(index)
        tensors |= {
            f"{layer}input_layernorm.weight": 1 + some(hidden),
            f"{layer}self_attention.query_key_value.weight": some((heads + 2 * keys) * dim, hidden),
            f"{layer}self_attention.dense.weight": some(hidden, heads * dim),
            f"{layer}post_attention_layernorm.weight": 1 + some(hidden),
            f"{layer}mlp.dense_h_to_4h.weight": some(2 * config["ffn_hidden_size"], hidden),
            f"{layer}mlp.dense_4h_to_h.weight": some(hidden, config["ffn_hidden_size"]),
        }
        if config["add_qkv_bias"]:
            tensors[f"{layer}self_attention.query_key_value.bias"] = some((heads + 2 * keys) * dim)
    return tensors | {
        "transformer.encoder.final_layernorm.weight": 1 + some(hidden),
        "transformer.output_layer.weight": some(config["padded_vocab_size"], hidden),
    }


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def turned(x: Tensor, base: float, pairing: str) -> Tensor:
    """Rotate the pairs in the first half of the dims of x (length, heads, dim) by position * base^(-pair / pairs)."""
    length, _, dim = x.shape
    pairs = dim // 4
    angles = torch.outer(torch.arange(length).float(), base ** (-torch.arange(pairs) / pairs)).unsqueeze(1)
    first = {"interleaved": slice(0, 2 * pairs, 2), "half": slice(0, pairs)}[pairing]
    second = {"interleaved": slice(1, 2 * pairs, 2), "half": slice(pairs, 2 * pairs)}[pairing]
    out = x.clone()
    out[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    out[..., second] = x[..., second] * angles.cos() + x[..., first] * angles.sin()
    return out


def attention(x: Tensor, tensors: dict[str, Tensor], index: int, config: dict[str, Any], pairing: str) -> Tensor:
    heads, dim = config["num_attention_heads"], config["kv_channels"]
    mixed = functional.linear(x, tensors[QKV.format(index) + "weight"], tensors.get(QKV.format(index) + "bias"))
    if config["multi_query_attention"]:  # all queries, then the keys of all groups, then their values
        keys = config["multi_query_group_num"]
        q, k, v = (
            part.reshape(len(x), -1, dim) for part in torch.split(mixed, [heads * dim, keys * dim, keys * dim], -1)
        )
        k, v = (part.repeat_interleave(heads // keys, 1) for part in (k, v))
    else:  # query, key and value of one head after another
        q, k, v = mixed.reshape(len(x), heads, 3, dim).unbind(-2)
    base = 10_000.0 * config.get("rope_ratio", 1)
    q, k = turned(q, base, pairing), turned(k, base, pairing)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    return functional.linear(seen.flatten(1), tensors[LAYER.format(index) + "self_attention.dense.weight"])


def run(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor, pairing: str) -> Tensor:
    """Return the logits (length, vocabulary) of ids (length,)."""
    x = tensors["transformer.embedding.word_embeddings.weight"][ids]
    for index in range(config["num_layers"]):
        layer = LAYER.format(index)
        x = x + attention(norm(x, tensors[f"{layer}input_layernorm.weight"]), tensors, index, config, pairing)
        inner = functional.linear(
            norm(x, tensors[f"{layer}post_attention_layernorm.weight"]), tensors[f"{layer}mlp.dense_h_to_4h.weight"]
        )
        gate, up = inner.chunk(2, -1)
        x = x + functional.linear(functional.silu(gate) * up, tensors[f"{layer}mlp.dense_4h_to_h.weight"])
    x = norm(x, tensors["transformer.encoder.final_layernorm.weight"])
    return functional.linear(x, tensors["transformer.output_layer.weight"])


def as_glm(tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    """Return the same model in the class of transformers, which has queries, keys and values apart."""
    heads, keys, dim = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    model = transformers.GlmForCausalLM(
        transformers.GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=heads,
            num_key_value_heads=keys,
            head_dim=dim,
            attention_bias=config["add_qkv_bias"],
            rms_norm_eps=1e-5,
            max_position_embeddings=config["seq_length"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0 * config.get("rope_ratio", 1),
                "partial_rotary_factor": 0.5,
            },
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    ).eval()
    names = {
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
        "transformer.encoder": "model",
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
    state = {}
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            for letter, part in zip("qkv", torch.split(tensor, [heads * dim, keys * dim, keys * dim]), strict=True):
                new = name.replace("self_attention.query_key_value", f"self_attn.{letter}_proj")
                state[new.replace("transformer.encoder", "model")] = part
        elif "inv_freq" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            state[name] = tensor
    model.load_state_dict(state)
    return model


CONFIGS: dict[str, dict[str, Any]] = {
    "ChatGLM2 and 3": {},
    "GLM-4": {"rope_ratio": 500, "num_layers": 3},
    "without biases": {"add_qkv_bias": False},
    "wide heads": {"kv_channels": 32},
    "one key head": {"multi_query_group_num": 1},
    "a key for each query": {"multi_query_attention": False},
    "a key for each query, without biases": {"multi_query_attention": False, "add_qkv_bias": False},
}


@pytest.mark.parametrize("name", [name for name in CONFIGS if "a key for each" not in name])
def test_the_definition_is_what_transformers_computes(name: str) -> None:
    """All public models have groups of heads; the other layout exists in their code only."""
    config = own_config("chatglm", **CONFIGS[name])
    tensors, ids = random_tensors(config), tokens(24)
    expected = logits(as_glm(tensors, config), ids)[0]
    torch.testing.assert_close(run(tensors, config, ids[0], "interleaved"), expected, atol=1e-4, rtol=0)
    assert (run(tensors, config, ids[0], "half") - expected).abs().max() > 1e-2


# --- folders ---------------------------------------------------------------------------------------------------------


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], parts: int = 2) -> Path:
    """Return a folder like those on the Hub, whose code leaves a trace if it is run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    trap = f"open({str(folder.parent / 'was run')!r}, 'w').close()\nraise RuntimeError('was run')\n"
    for name in ("configuration_chatglm.py", "modeling_chatglm.py", "tokenization_chatglm.py"):
        (folder / name).write_text(trap, encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in dict.fromkeys(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = own_config("chatglm")
    return write(tmp_path / "source", random_tensors(config), config)


@pytest.mark.slow
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_under_the_other_rotation(name: str, trust: bool, tmp_path: Path) -> None:
    config = own_config("chatglm", **CONFIGS[name])
    tensors, ids = random_tensors(config), tokens(24)[0]
    source = write(tmp_path / "source", tensors, config)
    before = content(source)
    with pytest.warns(
        UserWarning, match="holds weights in the half pairing, with which transformers does not run 'chatglm' models"
    ):
        report = rope.convert_checkpoint(source, tmp_path / "half", "half", verify=True, trust_remote_code=trust)
    assert (report.source, report.to, report.loads_natively) == ("interleaved", "half", False)
    assert report.converted == config["num_layers"] * (2 if config["add_qkv_bias"] else 1)
    assert "q.k of" in str(report.verified)
    assert "no class of 'chatglm', and code in the folder is not run" in str(report.verified)
    converted = read(tmp_path / "half")
    expected = run(tensors, config, ids, "interleaved")
    torch.testing.assert_close(run(converted, config, ids, "half"), expected, atol=1e-4, rtol=0)
    assert (run(converted, config, ids, "interleaved") - expected).abs().max() > 1e-2
    after = content(tmp_path / "half")
    assert after.keys() == before.keys()
    assert [file for file in before if file.endswith((".py", ".model")) and after[file] != before[file]] == []
    said = {"rope_pairing": "half", "original_rope": False}
    assert json.loads(after["config.json"]) == config | said

    back = rope.convert_checkpoint(tmp_path / "half", tmp_path / "back", "interleaved", trust_remote_code=trust)
    assert back.loads_natively
    after = content(tmp_path / "back")
    assert [file for file in before if file.endswith(".safetensors") and after[file] != before[file]] == []
    assert json.loads(after["config.json"]) == config | {"rope_pairing": "interleaved"}
    assert not (tmp_path / "was run").exists()


def test_a_model_that_is_half_by_its_own_word(tmp_path: Path) -> None:
    """The pairing of CogAgent, with `original_rope: false`, is known of its weights, but not of its code."""
    config = own_config("chatglm", original_rope=False)
    tensors, ids = random_tensors(config), tokens(24)[0]
    source = write(tmp_path / "source", tensors, config)
    with pytest.raises(rope.CheckpointError, match="are in the half pairing already: the config or the model family"):
        rope.convert_checkpoint(source, tmp_path / "half", "half")
    report = rope.convert_checkpoint(source, tmp_path / "converted", "interleaved")
    assert report.loads_natively
    found = run(read(tmp_path / "converted"), config, ids, "interleaved")
    torch.testing.assert_close(found, run(tensors, config, ids, "half"), atol=1e-4, rtol=0)


def test_numbers_of_few_bits_move_with_their_scales(tmp_path: Path) -> None:
    """The code of these families packs two numbers of the same row into a byte, with a scale per row."""
    config = own_config("chatglm")
    tensors = random_tensors(config)
    rows = tensors[QKV.format(0) + "weight"].shape[0]
    for layer in range(config["num_layers"]):
        name = QKV.format(layer)
        tensors[name + "weight"] = torch.arange(rows, dtype=torch.int8)[:, None].repeat(1, 32)
        tensors[name + "weight_scale"] = torch.arange(rows).float()
    source = write(tmp_path / "source", tensors, config | {"quantization_bit": 4})
    with pytest.warns(UserWarning, match="does not run"):
        rope.convert_checkpoint(source, tmp_path / "half", "half", verify=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]  # of the rows of one head
    expected = [16 * head + row for head in range(6) for row in order] + list(range(96, 128))  # 4 + 2 heads, values
    for layer in range(config["num_layers"]):
        found = read(tmp_path / "half")
        assert found[QKV.format(layer) + "weight"][:, 0].tolist() == expected
        assert found[QKV.format(layer) + "weight_scale"].tolist() == expected


def test_an_adapter(source: Path, tmp_path: Path) -> None:
    """Model and adapter are each converted alone and then put together: the logits are equal."""
    config, tensors, ids = own_config("chatglm"), read(source), tokens(24)[0]
    draws = torch.Generator().manual_seed(5)
    adapter = {}
    for layer in range(config["num_layers"]):
        name = f"base_model.model.{QKV.format(layer)}"
        adapter[f"{name}lora_A.weight"] = torch.randn(4, 64, generator=draws) / 8
        adapter[f"{name}lora_B.weight"] = torch.randn(128, 4, generator=draws) / 8
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter/adapter_model.safetensors", {"format": "pt"})
    said = {"base_model_name_or_path": str(source), "peft_type": "LORA"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(said), encoding="utf-8")

    def merged(tensors: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        products = {
            name.removeprefix("base_model.model.").replace("lora_B.", ""): adapter[name]
            @ adapter[name.replace("lora_B", "lora_A")]
            for name in adapter
            if "lora_B" in name
        }
        return tensors | {name: tensors[name] + product for name, product in products.items()}

    for folder in ("source", "adapter"):
        with pytest.warns(UserWarning, match="does not run"):
            report = rope.convert_checkpoint(tmp_path / folder, tmp_path / f"half {folder}", "half", verify=True)
    assert report.converted == config["num_layers"]
    found = merged(read(tmp_path / "half source"), read(tmp_path / "half adapter"))
    expected = run(merged(tensors, adapter), config, ids, "interleaved")
    assert (expected - run(tensors, config, ids, "interleaved")).abs().max() > 1e-2
    torch.testing.assert_close(run(found, config, ids, "half"), expected, atol=1e-4, rtol=0)
    assert not (tmp_path / "was run").exists()


def test_the_sizes_of_the_public_models() -> None:
    """ChatGLM3-6B and GLM-4-9B have 32 query heads and 2 key heads of 128 dims, of which 64 rotate."""
    sizes = {"hidden_size": 4096, "kv_channels": 128, "num_attention_heads": 32, "seq_length": 131072}
    config = transformers.PreTrainedConfig(**own_config("chatglm", **sizes, rope_ratio=500))
    rotary = stated_rotary(config)
    assert rotary is not None
    assert (rotary.dim, rotary.theta, rotary.trained_length) == (64, 5_000_000.0, 131072)
    known = RotaryTensors(config, rotary.dim)
    layout = RowLayout(1, (HeadBlock(32, 128, 64), HeadBlock(2, 128, 64), HeadBlock(2, 128)))
    assert known.find(QKV.format(0) + "weight", (4608, 4096)) == layout
    assert known.find("transformer.encoder.layers.0.self_attention.dense.weight", (4096, 4096)) is None
    of_glm_4v = "transformer.vision.transformer.layers.0.attention.query_key_value.weight"
    assert known.find(of_glm_4v, (5376, 1792)) is None


# --- refused by name -------------------------------------------------------------------------------------------------


def without_a_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}


def with_a_key_for_each_query(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {QKV.format(1) + "weight": torch.zeros(192, 64)}


def with_a_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {LAYER.format(1) + "self_attention.q_norm.weight": torch.zeros(16)}


WRONG: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "a layer is missing": ({}, without_a_layer, r"layers.1.self_attention.query_key_value' is missing in"),
    "another shape": (
        {},
        with_a_key_for_each_query,
        r"layers.1.self_attention.query_key_value.weight' has shape \(192, 64\), but by the config 128 rows",
    ),
    "another layout": ({"multi_query_attention": None}, dict, r"has shape .*, but by the config 192 rows"),
    "a tensor that is not known": ({}, with_a_norm, "q_norm.weight' belongs to an attention module of 'chatglm', and"),
    "no size of heads": ({"kv_channels": None}, dict, "'kv_channels' in the config .* above zero, and is None"),
    "no number of layers": ({"num_layers": None}, dict, "'num_layers' in the config .* above zero, and is None"),
    "no number of groups": ({"multi_query_group_num": None}, dict, "'multi_query_group_num' in the config"),
    "no number of heads": ({"num_attention_heads": None}, dict, "'num_attention_heads' in the config"),
    "a number in words": ({"kv_channels": "16"}, dict, "'kv_channels' in the config .*, and is '16'"),
    "a list": ({"kv_channels": [16]}, dict, r"'kv_channels' in the config .*, and is \[16\]"),
    "yes": ({"kv_channels": True}, dict, "'kv_channels' in the config .*, and is True"),
    "less than nothing": ({"multi_query_group_num": -2}, dict, "'multi_query_group_num' in the config .*, and is -2"),
    "layers without end": (
        {"num_layers": 10**15},
        dict,
        "states 1000000000000000 as its num_layers; at most 1,000,000",
    ),
    "no end": ({"rope_ratio": math.inf}, dict, "'rope_ratio' in the config .*, and is inf"),
    "no number": ({"rope_ratio": math.nan}, dict, "'rope_ratio' in the config .*, and is nan"),
    "an odd number of dims": ({"kv_channels": 18}, dict, "by the config, 9 of the 18 dims of a head rotate"),
    "a key that hides the config": ({"get_text_config": "no"}, dict, "the config of .* could not be loaded"),
    "a name of another kind": ({"model_type": ["chatglm"]}, dict, "the config of .* could not be loaded"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_name(name: str, tmp_path: Path) -> None:
    overrides, change, message = WRONG[name]
    source = write(
        tmp_path / "source", change(random_tensors(own_config("chatglm"))), own_config("chatglm", **overrides)
    )
    with pytest.raises(rope.CheckpointError, match=message):
        rope.convert_checkpoint(source, tmp_path / "converted", "half")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_first_chatglm_is_another_model(tmp_path: Path) -> None:
    """Its config is the published one, and its weights have the published names."""
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "hidden_size": 64,
        "inner_hidden_size": 256,
        "layernorm_epsilon": 1e-05,
        "max_sequence_length": 2048,
        "num_attention_heads": 4,
        "num_layers": 1,
        "position_encoding_2d": True,
        "vocab_size": 97,
    }
    name = "transformer.layers.0.attention.query_key_value"
    tensors = {f"{name}.weight": torch.zeros(192, 64), f"{name}.bias": torch.zeros(192)}
    source = write(tmp_path / "source", tensors, config, 1)
    with pytest.raises(
        rope.UnsupportedModelError, match="marks this 'chatglm' as the first ChatGLM-6B, which rotates each"
    ):
        rope.convert_checkpoint(source, tmp_path / "converted", "half")
    with pytest.raises(rope.UnsupportedModelError, match="the first ChatGLM-6B"):
        rope.detect_pairing(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# --- detection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("groups", [True, False])
def test_planted_pairs_are_found(groups: bool, pairing: str, tmp_path: Path) -> None:
    config = own_config("chatglm", num_layers=4, multi_query_attention=groups)
    tensors = random_tensors(config)
    for layer in range(4):
        weight = tensors[QKV.format(layer) + "weight"]
        if groups:
            queries, keys = weight[:64].view(2, 2, 16, 64), weight[64:96].view(2, 16, 64)
        else:
            heads = weight.view(4, 3, 16, 64)
            queries, keys = heads[:, :1], heads[:, 1]
        plant_pairs(queries[:, :, :8], keys[:, :8], pairing)
    report = rope.detect_pairing(write(tmp_path / "source", tensors, config))
    assert (report.pairing, report.stated) == (pairing, "interleaved")
    assert report.layers[1].name == "transformer.encoder.layers.1.self_attention"
    assert not (tmp_path / "was run").exists()


def test_random_weights_do_not_tell_and_a_text_cannot_be_run(source: Path, tmp_path: Path) -> None:
    assert rope.detect_pairing(source).pairing is None
    with pytest.raises(rope.CheckpointError, match="transformers has no class that runs a 'chatglm' on a text"):
        rope.detect_pairing(source, text="a text", trust_remote_code=True)
    assert not (tmp_path / "was run").exists()

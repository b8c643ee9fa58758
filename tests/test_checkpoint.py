"""Checkpoints converted on disk: equal logits under the other rotation, equal bytes there and back, or nothing."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf import files
from rope_ext_hf.checkpoints import conversion as checkpoint
from rope_ext_hf.checkpoints import weight_files as shards
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.rotary.pairing import rotate
from tests.models import ROTATING, build_known, known_config, logits, modeling, tokens

OTHER = {"half": "interleaved", "interleaved": "half"}


def convert(src: Path, dst: Path, to: str, **options: Any) -> rope.ConversionReport:
    """`convert_checkpoint`, without its warning of weights that transformers does not run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not run")
        return rope.convert_checkpoint(src, dst, to, **options)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def untouched(parent: Path, dst: str = "converted") -> bool:
    """Whether nothing of a destination is there, begun or whole."""
    return not [path for path in parent.iterdir() if dst in path.name]


def turn_otherwise(monkeypatch: pytest.MonkeyPatch, model_type: str, to: str) -> None:
    """Have the family's own code run the other rotation, by the definition in pairing.rotate."""
    module = modeling(model_type)

    def angles(cos: Tensor, sin: Tensor) -> Tensor:
        both = torch.atan2(sin, cos)
        pairs = both.shape[-1] // 2
        if torch.equal(both[..., :pairs], both[..., pairs:]):
            return both[..., :pairs]
        return both[..., ::2] if torch.equal(both[..., ::2], both[..., 1::2]) else both  # gpt-oss has each angle once

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        by = angles(cos, sin).unsqueeze(unsqueeze_dim) * (-1 if model_type == "nanochat" else 1)  # turns backwards
        return rotate(q, by, to), rotate(k, by, to)

    def turn_complex(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        by = turns.angle().unsqueeze(2 if model_type == "llama4_text" else 1)
        return rotate(q, by, to), rotate(k, by, to)

    def turn_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        return rotate(x, angles(cos, sin).unsqueeze(unsqueeze_dim), to)

    def turn_by_pair(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:  # (batch, length, heads, dims), once a pair
        return rotate(tensor, torch.atan2(sin, cos).unsqueeze(2), to)

    names = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb")
    name = next(name for name in names if hasattr(module, name))
    first, *_, last = inspect.signature(getattr(module, name)).parameters
    by_words = {("x", "unsqueeze_dim"): turn_one, ("tensor", "cos"): turn_by_pair}
    new = turn_complex if name == "apply_rotary_emb" else by_words.get((first, last), turn)
    monkeypatch.setattr(module, name, new)


# --- equal logits, for every family of the table ---------------------------------------------------------------------

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


@pytest.mark.parametrize("name", KNOWN)
def test_logits_are_equal_under_the_other_rotation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, overrides = KNOWN[name]
    build_known(model_type, **overrides).save_pretrained(tmp_path / "source")
    source = load(tmp_path / "source")
    expected = logits(source, tokens(24))
    now = str(class_pairing(source.config))
    report = convert(tmp_path / "source", tmp_path / "converted", OTHER[now], verify=True)
    assert (report.source, report.to) == (now, OTHER[now])
    assert "equal to" in str(report.verified)
    converted = load(tmp_path / "converted")
    assert converted.config.rope_pairing == OTHER[now]
    switch = family(model_type).pairing_switch
    assert report.runs == (switch is not None)
    if switch is not None:
        assert getattr(converted.config, switch) is (OTHER[now] == "interleaved")
    else:
        assert (logits(converted, tokens(24)) - expected).abs().max() > 1e-2  # its own rotation makes noise of it
        turn_otherwise(monkeypatch, model_type, OTHER[now])
    torch.testing.assert_close(logits(converted, tokens(24)), expected, atol=1e-4, rtol=0)
    assert convert(tmp_path / "converted", tmp_path / "back", now).runs
    assert content(tmp_path / "back").keys() == content(tmp_path / "source").keys()
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()


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
    """The tests above see each kind of tensor, and so does verify."""
    build_known(model_type).save_pretrained(tmp_path / "source")
    expected = logits(load(tmp_path / "source"), tokens(24))
    now = str(family(model_type).pairing)
    monkeypatch.setattr(checkpoint._Work, "_repaired", forget(forgotten, checkpoint._Work._repaired))
    with pytest.raises(rope.CheckpointError, match=r"verification failed: the scores of '(layers|h|blocks)\.\d\."):
        convert(tmp_path / "source", tmp_path / "checked", OTHER[now], verify=True)
    assert not (tmp_path / "checked").exists()
    convert(tmp_path / "source", tmp_path / "converted", OTHER[now])
    turn_otherwise(monkeypatch, model_type, OTHER[now])
    assert (logits(load(tmp_path / "converted"), tokens(24)) - expected).abs().max() > 1e-3


def forget(tensor: str, repaired: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def without(work: Any, file: Any, name: str) -> Tensor:
        return file.read(name) if name.endswith(tensor) else repaired(work, file, name)

    return without


@pytest.mark.parametrize("model_type", ["glm", "cohere", "llama4_text", "deepseek_v2", "ernie4_5"])
def test_an_interleaved_family_loads_as_it_is(model_type: str, tmp_path: Path) -> None:
    """Half weights of such a family (from another engine) become what its transformers class runs."""
    build_known(model_type).save_pretrained(tmp_path / "source")
    expected = logits(load(tmp_path / "source"), tokens(24))
    convert(tmp_path / "source", tmp_path / "half", "half")
    unsaid(tmp_path / "half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = rope.convert_checkpoint(tmp_path / "half", tmp_path / "converted", "interleaved", source="half")
    assert report.runs
    assert "note" not in str(report)
    torch.testing.assert_close(logits(load(tmp_path / "converted"), tokens(24)), expected, atol=0, rtol=0)


def unsaid(folder: Path) -> None:
    """Take the record of the pairing out of a config, as if somebody else had written the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["rope_pairing"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


# --- a small Llama, made by hand -------------------------------------------------------------------------------------

HEADS, KEYS, DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
}


def llama_tensors(prefix: str = "model.", dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random bytes of any dtype, in the order that they would have on disk."""
    draws = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        if dtype == torch.float32:
            return torch.randn(*shape, generator=draws) / 8
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape, size), generator=draws, dtype=torch.uint8)
        return raw.view(dtype)[..., 0].contiguous()

    tensors = {f"{prefix}embed_tokens.weight": some(97, HIDDEN)}
    for layer in range(LAYERS):
        for module, rows, columns in (
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", KEYS * DIM, HIDDEN),
            ("self_attn.v_proj", KEYS * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", 96, HIDDEN),
            ("mlp.up_proj", 96, HIDDEN),
            ("mlp.down_proj", HIDDEN, 96),
        ):
            tensors[f"{prefix}layers.{layer}.{module}.weight"] = some(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}layers.{layer}.{norm}.weight"] = some(HIDDEN)
    tensors[f"{prefix}norm.weight"] = some(HIDDEN)
    return tensors | {"lm_head.weight": some(97, HIDDEN)}


def write_config(folder: Path, **overrides: Any) -> None:
    config = transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"]} | overrides
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_folder(folder: Path, tensors: dict[str, Tensor] | None = None, parts: int = 1, **overrides: Any) -> Path:
    """A model folder, in so many parts; the tensors are dealt out in turn."""
    tensors = llama_tensors() if tensors is None else tensors
    folder.mkdir(parents=True)
    write_config(folder, **overrides)
    metadata = {"format": "pt", "made by": "hand"}
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return folder
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in dict.fromkeys(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file, metadata)
    write_index(folder / "model.safetensors.index.json", where)
    return folder


def write_index(path: Path, where: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1, "mine": "too"}, "weight_map": where}), encoding="utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two parts, and files that come along."""
    folder = write_folder(tmp_path / "source", parts=2)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "deep").mkdir()
    (folder / "deep" / "note.txt").write_text("deep", encoding="utf-8")
    return folder


def moved_by_hand(tensor: Tensor, heads: int) -> Tensor:
    """Half to interleaved: of each head rows 0, 8, 1, 9, ..."""
    order = [
        head * DIM + half * DIM // 2 + pair for head in range(heads) for pair in range(DIM // 2) for half in (0, 1)
    ]
    return tensor[order]


def by_hand(tensors: dict[str, Tensor], rotating: Callable[[str], int | None] | None = None) -> dict[str, Tensor]:
    """What a conversion to interleaved makes of them."""

    def heads(name: str) -> int | None:
        return HEADS if "q_proj" in name else KEYS if "k_proj" in name else None

    count = rotating or heads
    return {name: moved_by_hand(t, n) if (n := count(name)) else t for name, t in tensors.items()}


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit, NaNs included."""
    assert found.keys() == expected.keys()
    return all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_hand_and_bytes_there_and_back(dtype: torch.dtype, parts: int, tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=dtype)
    source = write_folder(tmp_path / "source", tensors, parts)
    before = content(source)
    report = convert(source, tmp_path / "converted", "interleaved")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert (report.converted, report.tensors, report.bytes) == (2 * LAYERS, len(tensors), size)
    assert same(all_tensors(tmp_path / "converted"), by_hand(tensors))
    convert(tmp_path / "converted", tmp_path / "back", "half")
    after = content(tmp_path / "back")
    assert after.keys() == before.keys()
    assert [name for name in before if name.endswith(".safetensors") and after[name] != before[name]] == []
    assert content(source) == before


def test_everything_but_the_weights_comes_along(source: Path, tmp_path: Path) -> None:
    before = content(source)
    convert(source, tmp_path / "converted", "interleaved")
    after = content(tmp_path / "converted")
    assert after.keys() == before.keys()
    for name in ("tokenizer.json", "deep/note.txt"):
        assert after[name] == before[name]
    index = json.loads(after["model.safetensors.index.json"])
    assert index == json.loads(before["model.safetensors.index.json"])
    config = json.loads(after["config.json"])
    assert config.pop("rope_pairing") == "interleaved"
    assert config == json.loads(before["config.json"])
    for name in after:
        if name.endswith(".safetensors"):
            with safe_open(tmp_path / "converted" / name, "pt") as file:
                assert file.metadata() == {"format": "pt", "made by": "hand"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "source"]


def test_only_what_rotates_goes_through_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    read = shards.SafetensorsFile.read

    def watched(file: shards.SafetensorsFile, name: str) -> Tensor:
        seen.append(name)
        return read(file, name)

    monkeypatch.setattr(shards.SafetensorsFile, "read", watched)
    convert(source, tmp_path / "converted", "interleaved")
    assert sorted(seen) == sorted(name for name in all_tensors(source) if "q_proj" in name or "k_proj" in name)


def test_a_model_of_the_hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, revision: str, ignore_patterns: list[str]) -> str:
        if name != "some/llama":
            raise huggingface_hub.errors.HFValidationError("no such model\nand more")
        assert revision == "v2"
        assert "*.gguf" in ignore_patterns
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    convert(Path("some/llama"), tmp_path / "converted", "interleaved", revision="v2")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    with pytest.raises(rope.CheckpointError, match="'some/other' is neither a folder nor a model on the Hub: no such"):
        convert(Path("some/other"), tmp_path / "again", "interleaved")


def test_weights_in_other_forms_are_left_behind_and_named(source: Path, tmp_path: Path) -> None:
    others = ["consolidated.safetensors", "model.gguf", "training_args.bin", "onnx/model.onnx", "original/params.json"]
    for name in others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"weights")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("not part of the model", encoding="utf-8")
    report = convert(source, tmp_path / "converted", "interleaved")
    assert sorted(report.left_behind) == sorted(others)
    assert "left behind      consolidated.safetensors, model.gguf" in str(report)
    assert not [name for name in content(tmp_path / "converted") if name in others or ".git" in name]


def test_what_it_says(source: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"holds interleaved weights, which the code of 'llama' models does not run; for it"
    ):
        report = rope.convert_checkpoint(source, tmp_path / "converted", "interleaved")
    assert json.loads(json.dumps(report.to_dict()))["runs"] is False
    assert "4 of 21 rotate" in str(report)
    assert f"rope-ext convert {tmp_path / 'converted'} NEW --to half" in str(report)
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "converted", tmp_path / "back", "half", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes, report.bytes)


def test_converting_twice_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(rope.CheckpointError, match="are half already, by their config; to convert them all the same"):
        convert(source, tmp_path / "converted", "half")
    convert(source, tmp_path / "once", "interleaved")
    with pytest.raises(rope.CheckpointError, match="are interleaved already, by their config"):
        convert(tmp_path / "once", tmp_path / "converted", "interleaved")
    with pytest.raises(rope.CheckpointError, match="are interleaved already, you say"):
        convert(source, tmp_path / "converted", "interleaved", source="interleaved")
    assert untouched(tmp_path)
    convert(tmp_path / "once", tmp_path / "twice", "interleaved", force=True)
    assert same(all_tensors(tmp_path / "twice"), by_hand(by_hand(all_tensors(source))))
    convert(source, tmp_path / "said", "half", source="interleaved")  # the config is wrong, and its user knows
    convert(tmp_path / "said", tmp_path / "undone", "interleaved", source="half")
    assert same(all_tensors(tmp_path / "undone"), all_tensors(source))


def test_wrong_words_and_places_are_refused(source: Path, tmp_path: Path) -> None:
    for to, options in (("neox", {}), ("half", {"source": "neox"})):
        with pytest.raises(rope.CheckpointError, match=r"pairings are half and interleaved.*'neox'"):
            convert(source, tmp_path / "converted", to, **options)
    for dst in (source, tmp_path):
        with pytest.raises(rope.FileError, match="exists already; give a new folder"):
            convert(source, dst, "interleaved")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(rope.FileError, match="exists already"):
        convert(source, tmp_path / "dangling", "interleaved")
    with pytest.raises(rope.FileError, match="lies inside the source"):
        convert(source, source / "deep" / "converted", "interleaved")
    for nothing in ("no/such/folder", str(tmp_path / "nothing"), "nothing"):
        with pytest.raises(rope.CheckpointError, match="no such folder"):
            convert(Path(nothing), tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)
    assert untouched(source)


# --- names of several parts, forms on disk ---------------------------------------------------------------------------


def test_a_vision_tower_is_left_alone(tmp_path: Path) -> None:
    """With the same names and shapes as the language model's own."""
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(text_config=text).to_dict()
    tensors = llama_tensors("model.language_model.")
    tower = {
        name.replace("language_model", "vision_tower.encoder"): tensor
        for name, tensor in llama_tensors("model.language_model.", seed=1).items()
        if "layers" in name
    }
    source = write_folder(tmp_path / "source", tower | tensors, 2, **config)
    report = convert(source, tmp_path / "converted", "interleaved", verify=True)
    assert report.converted == 2 * LAYERS
    assert same(all_tensors(tmp_path / "converted"), tower | by_hand(tensors))
    assert json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))["rope_pairing"] == "interleaved"


def test_two_stacks_of_layers_are_not_guessed_at(tmp_path: Path) -> None:
    tensors = llama_tensors("first.") | llama_tensors("second.")
    source = write_folder(tmp_path / "source", tensors)
    with pytest.raises(
        rope.CheckpointError, match=r"under 'first' and 'second' .* which of them is the language model"
    ):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


def test_layers_that_predict_further_tokens_come_along(tmp_path: Path) -> None:
    further = {name: tensor for name, tensor in llama_tensors("mtp.").items() if "layers.0." in name}
    tensors = llama_tensors() | further
    source = write_folder(tmp_path / "source", tensors)
    assert convert(source, tmp_path / "converted", "interleaved").converted == 2 * LAYERS + 2
    assert same(all_tensors(tmp_path / "converted"), by_hand(tensors))


def test_the_switch_of_a_text_config_is_set_where_it_stands(tmp_path: Path) -> None:
    text = known_config("deepseek_v3")
    model = build_known("deepseek_v3")
    model.save_pretrained(tmp_path / "source")
    config = {
        "model_type": "kimi_k25",
        "text_config": text.to_dict(),
        "vision_config": {"model_type": "kimi_k25_vision"},
    }
    if "kimi_k25" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no such family")
    (tmp_path / "source/config.json").write_text(json.dumps(config), encoding="utf-8")
    assert convert(tmp_path / "source", tmp_path / "converted", "half").runs
    after = json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))
    assert after["text_config"]["rope_interleave"] is False
    assert "rope_interleave" not in after


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_become_safetensors(parts: int, legacy: bool, tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied: torch has both names for one memory
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous().T  # columns first in memory
    source = tmp_path / "source"
    source.mkdir()
    write_config(source)
    where = {n: f"pytorch_model-{i % parts + 1:05}-of-{parts:05}.bin" for i, n in enumerate(tensors)}
    for file in dict.fromkeys(where.values()):
        part = {n: tensors[n] for n in tensors if where[n] == file}
        path = source / (file if parts > 1 else "pytorch_model.bin")
        torch.save(part, path, _use_new_zipfile_serialization=not legacy)
    if parts > 1:
        write_index(source / "pytorch_model.bin.index.json", where)
    report = convert(source, tmp_path / "converted", "interleaved", verify=True)
    assert report.left_behind == ()
    assert "logits not compared: the source's are not finite" in (report.verified or "")  # random bytes
    assert same(all_tensors(tmp_path / "converted"), by_hand(tensors))
    written = sorted(path.name for path in (tmp_path / "converted").iterdir())
    if parts == 1:
        assert written == ["config.json", "model.safetensors"]
    else:
        assert [n for n in written if "model-" in n] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        index = json.loads((tmp_path / "converted/model.safetensors.index.json").read_text(encoding="utf-8"))
        expected = {n: f.replace("pytorch_model", "model").replace(".bin", ".safetensors") for n, f in where.items()}
        assert index == {"metadata": {"total_size": 1, "mine": "too"}, "weight_map": expected}


def test_tied_weights(tmp_path: Path) -> None:
    model = build_known("gemma", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    expected = logits(load(tmp_path / "source"), tokens(24))
    convert(tmp_path / "source", tmp_path / "converted", "interleaved")
    convert(tmp_path / "converted", tmp_path / "back", "half")
    torch.testing.assert_close(logits(load(tmp_path / "back"), tokens(24)), expected, atol=0, rtol=0)


def test_the_single_file_counts_where_there_are_parts_too(source: Path, tmp_path: Path) -> None:
    """As transformers chooses."""
    tensors = llama_tensors(seed=5)
    save_file(tensors, source / "model.safetensors")
    report = convert(source, tmp_path / "converted", "interleaved")
    assert sorted(report.left_behind) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in (tmp_path / "converted").iterdir()) == [
        "config.json",
        "deep",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert same(all_tensors(tmp_path / "converted"), by_hand(tensors))


def test_safetensors_count_where_there_are_torch_files_too(source: Path, tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(1)}, source / "pytorch_model.bin")
    report = convert(source, tmp_path / "converted", "interleaved")
    assert report.left_behind == ("pytorch_model.bin",)


def test_a_snapshot_of_the_hubs_cache(source: Path, tmp_path: Path) -> None:
    """Its files are links to blobs beside it; the copy has files of its own."""
    repository = tmp_path / "hub" / "models--some--llama"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    shutil.copytree(source, snapshot)
    blobs.mkdir()
    for i, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        path.rename(blobs / str(i))
        path.symlink_to(os.path.relpath(blobs / str(i), path.parent))
    convert(snapshot, tmp_path / "converted", "interleaved")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    assert not [path for path in (tmp_path / "converted").rglob("*") if path.is_symlink()]
    (snapshot / "stray.json").symlink_to(tmp_path / "source" / "config.json")
    with pytest.raises(rope.FileError, match=r"'stray.json' leads out of the folder"):
        convert(snapshot, tmp_path / "again", "interleaved")


def test_unusual_tensors_pass_by(tmp_path: Path) -> None:
    """Of dtypes that torch has no name for, empty ones, buffers that old checkpoints hold."""
    tensors = llama_tensors() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8.0),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor(True),
    }
    source = write_folder(tmp_path / "source", tensors)
    path = source / "model.safetensors"
    data = path.read_bytes().replace(b'"dtype":"BOOL"', b'"dtype":"F8_E8M0"')
    length = int.from_bytes(data[:8], "little") + 3
    path.write_bytes(length.to_bytes(8, "little") + data[8:])
    convert(source, tmp_path / "converted", "interleaved")
    convert(tmp_path / "converted", tmp_path / "back", "half")
    assert (tmp_path / "back/model.safetensors").read_bytes() == path.read_bytes()
    assert (tmp_path / "converted/model.safetensors").read_bytes() != path.read_bytes()


# --- quantised weights -----------------------------------------------------------------------------------------------


def quantised(how: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A quantised Llama's tensors as their tools name them, and what its config says."""
    dtype = torch.int8 if "int8" in how else torch.float8_e4m3fn
    tensors = llama_tensors(dtype=dtype)
    draws = torch.Generator().manual_seed(3)
    config: dict[str, Any] = {"quant_method": "compressed-tensors"}
    for name, tensor in list(tensors.items()):
        if "proj" not in name:
            tensors[name] = torch.randn(tensor.shape, generator=draws, dtype=torch.bfloat16)
            continue
        rows = tensor.shape[0]
        if "per row" in how:
            tensors[f"{name}_scale"] = torch.rand(rows, 1, generator=draws)
        elif "per tensor" in how:
            tensors[f"{name}_scale"] = torch.rand(1, generator=draws)
            tensors[name.replace("weight", "input_scale")] = torch.rand(1, generator=draws)
        elif "blocks" in how:
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // DIM), -(-tensor.shape[1] // DIM), generator=draws)
            config = {"quant_method": "fp8", "weight_block_size": [DIM, DIM]}
        else:
            tensors[name.replace("weight", "SCB")] = torch.rand(rows, generator=draws)
            tensors[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return tensors, {"quantization_config": config}


def restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float, by each form's own formula."""
    out = {}
    for name, tensor in tensors.items():
        if "proj" not in name:
            out[name] = tensor.float()
        if not name.endswith("proj.weight"):
            continue
        weight = tensor.float().nan_to_num()
        if (scale := tensors.get(f"{name}_scale")) is not None:
            weight = weight * scale
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            weight = (
                weight * scale.repeat_interleave(DIM, 0).repeat_interleave(DIM, 1)[: len(weight), : weight.shape[1]]
            )
        if (scale := tensors.get(name.replace("weight", "SCB"))) is not None:
            weight = weight * scale[:, None] / 127
        out[name] = weight / weight.std()
    return out


@pytest.mark.parametrize("how", ["fp8 per tensor", "fp8 per row", "int8 per row", "fp8 in blocks", "LLM.int8"])
def test_quantised_weights_take_their_scales_along(how: str, tmp_path: Path) -> None:
    tensors, config = quantised(how)
    source = write_folder(tmp_path / "source", tensors, **config)
    convert(source, tmp_path / "converted", "interleaved", verify=True)
    found = all_tensors(tmp_path / "converted")
    expected = by_hand(restored(tensors))
    for name, tensor in restored(found).items():
        torch.testing.assert_close(tensor, expected[name])
    assert [name for name in tensors if not torch.equal(found[name].view(-1), tensors[name].view(-1))]
    convert(tmp_path / "converted", tmp_path / "back", "half")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_blocks_that_are_split_are_refused(tmp_path: Path) -> None:
    """Blocks of half a head: the rows of each go to both, which have scales of their own."""
    tensors, config = quantised("fp8 in blocks")
    config["quantization_config"]["weight_block_size"] = [DIM // 2, DIM]
    for name in [name for name in tensors if name.endswith("scale_inv")]:
        tensors[name] = tensors[name].repeat_interleave(2, 0)
    source = write_folder(tmp_path / "source", tensors, **config)
    with pytest.raises(
        rope.CheckpointError, match=r"[qk]_proj.weight_scale_inv' cannot be converted exactly: rows of one"
    ):
        convert(source, tmp_path / "converted", "interleaved")
    del config["quantization_config"]["weight_block_size"]
    write_config(source, **config)
    with pytest.raises(rope.CheckpointError, match=r"_scale_inv' has shape \(\d, 4\), but by the config \d\d rows;"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


@pytest.mark.parametrize(
    ("how", "replaced"),
    [
        ("GPTQ", {"qweight": (HIDDEN // 8, 64), "qzeros": (1, 8), "scales": (1, 64), "g_idx": (HIDDEN,)}),
        ("AWQ", {"qweight": (HIDDEN, 8), "qzeros": (1, 8), "scales": (1, 64)}),
        ("bitsandbytes", {"weight": (64 * HIDDEN // 2, 1), "weight.absmax": (64,), "weight.quant_map": (16,)}),
    ],
)
def test_packed_weights_are_refused_with_the_reason(
    how: str, replaced: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    tensors = llama_tensors()
    name = "model.layers.0.self_attn.q_proj.weight"
    del tensors[name]
    for key, shape in replaced.items():
        tensors[name.replace("weight", key)] = torch.zeros(shape, dtype=torch.int32)
    source = write_folder(tmp_path / "source", tensors)
    with pytest.raises(rope.CheckpointError, match=rf"q_proj.* packs several rows into one number \(.*{how}"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*lora_B.bias.*invalid shape|.*invalid shape.*lora_B.bias:UserWarning")  # lora_bias
@pytest.mark.parametrize("as_bin", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_adapters_of_peft(
    options: dict[str, Any], as_bin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and adapter converted each by itself, then put together by PEFT: equal logits of the merged models."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = build_known("llama", attention_bias=True)
    base.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    base = load(tmp_path / "base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        adapted = get_peft_model(base, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4)
    adapted.save_pretrained(tmp_path / "adapter", safe_serialization=not as_bin)
    assert (tmp_path / "adapter" / "adapter_model.bin").exists() == as_bin
    expected = logits(adapted.merge_and_unload(), tokens(24))
    assert (expected - logits(load(tmp_path / "base"), tokens(24))).abs().max() > 1e-2

    report = convert(tmp_path / "adapter", tmp_path / "new adapter", "interleaved", verify=True)
    assert report.converted == 4 * (1 + len(options))
    with pytest.raises(rope.CheckpointError, match="are interleaved already"):
        convert(tmp_path / "new adapter", tmp_path / "twice", "interleaved")
    convert(tmp_path / "base", tmp_path / "new base", "interleaved")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rope_pairing")
        found = PeftModel.from_pretrained(load(tmp_path / "new base"), str(tmp_path / "new adapter")).eval()
    turn_otherwise(monkeypatch, "llama", "interleaved")
    torch.testing.assert_close(logits(found.merge_and_unload(), tokens(24)), expected, atol=1e-4, rtol=0)
    convert(tmp_path / "new adapter", tmp_path / "back", "half")
    if not as_bin:
        assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == (
            tmp_path / "adapter" / "adapter_model.safetensors"
        ).read_bytes()


def test_an_adapter_that_names_no_model_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.zeros(1)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(rope.CheckpointError, match="an adapter that does not name the model it is for"):
        convert(source, tmp_path / "converted", "interleaved")
    save_file({"a": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(rope.CheckpointError, match="holds a model and an adapter; give each a folder of its own"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


# --- hostile and broken folders: refused by name before anything is written ------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def everything_in(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, lambda where: where.update(dict.fromkeys(where, name)))


def link_out(name: str) -> Callable[[Path], None]:
    """Move a file beside the folder, and have a link lead to it."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return change


def without(tensor: str) -> Callable[[Path], None]:
    """Take a tensor out of its part and out of the index."""

    def change(folder: Path) -> None:
        name = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][tensor]
        tensors = load_file(folder / name)
        del tensors[tensor]
        save_file(tensors, folder / name)
        edit_index(folder, lambda where: where.pop(tensor))

    return change


def with_tensor(tensor: str, *shape: int, file: str = FIRST, indexed: bool = True) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(load_file(folder / file) | {tensor: torch.zeros(shape)}, folder / file)
        if indexed:
            edit_index(folder, lambda where: where.update({tensor: file}))

    return change


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def configured(**overrides: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **overrides)


K = "model.layers.1.self_attn.k_proj.weight"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a name that leads up": (everything_in("../outside.safetensors"), "is not a valid file name in"),
    "an absolute name": (everything_in("/etc/passwd"), "'/etc/passwd' .* is not a valid file name in"),
    "a name in a folder below": (everything_in("deep/x.safetensors"), "is not a valid file name in"),
    "the folder itself": (everything_in(".."), "is not a valid file name in|leads out"),
    "an empty name": (everything_in(""), "'' is not a plain file"),
    "a null byte": (everything_in("a\0b.safetensors"), "is not a valid file name in .*null"),
    "a name that is too long": (everything_in("a" * 5000), "is not a valid file name in .*too long"),
    "a part linked from outside": (link_out(FIRST), f"'{FIRST}' leads out of the folder"),
    "a config linked from outside": (link_out("config.json"), "'config.json' leads out of the folder"),
    "an index linked from outside": (link_out(INDEX), f"'{INDEX}' leads out of the folder"),
    "another file linked from outside": (link_out("tokenizer.json"), "'tokenizer.json' leads out of the folder"),
    "a folder linked from outside": (lambda f: (f / "more").symlink_to("/etc"), "'more' leads out of the folder"),
    "a link to a folder": (lambda f: (f / "more").symlink_to("deep"), "'more' is not a plain file"),
    "a link to nothing": (lambda f: (f / "more").symlink_to("nothing"), "'more' is not a plain file"),
    "links in a circle": (lambda f: (f / "more").symlink_to("more"), "'more' is not "),
    "a pipe": (lambda f: os.mkfifo(f / "more"), "'more' is not a plain file"),
    "a part that is missing": (lambda f: (f / SECOND).unlink(), f"'{SECOND}' is missing"),
    "a part that is a folder": (
        lambda f: (f / SECOND).rename(f / "deep" / SECOND) and (f / "deep").rename(f / SECOND),
        f"'{SECOND}' is not a plain file",
    ),
    "no weights": (lambda f: (f / INDEX).unlink(), "holds no weights; looked for model.safetensors.index.json"),
    "a tensor in another part": (
        lambda f: edit_index(f, lambda w: w.update({K: FIRST if w[K] == SECOND else SECOND})),
        f"'{K}' should be in",
    ),
    "a tensor that no part has": (
        lambda f: edit_index(f, lambda w: w.update({"ghost": FIRST})),
        "'ghost' should be in",
    ),
    "a tensor twice": (with_tensor(K, 32, 64, indexed=False), f"'{K}' stands in"),
    "a tensor that the index lacks": (with_tensor("ghost", 1, indexed=False), "'ghost' in .* is not in"),
    "a key that is missing": (without(K), f"'{K.removesuffix('.weight')}' is missing in"),
    "a query that is missing": (
        without("model.layers.0.self_attn.q_proj.weight"),
        "layers.0.self_attn.q_proj' is missing",
    ),
    "an unknown tensor in an attention": (
        with_tensor("model.layers.0.self_attn.q_norm.weight", 16),
        "q_norm.* whether it rotates is not known",
    ),
    "an unknown parameter": (
        with_tensor("model.layers.0.self_attn.q_proj.oft_r", 16),
        "what a 'oft_r' holds is not known",
    ),
    "no map in the index": (rewritten(INDEX, lambda data: b"{}"), "has no weight_map"),
    "a map that is a list": (rewritten(INDEX, lambda data: b'{"weight_map": ["a"]}'), "has no weight_map"),
    "a map to numbers": (rewritten(INDEX, lambda data: b'{"weight_map": {"a": 1}}'), "has no weight_map"),
    "an index that is no JSON": (rewritten(INDEX, lambda data: data[:-5]), "cannot be read"),
    "an index that is no text": (rewritten(INDEX, lambda data: b"\xff\xfe"), "cannot be read"),
    "an index that is a list": (rewritten(INDEX, lambda data: b"[]"), "not a JSON object"),
    "an index that says a thing twice": (
        rewritten(INDEX, lambda data: b'{"weight_map": {"a": "b", "a": "c"}}'),
        "'a' occurs twice",
    ),
    "an index of many brackets": (rewritten(INDEX, lambda data: b"[" * 100_000), "cannot be read"),
    "a part cut short": (rewritten(SECOND, lambda data: data[:-1]), "is no whole safetensors file: the tensors end"),
    "a part cut in its header": (
        rewritten(SECOND, lambda data: data[:100]),
        "is no whole safetensors file: a header of",
    ),
    "a part that is longer": (
        rewritten(SECOND, lambda data: data + b"\0"),
        "is no whole safetensors file: the tensors end",
    ),
    "an empty part": (rewritten(SECOND, lambda data: b""), "is no whole safetensors file: a header of 0 bytes"),
    "a header of impossible length": (
        rewritten(SECOND, lambda data: b"\xff" * 8 + data[8:]),
        "is no whole safetensors file",
    ),
    "other heads in the config": (
        configured(num_key_value_heads=4),
        r"k_proj.weight' has shape \(32, 64\), but by the config 64 rows",
    ),
    "other dims in the config": (configured(head_dim=32), "proj.weight' has shape .* config and weights disagree"),
    "more layers in the config": (
        configured(num_hidden_layers=3),
        "'model.layers.2.self_attn.k_proj' is missing in .*, and 1 more",
    ),
    "no heads in the config": (
        configured(num_attention_heads=0),
        "the config of .* cannot be used|no model can be built",
    ),
    "words for numbers": (
        configured(num_attention_heads="four"),
        "the config of .* cannot be used|no model can be built",
    ),
    "negative sizes": (configured(hidden_size=-64), "the config of .* cannot be used|no model can be built"),
    "an unknown family": (configured(model_type="no_such_family"), "the config of .* cannot be used"),
    "a config that is no JSON": (rewritten("config.json", lambda data: data[:-5]), "config"),
    "no config": (lambda f: (f / "config.json").unlink(), "'config.json' is missing"),
    "a pairing that is none": (
        configured(rope_pairing="neox"),
        "rope_pairing in .* is 'neox'; known: half, interleaved",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_folders_are_refused(name: str, source: Path, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    change(source)
    with pytest.raises((rope.CheckpointError, rope.FileError), match=message):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


def test_families_without_rotation_are_refused(source: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=4, n_embd=64, vocab_size=97).to_dict()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(rope.UnsupportedModelError, match="no rotary position embedding"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


class Trap:
    """Pickled code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def without_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": "trap"}, r"cannot be read as tensors alone \(weights_only\)"),
        ([torch.zeros(1)], "does not hold tensors by name"),
        ({"a": 1}, "does not hold tensors by name"),
        ({1: torch.zeros(1)}, "does not hold tensors by name"),
        ({"a": torch.zeros(1).expand(10**12)}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(3, device="meta")}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "'a': safetensors has no name for torch.complex128"),
        ("short", "cannot be read as tensors alone"),
        ("garbage", "cannot be read as tensors alone"),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_that_are_not_tensors_alone_are_refused(
    content: Any, message: str, legacy: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_config(source)
    path = source / "pytorch_model.bin"
    if content == {"a": "trap"}:
        content = {"a": Trap(tmp_path / "sprung")}
    torch.save(
        llama_tensors() if isinstance(content, str) else content, path, _use_new_zipfile_serialization=not legacy
    )
    if content == "short":
        path.write_bytes(path.read_bytes()[:-200])
    elif content == "garbage":
        path.write_bytes(b"\x80\x02garbage" * 50)
    with pytest.raises(rope.CheckpointError, match=message):
        convert(source, tmp_path / "converted", "interleaved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# --- whole or not at all ---------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """A conversion that its user interrupted."""


@pytest.fixture
def begun(source: Path, tmp_path: Path) -> Path:
    """The unfinished folder of a conversion that was interrupted in its second part."""
    first = sum(tensor.numel() * 4 for tensor in load_file(source / FIRST).values())

    def progress(done: int, total: int) -> None:
        if done > first:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert(source, tmp_path / "converted", "interleaved", progress=progress)
    unfinished = tmp_path / ".converted.unfinished"
    assert not (tmp_path / "converted").exists()
    assert sorted(path.name for path in unfinished.iterdir()) == [FIRST, "rope-ext-plan.json"]
    return unfinished


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "a bit": lambda path: flip(path, -1),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "other metadata": lambda path: path.write_bytes(path.read_bytes().replace(b"hand", b"foot")),
    "another file": lambda path: save_file({"a": torch.zeros(1)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_going_on_checks_what_is_there(damage: str, begun: Path, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "expected", "interleaved")
    DAMAGE[damage](begun / FIRST)
    (begun / "stray.json").write_text("{}", encoding="utf-8")
    (begun / "stray").mkdir()
    before = (begun / FIRST).stat().st_ino
    keep = (begun / FIRST).open("rb")  # so that its number is not given to the file that takes its place
    seen: list[int] = []
    convert(source, tmp_path / "converted", "interleaved", resume=True, progress=lambda done, total: seen.append(done))
    assert content(tmp_path / "converted") == content(tmp_path / "expected")
    assert ((tmp_path / "converted" / FIRST).stat().st_ino == before) == (damage == "none")
    assert seen[-1] == sum(t.numel() * 4 for t in all_tensors(source).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "expected", "source"]
    keep.close()


def test_without_resume_it_begins_anew(begun: Path, source: Path, tmp_path: Path) -> None:
    flip(begun / FIRST, -1)
    convert(source, tmp_path / "converted", "interleaved")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    assert not begun.exists()


@pytest.mark.parametrize("plan", [b"", b'{"to": "interl', None])
def test_a_plan_that_was_not_finished_begins_anew(
    plan: bytes | None, begun: Path, source: Path, tmp_path: Path
) -> None:
    if plan is None:
        (begun / "rope-ext-plan.json").unlink()
    else:
        (begun / "rope-ext-plan.json").write_bytes(plan)
    convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


def test_a_changed_source_is_not_gone_on_with(begun: Path, source: Path, tmp_path: Path) -> None:
    flip(source / SECOND, -1)
    with pytest.raises(rope.FileError, match="was begun with have changed; start anew without resume"):
        convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert begun.exists()
    with pytest.raises(rope.FileError, match="was begun with have changed"):
        convert(source, tmp_path / "converted", "half", source="interleaved", resume=True)
    convert(source, tmp_path / "converted", "interleaved")
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


def test_a_full_disk_is_one_clear_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, left = content(source), [50_000]

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def limited(function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any, **options: Any) -> int:
            left[0] -= 10_000
            return full() if left[0] < 0 else function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", limited(os.copy_file_range))
        patch.setattr(os, "write", limited(os.write))
        with pytest.raises(rope.FileError, match=r"the disk of .*converted' is full; make room and go on with resume"):
            convert(source, tmp_path / "converted", "interleaved")
    assert not (tmp_path / "converted").exists()
    convert(source, tmp_path / "converted", "interleaved", resume=True)
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))
    assert content(source) == before
    for call in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(rope.FileError, match="is full; make room"):
                convert(source, tmp_path / call, "interleaved")
        assert not (tmp_path / call).exists()


def test_too_little_room_is_said_before(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(rope.FileError, match=r"0.0 GB are to be written to .*converted', where 0.0 GB are free"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


def test_a_place_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(rope.FileError, match=r"file' could not be read or written: (Not a directory|File exists)"):
        convert(source, tmp_path / "file" / "converted", "interleaved")


def test_two_cannot_write_one_destination(source: Path, tmp_path: Path) -> None:
    """The second one fails at once and disturbs nothing."""
    errors: list[str] = []

    def second(done: int, total: int) -> None:
        if not errors:
            command = [sys.executable, "-m", "rope_ext_hf", "convert", str(source), str(tmp_path / "converted")]
            run = subprocess.run([*command, "--to", "interleaved"], capture_output=True, text=True, check=False)
            errors.append(f"{run.returncode} {run.stderr}")

    convert(source, tmp_path / "converted", "interleaved", progress=second)
    assert errors[0].startswith("2 ")
    assert "another process is writing" in errors[0]
    assert same(all_tensors(tmp_path / "converted"), by_hand(all_tensors(source)))


def kill_many(source: Path, parent: Path, kills: int) -> None:
    """Conversions killed at points spread over all their dealings with the disk; prints what each of them left.

    For a process of its own: it forks, which costs less than as many starts of Python.
    """
    torch.set_num_threads(1)
    files.COPY_BLOCK = 5_000  # so that files are cut in their middle too
    convert(source, parent / "expected", "interleaved")
    expected, before = content(parent / "expected"), content(source)

    def count_or_kill(limit: int) -> list[int]:
        """Has this process end at that call."""
        calls = [0]

        def count() -> None:
            calls[0] += 1
            if calls[0] == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                count()
                return function(*args, **options)

            return call

        def hook(event: str, args: Any) -> None:
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile"):
                count()

        sys.addaudithook(hook)
        for name in ("write", "copy_file_range", "fsync", "close"):
            setattr(os, name, counted(getattr(os, name)))
        return calls

    def attempt(limit: int, resume: bool) -> int:
        """In a child; its calls, where it came to its end."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                calls = count_or_kill(limit)
                convert(source, parent / "converted", "interleaved", resume=resume)
                os.write(writer, str(calls[0]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        said = os.read(reader, 100)
        os.close(reader)
        return int(said) if os.WIFEXITED(status) else 0

    total = attempt(-1, False)
    found = []
    for i in range(kills):
        shutil.rmtree(parent / "converted", ignore_errors=True)
        finished = attempt(1 + i * total // kills, resume=i % 3 == 1)
        whole = (parent / "converted").exists()
        found.append(
            {
                "killed": not finished,
                "there": whole,
                "right": not whole or content(parent / "converted") == expected,
                "source": content(source) == before,
            }
        )
    shutil.rmtree(parent / "converted", ignore_errors=True)
    convert(source, parent / "converted", "interleaved", resume=True)
    print(json.dumps({"calls": total, "end": content(parent / "converted") == expected, "kills": found}))


def test_killed_at_any_point(source: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    code = "from pathlib import Path; from tests.test_checkpoint import kill_many; "
    code += f"kill_many(Path({str(source)!r}), Path({str(tmp_path / 'killed')!r}), 40)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["calls"] > 100
    assert found["end"]
    assert sum(kill["killed"] for kill in found["kills"]) >= 30  # one that goes on has fewer calls to be killed at
    assert all(kill["right"] and kill["source"] for kill in found["kills"])
    assert sum(kill["there"] for kill in found["kills"]) <= 2  # killed after the folder got its name
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["converted", "expected"]


def test_verify_compares_logits_where_there_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    with pytest.warns(UserWarning, match="does not run"):
        there = rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert "logits of both, loaded: equal to 0e+00" in (there.verified or "")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    back = rope.convert_checkpoint(tmp_path / "there", tmp_path / "back", "half", verify=True)
    assert "q.k of 3 of 5 layers" in (back.verified or "")
    assert "logits not compared: that takes 0.0 GB of memory" in (back.verified or "")


def test_verify_catches_wrong_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rope_ext_hf.checkpoints import verification as verifying

    monkeypatch.setattr(verifying, "MOST_LOGITS", -1.0)
    with pytest.raises(rope.CheckpointError, match="logits of what was written differ"):
        rope.convert_checkpoint("reference", tmp_path / "there", "interleaved", verify=True)
    assert not (tmp_path / "there").exists()

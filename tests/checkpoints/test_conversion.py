"""Conversions of a small Llama in every format, quantised too, and of adapters: the rows that move, and other files."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import rope_ext_hf as rope
from tests.support.checkpoint_folders import (
    DIM,
    HIDDEN,
    LAYERS,
    OTHER,
    SIZES,
    all_tensors,
    by_hand,
    content,
    convert,
    llama_tensors,
    load,
    rotate_otherwise,
    same,
    untouched,
    watch_reads,
    write_config,
    write_folder,
    write_index,
    write_source,
)
from tests.support.models import build, build_known, known_config, logits, tokens
from tests.support.oracles import Pairing
from tests.support.wrapped_text import unwrapped


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


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
    seen = watch_reads(monkeypatch)
    convert(source, tmp_path / "converted", "interleaved")
    rotating = [name for name in all_tensors(source) if "q_proj" in name or "k_proj" in name]
    norms = [name for name in all_tensors(source) if "input_layernorm" in name]  # the detection before it reads them
    assert sorted(seen) == sorted([*rotating, *rotating, *norms])


def test_weights_in_other_forms_are_left_behind_and_named(source: Path, tmp_path: Path) -> None:
    others = ["consolidated.safetensors", "model.gguf", "training_args.bin", "onnx/model.onnx", "original/params.json"]
    for name in others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"weights")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("not part of the model", encoding="utf-8")
    report = convert(source, tmp_path / "converted", "interleaved")
    assert sorted(report.skipped_files) == sorted(others)
    assert "not copied       consolidated.safetensors, model.gguf" in str(report)
    assert not [name for name in content(tmp_path / "converted") if name in others or ".git" in name]


def test_what_it_says(source: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"holds weights in the interleaved pairing, with which transformers does not run 'llama' models",
    ):
        report = rope.convert_checkpoint(source, tmp_path / "converted", "interleaved")
    assert json.loads(json.dumps(report.to_dict()))["loads_natively"] is False
    assert "4 of 21 reordered" in str(report)
    assert f"rope-ext convert {tmp_path / 'converted'} NEW --to half" in unwrapped(str(report))
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "converted", tmp_path / "back", "half", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes, report.bytes)


def test_converting_twice_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        rope.CheckpointError,
        match=r"are in the half pairing already: the config or the model family says so; .* --from interleaved",
    ):
        convert(source, tmp_path / "converted", "half")
    convert(source, tmp_path / "once", "interleaved")
    with pytest.raises(
        rope.CheckpointError, match="are in the interleaved pairing already: the config or the model family says so"
    ):
        convert(tmp_path / "once", tmp_path / "converted", "interleaved")
    with pytest.raises(rope.CheckpointError, match="are in the interleaved pairing already: you stated it"):
        convert(source, tmp_path / "converted", "interleaved", source_pairing="interleaved")
    assert untouched(tmp_path)
    convert(tmp_path / "once", tmp_path / "twice", "interleaved", force=True)
    assert same(all_tensors(tmp_path / "twice"), by_hand(by_hand(all_tensors(source))))
    convert(source, tmp_path / "said", "half", source_pairing="interleaved")  # the config is wrong, and its user knows
    convert(tmp_path / "said", tmp_path / "undone", "interleaved", source_pairing="half")
    assert same(all_tensors(tmp_path / "undone"), all_tensors(source))


@pytest.mark.parametrize(("name", "pairing"), [("llama", "half"), ("gptj", "interleaved"), ("glm", "interleaved")])
def test_hf_is_the_pairing_that_the_class_runs(name: str, pairing: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    build(name).save_pretrained(source)
    with pytest.raises(rope.CheckpointError, match=f"are in the {pairing} pairing already"):
        convert(source, tmp_path / "converted", "hf")
    convert(source, tmp_path / "other", OTHER[cast("Pairing", pairing)])
    report = convert(tmp_path / "other", tmp_path / "back", "hf")
    assert (report.to, report.loads_natively) == (pairing, True)
    assert same(all_tensors(tmp_path / "back"), all_tensors(source))


HEADS: dict[str, tuple[int, int]] = {
    "llama": (4, 2),
    "gpt_neox": (4, 4),
    "glm": (4, 2),
    "deepseek_v3": (4, 1),  # all heads share the part of a key that rotates
}


@pytest.mark.parametrize("name", HEADS)
def test_the_report_states_heads(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "source")
    to = "half" if name in ("glm", "deepseek_v3") else "interleaved"
    report = convert(tmp_path / "source", tmp_path / "converted", to)
    config = model.config
    heads, key_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert report.heads == heads
    assert report.key_heads == (1 if name == "deepseek_v3" else key_heads)
    assert f"heads            {heads} query heads, " in str(report)


TOKENIZERS: dict[str, tuple[dict[str, bytes], str]] = {
    "none": ({}, "none; the source has none"),
    "sentencepiece": (
        {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"},
        "tokenizer.model copied as it is; transformers reads it with the packages sentencepiece and protobuf",
    ),
    "both": (
        {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "tokenizer.json": b"{}"},
        "tokenizer.json and tokenizer.model copied as they are",
    ),
    "Llama 3": ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "copy tokenizer.json and tokenizer_config.json of"),
    "unknown": ({"tokenizer.model": bytes(100)}, "tokenizer.model not copied"),
}


@pytest.mark.filterwarnings("ignore:Meta's format has no place")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_report_says_what_became_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    files, text = TOKENIZERS[name]
    build("llama").save_pretrained(tmp_path / "source")
    for file, content_ in files.items():
        (tmp_path / "source" / file).write_bytes(content_)
    report = convert(tmp_path / "source", tmp_path / "converted", "interleaved")
    assert text in report.tokenizer
    assert report.tokenizer in unwrapped(str(report))
    to_meta = convert(tmp_path / "source", tmp_path / "meta", "meta")
    needs = "Meta's code reads tokenizer.model" in to_meta.tokenizer
    assert needs == (not (tmp_path / "meta" / "tokenizer.model").exists() and bool(files))


def test_wrong_words_and_places_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(rope.CheckpointError, match="converted to half, interleaved, hf or meta, got to='neox'"):
        convert(source, tmp_path / "converted", "neox")
    with pytest.raises(rope.CheckpointError, match="source_pairing must be one of half, interleaved, got 'neox'"):
        convert(source, tmp_path / "converted", "half", source_pairing="neox")
    for dst in (source, tmp_path):
        with pytest.raises(rope.FileError, match="exists already; give a new folder"):
            convert(source, dst, "interleaved")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(rope.FileError, match="exists already"):
        convert(source, tmp_path / "dangling", "interleaved")
    with pytest.raises(rope.FileError, match="lies inside the source"):
        convert(source, source / "deep" / "converted", "interleaved")
    for nothing in ("no/such/folder", str(tmp_path / "nothing"), "nothing"):
        with pytest.raises(rope.CheckpointError, match=r"no such model folder|neither a folder here"):
            convert(Path(nothing), tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)
    assert untouched(source)


# --- several parts, further formats --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
def test_a_vision_tower_is_left_alone(tmp_path: Path) -> None:
    """They may have the same names and shapes as those of the language model."""
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
    with pytest.raises(rope.CheckpointError, match=r"under 'first' and 'second' .*which of them is the language model"):
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
    assert convert(tmp_path / "source", tmp_path / "converted", "half").loads_natively
    after = json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))
    assert after["text_config"]["rope_interleave"] is False
    assert "rope_interleave" not in after


@pytest.mark.slow
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
    assert report.skipped_files == ()
    assert "logits not compared: those of the source are not finite" in (report.verified or "")  # random bytes
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
    """transformers makes the same choice."""
    tensors = llama_tensors(seed=5)
    save_file(tensors, source / "model.safetensors")
    report = convert(source, tmp_path / "converted", "interleaved")
    assert sorted(report.skipped_files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
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
    assert report.skipped_files == ("pytorch_model.bin",)


def test_a_snapshot_of_the_hubs_cache(source: Path, tmp_path: Path) -> None:
    """Its files are links to blobs beside it; the copy has real files."""
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
    """They are tensors of dtypes that torch does not have, empty tensors, and buffers that old checkpoints hold."""
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
    """Return the tensors of a quantised Llama, named as its tool names them, and the entry of its config."""
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
    """Return the weights in float, by the formula of each form."""
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
    """The rows of each block of half a head would go to both blocks, which have different scales."""
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*lora_B.bias.*invalid shape|.*invalid shape.*lora_B.bias:UserWarning")  # lora_bias
@pytest.mark.parametrize("as_bin", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_adapters_of_peft(
    options: dict[str, Any], as_bin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and adapter are each converted alone and then merged by PEFT: the logits are equal."""
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
    with pytest.raises(rope.CheckpointError, match="are in the interleaved pairing already"):
        convert(tmp_path / "new adapter", tmp_path / "twice", "interleaved")
    convert(tmp_path / "base", tmp_path / "new base", "interleaved")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rope_pairing")
        found = PeftModel.from_pretrained(load(tmp_path / "new base"), str(tmp_path / "new adapter")).eval()
    rotate_otherwise(monkeypatch, "llama", "interleaved")
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
    with pytest.raises(rope.CheckpointError, match="an adapter without the name of its model"):
        convert(source, tmp_path / "converted", "interleaved")
    save_file({"a": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(rope.CheckpointError, match="holds a model and an adapter; give each a folder of its own"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)

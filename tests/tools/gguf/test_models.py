"""Models in GGUF files: what is loaded equals the model that was written, and all else ends in a clear error."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, FileError
from rope_ext_hf.files.model_folders import model_folder
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer
from rope_ext_hf.runs.folder.model_digest import model_digest
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.gguf.headers import read_file_rope
from rope_ext_hf.tools.gguf.models import check_rotation
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support.models import logits, tokens
from tests.tools.support.gguf_models import LENGTH, THETA, write_llama

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "small.Q8_0.gguf"


@pytest.fixture
def model(file: Path) -> LlamaForCausalLM:
    """The model that is in `file`."""
    return write_llama(file)


def test_a_loaded_model_is_the_one_in_the_file(file: Path, model: LlamaForCausalLM) -> None:
    ids = tokens(40, batch=2) % 250
    expected = logits(model, ids)
    loaded = [
        rope.from_pretrained(file),
        rope.from_pretrained(file.parent, gguf_file=file.name),
        rope.from_pretrained(file.parent.parent, gguf_file=file.name, subfolder="models"),
        load_model(str(file)),
    ]
    for each in loaded:
        torch.testing.assert_close(logits(each, ids), expected, atol=1e-5, rtol=1e-5)
        assert each.config.max_position_embeddings == LENGTH
    for over in (rope.from_pretrained(file, "yarn", factor=4.0), rope.patch(loaded[1], "yarn", factor=4.0)):
        patched = rope.patch(model, "yarn", factor=4.0)
        torch.testing.assert_close(logits(over, ids), logits(patched, ids), atol=1e-5, rtol=1e-5)
        assert (logits(over, ids) - expected).abs().max() > 1e-2
        rope.unpatch(model)


def test_weights_are_those_of_the_named_folder(
    file: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers reads a file of this name in the current folder instead."""
    here = tmp_path / "here"
    here.mkdir()
    write_llama(here / file.name, seed=1)
    monkeypatch.chdir(here)
    ids = tokens(8) % 250
    loaded = rope.from_pretrained(file.parent, gguf_file=file.name)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), atol=1e-5, rtol=1e-5)


def test_the_digest_of_a_run_does_not_depend_on_the_place(file: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    other = tmp_path / "renamed.gguf"
    other.write_bytes(file.read_bytes())
    first, second = (AutoModelForCausalLM.from_pretrained(each.parent, gguf_file=each.name) for each in (file, other))
    assert model_digest(first) == model_digest(second)
    assert model_digest(load_model(file)) == model_digest(load_model(other))


def test_the_tokenizer_is_that_of_the_file(file: Path, model: LlamaForCausalLM) -> None:
    assert load_tokenizer(file)("thx").input_ids == [259, load_tokenizer(file)("x").input_ids[0]]


@pytest.mark.parametrize("patched", [False, True])
def test_saving_what_transformers_loaded_names_the_way_out(
    patched: bool, file: Path, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    rope.patch(loaded, "ntk", factor=2.0)
    if not patched:
        rope.unpatch(loaded)
    if not hasattr(loaded, "hf_quantizer"):
        pytest.skip("this transformers saves a model from a GGUF file")
    with pytest.raises(CheckpointError, match="cannot be saved") as caught:
        loaded.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert f"rope_ext_hf.from_pretrained({str(file)!r})" in str(caught.value)
    assert f"`rope-ext gguf {file} OUT.gguf --method NAME`" in str(caught.value)
    assert f"`rope-ext convert {file} FOLDER --to hf --dequantize bfloat16`" in str(caught.value)


def test_what_was_loaded_here_is_saved_unpacked(file: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids = tokens(90) % 250
    rope.from_pretrained(file).save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(plain, ids), logits(model, ids))
    rope.from_pretrained(file, "linear", factor=2.0).save_pretrained(tmp_path / "patched")
    patched = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    expected = logits(rope.patch(model, "linear", factor=2.0), ids)
    torch.testing.assert_close(logits(patched, ids), expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_is_loaded_onto_a_file(file: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens(20) % 250
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(rope.from_pretrained(file, "linear", factor=2.0), settings)
    adapted.save_pretrained(tmp_path / "adapter")
    for loaded in (rope.from_pretrained(tmp_path / "adapter"), load_model(tmp_path / "adapter")):
        torch.testing.assert_close(logits(loaded, ids), logits(adapted, ids), atol=1e-5, rtol=1e-5)
    assert rope.describe(load_empty(tmp_path / "adapter")).method == "linear"
    assert load_tokenizer(tmp_path / "adapter")("thx").input_ids == load_tokenizer(file)("thx").input_ids


def test_folders_name_their_files(file: Path, model: LlamaForCausalLM) -> None:
    for load in (rope.from_pretrained, load_empty, model_folder):
        with pytest.raises(CheckpointError, match="give the path of the file") as caught:
            load(file.parent)
        assert str(file) in str(caught.value)
    (file.parent / "a.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the folder has a\.gguf, small\.Q8_0\.gguf"):
        rope.from_pretrained(file.parent)
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    assert load_empty(file.parent).config.num_hidden_layers == 1


def damaged(whole: bytes, path: Path) -> Path:
    path.write_bytes(whole)
    return path


def test_other_paths_are_errors_of_one_line(file: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    whole = file.read_bytes()
    write_llama(tmp_path / "part.gguf", keys={"split.count": 3})
    write_llama(tmp_path / "deep.gguf", keys={"block_count": 10**9})
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "out.gguf").symlink_to(file)
    loads: dict[str, tuple[Any, dict[str, Any]]] = {
        "no such": (tmp_path / "gone.gguf", {}),
        "no such GGUF file": (tmp_path / "link.gguf", {}),
        "one of 3 files of a split": (tmp_path / "part.gguf", {}),
        "layers": (tmp_path / "deep.gguf", {}),
        "cannot be read": (damaged(whole[:100], tmp_path / "short.gguf"), {}),
        "not a little-endian GGUF": (damaged(b"GGML" + whole[4:], tmp_path / "magic.gguf"), {}),
        "too many": (damaged(whole[:16] + struct.pack("<Q", 2**60) + whole[24:], tmp_path / "keys.gguf"), {}),
        "ends before what its header": (damaged(whole[: len(whole) // 2], tmp_path / "half.gguf"), {}),
        "leads out of the folder": (file.parent, {"gguf_file": "../part.gguf"}),
        "out.gguf' leads out of the folder": (tmp_path / "folder", {"gguf_file": "out.gguf"}),
        "is missing in": (file.parent, {"gguf_file": "other.gguf"}),
        "leave out gguf_file": (file, {"gguf_file": file.name}),
        "must be the name of a file": (file.parent, {"gguf_file": 3}),
    }
    for message, (path, arguments) in loads.items():
        with pytest.raises((CheckpointError, FileError), match=message) as caught:
            rope.from_pretrained(path, **arguments)
        assert "\n" not in str(caught.value)
        if not arguments:
            with pytest.raises(CheckpointError, match=message):
                load_empty(path)


def test_the_rope_of_a_file_is_the_one_that_it_states(file: Path) -> None:
    """transformers reads no scaling from a GGUF file."""
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_llama(file, keys=scaling)
    described = rope.describe(load_empty(file))
    assert (described.method, described.params["factor"], described.theta) == ("linear", 4.0, THETA)
    ids = tokens(30) % 250
    plain = write_llama(file.with_name("plain.gguf"))
    plain.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}
    scaled = LlamaForCausalLM(plain.config).eval()
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(logits(rope.from_pretrained(file), ids), logits(scaled, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "params"), [("cope", {}), ("cope", {"hard": True}), ("nope", {"recalibrated": 1})])
def test_pairs_that_a_file_stops_are_read_as_stopped(method: str, params: dict[str, Any], file: Path) -> None:
    model = write_llama(file)
    target = make_target(open_model(model), method, **params)
    (divisors,) = find_engine("gguf").config_for(target).gguf_tensors.values()
    rope.patch(model, method, **params)
    write_llama(file, tensors={"rope_freqs.weight": list(divisors)})
    loaded, ids = rope.from_pretrained(file), tokens(90) % 250
    wavelengths = [math.inf if math.isinf(each) else pytest.approx(each) for each in rope.describe(model).wavelengths]
    assert math.inf in wavelengths
    assert list(rope.describe(loaded).wavelengths) == wavelengths
    model.load_state_dict(rope.unpatch(loaded).state_dict())
    torch.testing.assert_close(logits(rope.from_pretrained(file), ids), logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"rope.scaling.type": "other", "rope.scaling.factor": 2.0}, {}, "rope.scaling.type other"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier 0.1"),
        ({}, {"rope_freqs.weight": [1.0, 2.0]}, "2 divisors of frequencies for 8 rotated pairs"),
    ],
)
def test_a_rope_that_transformers_does_not_compute_is_refused(
    keys: dict[str, Any], tensors: dict[str, list[float]], message: str, file: Path
) -> None:
    write_llama(file, keys=keys, tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        load_empty(file)


@pytest.mark.parametrize("changed", [{"rope.freq_base": 1e4}, {"rope.scale_linear": 2.0}])
def test_another_rotation_than_the_stated_one_is_refused(changed: dict[str, float], file: Path) -> None:
    """For an architecture whose keys transformers reads otherwise, or not at all."""
    model = write_llama(file)
    stated = read_file_rope(file)
    check_rotation(rope.fingerprint(model), stated, file)
    with pytest.raises(CheckpointError, match=r"another RoPE .*\(theta 50000, 16 dims\) than the file states"):
        check_rotation(rope.fingerprint(model), replace(stated, keys={**stated.keys, **changed}), file)

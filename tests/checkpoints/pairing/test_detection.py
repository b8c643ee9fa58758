"""Detection of the pairing. benchmarks/detection.py measures it on trained models of more kinds."""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.pairing import detection
from rope_ext_hf.checkpoints.pairing.detection import combine_evidence, pairing_correlations
from rope_ext_hf.checkpoints.pairing.pairing_report import TextLosses
from rope_ext_hf.checkpoints.pairing.text_losses import SPAN_TOKENS, SPANS
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.reference import path
from rope_ext_hf.rotary.pairing_names import PAIRINGS
from tests.support.checkpoint_folders import watch_reads
from tests.support.models import FAMILIES, ROTATING, build, build_known, plant_pairs
from tests.support.planted_pairs import PLANTED, planted, separate

ATTENTION = "model.layers.{}.self_attn.{}.weight"


def bundled() -> Any:
    return rope.from_pretrained(path(), dtype=torch.float32)


def converted(model: Any) -> Any:
    """Return the model with weights in the pairing that its class does not run, and no record of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope.convert(model, "interleaved")
    del model.config.rope_pairing
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model and its conversion."""
    made = tmp_path_factory.mktemp("detect") / "interleaved"
    with pytest.warns(UserWarning, match="does not run"):
        rope.convert_checkpoint(path(), made, "interleaved")
    return {"half": path(), "interleaved": made}


def changed(folder: Path, new: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Return a copy of a folder with tensors changed by a function."""
    shutil.copytree(folder, new)
    save_file(change(load_file(folder / "model.safetensors")), new / "model.safetensors", {"format": "pt"})
    return new


# --- trained weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_bundled_model_and_its_conversion(folders: dict[str, Path], pairing: str) -> None:
    report = rope.detect_pairing(folders[pairing])
    assert (report.pairing, report.stated, report.reason) == (pairing, pairing, None)
    assert report.confidence > 0.9999
    assert [layer.name for layer in report.layers] == [f"model.layers.{i}.self_attn" for i in range(5)]
    assert all((layer.half > layer.interleaved) == (pairing == "half") for layer in report.layers)
    assert abs(report.score) > 0.09  # 0.099 and -0.100 when this was written


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_loaded_patched_and_with_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model = bundled()
    plain = rope.detect_pairing(model)
    assert plain.pairing == "half"
    assert rope.detect_pairing(rope.patch(model, "yarn", factor=4)).layers == plain.layers
    rope.unpatch(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    found = rope.detect_pairing(adapted)
    assert (found.pairing, found.score) == ("half", plain.score)


def test_what_the_config_says_is_not_asked() -> None:
    report = rope.detect_pairing(converted(bundled()))
    assert (report.pairing, report.stated) == ("interleaved", "half")
    assert "the config or the model family says half" in str(report)


def test_half_precision_and_torchs_own_files(tmp_path: Path) -> None:
    shutil.copytree(path(), tmp_path / "bin")
    tensors = load_file(path() / "model.safetensors")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "bin" / "pytorch_model.bin")
    assert rope.detect_pairing(tmp_path / "bin").pairing == "half"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        (torch.float8_e4m3fn, (1, 256)),
        (torch.int8, (1, 256)),
        (torch.float8_e4m3fn, (64, 128)),
        (torch.float8_e4m3fn, (256, 256)),
    ],
)
def test_quantised_weights_with_scales(tmp_path: Path, dtype: torch.dtype, block: tuple[int, int]) -> None:
    """They have a scale per row, per block, or (the queries, which have 256 rows) per tensor."""

    def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
            weight = tensors[name].float()
            rows, columns = min(block[0], len(weight)), block[1]
            blocks = weight.reshape(len(weight) // rows, rows, -1, columns)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 100
            tensors |= {name: (blocks / scale).to(dtype).reshape(weight.shape), f"{name}_scale_inv": scale[:, 0, :, 0]}
        return tensors

    folder = changed(path(), tmp_path / "few", quantised)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if block[0] > 1:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    report = rope.detect_pairing(folder)
    assert report.pairing == "half"
    assert report.score == pytest.approx(rope.detect_pairing(path()).score, abs=0.01)


@pytest.mark.filterwarnings("ignore:Meta's format has no place:UserWarning")
def test_metas_format(tmp_path: Path) -> None:
    rope.convert_checkpoint(path(), tmp_path / "meta", "meta")
    report = rope.detect_pairing(tmp_path / "meta")
    assert (report.pairing, report.stated) == ("interleaved", "interleaved")
    with pytest.raises(rope.CheckpointError, match="convert them first, or give no text"):
        rope.detect_pairing(tmp_path / "meta", text="a text")


def test_few_layers_are_read_and_little_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=20)
    model.save_pretrained(tmp_path)
    seen = watch_reads(monkeypatch)
    report = rope.detect_pairing(tmp_path)
    layers = [0, 3, 5, 8, 11, 14, 16, 19]
    assert [layer.name for layer in report.layers] == [f"model.layers.{i}.self_attn" for i in layers]
    assert {name.split(".")[-2] for name in seen} == {"q_proj", "k_proj", "input_layernorm"}
    assert len(seen) == 3 * len(layers)


# --- weights that do not tell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_do_not_tell(name: str) -> None:
    for seed in range(4):
        report = rope.detect_pairing(build(name, seed=seed))
        assert report.pairing is None
        assert report.reason == "the difference between the pairings may be chance"
        assert "undecided" in str(report)


@pytest.mark.parametrize("name", ROTATING)
def test_every_family_of_the_table_is_read(name: str) -> None:
    report = rope.detect_pairing(build_known(name))
    assert report.layers
    assert report.pairing is None


def test_a_third_arrangement_is_not_guessed_at() -> None:
    model = bundled()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                weight.copy_(weight.unflatten(0, (-1, 64))[:, order].flatten(0, 1))
    assert rope.detect_pairing(model).pairing is None


def test_layers_that_contradict_each_other_do_not_tell() -> None:
    model, other = bundled(), converted(bundled())
    for index in (1, 3):
        model.model.layers[index] = other.model.layers[index]
    report = rope.detect_pairing(model)
    assert report.pairing is None
    assert [layer.half > layer.interleaved for layer in report.layers] == [True, False, True, False, True]


def test_a_quarter_of_the_layers_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(differences: list[float]) -> rope.PairingReport:
        model = build("llama", num_hidden_layers=len(differences))
        found = iter(differences)
        answers = lambda *arguments: np.array([[next(found), 0.0]]).repeat(200, 0)  # noqa: E731
        monkeypatch.setattr(detection, "pairing_correlations", answers)
        return rope.detect_pairing(model)

    assert verdict([0.3, 0.3, 0.3, -0.05]).pairing == "half"
    assert verdict([-0.3, -0.3, -0.3, 0.05]).pairing == "interleaved"
    divided = verdict([0.3, 0.3, -0.05, -0.05])
    assert (divided.pairing, divided.reason) == (None, "2 of 4 layers contradict the others")


@pytest.mark.slow
def test_packed_damaged_and_missing_weights_do_not_tell(tmp_path: Path) -> None:
    name = ATTENTION.format(2, "q_proj")

    def verdict(label: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> str:
        report = rope.detect_pairing(changed(path(), tmp_path / label, change))
        assert report.pairing is None
        return report.reason or ""

    assert "packed into torch.uint8" in verdict("bytes", lambda t: t | {name: t[name].to(torch.uint8)})
    assert "packed into torch.int8" in verdict("no scale", lambda t: t | {name: t[name].to(torch.int8)})
    assert "packed into torch.uint8" in verdict(
        "4 bits", lambda t: t | {name: torch.zeros(8192 * 4, 1, dtype=torch.uint8)[:9000]}
    )
    assert "not finite" in verdict("nan", lambda t: t | {name: t[name] * torch.nan})
    assert "config and weights disagree" in verdict("shape", lambda t: t | {name: t[name][:96].clone()})
    norm = "model.layers.2.input_layernorm.weight"
    assert "config and weights disagree" in verdict("norm", lambda t: t | {norm: t[norm][:7].clone()})
    gptq = name.replace(".weight", ".qweight")
    without = verdict("gptq", lambda t: {k: v for k, v in t.items() if k != name} | {gptq: torch.zeros(32, 256)})
    assert "packed, or of an adapter" in without


def test_two_dims_are_one_pair_either_way() -> None:
    found = pairing_correlations(torch.randn(4, 2, 8).numpy(), torch.randn(2, 2, 8).numpy(), np.ones(1))
    assert found.tolist() == [[0.0, 0.0]] * 4


# --- planted pairs: that the right rows of every kind of tensor are looked at -----------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_pairs_are_found(name: str, pairing: str) -> None:
    model = planted(name, pairing)
    report = rope.detect_pairing(model)
    assert report.pairing == pairing
    assert report.confidence > 0.9999


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", ["gptj", "codegen", "dbrx"])
def test_planted_pairs_are_found_behind_other_names(name: str, pairing: str) -> None:
    """Norms have other names, and CodeGen stores queries, values and keys of two heads in each of four parts."""
    model = build_known(name, num_hidden_layers=4)
    with torch.no_grad():
        for index in range(4):
            if name == "dbrx":
                weight = model.transformer.blocks[index].norm_attn_norm.attn.Wqkv.weight
                plant_pairs(weight[:64].view(2, 2, 16, 64), weight[64:96].view(2, 16, 64), pairing)
                continue
            attention = model.transformer.h[index].attn
            if name == "gptj":
                queries, keys = (getattr(attention, f"{side}_proj").weight.view(4, 16, 64) for side in "qk")
                plant_pairs(queries[:, None, :8], keys[:, :8], pairing)
            else:
                for part in attention.qkv_proj.weight.view(4, 3, 2, 8, 64):
                    plant_pairs(part[0][:, None, :4], part[2][:, :4], pairing)
    report = rope.detect_pairing(model)
    assert (report.pairing, report.stated) == (pairing, "half" if name == "dbrx" else "interleaved")


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_planted_pairs_are_found_through_a_latent(pairing: str) -> None:
    """The queries of DeepSeek read a latent: their likeness to the keys shows after both projections only."""
    model = build("deepseek_v3", num_hidden_layers=4, qk_rope_head_dim=16)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            queries = attention.q_b_proj.weight.view(1, 4, 24, 32)[:, :, 8:]  # 8 dims before do not rotate
            keys = attention.kv_a_proj_with_mqa.weight[16:].view(1, 16, 64)  # they follow a latent of 16
            down = torch.linalg.qr(attention.q_a_proj.weight.T).Q.T  # (32, 64) with orthonormal rows
            attention.q_a_proj.weight.copy_(down)
            attention.q_a_layernorm.weight.uniform_(0.5, 1.5)
            shared = torch.zeros(1, 16, 32)
            plant_pairs(queries, shared, pairing)
            keys += 0.5 * shared @ down
    assert rope.detect_pairing(model).pairing == pairing


def test_a_norm_does_what_its_family_does() -> None:
    """Gemma multiplies by 1 + weight: pairs where the weight is 0, and nothing but noise where it is -1."""
    model = build("gemma2", num_hidden_layers=4)
    with torch.no_grad():
        for layer in model.model.layers:
            queries, keys = separate(layer.self_attn)
            layer.input_layernorm.weight[:32] = -1.0
            plant_pairs(queries[..., 32:], keys[..., 32:], "half")
            queries[..., :32] = 50 * torch.randn(queries[..., :32].shape)
            keys[..., :32] = 50 * torch.randn(keys[..., :32].shape)
    assert rope.detect_pairing(model).pairing == "half"


# --- what a text says -------------------------------------------------------------------------------------------------

TEXT = stdlib_held_out()[0].text


@pytest.mark.slow
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_text_says_the_same(folders: dict[str, Path], pairing: str) -> None:
    report = rope.detect_pairing(folders[pairing], text=TEXT)
    assert report.pairing == pairing
    assert report.text is not None
    assert report.text.pairing == pairing
    worse, better = sorted([report.text.half, report.text.interleaved], reverse=True)
    assert worse - better > 1.5  # nats per byte: 3.55 and 1.59 when this was written
    assert report.text.tokens == SPANS * (SPAN_TOKENS - 1)
    assert f"perplexity       half {math.exp(report.text.half):.4g}, interleaved" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "yarn", "dynamic-yarn"])
def test_the_weights_are_put_back(method: str | None) -> None:
    model = bundled().train()
    model.model.layers[1].eval()
    if method is not None:
        rope.patch(model, method, target_length=1024)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    assert rope.detect_pairing(model, text=TEXT).text is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes


@pytest.mark.slow
def test_the_weights_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bundled()
    before = copy.deepcopy(model.state_dict())
    forward, calls = model.forward, iter(range(SPANS + 3))

    def failing(**arguments: Any) -> Any:
        if next(calls) == SPANS + 2:  # in the other order already
            raise KeyboardInterrupt
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        rope.detect_pairing(model, text=TEXT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_model_that_has_learned_nothing_does_not_tell_by_a_text_either() -> None:
    model = bundled()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)
    report = rope.detect_pairing(model, text=TEXT)
    assert report.pairing is None
    assert report.text is not None
    assert report.text.pairing is None


def test_weights_and_text_are_weighed_together() -> None:
    base = rope.detect_pairing(path())
    unsure = replace(base, pairing=None, confidence=0.5, reason="chance")
    says = {
        "half": TextLosses(1.0, 3.0, 0.1, 99, "half"),
        "interleaved": TextLosses(3.0, 1.0, 0.1, 99, "interleaved"),
    }
    mute = TextLosses(3.0, 3.0, 0.1, 99, None)
    assert combine_evidence(base, says["half"]).pairing == "half"
    assert combine_evidence(base, mute).pairing == "half"
    assert combine_evidence(base, says["interleaved"]).pairing is None
    assert "the text interleaved" in (combine_evidence(base, says["interleaved"]).reason or "")
    found = combine_evidence(unsure, says["interleaved"])
    assert (found.pairing, found.reason) == ("interleaved", None)
    assert found.confidence > 0.9999
    assert combine_evidence(unsure, mute).reason == "chance"


def test_texts_that_cannot_be_read() -> None:
    with pytest.raises(rope.CorpusError, match="the text has 5 tokens; at least 512 are needed"):
        rope.detect_pairing(path(), text="short")
    with pytest.raises(rope.CorpusError, match="give one"):
        rope.detect_pairing(build("llama"), text=TEXT)


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report() -> None:
    report = rope.detect_pairing(path(), text=TEXT)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["heads"] == 4
    lines = str(report).splitlines()
    assert lines[0] == f"{path()}: half, confidence above 0.9999"
    assert sum("self_attn" in line for line in lines) == 5


def test_folders_that_are_not_there() -> None:
    with pytest.raises(rope.CheckpointError, match="no such model folder"):
        rope.detect_pairing("./nowhere")

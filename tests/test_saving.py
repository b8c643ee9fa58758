"""What `save_pretrained` of a patched model leaves behind: the same model for plain transformers, or a clear stop."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError
from tests.models import FAMILIES, THETA, TRAINED, build, dynamic_cases, logits, static_cases, tokens

LONG = 4 * TRAINED
FAR = 16 * TRAINED
TOLERANCE = 1e-4  # of logits, float32, up to 256 positions
FREQUENCIES = 2e-5  # relative, of inverse frequencies

every_family = pytest.mark.parametrize("name", FAMILIES)
STATIC = [(name, which) for name in FAMILIES for which in static_cases(name)]
DYNAMIC = [(name, which) for name in FAMILIES for which in dynamic_cases(name)]
ON_THE_WAY = [("llama", "yarn"), ("gemma3", "linear"), ("phi3", "ntk"), ("mixtral", "by-parts"), ("glm", "llama3")]

# Run in a process that never imports the package: loads every folder named in the manifest and notes what it finds.
PLAIN_PROCESS = """
import json, logging, sys
from pathlib import Path
import torch, transformers

root = Path(sys.argv[1])
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
transformers.utils.logging.get_logger("transformers").addHandler(handler)
transformers.utils.logging.disable_progress_bar()
found = {}
for folder, length in json.loads((root / "manifest.json").read_text()):
    said.clear()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(root / folder).eval()
    except Exception as error:
        found[folder] = {"error": f"{type(error).__name__}: {error}"}
        continue
    rotary = next(module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))
    before = getattr(rotary, prefix + "inv_freq").clone()
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False).logits
    found[folder] = {
        "inv_freq": before,
        "inv_freq after": getattr(rotary, prefix + "inv_freq").clone(),
        "attention_factor": getattr(rotary, prefix + "attention_scaling"),
        "logits": out,
        "max_position_embeddings": model.config.max_position_embeddings,
        "said": list(said),
    }
assert not any(name.partition(".")[0] == "rope_ext_hf" for name in sys.modules)
torch.save(found, root / "found.pt")
"""


@dataclass
class Saved:
    """A patched model saved in a folder, and what a plain process found when it loaded it."""

    model: Any
    folder: Path
    found: dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Saved]:
    root = tmp_path_factory.mktemp("saved")
    models: dict[str, Any] = {}
    manifest: list[tuple[str, int]] = []

    def save(kind: str, name: str, which: str, method: str, params: dict[str, Any], length: int) -> None:
        folder = f"{kind}, {name}, {which}"
        models[folder] = rope.patch(build(name), method, **params)
        models[folder].save_pretrained(root / folder)
        manifest.append((folder, length))

    for name, which in STATIC:
        case = static_cases(name)[which]
        save("static", name, which, case.method, case.params, LONG)
    for name, which in ON_THE_WAY:
        case = static_cases(name, 16.0)[which]
        save("far", name, which, case.method, case.params, FAR)
    for name, which in DYNAMIC:
        method, params = dynamic_cases(name)[which]
        save("dynamic", name, which, method, params, LONG)
    (root / "manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PROCESS, str(root)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(root / "found.pt", weights_only=False)

    def look_up(kind: str, name: str, which: str) -> Saved:
        folder = f"{kind}, {name}, {which}"
        return Saved(models[folder], root / folder, found[folder])

    return look_up


Lookup = Callable[[str, str, str], Saved]


def saved_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def saved_rope(folder: Path) -> dict[str, Any]:
    parameters = saved_config(folder)["rope_parameters"]
    scaled: dict[str, Any] = parameters.get("full_attention", parameters)
    return scaled


def load_plainly(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- static methods: plain transformers gets the same model -------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), STATIC)
def test_plain_loading_reproduces_static_methods(name: str, which: str, saved: Lookup) -> None:
    case, it = static_cases(name)[which], saved("static", name, which)
    assert "error" not in it.found, it.found
    expected = rope.frequencies(case.method, rope.Rotary(FAMILIES[name].rotated, THETA, TRAINED), **case.params)
    for when in ("inv_freq", "inv_freq after"):
        torch.testing.assert_close(it.found[when].double(), expected.inv_freq, rtol=FREQUENCIES, atol=0)
    assert it.found["attention_factor"] == pytest.approx(expected.attention_factor, rel=1e-6)
    assert difference(it.found["logits"], logits(it.model, tokens(LONG))) <= TOLERANCE


@pytest.mark.parametrize(("name", "which"), [case for case in STATIC if case[1] != "default"])
def test_plain_loading_is_not_the_model_before_the_patch(name: str, which: str, saved: Lookup) -> None:
    assert difference(saved("static", name, which).found["logits"], logits(build(name), tokens(LONG))) >= 1e-2


@pytest.mark.parametrize(("name", "which"), ON_THE_WAY)
def test_plain_loading_at_a_thousand_tokens(name: str, which: str, saved: Lookup) -> None:
    it = saved("far", name, which)
    expected = logits(it.model, tokens(FAR))
    assert difference(it.found["logits"], expected) <= 1e-3 * float(expected.std())


@pytest.mark.parametrize(("name", "which"), STATIC)
def test_loading_a_native_form_is_silent(name: str, which: str, saved: Lookup) -> None:
    assert saved("static", name, which).found["said"] == []


@pytest.mark.parametrize(("name", "which"), STATIC)
def test_config_lengths(name: str, which: str, saved: Lookup) -> None:
    it, case = saved("static", name, which), static_cases(name)[which]
    extended = LONG if "factor" in case.params else TRAINED
    config, written = saved_config(it.folder), saved_rope(it.folder)
    assert config["max_position_embeddings"] == it.found["max_position_embeddings"] == extended
    assert it.model.config.max_position_embeddings == extended
    if written["rope_type"] in ("yarn", "llama3") or (written["rope_type"] == "longrope" and name != "phi3"):
        assert written["original_max_position_embeddings"] == TRAINED
    if name == "phi3":
        assert config["original_max_position_embeddings"] == written.get("original_max_position_embeddings", TRAINED)
    assert "rope_ext_hf" in config


@every_family
def test_rope_types_in_the_saved_config(name: str, saved: Lookup) -> None:
    expected = {
        "default": "default",
        "linear": "linear",
        "ntk": "default",
        "theta": "default",
        "yarn": "yarn",
        "yarn, own ramp": "yarn",
        "by-parts": "yarn",
        "by-parts, turns": "llama3",
        "llama3": "llama3",
        "longrope": "longrope",
        "factors": "longrope",
    }
    accepted = FAMILIES[name].forms
    for which, rope_type in expected.items():
        written = saved_rope(saved("static", name, which).folder)
        assert written["rope_type"] == (rope_type if rope_type in accepted else "longrope"), which


@pytest.mark.parametrize("method", ["theta", "factors", "dynamic-ntk"])
def test_a_target_length_is_stated(method: str, tmp_path: Path) -> None:
    params: dict[str, dict[str, Any]] = {"theta": {"theta": 1e6}, "factors": {"factors": [2.0] * 8}, "dynamic-ntk": {}}
    model = rope.patch(build("llama"), method, target_length=LONG, **params[method])
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["max_position_embeddings"] == LONG
    assert rope.describe(rope.from_pretrained(tmp_path)).extended_length == LONG
    assert rope.describe(rope.from_pretrained(tmp_path)).trained_length == TRAINED


@pytest.mark.parametrize(("name", "which"), [case for case in STATIC if case[0] in ("llama", "phi3", "gemma3")])
def test_our_loading_restores_static_methods(name: str, which: str, saved: Lookup) -> None:
    it = saved("static", name, which)
    model = rope.from_pretrained(it.folder)
    assert torch.equal(logits(model, tokens(LONG)), logits(it.model, tokens(LONG)))
    assert str(rope.describe(model)) == str(rope.describe(it.model))
    stock = build(name)
    assert torch.equal(logits(rope.unpatch(model), tokens(LONG)), logits(stock, tokens(LONG)))
    assert model.config.rope_parameters == stock.config.rope_parameters
    assert model.config.max_position_embeddings == TRAINED


def test_yarn_with_a_ramp_in_turns_goes_as_longrope(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4, ramp="turns", beta_fast=8)
    model.save_pretrained(tmp_path)
    assert saved_rope(tmp_path)["rope_type"] == "longrope"
    assert difference(logits(load_plainly(tmp_path), tokens(LONG)), logits(model, tokens(LONG))) <= TOLERANCE


def test_saved_in_bfloat16(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_plainly(tmp_path)
    assert loaded.dtype == torch.bfloat16
    expected = rope.frequencies("yarn", rope.Rotary(16, THETA, TRAINED), factor=4).inv_freq
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq.double(), expected, rtol=FREQUENCIES, atol=0)
    ours = rope.from_pretrained(tmp_path)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(logits(ours, tokens(LONG)), logits(model, tokens(LONG)))


@pytest.mark.parametrize("which", ["yarn", "linear", "ntk"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "mixtral"])
def test_generate_agrees_across_the_trained_length(name: str, which: str, saved: Lookup) -> None:
    it, ids = saved("static", name, which), tokens(TRAINED - 4)
    asked = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "output_logits": True}
    plain, ours = (
        model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **asked)
        for model in (load_plainly(it.folder), it.model)
    )
    assert torch.equal(plain.sequences, ours.sequences)
    assert difference(torch.stack(plain.logits), torch.stack(ours.logits)) <= TOLERANCE


# --- length-dependent methods: a stop that names us, and the way back ---------------------------------------------


@pytest.mark.parametrize(("name", "which"), DYNAMIC)
def test_plain_loading_stops_at_length_dependent_methods(name: str, which: str, saved: Lookup) -> None:
    it = saved("dynamic", name, which)
    if which == "longrope":  # transformers switches between the lists as the method does
        assert difference(it.found["logits"], logits(it.model, tokens(LONG))) <= TOLERANCE
        return
    method = "dynamic-yarn" if which == "dynamic-yarn" else "dynamic-ntk"
    assert f"rope_ext_hf/{method}" in it.found["error"]
    assert saved_rope(it.folder)["rope_type"] == f"rope_ext_hf/{method}"


@pytest.mark.parametrize(("name", "which"), DYNAMIC)
def test_our_loading_restores_length_dependent_methods(name: str, which: str, saved: Lookup) -> None:
    it = saved("dynamic", name, which)
    model = rope.from_pretrained(it.folder)
    for length in (TRAINED, 100, LONG):
        assert torch.equal(logits(model, tokens(length)), logits(it.model, tokens(length)))
    assert difference(logits(model, tokens(LONG)), logits(build(name), tokens(LONG))) >= 1e-2
    assert str(rope.describe(model)) == str(rope.describe(it.model))
    rope.unpatch(model)
    assert torch.equal(logits(model, tokens(LONG)), logits(build(name), tokens(LONG)))
    assert model.config.rope_parameters == build(name).config.rope_parameters


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_native_dynamic_when_asked_for(name: str, tmp_path: Path) -> None:
    model = rope.patch(build(name), "dynamic", factor=4, native=True)
    assert "as asked for" in rope.describe(model).save_route
    model.save_pretrained(tmp_path)
    assert saved_rope(tmp_path)["rope_type"] == "dynamic"
    assert saved_config(tmp_path)["max_position_embeddings"] == TRAINED  # where transformers' rule takes its start
    plain = load_plainly(tmp_path)
    assert difference(logits(plain, tokens(LONG)), logits(model, tokens(LONG))) <= TOLERANCE
    ours = rope.from_pretrained(tmp_path)
    assert torch.equal(logits(ours, tokens(LONG)), logits(model, tokens(LONG)))
    assert str(rope.describe(ours)) == str(rope.describe(model))
    rope.patch(plain, "linear", factor=4)
    fresh = rope.patch(build(name), "linear", factor=4)
    assert torch.equal(logits(plain, tokens(LONG)), logits(fresh, tokens(LONG)))


def test_native_for_a_family_that_does_not_take_it_stops_all_the_same(tmp_path: Path) -> None:
    rope.patch(build("phi3"), "dynamic", factor=4, native=True).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="rope_ext_hf/dynamic-ntk"):
        load_plainly(tmp_path)


# --- the foreign route of a config class that accepts no name of ours ---------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_phi3_foreign_route(copied: bool, tmp_path: Path) -> None:
    model = rope.patch(build("phi3"), "dynamic", factor=4)
    expected = logits(model, tokens(LONG))
    before = copy.deepcopy(model.config.to_dict())
    saver = copy.deepcopy(model) if copied else model
    if copied:
        with torch.no_grad():
            next(saver.parameters()).mul_(2)  # so that saving the original in its place would show
        expected = logits(saver, tokens(LONG))
    saver.save_pretrained(tmp_path, max_shard_size="20KB")
    assert model.config.to_dict() | {"architectures": before["architectures"]} == before  # saving notes the class
    with pytest.raises(Exception, match="rope_ext_hf/dynamic-ntk"):
        load_plainly(tmp_path)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), tokens(LONG)), expected)


def test_phi3_decoder_alone_and_after_unpatching(tmp_path: Path) -> None:
    model = rope.patch(build("phi3"), "dynamic", factor=4)
    model.model.save_pretrained(tmp_path / "decoder")
    with pytest.raises(Exception, match="rope_ext_hf/dynamic-ntk"):
        transformers.AutoModel.from_pretrained(tmp_path / "decoder")
    rope.unpatch(model).save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load_plainly(tmp_path / "plain"), tokens(LONG)), logits(build("phi3"), tokens(LONG)))


def test_phi3_foreign_route_is_not_pushed_half_done(tmp_path: Path) -> None:
    model = rope.patch(build("phi3"), "dynamic", factor=4)
    with pytest.raises(CheckpointError, match="native form"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


def test_a_trainer_saves_it_that_way(tmp_path: Path) -> None:
    model = rope.patch(build("phi3"), "dynamic", factor=4)
    data = [{"input_ids": tokens(80, seed=i)[0], "labels": tokens(80, seed=i)[0]} for i in range(2)]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(model, settings, train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    for folder in (tmp_path / "out", tmp_path / "checkpoint-1"):
        assert saved_rope(folder)["rope_type"] == "rope_ext_hf/dynamic-ntk"
        restored = rope.from_pretrained(folder)
        assert torch.equal(logits(restored, tokens(LONG)), logits(model.eval(), tokens(LONG)))


# --- what comes after ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), [c for c in STATIC if c[0] in ("llama", "phi3", "gemma3", "mixtral")])
def test_patching_a_plain_reload_starts_from_the_original(name: str, which: str, saved: Lookup) -> None:
    reloaded = load_plainly(saved("static", name, which).folder)
    own = logits(reloaded, tokens(LONG))
    said = copy.deepcopy(reloaded.config.to_dict())
    fresh = rope.patch(build(name), "linear", factor=4)
    rope.patch(reloaded, "linear", factor=4)
    assert torch.equal(logits(reloaded, tokens(LONG)), logits(fresh, tokens(LONG)))
    seen = rope.describe(reloaded)
    assert (seen.trained_length, seen.extended_length, seen.theta) == (TRAINED, LONG, THETA)
    assert reloaded.config.max_position_embeddings == LONG
    rope.unpatch(reloaded)
    assert reloaded.config.to_dict() == said
    assert difference(logits(reloaded, tokens(LONG)), own) == 0


@pytest.mark.parametrize("which", static_cases("llama"))
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_a_plain_reload_knows_its_trained_length(name: str, which: str, saved: Lookup) -> None:
    it = saved("static", name, which)
    seen, patched = rope.describe(load_plainly(it.folder)), rope.describe(it.model)
    assert seen.trained_length == TRAINED
    assert seen.extended_length == patched.extended_length or patched.extended_length is None
    assert seen.wavelengths == pytest.approx(patched.wavelengths, rel=FREQUENCIES)
    assert seen.attention_factor == pytest.approx(patched.attention_factor, rel=1e-6)


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@every_family
def test_unpatching_before_saving_gives_the_plain_model(name: str, method: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "stock")
    model = rope.unpatch(rope.patch(build(name), method, factor=4))
    model.save_pretrained(tmp_path / "unpatched")
    stock, unpatched = ((tmp_path / each / "config.json").read_bytes() for each in ("stock", "unpatched"))
    assert unpatched == stock
    assert torch.equal(logits(load_plainly(tmp_path / "unpatched"), tokens(LONG)), logits(build(name), tokens(LONG)))
    assert not rope.describe(rope.from_pretrained(tmp_path / "unpatched")).patched


@pytest.mark.parametrize("which", ["yarn", "linear", "factors"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "glm"])
def test_saving_again_after_plain_loading(name: str, which: str, saved: Lookup, tmp_path: Path) -> None:
    it = saved("static", name, which)
    load_plainly(it.folder).save_pretrained(tmp_path)
    assert saved_config(tmp_path)["rope_ext_hf"] == saved_config(it.folder)["rope_ext_hf"]
    assert difference(logits(load_plainly(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG))) <= TOLERANCE
    assert torch.equal(logits(rope.from_pretrained(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG)))


@pytest.mark.parametrize("which", ["paper", "dynamic-yarn"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_saving_again_after_our_loading(name: str, which: str, saved: Lookup, tmp_path: Path) -> None:
    it = saved("dynamic", name, which)
    rope.from_pretrained(it.folder).save_pretrained(tmp_path)
    assert saved_config(tmp_path) == saved_config(it.folder)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG)))
    with pytest.raises(Exception, match="rope_ext_hf/"):
        load_plainly(tmp_path)


def test_a_model_that_carried_a_scaling_comes_back_to_it(tmp_path: Path) -> None:
    form = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    }
    stock = build("llama", form, max_position_embeddings=8 * TRAINED)
    rope.patch(copy.deepcopy(stock), "dynamic", factor=4).save_pretrained(tmp_path)
    model = rope.unpatch(rope.from_pretrained(tmp_path))
    assert torch.equal(logits(model, tokens(LONG)), logits(stock, tokens(LONG)))
    assert model.config.rope_parameters == stock.config.rope_parameters
    assert model.config.max_position_embeddings == 8 * TRAINED


def test_plain_folders_load_as_they_are(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = rope.from_pretrained(tmp_path)
    assert torch.equal(logits(model, tokens(LONG)), logits(build("llama"), tokens(LONG)))
    assert rope.from_pretrained(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_keyword_arguments_reach_transformers(saved: Lookup) -> None:
    model = rope.from_pretrained(
        saved("dynamic", "llama", "paper").folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_device_map(name: str, saved: Lookup) -> None:
    it = saved("static", name, "yarn")
    for load in (rope.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained):
        model = load(it.folder, device_map={"": "cpu"})
        assert difference(logits(model, tokens(LONG)), logits(it.model, tokens(LONG))) <= TOLERANCE


# --- folders that contradict themselves ---------------------------------------------------------------------------


def tampered(folder: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = saved_config(folder)
    change(config)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return out


def raise_factor(config: dict[str, Any]) -> None:
    parameters = config["rope_parameters"]
    parameters.get("full_attention", parameters)["factor"] = 32.0


def other_type(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}


def no_method(config: dict[str, Any]) -> None:
    del config["rope_ext_hf"]["method"]


def unknown_method(config: dict[str, Any]) -> None:
    config["rope_ext_hf"]["method"]["method"] = "yarm"


def no_record(config: dict[str, Any]) -> None:
    config["rope_ext_hf"] = {}


@pytest.mark.parametrize("change", [raise_factor, other_type, no_method, unknown_method, no_record])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_tampering_is_noticed(
    name: str, change: Callable[[dict[str, Any]], None], saved: Lookup, tmp_path: Path
) -> None:
    folder = tampered(saved("static", name, "yarn").folder, tmp_path / "out", change)
    with pytest.raises(CheckpointError, match="rope_ext_hf"):
        rope.from_pretrained(folder)
    model = load_plainly(folder)
    own = logits(model, tokens(LONG))
    with pytest.raises(CheckpointError, match="rope_ext_hf"):
        rope.patch(model, "linear", factor=4)
    assert torch.equal(logits(model, tokens(LONG)), own)


def test_tampering_with_one_layer_type_is_noticed(saved: Lookup, tmp_path: Path) -> None:
    folder = tampered(saved("static", "gemma3", "yarn").folder, tmp_path / "out", raise_factor)
    with pytest.raises(CheckpointError, match="rope_ext_hf"):
        rope.from_pretrained(folder)


def test_without_the_record_the_settings_count_as_they_stand(saved: Lookup, tmp_path: Path) -> None:
    folder = tampered(
        saved("static", "llama", "yarn").folder, tmp_path / "out", lambda config: config.pop("rope_ext_hf")
    )
    seen = rope.describe(rope.from_pretrained(folder))
    assert (seen.method, seen.trained_length, seen.extended_length, seen.patched) == ("yarn", TRAINED, LONG, False)


@pytest.mark.parametrize("path", ["missing", "./missing", "~/no/such/folder/here"])
def test_a_missing_folder(path: str, tmp_path: Path) -> None:
    where = tmp_path / path if path == "missing" else path
    with pytest.raises(CheckpointError, match=r"missing|no/such/folder"):
        rope.from_pretrained(where)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        rope.from_pretrained(tmp_path)


def test_a_model_inside_another(tmp_path: Path) -> None:
    """Vision-language models keep the settings in a text config of their own."""
    text = {key: value for key, value in build("gemma3").config.to_dict().items() if key != "model_type"}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(LONG).clamp(max=90)
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=4)
    out = logits(model, ids)
    assert difference(out, plain) >= 1e-2
    assert model.config.text_config.max_position_embeddings == LONG
    model.save_pretrained(tmp_path / "yarn")
    assert difference(logits(load_plainly(tmp_path / "yarn"), ids), out) <= TOLERANCE
    ours = rope.from_pretrained(tmp_path / "yarn")
    assert torch.equal(logits(ours, ids), out)
    assert rope.describe(ours).trained_length == TRAINED
    rope.patch(model, "dynamic", factor=4).save_pretrained(tmp_path / "dynamic")
    with pytest.raises(KeyError, match="rope_ext_hf/dynamic-ntk"):
        load_plainly(tmp_path / "dynamic")
    ours = rope.from_pretrained(tmp_path / "dynamic")
    with rope.fixed_length(model, LONG), rope.fixed_length(ours, LONG):  # these models prepare their masks beforehand
        assert torch.equal(logits(ours, ids), logits(model, ids))
        assert difference(logits(ours, ids), plain) >= 1e-2
    assert torch.equal(logits(rope.unpatch(model), ids), plain)

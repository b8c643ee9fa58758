"""`from_pretrained`: patched folders restored, plain ones as they are, and folders that contradict themselves."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, FileError, FingerprintError, MethodError
from rope_ext_hf.patches.loading import load_config, load_patched_config
from rope_ext_hf.runs.folder.model_digest import model_digest
from tests.support.every_model import tiny
from tests.support.model_checks import LONG, TOLERANCE, difference
from tests.support.models import THETA, TRAINED, build, logits, static_cases, tokens
from tests.support.saved_models import DYNAMIC, FREQUENCIES, STATIC, Lookup, load_plainly, saved_config

# --- restored -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [case for case in STATIC if case[0] in ("llama", "phi3", "gemma3")])
@pytest.mark.sampled(5)
def test_our_loading_restores_static_methods(name: str, which: str, saved: Lookup) -> None:
    it = saved("static", name, which)
    model = rope.from_pretrained(it.folder)
    assert torch.equal(logits(model, tokens(LONG)), logits(it.model, tokens(LONG)))
    assert str(rope.describe(model)) == str(rope.describe(it.model))
    stock = build(name)
    assert torch.equal(logits(rope.unpatch(model), tokens(LONG)), logits(stock, tokens(LONG)))
    assert model.config.rope_parameters == stock.config.rope_parameters
    assert model.config.max_position_embeddings == TRAINED


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), DYNAMIC)
@pytest.mark.sampled(5)
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


def test_a_class_that_is_built_with_its_weights_alone_is_patched_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama").save_pretrained(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no tensors on this device")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "_from_config", refuse)
    model = rope.from_pretrained(tmp_path, method="yarn", factor=4)
    assert rope.describe(model).method == "yarn"


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "key"), [("dbrx", "max_seq_len"), ("bailing_hybrid", "model_max_length")])
@pytest.mark.parametrize(("method", "stated"), [("yarn", 4), ("linear", 1)])
def test_a_context_length_under_another_key_comes_back(
    model_type: str, key: str, method: str, stated: int, tmp_path: Path
) -> None:
    """A config whose class calls max_position_embeddings by another name."""
    stock = tiny(model_type)
    context_length = stock.config.max_position_embeddings
    stock.save_pretrained(tmp_path / "plain")
    rope.patch(stock, method, factor=4).save_pretrained(tmp_path / "patched")
    assert json.loads((tmp_path / "patched" / "config.json").read_text())[key] == stated * context_length
    loaded = rope.unpatch(rope.from_pretrained(tmp_path / "patched"))
    assert loaded.config.max_position_embeddings == context_length
    assert rope.describe(loaded).context_length == context_length
    assert model_digest(loaded) == model_digest(rope.from_pretrained(tmp_path / "plain"))
    other: dict[str, Any] = {key: 128}
    with pytest.raises(CheckpointError, match=f"{key} of a patched folder is set by its patch"):
        rope.from_pretrained(tmp_path / "patched", **other)


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


@pytest.mark.slow
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
    with pytest.raises(KeyError, match=r"rope_ext_hf/dynamic-ntk: load with rope_ext_hf\.from_pretrained"):
        load_plainly(tmp_path / "dynamic")
    ours = rope.from_pretrained(tmp_path / "dynamic")
    with rope.fixed_length(model, LONG), rope.fixed_length(ours, LONG):  # these models prepare their masks beforehand
        assert torch.equal(logits(ours, ids), logits(model, ids))
        assert difference(logits(ours, ids), plain) >= 1e-2
    assert torch.equal(logits(rope.unpatch(model), ids), plain)


# --- loaded plainly and gone on with ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [c for c in STATIC if c[0] in ("llama", "phi3", "gemma3", "mixtral")])
@pytest.mark.sampled(7)
def test_patching_a_plain_reload_starts_from_the_original(name: str, which: str, saved: Lookup) -> None:
    reloaded = load_plainly(saved("static", name, which).folder)
    own = logits(reloaded, tokens(LONG))
    before = copy.deepcopy(reloaded.config.to_dict())
    fresh = rope.patch(build(name), "linear", factor=4)
    rope.patch(reloaded, "linear", factor=4)
    assert torch.equal(logits(reloaded, tokens(LONG)), logits(fresh, tokens(LONG)))
    described = rope.describe(reloaded)
    assert (described.trained_length, described.extended_length, described.theta) == (TRAINED, LONG, THETA)
    assert reloaded.config.max_position_embeddings == LONG
    rope.unpatch(reloaded)
    assert reloaded.config.to_dict() == before
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


# --- loading options ----------------------------------------------------------------------------------------------


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
    for settings in (parameters.get("full_attention", parameters), config["rope_scaling"]):
        settings["factor"] = 32.0


def other_type(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}
    del config["rope_scaling"]


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


def another_factor(config: dict[str, Any]) -> None:
    config["rope_ext_hf"]["method"]["factor"] = 16.0


def another_theta(config: dict[str, Any]) -> None:
    config["rope_ext_hf"]["rotary"]["theta"] = 5e5


def another_magnitude(config: dict[str, Any]) -> None:
    config["rope_ext_hf"]["method"]["attention_factor"] = 1.0


def another_length(config: dict[str, Any]) -> None:
    config["rope_ext_hf"]["target_length"] = 2 * LONG


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (another_factor, "Frequencies differ by up to"),
        (another_theta, "theta is 500,000 instead of 10,000"),
        (another_magnitude, r"multiplied by 1 instead of 1.138.*the attention factor \(mscale\) is missing"),
        (another_length, f"a length of {2 * LONG} tokens instead of {LONG}"),
    ],
)
def test_a_model_that_would_rotate_otherwise_than_the_saved_one_is_refused(
    change: Callable[[dict[str, Any]], None], sentence: str, saved: Lookup, tmp_path: Path
) -> None:
    folder = tampered(saved("static", "llama", "yarn").folder, tmp_path / "out", change)
    for load in (rope.from_pretrained, rope.fingerprint):
        with pytest.raises(FingerprintError, match=f"does not rotate as it did when it was saved.* {sentence}"):
            load(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["rope_ext_hf"]["fingerprint"]  # the way out, and a folder of an earlier version
    file.write_text(json.dumps(config))
    rope.from_pretrained(folder)


def test_a_class_with_another_softmax_scale_is_noticed(saved: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("static", "llama", "yarn").folder
    init = transformers.models.llama.modeling_llama.LlamaAttention.__init__

    def as_another_version(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.scaling *= 2

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "__init__", as_another_version)
    with pytest.raises(FingerprintError, match=r"multiplied by 0\.5 instead of 0\.25: the softmax scale differs"):
        rope.from_pretrained(folder)


def test_a_length_that_its_user_set_is_no_difference(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "dynamic-yarn")
    model.config.max_position_embeddings = 12_345  # saving goes by the patch
    model.save_pretrained(tmp_path)
    assert rope.from_pretrained(tmp_path).config.max_position_embeddings == TRAINED


@pytest.mark.parametrize("damage", [None, {}, "text", {"layers": 3}])
def test_a_damaged_fingerprint_is_refused(damage: Any, saved: Lookup, tmp_path: Path) -> None:
    folder = tampered(
        saved("static", "llama", "yarn").folder,
        tmp_path / "out",
        lambda config: config["rope_ext_hf"].update(fingerprint=damage),
    )
    with pytest.raises(CheckpointError, match="is damaged; delete the key 'fingerprint'"):
        rope.from_pretrained(folder)


@pytest.mark.parametrize("path", ["missing", "./missing", "~/no/such/folder/here"])
def test_a_missing_folder(path: str, tmp_path: Path) -> None:
    where = tmp_path / path if path == "missing" else path
    with pytest.raises(CheckpointError, match=r"missing|no/such/folder"):
        rope.from_pretrained(where)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        rope.from_pretrained(tmp_path)


# --- with a method ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_method_is_patched_in_beside_the_arguments_of_transformers(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"target_length": "1k", "beta_fast": 16.0}
    loaded = rope.from_pretrained("reference", "yarn", dtype="float32", attn_implementation="eager", **arguments)
    expected = rope.patch(rope.from_pretrained("reference", dtype=torch.float32), "yarn", **arguments)
    assert (loaded.dtype, loaded.config._attn_implementation) == (torch.float32, "eager")
    assert not rope.fingerprint(loaded).differences(rope.fingerprint(expected))
    loaded.save_pretrained(tmp_path)
    replaced = rope.from_pretrained(tmp_path, method="ntk", factor=2)
    assert not rope.fingerprint(replaced).differences(rope.fingerprint(rope.patch("reference", "ntk", factor=2)))
    above = rope.from_pretrained(tmp_path, method="ntk", factor=2, over="patched")
    assert rope.describe(above).extended_length == 2048
    assert rope.describe(rope.unpatch(above)).method == "yarn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "yarrn"}, "unknown method 'yarrn'. Did you mean 'yarn'?"),
        (
            {"method": "yarn", "factor": 2, "beta_fats": 3},
            "yarn has no parameter 'beta_fats'. Did you mean 'beta_fast'?",
        ),
        ({"method": "ntk", "factor": 2, "beta_fast": 3}, "ntk has no parameter 'beta_fast'"),
        ({"factor": 4}, "factor given without a method"),
        ({"over": "original", "beta_fast": 3}, "over, beta_fast given without a method"),
        ({"method": "yarn", "target_length": "4x"}, "not a length in tokens: '4x'"),
    ],
)
def test_a_mistake_in_a_method_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rope.MethodError, match=re.escape(message)):
        rope.from_pretrained("reference", **arguments)


# --- other classes than causal language models ----------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"method": "yarn", "factor": 4}, {"method": "dynamic-ntk"}, {"method": "rerope"}])
@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaModel", "LlamaForTokenClassification"])
def test_the_class_is_the_one_that_was_saved(kind: str, params: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(build("llama").config).eval()
    ids = tokens(LONG)
    rope.patch(model, **params)
    with torch.no_grad():
        expected = model(ids)[0]
    model.save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == kind
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], expected)


@pytest.mark.parametrize("patched", [False, True])
def test_weights_are_never_made_up_silently(patched: bool, tmp_path: Path) -> None:
    model = build("llama")
    (rope.patch(model, "dynamic-ntk") if patched else model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"9 tensors of LlamaForCausalLM are missing .*'model\.layers\.2\."):
        rope.from_pretrained(tmp_path)


def test_weights_are_never_dropped_silently(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(build("llama").config)
    rope.patch(model, "dynamic-ntk").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"LlamaModel has no place for 1 tensors.*score\.weight.*auto_class"):
        rope.from_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path, auto_class="AutoModelForSequenceClassification")
    assert type(loaded).__name__ == "LlamaForSequenceClassification"
    assert rope.describe(loaded).method == "dynamic-ntk"
    with pytest.raises(CheckpointError, match="'AutoModelFor'"):
        rope.from_pretrained(tmp_path, auto_class="AutoModelFor")


def test_a_device_among_the_weights_is_refused(tmp_path: Path) -> None:
    """It has no end: torch would read from it until memory is full."""
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "pytorch_model.bin").symlink_to("/dev/zero")
    with pytest.raises(FileError, match=r"pytorch_model\.bin' is not a regular file"):
        rope.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "yarn"}, "yarn needs factor"),
        ({"method": "yarn", "factor": 0.5}, "factor must be at least 1"),
        ({"method": "yarn", "target_length": "2q", "dtype": "bfloat16"}, "not a length in tokens: '2q'"),
        ({"method": "yarn", "factor": 2, "target_length": 128}, "give one"),
    ],
)
def test_a_mistake_in_a_method_is_reported_before_weights_are_read(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build("llama").config.save_pretrained(tmp_path)
    with pytest.raises(MethodError, match=message):
        rope.from_pretrained(tmp_path, **arguments)
    with pytest.raises(OSError, match="no file named"):
        rope.from_pretrained(tmp_path, method="yarn", factor=2)


@pytest.mark.parametrize(("method", "arguments"), [("yarn", {"factor": 4}), ("dynamic-yarn", {}), ("nope", {})])
@pytest.mark.filterwarnings("ignore:nope drops the rotation")
def test_an_encoder_and_a_decoder_have_a_config_each(method: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Both record the patch, and both are as before once it is taken off."""
    model: Any = tiny("t5gemma").eval()
    ids = tokens(40)
    before = logits(model, ids, decoder_input_ids=ids)
    patched = logits(rope.patch(model, method, **arguments), ids, decoder_input_ids=ids)
    model.save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids, decoder_input_ids=ids), patched)
    assert torch.equal(logits(rope.unpatch(loaded), ids, decoder_input_ids=ids), before)
    config, _ = load_patched_config(tmp_path)
    of_user = logits(rope.from_pretrained(tmp_path, config=config), ids, decoder_input_ids=ids)
    assert torch.equal(of_user, patched)


def test_an_empty_record_is_none(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_ext_hf": None}))
    assert load_config(tmp_path)[1] is None

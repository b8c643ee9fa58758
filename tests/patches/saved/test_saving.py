"""Folders that `save_pretrained` of a patched model writes: plain transformers loads the same model, or stops."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError
from tests.support.model_checks import LONG, TOLERANCE, difference, every_family
from tests.support.models import FAMILIES, THETA, TRAINED, build, logits, static_cases, tokens
from tests.support.saved_models import (
    DYNAMIC,
    FREQUENCIES,
    STATIC,
    Lookup,
    Saved,
    load_plainly,
    saved_config,
    saved_rope,
)
from tests.support.tiers import OLDER

# Run in a process that never imports the package: loads every folder named in the manifest and notes what it reads.
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
results = {}
for folder, length in json.loads((root / "manifest.json").read_text()):
    said.clear()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(root / folder).eval()
    except Exception as error:
        results[folder] = {"error": f"{type(error).__name__}: {error}"}
        continue
    rotary = next(module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    prefix = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))
    before = getattr(rotary, prefix + "inv_freq").clone()
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False).logits
    results[folder] = {
        "inv_freq": before,
        "inv_freq after": getattr(rotary, prefix + "inv_freq").clone(),
        "attention_factor": getattr(rotary, prefix + "attention_scaling"),
        "logits": out,
        "max_position_embeddings": model.config.max_position_embeddings,
        "said": list(said),
    }
assert not any(name.partition(".")[0] == "rope_ext_hf" for name in sys.modules)
torch.save(results, root / "read.pt")
"""


ON_THE_WAY = [("llama", "yarn"), ("gemma3", "linear"), ("phi3", "ntk"), ("mixtral", "by-parts"), ("glm", "llama3")]
FAR = 16 * TRAINED


def cases(names: set[str]) -> list[tuple[str, str, str, int]]:
    """Every case of these families: kind, family, which, and the tokens to run."""
    return (
        [("static", name, which, LONG) for name, which in STATIC if name in names]
        + [("far", name, which, FAR) for name, which in ON_THE_WAY if name in names]
        + [("dynamic", name, which, LONG) for name, which in DYNAMIC if name in names]
    )


@pytest.fixture(scope="module")
def read(saved: Lookup, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lookup:
    """The saved models under test, read by one process that never imports the package."""
    root = tmp_path_factory.mktemp("read")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params: list[dict[str, Any]] = [dict(item.callspec.params) for item in tests if "read" in item.fixturenames]
    tested = {(values["name"], values["which"]) for values in params}
    chosen = {case[:3]: case[3] for case in cases({name for name, _ in tested}) if case[1:3] in tested}
    (root / "manifest.json").write_text(
        json.dumps([(str(saved(*case).folder), length) for case, length in chosen.items()])
    )
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PROCESS, str(root)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(root / "read.pt", weights_only=False)

    def look_up(kind: str, name: str, which: str) -> Saved:
        it = saved(kind, name, which)
        return dataclasses.replace(it, read=results[str(it.folder)])

    return look_up


# --- static methods: plain transformers gets the same model -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), STATIC)
@pytest.mark.sampled(7)
def test_plain_loading_reproduces_static_methods(name: str, which: str, read: Lookup) -> None:
    case, it = static_cases(name)[which], read("static", name, which)
    assert "error" not in it.read, it.read
    expected = rope.frequencies(case.method, rope.Rotary(FAMILIES[name].rotated, THETA, TRAINED), **case.params)
    for when in ("inv_freq", "inv_freq after"):
        torch.testing.assert_close(it.read[when].double(), expected.inv_freq, rtol=FREQUENCIES, atol=1e-38)
    assert it.read["attention_factor"] == pytest.approx(expected.attention_factor, rel=1e-6)
    assert difference(it.read["logits"], logits(it.model, tokens(LONG))) <= TOLERANCE
    if which != "default":
        assert difference(it.read["logits"], logits(build(name), tokens(LONG))) >= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), ON_THE_WAY)
def test_plain_loading_at_a_thousand_tokens(name: str, which: str, read: Lookup) -> None:
    it = read("far", name, which)
    expected = logits(it.model, tokens(FAR))
    assert difference(it.read["logits"], expected) <= 1e-3 * float(expected.std())


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), STATIC)
def test_loading_a_native_form_is_silent(name: str, which: str, read: Lookup) -> None:
    """But for the keys that are there for other readers: transformers names them once."""
    it = read("static", name, which)
    for message in it.read["said"]:
        assert message.startswith("Unrecognized keys in `rope_parameters`")
        named = set(re.findall(r"'(\w+)'", message.partition("': ")[2]))
        assert named
        assert named <= {"attn_factor", "short_mscale", "long_mscale"} & saved_rope(it.folder).keys()


def served_length(max_position_embeddings: int, settings: dict[str, Any], name: str) -> float:
    """The longest request by the rule of vLLM 0.33 (config/model.py) and SGLang 0.5.23 (hf_transformers_utils.py).

    They multiply max_position_embeddings by the factor for linear and dynamic, and for no other rope type. Gemma 3's
    configs have it extended already, so there transformers' reading of its published configs is kept.
    """
    if settings["rope_type"] in ("linear", "dynamic") and name != "gemma3":
        return max_position_embeddings * float(settings["factor"])
    return max_position_embeddings


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), STATIC)
def test_config_lengths(name: str, which: str, read: Lookup) -> None:
    it, case = read("static", name, which), static_cases(name)[which]
    extended = LONG if "factor" in case.params else TRAINED
    config, written = saved_config(it.folder), saved_rope(it.folder)
    assert config["max_position_embeddings"] == it.read["max_position_embeddings"]
    assert served_length(config["max_position_embeddings"], written, name) == extended
    assert it.model.config.max_position_embeddings == extended  # generate reads the live config
    original: Any = written.get("original_max_position_embeddings")
    if written["rope_type"] in ("yarn", "llama3"):
        assert original == TRAINED
    if written["rope_type"] == "longrope" and name != "phi3" and written["short_factor"] == written["long_factor"]:
        # Engines that ignore the attention factor work it out from the lengths, as Phi-3's class does.
        by_lengths = math.sqrt(1 + math.log(extended / original) / math.log(original))
        assert by_lengths == pytest.approx(written["attention_factor"], rel=5e-3)
    if name == "phi3":
        assert config["original_max_position_embeddings"] == written.get("original_max_position_embeddings", TRAINED)
    assert "rope_ext_hf" in config


@pytest.mark.slow
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
        "by-parts, cycles": "llama3",
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


def test_yarn_with_a_ramp_in_turns_goes_as_longrope(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4, ramp="cycles", beta_fast=8)
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
    arguments = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "output_logits": True}
    plain, ours = (
        model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments)
        for model in (load_plainly(it.folder), it.model)
    )
    assert torch.equal(plain.sequences, ours.sequences)
    assert difference(torch.stack(plain.logits), torch.stack(ours.logits)) <= TOLERANCE


# --- length-dependent methods: a stop that names us, and the way back ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), DYNAMIC)
def test_plain_loading_stops_at_length_dependent_methods(name: str, which: str, read: Lookup) -> None:
    it = read("dynamic", name, which)
    if which == "longrope":  # transformers switches between the lists as the method does
        assert difference(it.read["logits"], logits(it.model, tokens(LONG))) <= TOLERANCE
        return
    method = "dynamic-yarn" if which == "dynamic-yarn" else "dynamic-ntk"
    assert f"rope_ext_hf/{method}" in it.read["error"]
    assert saved_rope(it.folder)["rope_type"] == f"rope_ext_hf/{method}: load with rope_ext_hf.from_pretrained"


@pytest.mark.filterwarnings("ignore:the folder of this model records:UserWarning")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_native_dynamic_when_asked_for(name: str, tmp_path: Path) -> None:
    model = rope.patch(build(name), "dynamic", factor=4, native=True)
    assert "because native was given" in rope.describe(model).save_route
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
    with pytest.raises(CheckpointError, match="save it to a folder"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
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
        assert saved_rope(folder)["rope_type"] == "rope_ext_hf/dynamic-ntk: load with rope_ext_hf.from_pretrained"
        restored = rope.from_pretrained(folder)
        assert torch.equal(logits(restored, tokens(LONG)), logits(model.eval(), tokens(LONG)))


# --- undone before saving, saved again ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@every_family
def test_unpatching_before_saving_gives_the_plain_model(name: str, method: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "stock")
    model = rope.unpatch(rope.patch(build(name), method, factor=4))
    model.save_pretrained(tmp_path / "unpatched")
    stock, unpatched = ((tmp_path / name / "config.json").read_bytes() for name in ("stock", "unpatched"))
    assert unpatched == stock
    assert torch.equal(logits(load_plainly(tmp_path / "unpatched"), tokens(LONG)), logits(build(name), tokens(LONG)))
    assert not rope.describe(rope.from_pretrained(tmp_path / "unpatched")).patched


@pytest.mark.slow
@pytest.mark.parametrize("which", ["yarn", "linear", "factors"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "glm"])
def test_saving_again_after_plain_loading(name: str, which: str, saved: Lookup, tmp_path: Path) -> None:
    it = saved("static", name, which)
    load_plainly(it.folder).save_pretrained(tmp_path)
    assert saved_config(tmp_path)["rope_ext_hf"] == saved_config(it.folder)["rope_ext_hf"]
    assert difference(logits(load_plainly(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG))) <= TOLERANCE
    assert torch.equal(logits(rope.from_pretrained(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG)))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["paper", "dynamic-yarn"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_saving_again_after_our_loading(name: str, which: str, saved: Lookup, tmp_path: Path) -> None:
    it = saved("dynamic", name, which)
    rope.from_pretrained(it.folder).save_pretrained(tmp_path)
    assert saved_config(tmp_path) == saved_config(it.folder)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), tokens(LONG)), logits(it.model, tokens(LONG)))
    with pytest.raises(Exception, match="rope_ext_hf/"):
        load_plainly(tmp_path)


@pytest.mark.parametrize(("method", "parameters"), [("dynamic-yarn", {}), ("rerope", {}), ("dynamic", {"factor": 4.0})])
def test_saving_says_where_plain_transformers_stops(method: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    model = rope.patch(build("llama"), method, **parameters)
    with pytest.warns(UserWarning, match=r"loads with rope_ext_hf\.from_pretrained alone") as caught:
        model.save_pretrained(tmp_path / "model")
    assert caught[0].filename == __file__
    assert ("native=True" in str(caught[0].message)) == (method == "dynamic")
    with pytest.raises(KeyError, match="rope_ext_hf"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("method", "parameters"), [("yarn", {"factor": 4.0}), ("dynamic", {"factor": 4.0, "native": True})]
)
def test_saving_says_nothing_where_plain_transformers_loads(
    method: str, parameters: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rope.patch(build("llama"), method, **parameters).save_pretrained(tmp_path / "model")
    assert not [warning for warning in recwarn if "from_pretrained alone" in str(warning.message)]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(("method", "arguments"), [("cope", {}), ("yarn", {"factor": 4, "attention_factor": 1.3})])
def test_saving_and_loading_print_nothing_of_keys_for_other_engines(
    method: str, arguments: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers prints that it does not know them; what it says of other keys is printed as before."""
    caplog.set_level(logging.WARNING, logger="transformers")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        rope.patch(build("llama"), method, **arguments).save_pretrained(tmp_path)
        model = rope.from_pretrained(tmp_path)
        assert [line for line in lines if "rope_parameters" in line] == []
        model.config.rope_parameters["of_somebody_else"] = 1
        model.save_pretrained(tmp_path)
    finally:
        logger.removeHandler(handler)
    assert OLDER or any("of_somebody_else" in line for line in lines)  # 5.0 names no keys when it saves

"""The models that people extend most, by their published configs: no two commands contradict each other."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

import rope_ext_hf as rope
from docs.figures.recipes import published_config
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, UnsupportedModelError, size_text
from rope_ext_hf.hub import fingerprint, load_empty
from rope_ext_hf.models.recipes import Recipe, recipes
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.advice import advise
from rope_ext_hf.tools.advice.extending import plan_extension
from rope_ext_hf.tools.engines.base import find_engine, list_engines
from rope_ext_hf.tools.serving.auditing import audit
from rope_ext_hf.tools.serving.serving_options import Extending, GPUServer
from tests.support.commands import run, run_json
from tests.support.models import build
from tests.tools.support.serving_models import PUBLISHED

K = 1024
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.slow
@pytest.mark.parametrize("length", [64 * K, 128 * K, 256 * K, 512 * K])
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sampled(5)
def test_advise_extend_and_serve_config_agree(name: str, length: int, tmp_path: Path) -> None:
    """They agree on what is needed, on the length that is extended, and on the factor."""
    stated, folder = PUBLISHED[name].context_length, PUBLISHED[name].write(tmp_path)
    advice = advise(folder, length)
    assert advice.context_length == stated == rope.describe(load_empty(folder)).context_length
    assert bool(advice.methods) == (length > stated)
    for asked in (extend, serve):
        try:
            found = asked(folder, length)
        except MethodError:  # nothing to extend
            assert length <= stated
        except ServingError:
            assert "vllm" not in advice.served
        else:
            assert length > stated
            assert found == (advice.served["vllm"], length / stated)


def extend(folder: Path, length: int) -> tuple[str, float]:
    plan = plan_extension(str(folder), Extending(target_length=length))
    return plan.method, plan.target_length / plan.context_length


def serve(folder: Path, length: int) -> tuple[str, float]:
    config = serving.serving_config(folder, "vllm", "yarn", target_length=length)
    name, _, factor = config.method.partition(" x")
    return name, float(factor)


def test_one_engine_is_told_as_among_all() -> None:
    alone, every = (advise("reference", K, engines=engines).methods for engines in (["vllm"], None))
    assert [each.method for each in alone] == [each.method for each in every]
    for one, of_all in zip(alone, every, strict=True):
        assert one.engines == {name: how for name, how in of_all.engines.items() if name == "vllm"}
        assert one.refusals == {name: why for name, why in of_all.refusals.items() if name == "vllm"}
    assert any(each.engines.get("vllm") for each in alone)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_methods_lengths_memory_and_commands_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every engine, at the length of the model's page, on a node with GPUs that hold it."""
    monkeypatch.chdir(tmp_path)
    model, server = PUBLISHED[name], GPUServer(gpus=8, gpu_memory=10**12)
    model.write(Path())
    context, target = model.context_length, model.target_length
    advice = advise(model.name, target, server=server)
    assert (advice.context_length, advice.factor, advice.model) == (context, target / context, model.name)
    (of_cache,) = (m.bytes for m in advice.memory if (m.dtype, m.batch, m.tokens) == ("bfloat16", 1, target))
    assert advice.on_gpus is not None
    for engine in list_engines():
        method, gpus = advice.served.get(engine), server if find_engine(engine).on_gpus else GPUServer()
        asked = Extending(target_length=target, engine=engine, **gpus.options)
        if method is None:
            with pytest.raises(ServingError):
                plan_extension(model.name, asked)
            continue
        plan = plan_extension(model.name, asked)
        assert (plan.method, plan.target_length, plan.context_length) == (method, target, context)
        assert plan.lengths[-2:] == (context, target)
        config = serving.serving_config(model.name, engine, method, target_length=target, server=gpus)
        assert (config.method, config.length) == (f"{method} x{target / context:g}", target)
        if gpus.gpus:
            assert set(advice.on_gpus.sentences) <= set(config.notes)
            alone = " ".join(serving.serving_config(model.name, engine, method, target_length=target).notes)
            said = f"{target:,} tokens takes {size_text(of_cache)} of keys and values"
            assert (said in alone) == ("of keys and values" in alone) == (of_cache > 16e9)
        first, *commands = advice.commands.get(f"serve with {engine}", [""])
        if first:  # not the second way to run the same program
            code, out, err = run(*shlex.split(first)[1:])
            assert code == 0, err
            printed = out.replace(" \\\n", "").splitlines()
            for words in map(shlex.split, commands):
                told = [shlex.split(line) for line in printed if line.startswith(words[0])]
                assert words in told or words[:2] == ["rope-ext", "gguf"], words


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_extend_and_serve_config_to_their_end_on_tiny_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model of the shape of each, all its lengths divided so that it is for 256 tokens or a little more."""
    monkeypatch.chdir(tmp_path)
    model, divisor = PUBLISHED[name], 1 << (PUBLISHED[name].context_length // 256).bit_length() - 1
    target, folder = model.target_length // divisor, model.write_weights(Path(), divisor)
    advice = run_json("extend", folder, "--target-length", target, "--dry-run")["advice"]
    engine = next((each for each in advice["served"] if each != "transformers"), "vllm")
    options = ("--engine", engine, "--max-spans", 3, "--device", "cpu", "--out", "longer", "--anyway", "--yes")
    code, _, err = run("extend", folder, "--target-length", target, *options)
    assert code == (0 if engine in advice["served"] else 2), err
    if code == 0:
        method, served = advice["served"][engine], serving.serving_config("longer", engine)
        direct = serving.serving_config(folder, engine, method, target_length=target)
        assert (served.method, served.length) == (direct.method, direct.length)
        assert rope.describe(load_empty("longer")).context_length == advice["context_length"]
        patched = rope.patch(load_empty(folder), method, target_length=target)
        assert not fingerprint(load_empty("longer")).differences(fingerprint(patched))


@pytest.mark.parametrize(("length", "factor"), [(128 * K, 4.0), (256 * K, 8.0)])
def test_the_published_base_of_qwen3_holds_in_every_command(length: int, factor: float, tmp_path: Path) -> None:
    """32,768 tokens; its config states 40,960."""
    folder = PUBLISHED["Qwen3"].write(tmp_path)
    plan = plan_extension(str(folder), Extending(target_length=length))
    assert (plan.method, plan.context_length) == ("yarn", 32 * K)
    assert ("and not for more" in plan.reason) == (length > 128 * K)
    assert serve(folder, length) == ("yarn", factor)
    assert any("ublished for Qwen3" in note for note in advise(folder, length).notes)
    stated = serving.serving_config(folder, "vllm", "yarn", target_length=length, context_length=40960)
    assert any("not the published one" in note for note in stated.notes)


@pytest.mark.parametrize("recipe", [each for each in recipes() if each.entry], ids=lambda recipe: recipe.name)
def test_no_command_misses_a_published_recipe(recipe: Recipe, tmp_path: Path) -> None:
    """At the published length, each leads to the published entry and names who published it."""
    length = recipe.arguments(recipe.stated_length).get("target_length") or 2 * recipe.context_length
    published_config(recipe).save_pretrained(tmp_path)
    entry = recipe.entry or {}
    advice = advise(tmp_path, length)
    assert advice.context_length == recipe.context_length
    assert any(f"ublished for {recipe.name}" in note for note in advice.notes)
    assert f"as published for {recipe.name}" in advice.commands
    assert entry["rope_type"] in advice.choices["to serve it without training"]
    plan = plan_extension(str(tmp_path), Extending(target_length=length))
    assert plan.reason.startswith(f"yarn over {recipe.context_length:,} tokens is published for {recipe.name}")
    assert (plan.method, plan.context_length) == (entry["rope_type"], recipe.context_length)
    served = serving.serving_config(tmp_path, "vllm", **recipe.arguments(recipe.stated_length))
    written = served.overrides or served.config_keys
    rope_parameters = written.get("text_config", written)["rope_parameters"]
    assert {key: rope_parameters[key] for key in entry} == entry
    assert not any("not the published one" in note for note in served.notes)


def test_a_patch_has_the_published_base() -> None:
    theta = {"rope_type": "default", "rope_theta": 1e6}
    shape: dict[str, Any] = {"max_position_embeddings": 40960, "rope_parameters": theta}
    model = rope.patch(build("qwen3", **shape), "yarn", factor=4)
    described = rope.describe(model)
    assert (described.context_length, described.extended_length) == (32 * K, 128 * K)
    assert described.context_rule == "as published"
    assert described.recipe is not None
    assert described.recipe.startswith("This is as published")
    with pytest.warns(UserWarning, match="not the published one"):
        rope.patch(build("qwen3", **shape), "yarn", factor=4, context_length=40960)


def test_a_model_whose_every_layer_sees_a_window_is_refused_everywhere(tmp_path: Path) -> None:
    """Mistral 7B v0.1: 4,096 tokens in each of 32 layers."""
    mistral = PUBLISHED["Mistral 7B"]
    folder = mistral._replace(sizes=mistral.sizes | {"sliding_window": 4096, "rope_theta": 1e4}).write(tmp_path)
    for asked in (
        lambda: advise(folder, 64 * K),
        lambda: plan_extension(str(folder), Extending(target_length=64 * K)),
        lambda: serving.serving_config(folder, "vllm", "yarn", target_length=64 * K),
        lambda: rope.patch(build("mistral", sliding_window=32), "yarn", factor=4),
        lambda: rope.patch(build("mistral", sliding_window=32), "self-extend"),
    ):
        with pytest.raises(UnsupportedModelError, match="every layer of this model has a sliding window of"):
            asked()
    assert rope.describe(build("mistral", sliding_window=32)).rotating_layers == (0, 0)
    forced = rope.patch(build("mistral", sliding_window=32), "yarn", factor=4, layers="sliding_attention")
    assert rope.describe(forced).extended_length == 256
    rope.patch(build("mistral", sliding_window=4096), "yarn", factor=4)  # no input of the model reaches beyond it


def test_what_vllm_alone_cannot_serve_names_its_cause_once_and_the_plug_in(tmp_path: Path) -> None:
    folder = PUBLISHED["gpt-oss"].write(tmp_path)
    with pytest.raises(ServingError, match=r"passes on YaRN's keys alone.* --plugin") as error:
        serving.serving_config(folder, "vllm", "yarn", target_length=256 * K)
    assert str(error.value).count("beta_fast") == 1
    assert serving.serving_config(folder, "vllm", "yarn", target_length=256 * K, plugin=True).length == 256 * K


def test_an_adapter_is_refused_in_one_sentence_by_all(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    adapter = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    adapter.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapter.save_pretrained(tmp_path / "adapter")
    said = set()
    for asked in (
        lambda path: advise(path, 256),
        lambda path: plan_extension(str(path), Extending(target_length=256)),
        lambda path: serving.serving_config(path, "vllm"),
        audit,
    ):
        with pytest.raises(CheckpointError, match="merge the adapter") as error:
            asked(tmp_path / "adapter")
        said.add(str(error.value))
    assert len(said) == 1

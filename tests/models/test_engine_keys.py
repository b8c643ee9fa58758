"""Patched folders as other programs read them: the rules of engines, both spellings, and the sentences about them.

tests/tools/engines/test_comparison.py holds the table of `compare_engines` to the rules of the tool box.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.hub import load_empty
from rope_ext_hf.models.engine_keys import KEYS_FOR_OTHER_ENGINES, TRIED_FAMILIES, compare_engines, former_keys
from rope_ext_hf.models.families import former_key
from tests.support.models import FAMILIES, THETA, TRAINED, build, build_known, logits, static_cases, tokens
from tests.support.saved_models import DYNAMIC, STATIC, Lookup, load_plainly, saved_config, saved_rope

# --- the attention factor by the rules of others ------------------------------------------------------------------


def g(factor: float, mscale: float = 1.0) -> float:
    """yarn_get_mscale: the same in all of them."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_default(settings: dict[str, Any], max_position_embeddings: int) -> float:
    original = settings["original_max_position_embeddings"]
    scale = max_position_embeddings / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def vllm(settings: dict[str, Any], max_position_embeddings: int) -> float:
    """vllm-project/vllm 0.33.0, vllm/model_executor/layers/rotary_embedding.

    yarn_scaling_rope.py: attention_factor, else the ratio of both mscales, else g; attn_factor is not read.
    phi3_long_rope_scaled_rope.py: long_mscale, once the served length is above the original one.
    """
    if settings["rope_type"] == "yarn":
        if settings.get("attention_factor") is not None:
            return float(settings["attention_factor"])
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        if mscale and all_dim:
            return g(settings["factor"], mscale) / g(settings["factor"], all_dim)
        return g(settings["factor"])
    if settings["rope_type"] == "longrope":
        return float(settings.get("long_mscale") or longrope_default(settings, max_position_embeddings))
    return 1.0


def sglang(settings: dict[str, Any], max_position_embeddings: int) -> float:
    """sgl-project/sglang 0.5.23, python/sglang/srt/layers/rotary_embedding.

    yarn.py: the ratio of both mscales where they are there, else g, times attn_factor; attention_factor is not read.
    rope_variant.py: long_mscale, as in vLLM.
    """
    if settings["rope_type"] == "yarn":
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        own = g(settings["factor"])
        if mscale is not None and all_dim is not None:
            own = g(settings["factor"], mscale) / g(settings["factor"], all_dim)
        return own * float(settings.get("attn_factor", 1))
    return vllm(settings, max_position_embeddings)


def mlx_lm(settings: dict[str, Any], max_position_embeddings: int) -> float:
    """ml-explore/mlx-lm 0.32.2, mlx_lm/models/rope_utils.py: mscale and mscale_all_dim only; of a longrope, nothing."""
    if settings["rope_type"] == "yarn":
        return g(settings["factor"], settings.get("mscale", 1)) / g(
            settings["factor"], settings.get("mscale_all_dim", 0)
        )
    return longrope_default(settings, max_position_embeddings) if settings["rope_type"] == "longrope" else 1.0


def attention_factor(name: str, which: str) -> float:
    case = static_cases(name)[which]
    rotary = rope.Rotary(FAMILIES[name].rotated, THETA, TRAINED)
    return rope.frequencies(case.method, rotary, **case.params).attention_factor


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), STATIC)
@pytest.mark.sampled(5)
def test_vllm_and_sglang_read_the_attention_factor(name: str, which: str, saved: Lookup) -> None:
    folder, expected = saved("static", name, which).folder, attention_factor(name, which)
    settings, length = saved_rope(folder), saved_config(folder)["max_position_embeddings"]
    for read in (vllm, sglang):
        assert read(settings, length) == pytest.approx(expected, rel=1e-9), read.__name__
    if settings["rope_type"] == "longrope":
        assert settings["short_mscale"] == settings["long_mscale"] == settings["attention_factor"]


@pytest.mark.parametrize("given", [0.9, 1.0, 1.3])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_yarn_with_an_attention_factor_of_its_own(name: str, given: float, tmp_path: Path) -> None:
    model = rope.patch(build(name), "yarn", factor=4, attention_factor=given)
    model.save_pretrained(tmp_path)
    written = saved_rope(tmp_path)
    assert (written["rope_type"], written["attention_factor"]) == ("yarn", given)
    assert vllm(written, 256) == given
    assert sglang(written, 256) == pytest.approx(given, rel=1e-12)
    if given == 1 and name == "llama":
        assert written["mscale"] == written["mscale_all_dim"] == 1.0
        assert "attn_factor" not in written
        assert mlx_lm(written, 256) == 1.0
    else:  # DeepSeek's attention would scale its softmax by mscale_all_dim
        assert written["attn_factor"] == pytest.approx(given / (0.1 * math.log(4) + 1), rel=1e-12)
        assert not {"mscale", "mscale_all_dim"} & written.keys()
    plain = load_plainly(tmp_path)
    assert float((logits(plain, tokens(200)) - logits(model, tokens(200))).abs().max()) <= 1e-4


@pytest.mark.parametrize("which", list(static_cases("llama")))
@pytest.mark.parametrize("name", sorted(TRIED_FAMILIES))
def test_mlx_lm_is_called_right_where_it_is(name: str, which: str, saved: Lookup) -> None:
    folder = saved("static", name, which).folder
    settings, length = saved_rope(folder), saved_config(folder)["max_position_embeddings"]
    same = math.isclose(mlx_lm(settings, length), attention_factor(name, which), rel_tol=1e-6)
    one_list = settings.get("short_factor") == settings.get("long_factor")
    right = same and one_list and settings.get("truncate", True)  # its yarn always rounds the ends of the ramp
    config = saved_config(folder)
    assert ("mlx-lm 0.32.2" in compare_engines(config).agreeing) == right
    assert ("mlx-lm 0.32.2" in compare_engines(config).disagreeing) != right
    assert "vLLM 0.33" in compare_engines(config).agreeing


# --- both spellings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), STATIC + DYNAMIC)
def test_both_spellings_say_the_same(name: str, which: str, saved: Lookup) -> None:
    config = saved_config(saved("static" if (name, which) in STATIC else "dynamic", name, which).folder)
    settings = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    theta = former_key(name, "rope_theta")
    assert config[theta] == settings["rope_theta"]
    if settings["rope_type"] == "default":
        assert "rope_scaling" not in config
    else:
        assert config["rope_scaling"] == {key: value for key, value in settings.items() if key != "rope_theta"}
    if FAMILIES[name].partial is not None:
        assert FAMILIES[name].partial in (config.get("partial_rotary_factor"), config.get("rotary_pct"))
    if name == "gemma3":
        assert config["rope_local_base_freq"] == config["rope_parameters"]["sliding_attention"]["rope_theta"]


def test_layers_with_a_scaling_of_their_own_have_one_spelling() -> None:
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    both = {"full_attention": scaled, "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert former_keys("gemma3_text", both, ["full_attention"]) == {}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    former = former_keys("gemma3_text", both, ["full_attention"])
    assert former == {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}


def test_a_class_that_does_not_read_the_former_spelling_gets_none(tmp_path: Path) -> None:
    model = rope.patch(build_known("mellum"), "yarn", factor=4)  # its class takes `rope_scaling` for a flat dict
    model.save_pretrained(tmp_path)
    assert not {"rope_theta", "rope_scaling"} & saved_config(tmp_path).keys()
    plain = load_plainly(tmp_path)
    assert float((logits(plain, tokens(200)) - logits(model, tokens(200))).abs().max()) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "glm"])
def test_plain_loading_and_saving_keeps_one_spelling(name: str, saved: Lookup, tmp_path: Path) -> None:
    it = saved("static", name, "yarn")
    loaded = load_plainly(it.folder)
    loaded.save_pretrained(tmp_path / "plain")
    assert "rope_scaling" not in saved_config(tmp_path / "plain")
    assert torch.equal(logits(rope.from_pretrained(tmp_path / "plain"), tokens(200)), logits(it.model, tokens(200)))
    rope.patch(loaded, "ntk", factor=8).save_pretrained(tmp_path / "again")  # nothing of the first patch is left over
    rope.patch(build(name), "ntk", factor=8).save_pretrained(tmp_path / "fresh")
    again, fresh = saved_config(tmp_path / "again"), saved_config(tmp_path / "fresh")
    assert again == fresh | {"dtype": again.get("dtype")}
    unpatched = rope.unpatch(rope.from_pretrained(tmp_path / "again"))
    assert torch.equal(logits(unpatched, tokens(200)), logits(build(name), tokens(200)))
    unpatched.save_pretrained(tmp_path / "unpatched")
    assert not {"rope_scaling", "rope_theta", "rotary_emb_base"} & saved_config(tmp_path / "unpatched").keys()


@pytest.mark.parametrize("change", ["rope_scaling", "rope_theta", "rope_parameters"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_spellings_that_contradict_each_other_are_refused(
    name: str, change: str, saved: Lookup, tmp_path: Path
) -> None:
    config = saved_config(saved("static", name, "linear").folder)
    config[change] = {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_theta": 77.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": THETA},
    }[change]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="were changed since"):
        load_empty(tmp_path)


def test_a_scaling_put_beside_a_plain_form_is_refused(saved: Lookup, tmp_path: Path) -> None:
    config = saved_config(saved("static", "llama", "ntk").folder)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    with pytest.raises(CheckpointError, match="rope_scaling beside it"):
        load_empty(tmp_path)


@pytest.mark.parametrize("former", [5, "rope_theta", [["rope_theta"]], {"rope_theta": 1}, None])
def test_a_damaged_list_of_former_keys(former: object, saved: Lookup, tmp_path: Path) -> None:
    config = saved_config(saved("static", "llama", "linear").folder)
    config["rope_ext_hf"]["former"] = former
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"damaged.*former"):
        load_empty(tmp_path)


def test_a_process_that_writes_no_config_rewrites_none(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "linear", factor=4)
    model.save_pretrained(tmp_path, False)  # is_main_process, as Trainer calls it on every rank but one
    assert not (tmp_path / "config.json").exists()


# --- what is said of them -----------------------------------------------------------------------------------------

RUN = ("transformers 4.57", "ExLlamaV3 1.6.5", "mlx-lm 0.32.2", "vLLM 0.33", "SGLang 0.5.23")
SOURCE_ALONE = "TensorRT-LLM 1.2.0rc2"
LISTS = {"short_factor": [1.0] * 8, "long_factor": [float(i + 1) for i in range(8)]}


@pytest.mark.parametrize(
    ("method", "params", "wrong"),
    [
        ("yarn", {"attention_factor": 1.3}, ["mlx-lm 0.32.2"]),
        ("yarn", {"truncate": False}, ["mlx-lm 0.32.2"]),
        (
            "longrope",
            LISTS,
            [*RUN, SOURCE_ALONE],
        ),
    ],
)
def test_saving_warns_of_programs_that_run_another_model(
    method: str, params: dict[str, Any], wrong: list[str], tmp_path: Path
) -> None:
    model = rope.patch(build("llama"), method, factor=4, **params)
    with pytest.warns(UserWarning, match=f"^{', '.join(wrong)} would load .* and run another model"):
        model.save_pretrained(tmp_path / "model")
    build("llama").save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match=f"^{', '.join(wrong)} would load"):
        save_patched_folder(model, tmp_path / "plain", tmp_path / "folder")
    right = [label for label in RUN if label not in wrong]
    assert rope.describe(model).save_route.endswith(
        f"known to be read right by {', '.join(['transformers 5', *right])}"
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3", "by-parts"])
def test_forms_that_all_of_them_read(method: str, tmp_path: Path) -> None:
    model = rope.patch(build("llama"), method, factor=4)
    model.save_pretrained(tmp_path)
    known, _, by_source = rope.describe(model).save_route.partition(
        "; by their source code, which was read but not run, also by "
    )
    assert known.endswith(f"known to be read right by transformers 5, {', '.join(RUN)}")
    assert by_source == ("" if method in ("yarn", "by-parts") else SOURCE_ALONE)


@pytest.mark.filterwarnings("error")
def test_of_other_families_only_transformers_is_known(tmp_path: Path) -> None:
    model = rope.patch(build("glm"), "yarn", factor=4, attention_factor=1.3)
    model.save_pretrained(tmp_path)
    assert rope.describe(model).save_route.endswith("known to be read right by transformers 5")


def test_keys_for_other_engines_are_no_settings_of_a_family(saved: Lookup, tmp_path: Path) -> None:
    """A new patch of a plainly loaded model, its record deleted, leaves none of them behind."""
    config = saved_config(saved("static", "llama", "factors").folder)
    del config["rope_ext_hf"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = rope.patch(load_empty(tmp_path), "linear", factor=2, over="original")
    assert not KEYS_FOR_OTHER_ENGINES & model.config.rope_parameters.keys()

"""Patching live models: right frequencies, nothing left behind, nobody else touched, loud where it cannot be right."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from tests.support.model_checks import (
    CHANGED,
    LONG,
    TOLERANCE,
    BoomError,
    cos_of,
    difference,
    every_family,
    every_static,
    state,
)
from tests.support.models import (
    FAMILIES,
    THETA,
    TRAINED,
    build,
    build_config,
    dynamic_cases,
    from_config,
    logits,
    rotary_of,
    static_cases,
    tokens,
)

# --- the right frequencies ----------------------------------------------------------------------------------------


@every_static
def test_equals_the_same_weights_loaded_natively(name: str, which: str) -> None:
    case, ids = static_cases(name)[which], tokens(LONG, batch=2)
    model = build(name)
    native = build(name, case.form, max_position_embeddings=LONG, seed=9)
    native.load_state_dict(model.state_dict())
    plain, expected = logits(model, ids), logits(native, ids)
    output = logits(rope.patch(model, case.method, **case.params), ids)
    assert difference(output, expected) <= TOLERANCE
    if which != "default":
        assert difference(output, plain) >= CHANGED


@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, LONG])
@pytest.mark.parametrize("which", ["hf", "longrope"])
@every_family
@pytest.mark.sampled(3)
def test_length_dependent_equals_a_fresh_native_model(name: str, which: str, length: int) -> None:
    method, params = dynamic_cases(name)[which]
    if which == "hf":
        if "linear" not in FAMILIES[name].forms:
            pytest.skip("its config takes no rope type 'dynamic'")
        form, kept = {"rope_type": "dynamic", "factor": 4.0}, TRAINED
    else:
        original = {"original_max_position_embeddings": TRAINED}
        form, kept = {"rope_type": "longrope"} | params | original, LONG
    model, ids = build(name), tokens(length)
    native = build(name, form, max_position_embeddings=kept, seed=9)
    native.load_state_dict(model.state_dict())
    plain, expected = logits(model, ids), logits(native, ids)
    output = logits(rope.patch(model, method, **params), ids)
    assert difference(output, expected) <= TOLERANCE
    if length == LONG:
        assert difference(output, plain) >= CHANGED


@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_gemma3_sliding_layers_keep_their_own_table(layers: list[str]) -> None:
    model, positions = build("gemma3", layer_types=layers), torch.arange(LONG)[None]
    before = {layer_type: cos_of(model, positions, layer_type) for layer_type in set(layers)}
    rope.patch(model, "linear", factor=4)
    assert torch.allclose(
        cos_of(model, positions, "full_attention")[:, ::4], before["full_attention"][:, : LONG // 4], atol=1e-4
    )
    assert difference(cos_of(model, positions, "full_attention"), before["full_attention"]) > 0.1
    if "sliding_attention" in layers:
        assert difference(cos_of(model, positions, "sliding_attention"), before["sliding_attention"]) <= 1e-4
        (note,) = rope.describe(model).notes
        assert "1 of 2 layers" in note
        assert "theta 1000" in note
    else:
        assert rope.describe(model).notes == ()


def test_a_config_that_is_none_is_passed_over() -> None:
    """Idefics keeps a dropout rate in `config` of some of its layers."""
    model = build("llama")
    model.model.layers[0].mlp.config = 0.5
    assert (
        difference(logits(rope.patch(model, "yarn", factor=4), tokens(LONG)), logits(build("llama"), tokens(LONG))) > 1
    )


def test_accurate_in_a_model_cast_to_bfloat16() -> None:
    model = rope.patch(build("llama"), "linear", factor=4).to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 255, 131_070, 131_071]])
    cos, sin = rotary_of(model)(torch.zeros(1, dtype=torch.float32), positions)
    inv_freq = torch.tensor([THETA ** (-2 * i / 16) / 4 for i in range(8)], dtype=torch.float64)
    angle = (positions.double()[..., None] * inv_freq).repeat(1, 1, 2)
    assert difference(cos.double(), angle.cos()) <= 1e-6
    assert difference(sin.double(), angle.sin()) <= 1e-6


IN_FLOAT32 = ("olmo", "olmo2", "olmo3", "llama4", "deepseek_v2")  # whatever the model's dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every_family
def test_angles_come_in_the_dtype_and_shape_of_the_stock_module(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    layer_type = "full_attention" if FAMILIES[name].nested else None
    positions = torch.arange(8)[None].expand(2, -1)
    stock = cos_of(model, positions, layer_type, dtype)
    ours = cos_of(rope.patch(model, "default"), positions, layer_type, dtype)
    assert ours.dtype == stock.dtype
    assert ours.dtype == (torch.float32 if name in IN_FLOAT32 else dtype)
    assert ours.shape == stock.shape
    assert difference(ours.float(), stock.float()) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
def test_a_model_cast_before_the_patch_is_as_good_as_one_cast_after(theta: float, dtype: torch.dtype) -> None:
    before, after = (build("llama", {"rope_theta": theta}, head_dim=128) for _ in range(2))
    rope.patch(before.to(dtype), "yarn", factor=4)
    rope.patch(after, "yarn", factor=4).to(dtype)
    assert torch.equal(logits(before, tokens(LONG)), logits(after, tokens(LONG)))


@every_family
def test_runs_in_bfloat16(name: str) -> None:
    model = rope.patch(build(name), "yarn", factor=4).to(torch.bfloat16)
    out = logits(model, tokens(LONG))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_positions_may_be_given_and_shifted() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4), tokens(LONG)
    shifted = logits(model, ids, position_ids=torch.arange(LONG)[None] + 1000)
    assert difference(shifted, logits(model, ids)) <= 10 * TOLERANCE
    spread = logits(model, ids, position_ids=2 * torch.arange(LONG)[None])
    assert difference(spread, logits(model, ids)) >= CHANGED


# --- undone, replaced, restored -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@every_family
def test_unpatch_is_exact(name: str, method: str) -> None:
    model = build(name)
    twin = copy.deepcopy(model)
    before = state(model)
    rope.patch(model, method, factor=4)
    assert state(model)["modules"] != before["modules"]
    assert list(model.state_dict()) == before["keys"]
    for present in (model, twin):  # both lose the same bits of their frequencies and weights
        present.to(torch.bfloat16).to(torch.float32)
    ids = tokens(LONG)
    logits(model, ids)
    assert rope.unpatch(model) is model
    after = state(model)
    assert after == before | {"buffers": [path for path, _ in twin.named_buffers()]}
    assert torch.equal(logits(model, ids), logits(twin, ids))
    for (path, ours), (_, theirs) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), path
    assert model.config.to_dict() == twin.config.to_dict()


def test_casts_while_patched_reach_the_original() -> None:
    model = rope.patch(build("llama"), "linear", factor=4).to(torch.bfloat16)
    inv_freq = rotary_of(rope.unpatch(model)).inv_freq
    assert inv_freq.dtype == torch.bfloat16


def test_unpatch_of_an_unpatched_model_does_nothing() -> None:
    model = build("llama")
    before = state(model)
    assert rope.unpatch(model) is model
    assert state(model) == before


@pytest.mark.parametrize("first", ["yarn", "dynamic"])
@every_family
def test_patching_a_patched_model_replaces(name: str, first: str) -> None:
    ids = tokens(LONG)
    fresh = rope.patch(build(name), "linear", factor=4)
    twice = rope.patch(rope.patch(build(name), first, factor=2), "linear", factor=4)
    assert torch.equal(logits(twice, ids), logits(fresh, ids))
    assert twice.config.to_dict() == fresh.config.to_dict()
    assert str(rope.describe(twice)) == str(rope.describe(fresh))
    kept, new = state(twice), state(fresh)
    assert kept["buffers"] == new["buffers"]
    assert kept["hooks"] == new["hooks"]
    assert kept["own save"] == new["own save"]
    stock = build(name)
    rope.unpatch(twice)
    assert torch.equal(logits(twice, ids), logits(stock, ids))
    assert twice.config.to_dict() == stock.config.to_dict()


BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "unknown": ("yarm", {"factor": 4}, MethodError, "yarn"),
    "factor": ("yarn", {"factor": 0.5}, MethodError, "0.5"),
    "nan": ("yarn", {"factor": math.nan}, MethodError, "nan"),
    "both": ("yarn", {"factor": 4, "target_length": 256}, MethodError, "give one"),
    "too short": ("yarn", {"target_length": 32}, MethodError, "32"),
    "lists": ("longrope", {"factor": 4, "short_factor": [1.0], "long_factor": [1.0]}, MethodError, "8"),
    "parameter": ("yarn", {"factor": 4, "beta_fats": 3}, MethodError, "beta_fast"),
    "native": ("dynamic-ntk", {"native": True}, MethodError, "native"),
}


@pytest.mark.parametrize("already", [None, "ntk", "dynamic"])
@pytest.mark.parametrize("mistake", BAD)
def test_a_failed_patch_leaves_the_model_as_it_was(mistake: str, already: str | None) -> None:
    method, params, error, message = BAD[mistake]
    model, ids = build("llama"), tokens(LONG)
    if already:
        rope.patch(model, already, factor=2)
    before, out = state(model), logits(model, ids)
    with pytest.raises(error, match=message):
        rope.patch(model, method, **params)
    assert state(model) == before
    assert torch.equal(logits(model, ids), out)


def test_a_method_object_takes_no_parameters_beside_it() -> None:
    yarn = rope.list_methods()["yarn"](factor=4.0)  # type: ignore[call-arg]
    model, ids = build("llama"), tokens(LONG)
    by_name = logits(rope.patch(build("llama"), "yarn", factor=4), ids)
    assert torch.equal(logits(rope.patch(model, yarn), ids), by_name)
    with pytest.raises(TypeError, match="factor"):
        rope.patch(model, yarn, factor=8)
    with pytest.raises(TypeError, match="beta_fast"):
        rope.patch(model, yarn, beta_fast=8)


def test_target_length_is_factor_times_trained_length() -> None:
    ids = tokens(LONG)
    by_factor, by_length = (
        rope.patch(build("llama"), "yarn", factor=4),
        rope.patch(build("llama"), "yarn", target_length=LONG),
    )
    assert torch.equal(logits(by_factor, ids), logits(by_length, ids))
    assert by_length.config.to_dict() == by_factor.config.to_dict()


@pytest.mark.parametrize("already", [None, "ntk", "dynamic"])
def test_patched_restores_after_an_exception(already: str | None) -> None:
    model, ids = build("phi3"), tokens(LONG)
    if already:
        rope.patch(model, already, factor=2)
    before, out = state(model), logits(model, ids)
    described = str(rope.describe(model))

    def fail() -> None:
        with rope.patched(model, "linear", factor=4) as inside:
            assert inside is model
            assert difference(logits(model, ids), out) >= CHANGED
            raise BoomError

    with pytest.raises(BoomError):
        fail()
    assert torch.equal(logits(model, ids), out)
    assert str(rope.describe(model)) == described
    after = state(model)
    for kept in ("config", "keys", "buffers", "hooks", "own save") if already else before:
        assert after[kept] == before[kept], kept


def test_patched_nests_and_restores_what_was_patched_inside() -> None:
    model, ids = build("llama"), tokens(LONG)
    plain = logits(model, ids)
    with rope.patched(model, "yarn", factor=4):
        yarn = logits(model, ids)
        with rope.patched(model, "linear", factor=4):
            rope.patch(model, "ntk", factor=4)
        assert torch.equal(logits(model, ids), yarn)
        rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


def test_patched_that_fails_to_patch_leaves_the_model_alone() -> None:
    model = rope.patch(build("llama"), "ntk", factor=2)
    before = state(model)
    with pytest.raises(MethodError), rope.patched(model, "linear", factor=0):
        pass
    assert state(model) == before


def test_patched_restores_a_patch_with_all_its_settings() -> None:
    model = rope.patch(build("llama"), "dynamic", factor=4, native=True)
    before, route = copy.deepcopy(model.config.to_dict()), rope.describe(model).save_route
    with rope.patched(model, "theta", theta=1e6, target_length=LONG):
        assert model.config.max_position_embeddings == LONG
    assert model.config.to_dict() == before
    assert rope.describe(model).save_route == route


def resize(model: Any) -> None:
    model.resize_token_embeddings(100, mean_resizing=False)


def other_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def other_settings(model: Any) -> None:
    model.config.use_cache = False
    model.config.pad_token_id = 5


@pytest.mark.parametrize("act", [rope.unpatch, lambda model: rope.patch(model, "linear", factor=4)])
@pytest.mark.parametrize("change", [resize, other_attention, other_settings])
def test_what_else_changed_in_the_config_while_patched_stays(change: Any, act: Any) -> None:
    model, twin = rope.patch(build("llama"), "yarn", factor=4), build("llama")
    change(model)
    change(twin)
    act(model)
    act(twin)
    assert model.config.to_dict() == twin.config.to_dict()
    assert model.config._attn_implementation == twin.config._attn_implementation
    assert model.lm_head.weight.shape == twin.lm_head.weight.shape


# --- nobody else --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@every_family
def test_two_models_of_one_config_object(name: str, method: str) -> None:
    config = build_config(name)
    first, second = from_config(config, seed=0), from_config(config, seed=1)
    assert first.config is second.config is config
    ids, config_before = tokens(LONG), copy.deepcopy(config.to_dict())
    out, before = logits(second, ids), state(second)
    rope.patch(first, method, factor=4)
    logits(first, ids)
    assert first.config is not config
    assert config.to_dict() == config_before
    assert state(second) == before
    assert torch.equal(logits(second, ids), out)
    rope.patch(second, "linear", factor=2)
    patched = logits(first, ids)
    rope.unpatch(second)
    assert torch.equal(logits(first, ids), patched)
    assert torch.equal(logits(second, ids), out)
    assert first.config.max_position_embeddings != TRAINED or method == "dynamic"
    assert config.to_dict() == config_before


@every_family
def test_every_submodule_sees_the_same_new_config(name: str) -> None:
    model = build(name)
    old = model.config
    rope.patch(model, "linear", factor=4)
    stale = [
        path
        for path, module in model.named_modules()
        if module.__dict__.get("config") is old and not path.endswith("replaced")
    ]
    assert stale == []
    assert model.config is model.base_model.config


CACHES = ("__slotnames__", "_abc_impl")  # Python's own, filled when a class is first copied or asked about


def everything_of(module: Any) -> dict[str, int]:
    """Identity of every class and function of a module, and of every attribute of its classes."""
    actual = {key: id(value) for key, value in vars(module).items() if not key.startswith("__")}
    for name, cls in vars(module).items():
        if isinstance(cls, type):
            actual |= {f"{name}.{key}": id(value) for key, value in vars(cls).items() if key not in CACHES}
    return actual


def of_transformers() -> dict[str, Any]:
    from transformers import modeling_rope_utils, modeling_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.llama import modeling_llama
    from transformers.models.phi3 import configuration_phi3, modeling_phi3

    modules = (modeling_rope_utils, modeling_utils, modeling_llama, modeling_gemma3, modeling_phi3, configuration_phi3)
    return {module.__name__: everything_of(module) for module in modules} | {
        "rope": {key: id(value) for key, value in modeling_rope_utils.ROPE_INIT_FUNCTIONS.items()},
        "attention": list(modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()),
        "masks": list(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
        "configs": list(transformers.CONFIG_MAPPING.keys()),
    }


@pytest.mark.slow
def test_nothing_of_transformers_changes(tmp_path: Path) -> None:
    models = [build(name) for name in ("llama", "gemma3", "phi3")]
    before = of_transformers()
    for model in models:
        for method in ("yarn", "dynamic", "linear"):
            rope.patch(model, method, factor=4)
            with rope.fixed_length(model, LONG):
                logits(model, tokens(LONG))
            model.save_pretrained(tmp_path / "saved")
            rope.from_pretrained(tmp_path / "saved")
            assert of_transformers() == before
        rope.unpatch(model)
    assert of_transformers() == before


# --- refused ------------------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"vocab_size": 97}


def without_rope(model_type: str) -> Any:
    if model_type == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, **SMALL))
    if model_type == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, **SMALL
        )
        return transformers.BertModel(config)
    if model_type == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, **SMALL))
    if model_type == "mpt":
        return transformers.MptForCausalLM(transformers.MptConfig(d_model=32, n_layers=1, n_heads=2, **SMALL))
    raise KeyError(model_type)


@pytest.mark.parametrize("act", [rope.describe, lambda model: rope.patch(model, "yarn", factor=4)])
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "bloom", "mpt"])
def test_models_without_rope_are_refused(model_type: str, act: Any) -> None:
    model = without_rope(model_type)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=model_type):
        act(model)
    assert state(model) == before


@pytest.mark.slow
def test_angles_arranged_in_another_way_are_refused() -> None:
    """HunYuan-VL gives the two columns of a pair to different axes of its positions."""
    from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLTextConfig
    from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLTextModel

    settings = {"rope_type": "default", "rope_theta": THETA, "mrope_section": [2, 2, 2, 2]}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = HunYuanVLTextModel(HunYuanVLTextConfig(**sizes, **SMALL, head_dim=16, rope_parameters=settings))
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="arranges them in another way"):
        rope.patch(model, "yarn", factor=4)
    assert state(model) == before


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_frequencies_the_config_does_not_describe_are_refused(name: str) -> None:
    model = build(name)
    rotary = rotary_of(model)
    for path, buffer in rotary.named_buffers():
        if path.startswith(("full_attention", "inv_freq", "original")):
            buffer.mul_(0.5)
    before, out = state(model), logits(model, tokens(LONG))
    with pytest.raises(UnsupportedModelError, match=model.config.model_type):
        rope.patch(model, "yarn", factor=4)
    assert state(model) == before
    assert torch.equal(logits(model, tokens(LONG)), out)


@pytest.mark.parametrize("act", [rope.describe, lambda model: rope.patch(model, "yarn", factor=4)])
def test_what_is_no_transformers_model_is_refused(act: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="Linear"):
        act(nn.Linear(2, 2))


def test_a_softmax_scale_that_would_change_on_loading_is_refused() -> None:
    model = build("deepseek_v3")
    before = state(model)
    with pytest.raises(MethodError, match="mscale_all_dim"):
        rope.patch(model, "yarn", factor=4, mscale=1.0, mscale_all_dim=1.0)
    assert state(model) == before


@pytest.mark.slow
def test_patching_is_silent() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in FAMILIES:
            rope.patch(build(name), "yarn", factor=4)
    assert caught == []


@pytest.mark.filterwarnings("ignore:the folder of this model records:UserWarning")
def test_a_model_by_its_name(tmp_path: Path) -> None:
    model = rope.patch("reference", "yarn", target_length="2k")
    assert rope.describe(model).extended_length == 2048
    model.save_pretrained(tmp_path / "longer")
    again = rope.patch(tmp_path / "longer", "linear", factor=2)
    assert rope.describe(again).extended_length == 512  # of the model underneath the saved patch
    with pytest.raises(rope.CheckpointError, match="no such model folder"):
        rope.patch("./nowhere", "yarn", factor=2)
    with pytest.raises(MethodError, match="not a length in tokens: 'far'"):
        rope.patch(model, "yarn", target_length="far")


def test_a_patch_that_replaces_the_recorded_one_says_so(tmp_path: Path) -> None:
    rope.patch(build("llama"), "yarn", factor=4).save_pretrained(tmp_path)
    lengths = f"yarn for {4 * TRAINED} tokens, .* {4 * TRAINED} tokens become {2 * TRAINED}. over='patched' keeps it"
    plain = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.warns(UserWarning, match=lengths):
        model = rope.patch(plain(tmp_path), "linear", factor=2)
    assert any("this patch replaces it" in note for note in rope.describe(model).notes)
    with pytest.warns(UserWarning, match=lengths):
        rope.from_pretrained(tmp_path, "linear", factor=2)
    with pytest.warns(UserWarning, match=lengths):
        rope.patch(tmp_path, "linear", factor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.patch(model, "linear", factor=3)  # a live patch
        rope.patch(rope.from_pretrained(tmp_path), "linear", factor=3)
        rope.patch(plain(tmp_path), "yarn", factor=4)  # the same
        rope.patch(plain(tmp_path), "linear", factor=2, over="patched")


def test_no_method_is_offered_over_a_recorded_remapping(tmp_path: Path) -> None:
    rope.patch(build("llama"), "rerope").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="records rerope, and this patch replaces it$"):
        rope.from_pretrained(tmp_path, "linear", factor=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": TRAINED, "beta_fast": 16},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    ],
)
def test_rope_settings_give_what_transformers_computes_from_them(settings: dict[str, Any]) -> None:
    stock = build("llama", {"original_max_position_embeddings": TRAINED} | settings)
    for model in (rope.patch(build("llama"), settings), rope.patch(build("llama"), dict(settings))):
        torch.testing.assert_close(logits(model, tokens(100)), logits(stock, tokens(100)), atol=2e-4, rtol=0)


def test_the_factor_may_follow_the_method() -> None:
    expected = logits(rope.patch(build("llama"), "yarn", factor=4), tokens(100))
    assert torch.equal(logits(rope.patch(build("llama"), "yarn", 4), tokens(100)), expected)
    with rope.patched(build("llama"), "yarn", 4) as model:
        assert torch.equal(logits(model, tokens(100)), expected)
    assert rope.describe(rope.plan_patch(build("llama"), "yarn", 4)).params["factor"] == 4

"""Patching live models: right frequencies, nothing left behind, nobody else touched, loud where it cannot be right."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from tests.dispatch import HostReads
from tests.models import (
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

LONG = 4 * TRAINED
TOLERANCE = 1e-4  # of logits, float32, up to 256 positions
CHANGED = 100 * TOLERANCE  # what counts as another result

every_family = pytest.mark.parametrize("name", FAMILIES)
every_static = pytest.mark.parametrize(
    ("name", "which"), [(name, which) for name in FAMILIES for which in static_cases(name)]
)
every_dynamic = pytest.mark.parametrize("which", dynamic_cases("llama"))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def cos_of(model: Any, positions: Tensor, layer_type: str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The cosines a model's rotary module gives (batch, length, ...); of those that give complex numbers, all."""
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    out = rotary_of(model)(torch.zeros(1, dtype=dtype), positions, **kwargs)
    cos: Tensor = torch.view_as_real(out) if isinstance(out, Tensor) else out[0]
    return cos


def state(model: Any) -> dict[str, Any]:
    """All that must not change: who is where, configs by identity and by value, hooks, instance attributes."""
    return {
        "modules": {path: id(module) for path, module in model.named_modules()},
        "configs": {path: id(module.__dict__.get("config")) for path, module in model.named_modules()},
        "config": copy.deepcopy(model.config.to_dict()),
        "keys": list(model.state_dict()),
        "buffers": [path for path, _ in model.named_buffers()],
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()),
        "own save": [path for path, m in model.named_modules() if "save_pretrained" in m.__dict__],
    }


# --- the right frequencies ----------------------------------------------------------------------------------------


@every_static
def test_equals_the_same_weights_loaded_natively(name: str, which: str) -> None:
    case, ids = static_cases(name)[which], tokens(LONG, batch=2)
    model = build(name)
    native = build(name, case.form, max_position_embeddings=LONG, seed=9)
    native.load_state_dict(model.state_dict())
    plain, expected = logits(model, ids), logits(native, ids)
    got = logits(rope.patch(model, case.method, **case.params), ids)
    assert difference(got, expected) <= TOLERANCE
    if which != "default":
        assert difference(got, plain) >= CHANGED


@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, LONG])
@pytest.mark.parametrize("which", ["hf", "longrope"])
@every_family
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
    got = logits(rope.patch(model, method, **params), ids)
    assert difference(got, expected) <= TOLERANCE
    if length == LONG:
        assert difference(got, plain) >= CHANGED


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
    for each in (model, twin):  # both lose the same bits of their frequencies and weights
        each.to(torch.bfloat16).to(torch.float32)
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
    "both": ("yarn", {"factor": 4, "target_length": 256}, MethodError, "one of them"),
    "too short": ("yarn", {"target_length": 32}, MethodError, "32"),
    "lists": ("longrope", {"factor": 4, "short_factor": [1.0], "long_factor": [1.0]}, MethodError, "8"),
    "parameter": ("yarn", {"factor": 4, "beta_fats": 3}, MethodError, "beta_fast"),
    "native": ("dynamic-ntk", {"native": True}, MethodError, "native"),
}


@pytest.mark.parametrize("already", [None, "ntk", "dynamic"])
@pytest.mark.parametrize("what", BAD)
def test_a_failed_patch_leaves_the_model_as_it_was(what: str, already: str | None) -> None:
    method, params, error, said = BAD[what]
    model, ids = build("llama"), tokens(LONG)
    if already:
        rope.patch(model, already, factor=2)
    before, out = state(model), logits(model, ids)
    with pytest.raises(error, match=said):
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


class BoomError(Exception):
    pass


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
    said, route = copy.deepcopy(model.config.to_dict()), rope.describe(model).save_route
    with rope.patched(model, "theta", theta=1e6, target_length=LONG):
        assert model.config.max_position_embeddings == LONG
    assert model.config.to_dict() == said
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
    one, other = from_config(config, seed=0), from_config(config, seed=1)
    assert one.config is other.config is config
    ids, said = tokens(LONG), copy.deepcopy(config.to_dict())
    out, before = logits(other, ids), state(other)
    rope.patch(one, method, factor=4)
    logits(one, ids)
    assert one.config is not config
    assert config.to_dict() == said
    assert state(other) == before
    assert torch.equal(logits(other, ids), out)
    rope.patch(other, "linear", factor=2)
    patched = logits(one, ids)
    rope.unpatch(other)
    assert torch.equal(logits(one, ids), patched)
    assert torch.equal(logits(other, ids), out)
    assert one.config.max_position_embeddings != TRAINED or method == "dynamic"
    assert config.to_dict() == said


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
    found = {key: id(value) for key, value in vars(module).items() if not key.startswith("__")}
    for name, cls in vars(module).items():
        if isinstance(cls, type):
            found |= {f"{name}.{key}": id(value) for key, value in vars(cls).items() if key not in CACHES}
    return found


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


# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_a_deep_copy_is_a_model_of_its_own(name: str, method: str) -> None:
    model, ids = build(name), tokens(LONG)
    plain, said = logits(model, ids), copy.deepcopy(model.config.to_dict())
    rope.patch(model, method, factor=4)
    out, patched_config = logits(model, ids), copy.deepcopy(model.config.to_dict())
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, ids), out)
    rope.unpatch(copied)
    assert torch.equal(logits(copied, ids), plain)
    assert copied.config.to_dict() == said
    assert state(copied)["hooks"] == 0
    assert state(copied)["own save"] == []
    assert torch.equal(logits(model, ids), out)
    assert model.config.to_dict() == patched_config
    other = copy.deepcopy(model)
    rope.unpatch(model)
    assert torch.equal(logits(other, ids), out)
    assert torch.equal(logits(model, ids), plain)
    assert model.config.to_dict() == said


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_a_deep_copy_of_a_length_dependent_model_still_knows_its_rows(name: str) -> None:
    copied = copy.deepcopy(rope.patch(build(name), "dynamic", factor=4))
    mask = torch.ones(1, LONG, dtype=torch.int64)
    mask[0, :5] = 0
    expected = logits(rope.patch(build(name), "dynamic", factor=4), tokens(LONG)[:, 5:])
    assert difference(logits(copied, tokens(LONG), attention_mask=mask)[:, 5:], expected) <= TOLERANCE


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_pickling_round_trip(name: str, method: str) -> None:
    model, ids = build(name), tokens(LONG)
    plain = logits(model, ids)
    out = logits(rope.patch(model, method, factor=4), ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(logits(loaded, ids), out)
    assert str(rope.describe(loaded)) == str(rope.describe(model))
    rope.unpatch(loaded)
    assert torch.equal(logits(loaded, ids), plain)
    assert state(loaded)["hooks"] == 0
    assert torch.equal(logits(model, ids), out)


def test_weights_of_a_patched_model_load_into_a_plain_one_and_back() -> None:
    model, plain, ids = rope.patch(build("llama"), "yarn", factor=4), build("llama", seed=5), tokens(LONG)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(plain, ids), logits(build("llama"), ids))
    model.load_state_dict(build("llama", seed=5).state_dict())
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama", seed=5), "yarn", factor=4), ids))


# --- models that carry a scaling already --------------------------------------------------------------------------

PHI3_LISTS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
CARRIERS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # name, rope settings, max_position_embeddings, method
    "Llama 3.1": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        8 * TRAINED,
        "llama3",
    ),
    "Qwen2.5": (
        "qwen2",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        TRAINED,
        "yarn",
    ),
    "Qwen2.5, raised": (
        "qwen2",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        4 * TRAINED,
        "yarn",
    ),
    "Phi-3": ("phi3", {"rope_type": "longrope"} | PHI3_LISTS, 4 * TRAINED, "longrope"),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, TRAINED, "linear"),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, TRAINED, "dynamic-ntk"),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_scaling_in_the_config_is_understood(carrier: str) -> None:
    name, form, maximum, method = CARRIERS[carrier]
    model = build(name, form, max_position_embeddings=maximum)
    seen = rope.describe(model)
    assert not seen.patched
    assert seen.method == method
    assert seen.trained_length == TRAINED
    if method != "dynamic-ntk":
        assert seen.extended_length == (8 if carrier == "Llama 3.1" else 4) * TRAINED
    factor = form.get("factor")
    if factor is not None:
        assert seen.params["factor"] == factor
    rotary = rotary_of(model)
    assert torch.allclose(
        torch.tensor(seen.wavelengths, dtype=torch.float64), 2 * math.pi / rotary.inv_freq.double(), rtol=2e-5
    )
    assert seen.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_patch_starts_from_the_original_settings(carrier: str, method: str) -> None:
    name, form, maximum, _ = CARRIERS[carrier]
    model, ids = build(name, form, max_position_embeddings=maximum), tokens(LONG)
    own = logits(copy.deepcopy(model), ids)
    logits(model, ids)  # transformers' dynamic keeps what it grew to
    before = state(model)
    got = logits(rope.patch(model, method, factor=4), ids)
    assert torch.equal(got, logits(rope.patch(build(name), method, factor=4), ids))
    assert rope.describe(model).trained_length == TRAINED
    assert rope.describe(model).extended_length == LONG
    if method != form["rope_type"]:
        assert difference(got, own) >= CHANGED
    rope.unpatch(model)
    assert state(model) == before
    assert torch.equal(logits(model, ids), own)


# --- what is said -------------------------------------------------------------------------------------------------


def test_every_layer_sliding_is_a_warning() -> None:
    model = build("mistral", sliding_window=32)
    with pytest.warns(UserWarning, match="last 32 tokens"):
        rope.patch(model, "yarn", factor=4)
    (note,) = rope.describe(model).notes
    assert "32" in note
    assert note in str(rope.describe(model))


def test_a_window_that_is_not_reached_is_no_warning() -> None:
    model = build("mistral", sliding_window=LONG)
    rope.patch(model, "yarn", factor=4)  # warnings are errors here
    assert rope.describe(model).notes == ()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_some_layers_sliding_is_a_note(name: str) -> None:
    settings: dict[str, Any] = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    if name != "gemma2":
        settings["use_sliding_window"] = True
    model = rope.patch(build(name, **settings), "yarn", factor=4)
    (note,) = rope.describe(model).notes
    assert "1 of 2 layers" in note
    assert "32" in note
    assert "share" in note


def test_describe_a_plain_model() -> None:
    seen = rope.describe(build("llama"))
    assert (seen.model_type, seen.method, seen.params, seen.pairing) == ("llama", "default", {}, "half")
    assert (seen.trained_length, seen.extended_length, seen.patched) == (TRAINED, TRAINED, False)
    assert (seen.attention_factor, seen.theta) == (1.0, THETA)
    assert seen.wavelengths == pytest.approx([2 * math.pi * THETA ** (2 * i / 16) for i in range(8)])
    assert "as loaded" in str(seen)


def test_describe_a_patched_model() -> None:
    seen = rope.describe(rope.patch(build("glm"), "yarn", factor=4, beta_fast=8))
    assert (seen.model_type, seen.method, seen.pairing) == ("glm", "yarn", "interleaved")
    assert (seen.trained_length, seen.extended_length, seen.patched) == (TRAINED, LONG, True)
    assert seen.params["factor"] == 4
    assert seen.params["beta_fast"] == 8
    assert seen.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert seen.wavelengths[0] == pytest.approx(2 * math.pi)
    assert seen.wavelengths[-1] == pytest.approx(4 * 2 * math.pi * THETA ** (6 / 8))
    text = str(seen)
    for part in ("glm", "yarn", "factor=4", "interleaved", "64 tokens", "256 tokens", "1.1386", "'yarn'"):
        assert part in text, part


@every_family
@pytest.mark.parametrize("method", ["longrope", "hf"])
def test_descriptions_are_json(name: str, method: str) -> None:
    chosen, params = dynamic_cases(name)[method]
    seen = rope.describe(rope.patch(build(name), chosen, **params))
    read = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert read["method"] == seen.method
    assert tuple(read["wavelengths"]) == seen.wavelengths
    if method == "hf":
        assert "rope_ext_hf/dynamic-ntk" in seen.save_route
        assert "rope_ext_hf.from_pretrained" in seen.save_route


def test_a_description_with_pairs_that_do_not_turn_is_json() -> None:
    seen = rope.describe(build("llama", {"rope_type": "proportional", "partial_rotary_factor": 0.5}))
    assert seen.wavelengths[:4] == pytest.approx([2 * math.pi * THETA ** (2 * i / 16) for i in range(4)])
    assert seen.wavelengths[4:] == (math.inf,) * 4
    json.dumps(seen.to_dict(), allow_nan=False)


def test_describe_dynamic_extends_with_the_input_unless_told() -> None:
    model = build("llama")
    assert rope.describe(rope.patch(model, "dynamic-ntk")).extended_length is None
    assert "follows the input" in str(rope.describe(model))
    seen = rope.describe(rope.patch(model, "dynamic-ntk", target_length=8 * TRAINED))
    assert seen.extended_length == 8 * TRAINED


def test_describe_does_not_touch_the_model() -> None:
    model = rope.patch(build("gemma3"), "yarn", factor=4)
    before, out = state(model), logits(model, tokens(LONG))
    rope.describe(model)
    assert state(model) == before
    assert torch.equal(logits(model, tokens(LONG)), out)


# --- length-dependent methods -------------------------------------------------------------------------------------


def fill(model: Any, ids: Tensor, cut: int) -> Tensor:
    """Logits of a prefill of `cut` tokens and one decode step for each one after it, through a cache."""
    with torch.no_grad():
        out = model(input_ids=ids[:, :cut], use_cache=True)
        parts = [out.logits]
        for at in range(cut, ids.shape[1]):
            out = model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


@every_dynamic
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox"])
def test_calls_do_not_remember_each_other(name: str, which: str) -> None:
    method, params = dynamic_cases(name)[which]
    model = rope.patch(build(name), method, **params)
    fresh = logits(rope.patch(build(name), method, **params), tokens(80))
    logits(model, tokens(LONG))
    assert torch.equal(logits(model, tokens(80)), fresh)
    assert torch.equal(logits(model, tokens(TRAINED)), logits(rope.patch(build(name), method, **params), tokens(64)))


@every_dynamic
def test_the_length_matters(which: str) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(LONG)
    alone, within = logits(model, ids[:, :TRAINED]), logits(model, ids)[:, :TRAINED]
    assert difference(alone, within) >= CHANGED
    with rope.fixed_length(model, LONG):
        assert difference(logits(model, ids[:, :TRAINED]), within) <= TOLERANCE


@every_dynamic
def test_rows_of_a_batch_do_not_touch_each_other(which: str) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(60, batch=2)
    positions = torch.stack((torch.arange(60), torch.arange(60) + LONG))
    both = logits(model, ids, position_ids=positions)
    for row in range(2):
        alone = logits(model, ids[row : row + 1], position_ids=positions[row : row + 1])
        assert difference(both[row : row + 1], alone) <= TOLERANCE
    assert difference(both[1:], logits(model, ids[1:])) >= CHANGED


def test_static_methods_decode_and_pad() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4), tokens(80)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    padded = logits(model, ids, attention_mask=mask)[:, 10:]
    assert difference(padded, logits(model, ids[:, 10:])) <= TOLERANCE
    assert difference(fill(model, ids, 70), logits(model, ids)) <= TOLERANCE


@every_dynamic
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox", "deepseek_v3"])
def test_prefill_and_decode_under_a_fixed_length(name: str, which: str) -> None:
    method, params = dynamic_cases(name)[which]
    model, ids = rope.patch(build(name), method, **params), tokens(TRAINED + 12)
    one_shot = logits(model, ids)
    with rope.fixed_length(model, TRAINED + 12) as inside:
        assert inside is model
        assert difference(fill(model, ids, TRAINED - 4), one_shot) <= TOLERANCE
        assert difference(fill(model, ids, TRAINED + 4), one_shot) <= TOLERANCE


@pytest.mark.parametrize("method", ["dynamic-ntk", "yarn"])
@every_family
def test_generate_is_greedy_search_without_a_cache(name: str, method: str) -> None:
    params: dict[str, Any] = {"factor": 4} if method == "yarn" else {}
    model, ids, new = rope.patch(build(name), method, **params), tokens(TRAINED - 3), 8
    with rope.fixed_length(model, TRAINED - 3 + new):
        got = model.generate(
            ids,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = ids
        for step in range(new):
            last = logits(model, expected)[:, -1]
            assert difference(got.logits[step], last) <= TOLERANCE
            last[:, 2] = -torch.inf  # min_new_tokens keeps the end-of-sequence token out
            expected = torch.cat((expected, last.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(got.sequences, expected)


@pytest.mark.parametrize("method", ["dynamic-ntk", "yarn"])
def test_generate_with_a_static_cache_and_with_beams(method: str) -> None:
    params: dict[str, Any] = {"factor": 4} if method == "yarn" else {}
    model, ids = rope.patch(build("llama"), method, **params), tokens(TRAINED - 3, batch=2)
    asked = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with rope.fixed_length(model, TRAINED + 5):
        expected = model.generate(ids, **asked)
        assert torch.equal(model.generate(ids, cache_implementation="static", **asked), expected)
        assert torch.equal(model.generate(ids, use_cache=False, **asked), expected)
        beams = model.generate(ids, num_beams=3, **asked)
        assert torch.equal(model.generate(ids, num_beams=3, use_cache=False, **asked), beams)


def test_left_padding_under_a_fixed_length() -> None:
    model, ids = rope.patch(build("llama"), "dynamic-ntk"), tokens(80, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    with rope.fixed_length(model, 80):
        got = logits(model, ids, attention_mask=mask)
        assert difference(got[:1, 10:], logits(model, ids[:1, 10:])) <= TOLERANCE
        assert difference(got[1:], logits(model, ids[1:])) <= TOLERANCE
        assert model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False).shape == (2, 83)


def test_fixed_length_restores() -> None:
    model, ids = rope.patch(build("gemma3"), "dynamic-ntk"), tokens(LONG)
    plain = logits(model, ids)

    def fail() -> None:
        with rope.fixed_length(model, 1000):
            outer = logits(model, ids)
            assert difference(outer, plain) >= CHANGED
            with rope.fixed_length(model, LONG):
                assert difference(logits(model, ids), plain) <= TOLERANCE
            assert torch.equal(logits(model, ids), outer)
            raise BoomError

    with pytest.raises(BoomError):
        fail()
    assert torch.equal(logits(model, ids), plain)


def test_fixed_length_on_static_and_unpatched_models_changes_nothing() -> None:
    model, ids = build("llama"), tokens(LONG)
    plain = logits(model, ids)
    with rope.fixed_length(model, 1000):
        assert torch.equal(logits(model, ids), plain)
    yarn = logits(rope.patch(model, "yarn", factor=4), ids)
    with rope.fixed_length(model, 1000):
        assert torch.equal(logits(model, ids), yarn)


@pytest.mark.parametrize("length", [0, -1])
def test_fixed_length_refuses(length: int) -> None:
    model = rope.patch(build("llama"), "dynamic-ntk")
    with pytest.raises(MethodError, match=str(length)), rope.fixed_length(model, length):
        pass


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
def test_fixed_length_refuses_what_it_cannot_hold(form: str) -> None:
    if form == "dynamic":
        model = build("llama", {"rope_type": "dynamic", "factor": 4.0})
    else:
        model = build("phi3", {"rope_type": "longrope"} | PHI3_LISTS, max_position_embeddings=LONG)
    with pytest.raises(UnsupportedModelError, match="patch it first"), rope.fixed_length(model, LONG):
        pass


def test_sticky_growth_remembers_until_reset() -> None:
    model, ids = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True), tokens(80)
    first = logits(model, ids)
    logits(model, tokens(LONG))
    grown = logits(model, ids)
    assert difference(grown, first) >= CHANGED
    assert rope.reset(model) is model
    assert torch.equal(logits(model, ids), first)


# --- a patched model keeps being a transformers model -------------------------------------------------------------


@every_family
def test_gradients_flow(name: str) -> None:
    model, ids = rope.patch(build(name), "yarn", factor=4).train(), tokens(LONG, batch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    query = next(
        p for path, p in model.named_parameters() if any(k in path for k in ("q_proj", "qkv", "query_key", "q_b"))
    )
    assert query.grad is not None
    assert float(query.grad.abs().max()) > 0
    assert losses[1] < losses[0]


def test_gradients_equal_those_of_the_native_model() -> None:
    model, ids = build("llama"), tokens(LONG)
    native = build("llama", {"rope_type": "linear", "factor": 4.0}, max_position_embeddings=LONG)
    rope.patch(model, "linear", factor=4)
    for each in (model, native):
        each.train()
        each(input_ids=ids, labels=ids).loss.backward()
    for (path, ours), (_, theirs) in zip(model.named_parameters(), native.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=path)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # the name all of transformers 5 has
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4).train(), tokens(LONG)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, expected)


in_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).eval()


@in_peft
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_peft(name: str) -> None:
    ids = tokens(LONG)
    stock = with_lora(build(name))
    plain, before = logits(stock, ids), state(stock.base_model.model)
    assert difference(plain, logits(build(name), ids)) >= CHANGED
    first, then = with_lora(rope.patch(build(name), "yarn", factor=4)), stock
    assert rope.patch(then, "yarn", factor=4) is then
    assert torch.equal(logits(then, ids), logits(first, ids))
    assert difference(logits(then, ids), plain) >= CHANGED
    assert then.base_model.model.config.max_position_embeddings == LONG
    assert then.config.max_position_embeddings == LONG
    assert rope.describe(then).method == "yarn"
    rope.unpatch(then)
    assert torch.equal(logits(then, ids), plain)
    assert state(then.base_model.model) == before
    rope.unpatch(first)
    assert torch.equal(logits(first, ids), plain)


@in_peft
def test_peft_merges_a_patched_model() -> None:
    ids = tokens(LONG)
    model = rope.patch(with_lora(build("llama")), "yarn", factor=4)
    out = logits(model, ids)
    merged = model.merge_and_unload()
    assert difference(logits(merged, ids), out) <= 10 * TOLERANCE
    assert rope.describe(merged).method == "yarn"


class Wrapper(nn.Module):
    """Stands for what data-parallel wrappers do: the model hangs at .module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model
        self.config = model.config


def test_a_wrapped_model() -> None:
    ids, inner = tokens(LONG), build("llama")
    wrapped = Wrapper(inner)
    rope.patch(wrapped, "yarn", factor=4)
    assert torch.equal(logits(inner, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids))
    assert wrapped.config is inner.config
    rope.unpatch(wrapped)
    assert torch.equal(logits(inner, ids), logits(build("llama"), ids))
    assert wrapped.config is inner.config


def test_the_decoder_alone_can_be_patched() -> None:
    ids, model = tokens(LONG), build("llama")
    rope.patch(model.model, "yarn", factor=4)
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids))
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), logits(build("llama"), ids))
    assert model.config.to_dict() == build("llama").config.to_dict()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "method"), [("llama", "yarn"), ("gemma3", "linear"), ("glm", "ntk"), ("olmo", "linear")]
)
def test_compiles_in_one_graph(name: str, method: str) -> None:
    model, ids = rope.patch(build(name), method, factor=4), tokens(LONG)
    expected = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(logits(compiled, ids), expected) <= TOLERANCE


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_can_be_patched_and_unpatched() -> None:
    model: Any = torch.compile(build("llama"), backend="eager")
    ids = tokens(LONG)
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=4)
    assert difference(logits(model, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids)) <= TOLERANCE
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


def test_exports() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4), tokens(LONG)
    program = torch.export.export(model, (ids,), {"use_cache": False})
    with torch.no_grad():
        assert difference(program.module()(ids, use_cache=False).logits, logits(model, ids)) <= TOLERANCE


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_to_no_more_graphs_than_the_stock_model() -> None:
    from torch._dynamo.testing import CompileCounter

    counts = []
    for model in (build("llama"), rope.patch(build("llama"), "yarn", factor=4)):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for length in (TRAINED, LONG, 100, 101):
            logits(compiled, tokens(length))
        counts.append(counter.frame_count)
    stock, patched = counts
    assert 1 <= patched <= stock


def host_reads(model: Any, length: int = LONG) -> int:
    seen = HostReads()
    with seen:
        logits(model, tokens(length), position_ids=torch.arange(length)[None], attention_mask=None)
    return seen.count


@pytest.mark.parametrize("which", ["linear", "yarn", "llama3", "longrope", "ntk"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3", "glm", "olmo"])
def test_static_methods_never_wait_for_the_device(name: str, which: str) -> None:
    case, model = static_cases(name)[which], build(name)
    stock = host_reads(model)
    assert host_reads(rope.patch(model, case.method, **case.params)) <= stock


def test_the_rotary_module_never_waits_for_the_device() -> None:
    def reads(model: Any) -> int:
        seen = HostReads()
        with seen:
            rotary_of(model)(torch.zeros(1), torch.arange(LONG)[None])
        return seen.count

    assert reads(rope.patch(build("llama"), "yarn", factor=4)) == 0
    assert reads(rope.patch(build("llama"), "dynamic", factor=4)) == 0
    assert reads(build("llama", {"rope_type": "dynamic", "factor": 4.0})) > 0  # so that the count can be anything else


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_patched_without_weights_and_filled_later(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build_config(name)).eval()
    rope.patch(model, "yarn", factor=4)
    model.to_empty(device="cpu")
    model.load_state_dict(build(name).state_dict())
    rotary_of(model).replaced.to_empty(device="cpu")
    if name == "gemma3":
        model.model.embed_tokens.embed_scale.fill_(64**0.5)
    expected = rope.patch(build(name), "yarn", factor=4)
    assert torch.equal(logits(model, tokens(LONG)), logits(expected, tokens(LONG)))


DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def offload(model: Any, how: str, folder: Path) -> Any:
    from accelerate import cpu_offload, disk_offload, dispatch_model

    if how == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if how == "cpu, buffers too":
        return cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    if how == "disk":
        return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return dispatch_model(model, DEVICE_MAP, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = ["cpu", "cpu, buffers too", "disk", "map"]


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_patch_after_dispatch(name: str, how: str, tmp_path: Path) -> None:
    ids = tokens(LONG)
    plain = logits(build(name), ids)
    expected = logits(rope.patch(build(name), "yarn", factor=4), ids)
    model = offload(build(name), how, tmp_path)
    assert torch.equal(logits(model, ids), plain)
    rope.patch(model, "yarn", factor=4)
    assert torch.equal(logits(model, ids), expected)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_dispatch_after_patch(name: str, how: str, tmp_path: Path) -> None:
    ids = tokens(LONG)
    plain = logits(build(name), ids)
    expected = logits(rope.patch(build(name), "yarn", factor=4), ids)
    model = offload(rope.patch(build(name), "yarn", factor=4), how, tmp_path)
    assert torch.equal(logits(model, ids), expected)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


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
    if model_type == "qwen2_vl":
        config = transformers.Qwen2VLConfig(
            text_config={
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "mrope_section": [2, 3, 3]},
                **SMALL,
            },
            vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        )
        return transformers.Qwen2VLForConditionalGeneration(config)
    raise KeyError(model_type)


@pytest.mark.parametrize("act", [rope.describe, lambda model: rope.patch(model, "yarn", factor=4)])
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "bloom", "mpt"])
def test_models_without_rope_are_refused(model_type: str, act: Any) -> None:
    model = without_rope(model_type)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=model_type):
        act(model)
    assert state(model) == before


def test_several_position_axes_are_refused() -> None:
    model = without_rope("qwen2_vl")
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=r"(?i)qwen2_?vl"):
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


def test_patching_is_silent() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in FAMILIES:
            rope.patch(build(name), "yarn", factor=4)
    assert caught == []

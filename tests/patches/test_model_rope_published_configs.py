"""Models that were trained under a scaling, by their published configs: what each is for, and how it is extended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.slot_finding import find_slots

FOLDER = Path(__file__).parents[2] / "conformance" / "configurations"
PUBLISHED = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}
PHIMOE = Path(__file__).parents[1] / "support" / "phi-3.5-moe.json"  # its lists are not the published ones
PUBLISHED["phi-3.5-moe"] = json.loads(PHIMOE.read_text(encoding="utf-8"))
NAMES = [
    name
    for name, entry in PUBLISHED.items()
    if entry["method"] not in ("default", "dynamic-ntk")
    if entry["config"]["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]
pytestmark = pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")  # Phi-3.5-MoE
every_config = pytest.mark.parametrize("name", NAMES)
IDENTITIES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "ntk": {"factor": 1.0},
    "by-parts": {"factor": 1.0},
    "yarn": {"factor": 1.0},
    "llama3": {"factor": 1.0},
}
EXTENSIONS = [name for name in IDENTITIES if name != "default"]


def build(name: str, seed: int = 0) -> Any:
    """A small random model of a published config."""
    settings = json.loads(json.dumps(PUBLISHED[name]["config"]))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()


def tokens(length: int = 256) -> Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("name", [*NAMES, "internlm2-chat-1.8b", "mistral-7b-v0.3"])
def test_what_a_loaded_model_is_for(name: str) -> None:
    expected, model = PUBLISHED[name], build(name)
    described = rope.describe(model)
    assert described.context_length == expected["context_length"]
    assert described.extended_length == expected["context_length"]
    assert described.trained_length == expected["original_length"]
    assert described.method == expected["method"]
    assert described.attention_factor == pytest.approx(expected["rows"][-1]["magnitude"], rel=1e-6)
    assert not described.patched
    assert described.context_rule
    rotary = ModelRope.of_model(model).rotary
    assert rotary.context_length == expected["context_length"]
    assert ModelRope.of_model(model).extending(over="original").rotary.context_length == expected["original_length"]
    assert ModelRope.of_model(model).extending(context_length=1000).rotary.context_length == 1000
    note = "never uses long_factor" in " ".join(described.notes)
    assert note == (name == "phi-3.5-moe")


@every_config
def test_frequencies_underneath_are_those_of_the_kit(name: str) -> None:
    rotary = ModelRope.of_model(build(name)).rotary
    for row in PUBLISHED[name]["rows"]:
        if "inv_freq" in row and row["layer_type"] != "sliding_attention":
            inv_freq = rope.frequencies("default", rotary, length=row["length"]).inv_freq
            assert inv_freq.tolist() == pytest.approx(row["inv_freq"], rel=1e-14, abs=0)


@pytest.mark.slow
@every_config
@pytest.mark.sampled(3)
def test_factor_1_changes_nothing(name: str) -> None:
    model, ids = build(name), tokens()
    rotary, plain = ModelRope.of_model(model).rotary, logits(model, ids)
    expected = rope.frequencies("default", rotary)
    for method, params in IDENTITIES.items():
        same = rope.frequencies(method, rotary, **params)
        assert torch.allclose(same.inv_freq, expected.inv_freq, rtol=1e-14, atol=0), method
        assert same.attention_factor == pytest.approx(expected.attention_factor, rel=1e-14), method
        with rope.patched(model, method, **params):
            assert float((logits(model, ids) - plain).abs().max()) <= 1e-4, method
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.slow
@every_config
@pytest.mark.sampled(2)
def test_factor_2_doubles_the_context_length(name: str) -> None:
    model, length = build(name), PUBLISHED[name]["context_length"]
    before = rope.describe(model)
    fast = rope.frequencies("default", ModelRope.of_model(model).rotary).inv_freq[0]
    for method in EXTENSIONS:
        described = rope.describe(rope.patch(model, method, factor=2))
        assert (described.extended_length, described.context_length) == (2 * length, length), method
        assert [scaling.method for scaling in described.underneath] == [before.method]
        assert described.underneath[0].context_length == length
        assert before.method in str(described)
        inv_freq = rope.frequencies(method, ModelRope.of_model(model).rotary, factor=2).inv_freq
        assert (inv_freq[0] == fast) == (method != "linear"), method
    rope.unpatch(model)
    assert rope.describe(model) == before


@pytest.mark.slow
@every_config
@pytest.mark.parametrize(
    "method", ["ntk", "yarn", *(pytest.param(method, marks=pytest.mark.thorough) for method in ("linear", "by-parts"))]
)
@pytest.mark.sampled(5)
def test_saved_plainly_loaded_patched_again_unpatched(name: str, method: str, tmp_path: Path) -> None:
    model, ids = build(name), tokens()
    plain = logits(model, ids)
    rope.patch(model, method, factor=2)
    patched = logits(model, ids)
    described = rope.describe(model)
    model.save_pretrained(tmp_path)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)
    two_attention_factors = name in ("phi-3-mini-128k", "phi-4-mini") and method == "yarn"
    assert described.save_route.startswith("rope_type 'rope_ext_hf/yarn") == two_attention_factors
    if two_attention_factors:
        with pytest.raises(Exception, match="rope_ext_hf/yarn"):  # the config class's own validation
            AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded = rope.from_pretrained(tmp_path).eval()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    reloaded = logits(loaded, ids)
    assert float((reloaded - patched).abs().max()) <= 1e-4
    assert rope.describe(loaded).extended_length == described.extended_length
    restored = rope.from_pretrained(tmp_path).eval()
    assert rope.describe(restored).underneath == described.underneath
    again = rope.describe(rope.patch(restored, "ntk", factor=2))  # from what was underneath the saved patch
    assert again.context_length == described.context_length
    assert again.extended_length == described.extended_length
    stacked = rope.describe(rope.patch(loaded, "ntk", factor=2, over="patched"))  # from the saved patch
    assert stacked.extended_length == 4 * described.context_length
    assert [scaling.method for scaling in stacked.underneath] == [described.underneath[0].method, method]
    rope.unpatch(loaded)
    assert torch.equal(logits(loaded, ids), reloaded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "kimi-k2", "kimi-k2-0905"])
@pytest.mark.parametrize(
    ("method", "over"), [("yarn", "own"), ("ntk", "own"), ("yarn", "original"), ("ntk", "original")]
)
def test_the_softmax_scale_survives(name: str, method: str, over: str, tmp_path: Path) -> None:
    model, expected = build(name), PUBLISHED[name]["rows"][0]["softmax_scale"]
    rope.patch(model, method, factor=2, over=over).save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for present in (model, loaded):
        assert present.model.layers[0].self_attn.scaling == pytest.approx(expected, rel=1e-12)
    ids = tokens()
    assert float((logits(loaded, ids) - logits(model, ids)).abs().max()) <= 1e-4


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "dynamic-ntk", "dynamic-yarn"])
@pytest.mark.parametrize("length", [4095, 4096, 4097, 5000])
def test_over_two_lists_short_inputs_run_as_loaded(method: str, length: int) -> None:
    rotary = ModelRope.of_model(build("phi-3-mini-128k")).rotary
    params = {"factor": 2.0} if method in EXTENSIONS else {}
    plain = rope.frequencies("default", rotary, length=length)
    extended = rope.frequencies(method, rotary, length=length, **params)
    same = torch.allclose(extended.inv_freq, plain.inv_freq, rtol=1e-14, atol=0)
    same = same and extended.attention_factor == plain.attention_factor
    assert same == (length <= 4096 or method.startswith("dynamic"))
    first = rope.frequencies("default", rotary, length=1).inv_freq
    assert torch.equal(plain.inv_freq, first) == (length <= 4096)


def test_the_long_list_of_phimoe_is_used_by_a_patch_alone() -> None:
    """Its class calls rope_init_fn without a length, which gives the short list at every length."""
    entry = PUBLISHED["phi-3.5-moe"]["config"]
    scaling = entry["rope_scaling"] | {"long_factor": [4.0 * x for x in entry["rope_scaling"]["short_factor"]]}
    scaling |= {"original_max_position_embeddings": 32, "long_mscale": scaling["short_mscale"]}
    settings = entry | {"original_max_position_embeddings": 32, "max_position_embeddings": 512, "rope_scaling": scaling}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    rotary = find_slots(model)[0].module
    positions = torch.arange(200)[None]  # far beyond the original length
    short = 1 / (torch.tensor(scaling["short_factor"]) * 10000.0 ** (torch.arange(64) / 64))
    stock, _ = rotary(torch.zeros(1), positions)
    angles = torch.outer(torch.arange(200.0), short)
    torch.testing.assert_close(stock[0, :, :64], angles.cos() * scaling["short_mscale"], atol=1e-4, rtol=0)

    ids = tokens(200)
    plain = logits(model, ids)
    assert "never uses long_factor" in " ".join(rope.describe(model).notes)
    own = rope.patch(model, "yarn", factor=1)
    assert float((logits(own, ids) - plain).abs().max()) <= 1e-3
    lists = {key: scaling[key] for key in ("short_factor", "long_factor")}
    parameters = {"factor": 1.0, "attention_factor": scaling["short_mscale"]}
    patched = rope.patch(rope.unpatch(model), "longrope", over="original", **lists, **parameters)
    assert float((logits(patched, ids[:, :32]) - plain[:, :32]).abs().max()) <= 1e-3
    assert float((logits(patched, ids) - plain).abs().max()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rerope", "leaky-rerope", "self-extend", "dca"])
def test_remapping_methods_count_from_the_context_length(method: str) -> None:
    for name in ("llama-3.1", "gemma-3-4b", "qwen2.5-7b-yarn"):
        model = rope.patch(build(name), method)
        assert rope.describe(model).params["max_distance"] == PUBLISHED[name]["context_length"]
    composed = rope.describe(rope.patch(build("llama-3.1"), method, frequency="yarn", factor=2))
    assert composed.params["max_distance"] == 262144
    with pytest.raises(MethodError, match=f"{method} needs frequencies that do not change.*longrope"):
        rope.patch(build("phi-3-mini-128k"), method)


def test_a_model_with_a_temperature_of_its_own_keeps_it_alone() -> None:
    entry = PUBLISHED["ministral-3"]["config"]
    scaling = entry["rope_parameters"] | {"original_max_position_embeddings": 32, "max_position_embeddings": 512}
    settings = entry | {"max_position_embeddings": 512, "rope_parameters": scaling}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    ids = tokens(200)  # at 32, 64, ... its attention gets sharper; nothing is farther away than the window
    plain = logits(model, ids)
    assert float((logits(rope.patch(model, "rerope"), ids) - plain).abs().max()) <= 1e-4
    assert rope.describe(rope.patch(build("ministral-3"), "rerope")).params["temperature"] == "none"
    assert rope.describe(rope.patch(build("llama-3.1"), "rerope")).params["temperature"] != "none"


def test_over_patched_is_refused_where_nothing_lies_underneath() -> None:
    with pytest.raises(MethodError, match=r"over='patched'.*none"):
        rope.patch(build("llama-3.1"), "yarn", factor=2, over="patched")
    with pytest.raises(MethodError, match=r"over must be one of own, original, patched.*Did you mean 'original'"):
        rope.patch(build("llama-3.1"), "yarn", factor=2, over="orginal")
    with pytest.raises(MethodError, match=r"context_length.*0"):
        rope.patch(build("llama-3.1"), "yarn", factor=2, context_length=0)
    with pytest.raises(MethodError, match="no method can be applied over rerope"):
        rope.patch(rope.patch(build("llama-3.1"), "rerope"), "yarn", factor=2, over="patched")
    with pytest.raises(MethodError, match="no method can be applied over dynamic-yarn"):
        rope.patch(rope.patch(build("llama-3.1"), "dynamic-yarn"), "yarn", factor=2, over="patched")
    with pytest.raises(MethodError, match=r"trained under llama3.*over='original'"):
        rope.patch(build("llama-3.1"), "theta", theta=1e6)


def test_live_patches_stack_and_come_off_one_by_one(tmp_path: Path) -> None:
    model, ids = build("llama-3.1"), tokens()
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=2)
    once = logits(model, ids)
    rope.patch(model, "ntk", factor=4, over="patched")
    twice, described = logits(model, ids), rope.describe(model)
    assert described.extended_length == 8 * 131072
    assert [(s.method, s.context_length) for s in described.underneath] == [("llama3", 131072), ("yarn", 262144)]
    model.save_pretrained(tmp_path)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path).eval(), rope.from_pretrained(tmp_path).eval()):
        assert float((logits(loaded, ids) - twice).abs().max()) <= 1e-4
    restored = rope.from_pretrained(tmp_path).eval()
    assert rope.describe(restored).underneath == described.underneath
    for present in (restored, model):
        rope.unpatch(present)
        assert float((logits(present, ids) - once).abs().max()) <= 1e-6
        assert rope.describe(present).method == "yarn"
        rope.unpatch(present)
        assert torch.equal(logits(present, ids), plain) or present is restored
        assert rope.describe(present).method == "llama3"
    rope.patch(rope.patch(model, "yarn", factor=2), "ntk", factor=4)  # over="own": the patch is replaced
    assert rope.describe(model).extended_length == 4 * 131072


def test_original_strips_the_scaling() -> None:
    model = rope.patch(build("llama-3.1"), "yarn", factor=16, over="original")
    described = rope.describe(model)
    assert (described.context_length, described.extended_length, described.underneath) == (8192, 131072, ())
    expected = rope.frequencies("yarn", rope.Rotary(128, 500000.0, 8192), factor=16)
    assert described.wavelengths == tuple((2 * math.pi / expected.inv_freq).tolist())


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("cohere2", {"sliding_window": 64}, (0, 1)),
        ("exaone4", {"sliding_window": 64}, (0, 1)),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (2, 2)),
        ("afmoe", {"sliding_window": 64}, (0, 1)),
        ("smollm3", {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}, (1, 2)),
        ("llama4_text", {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}, (0, 1)),
        ("gemma3_text", {"sliding_window": 64}, (1, 1)),
        ("llama", {"layer_types": None}, (2, 2)),
    ],
)
def test_full_attention_layers_that_rotate(
    model_type: str, settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    small = {
        name: PUBLISHED["llama-3.1"]["config"][name] for name in ("vocab_size", "hidden_size", "intermediate_size")
    }
    layers = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "pad_token_id": 0,
    }
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(model_type, **(small | layers | types | settings))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = rope.describe(model)
    assert described.rotating_layers == expected
    assert f"{expected[0]} of {expected[1]} full-attention layers" in str(described)
    if expected[0]:
        rope.patch(model, "ntk", factor=2)
    else:
        with pytest.raises(
            UnsupportedModelError, match=f"none of the {expected[1]} full-attention layers.*{model_type}"
        ):
            rope.patch(model, "ntk", factor=2)
        assert not rope.describe(model).patched


@pytest.mark.parametrize(
    "method", ["rerope", "leaky-rerope", "self-extend", "dca", "dynamic-yarn", "dynamic-ntk", "default"]
)
def test_a_factor_states_the_extended_length_of_every_method(method: str) -> None:
    by_factor = rope.describe(rope.patch(build("llama-3.1"), method, factor=4))
    by_length = rope.describe(rope.patch(build("llama-3.1"), method, target_length=4 * 131072))
    assert by_factor == by_length
    assert by_factor.extended_length == 4 * 131072

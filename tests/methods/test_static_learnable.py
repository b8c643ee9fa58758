"""`learnable`: frequencies that are trained with a patched model, and saved as plain divisors."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.static import Learnable
from rope_ext_hf.patches.slots.patched_slot import patched_slots
from tests.support.models import build, logits, rope_parameters, tokens
from tests.support.oracles import plain

ROTARY = rope.Rotary(dim=16, theta=10_000.0, trained_length=64)
KEY = "model.rotary_emb.tables.all.trained"
DYNAMIC: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def values(seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(seed))


def trained(model: Any) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = dict(model.named_parameters())[KEY]
    return parameter


def fill(model: Any) -> Any:
    with torch.no_grad():
        trained(model).copy_(values())
    return model


def test_at_first_nothing_changes_and_unpatch_removes_the_parameter() -> None:
    model, ids = build("llama"), tokens(60)
    before, keys = logits(model, ids), list(model.state_dict())
    rope.patch(model, "learnable")
    assert KEY in model.state_dict()
    torch.testing.assert_close(logits(model, ids), before, atol=1e-5, rtol=0)
    assert not torch.equal(logits(fill(model), ids), before)
    rope.unpatch(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, ids), before)


def test_frequencies_without_a_model() -> None:
    scales = tuple(values().double().tolist())
    method = Learnable(log_scales=scales)
    expected = [value * torch.tensor(a).double().exp().item() for value, a in zip(plain(ROTARY), scales, strict=True)]
    assert method.frequencies(ROTARY).inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert method.extended_length(ROTARY) == 64
    assert Learnable().frequencies(ROTARY).inv_freq.tolist() == pytest.approx(plain(ROTARY), rel=1e-12)


def test_angles_and_gradients_are_the_formula() -> None:
    """Compare d/da of a weighted sum of cos and sin with finite differences of the formula in float64."""
    module = rope.RotaryEmbedding("learnable", ROTARY)
    with torch.no_grad():
        module.trained.copy_(values())
    positions = torch.tensor([[0, 3, 500]])
    weights = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def formula(a: Tensor) -> Tensor:
        angle = positions.double()[..., None] * torch.tensor(plain(ROTARY), dtype=torch.float64) * a.exp()
        angle = torch.cat([angle, angle], -1)
        return ((angle.cos() + 2 * angle.sin()) * weights).sum()

    cos, sin = module(torch.zeros(1), positions)
    actual = ((cos + 2 * sin) * weights).sum()
    actual.backward()
    a = module.trained.detach().double()
    assert float(actual.detach()) == pytest.approx(float(formula(a)), abs=1e-5)
    steps = 1e-6 * torch.eye(8, dtype=torch.float64)
    slopes = torch.stack([(formula(a + step) - formula(a - step)) / 2e-6 for step in steps])
    torch.testing.assert_close(module.trained.grad.double(), slopes, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["half", "interleaved", "bare", "complex"])
def test_angles_stay_accurate_at_any_position_and_in_any_dtype(layout: Any) -> None:
    """They do so after a cast to bfloat16, too, which would round every a by up to 2^-9 of it."""
    rotary = rope.Rotary(dim=128, theta=10_000.0, trained_length=4096)
    module = rope.RotaryEmbedding("learnable", rotary, layout=layout, cast=False)
    scales = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module.trained.copy_(scales)
    module.to(torch.bfloat16)
    assert module.trained.dtype == torch.float32
    positions = torch.tensor([[1, 131_071, 2**24 - 1]])
    angles = positions.double()[..., None] * torch.tensor(plain(rotary), dtype=torch.float64) * scales.double().exp()
    out = module(torch.zeros(1), positions)
    cos, sin = (out.real, out.imag) if layout == "complex" else out
    once = slice(0, None, 2) if layout == "interleaved" else slice(0, 64)
    for actual, expected in ((cos, angles.cos()), (sin, angles.sin())):
        torch.testing.assert_close(actual[..., once].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "glm", "cohere", "gpt_neox", "gemma3"])
def test_gradients_through_patched_models(family: str) -> None:
    """The gradient of the loss is its slope, which is measured with models that have other values."""
    model, ids = build(family).double().train(), tokens(50)
    rope.patch(model, "learnable")
    (key,) = (key for key, _ in model.named_parameters() if key.endswith("trained"))
    parameter = model.get_parameter(key)
    model(ids, labels=ids).loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.isfinite().all()
    pair = int(parameter.grad.abs().argmax())
    losses = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            parameter.zero_()[pair] = step
            losses.append(float(model(ids, labels=ids).loss.detach()))
    slope = (losses[0] - losses[1]) / 2e-3
    assert abs(slope) > 1e-6
    assert float(parameter.grad[pair]) == pytest.approx(slope, rel=2e-2)


def test_an_optimizer_trains_it_with_the_model() -> None:
    model, ids = rope.patch(build("llama"), "learnable").train(), tokens(60, batch=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert (trained(model) != 0).all()


def test_saved_as_divisors_loads_plainly_and_goes_on(tmp_path: Path) -> None:
    model, ids = fill(rope.patch(build("llama"), "learnable")), tokens(60)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "longrope"
    assert config["rope_parameters"]["short_factor"] == pytest.approx((-values().double()).exp().tolist(), rel=1e-9)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded, ids), expected, atol=1e-4, rtol=0)
    back: Any = rope.from_pretrained(tmp_path)
    assert torch.equal(trained(back), values())
    assert torch.equal(logits(back, ids), expected)
    back.train()(ids, labels=ids).loss.backward()
    assert trained(back).grad is not None
    assert KEY in model.state_dict()  # saving has left the live model alone


def test_present_values_survive_copies_moves_and_other_patches() -> None:
    model, ids = fill(rope.patch(build("llama"), "learnable")), tokens(60)
    expected = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), expected)
    with rope.patched(model, "linear", factor=2.0):
        assert not torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(model, ids), expected)
    assert rope.describe(model).params["log_scales"] == pytest.approx(values().tolist())
    assert rope.describe(model).wavelengths[0] == pytest.approx(2 * torch.pi / float(values()[0].double().exp()))
    slot = patched_slots(model)[0]
    slot.to_empty(device="meta")
    slot.to_empty(device="cpu")
    assert torch.equal(trained(model), values())  # what the present patch begins with


def test_over_a_scaling_it_begins_at_that_scaling() -> None:
    model, ids = build("llama"), tokens(100)
    expected = logits(rope.patch(model, "yarn", factor=2.0), ids)
    rope.patch(model, "learnable", over="patched")
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        trained(model).copy_(values())
    changed = logits(model, ids)
    assert not torch.allclose(changed, expected, atol=1e-3)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_records_the_values_it_was_trained_with(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    build("llama").save_pretrained(tmp_path / "base")
    base = rope.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "learnable")
    model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    fill(base)
    model.save_pretrained(tmp_path / "adapter")
    back = rope.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(back, tokens(60)), logits(model, tokens(60)), atol=1e-6, rtol=0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(MethodError, match="each of the 8 pairs of this model, got 3"):
        rope.patch(build("llama"), "learnable", log_scales=[0.0, 0.1, 0.2])
    with pytest.raises(rope.MethodError, match="log_scales"):
        rope.patch(build("llama"), "learnable", log_scales=[0.0] * 9)
    with pytest.raises(MethodError, match="over='original'"):
        rope.patch(build("phi3", DYNAMIC, max_position_embeddings=256), "learnable")
    model = build("llama")
    model.second = copy.deepcopy(model.model)
    with pytest.raises(UnsupportedModelError, match="has 2, for different layers"):
        rope.patch(model, "learnable")


def test_sliding_layers_keep_their_own_frequencies() -> None:
    model = rope.patch(build("gemma3"), "learnable")
    assert [key for key, _ in model.named_parameters() if "rotary" in key] == [
        "model.rotary_emb.tables.full_attention.trained"
    ]
    assert rope_parameters("gemma3")["sliding_attention"]

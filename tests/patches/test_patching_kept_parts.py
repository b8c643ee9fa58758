"""Parts of a model beside its frequencies: learned multipliers, temperatures that follow positions, a YaRN's window."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.families import family
from tests.support.every_model import tiny
from tests.support.model_checks import state
from tests.support.models import TRAINED, build, logits, rotary_of, tokens

IDS, LONG = tokens(40), tokens(3 * TRAINED)


LARGE4: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.0,
}


def multipliers(model: Any) -> list[torch.Tensor]:
    """Every alpha of a model, which transformers keeps as a buffer up to 5.23 and as a parameter from 5.24 on."""
    return [value for name, value in model.state_dict(keep_vars=True).items() if name.endswith("alpha")]


class TestMistralLarge4:
    """Inverse frequencies times e^alpha, alpha of the weights; YaRN x 2048 over 512 tokens without a magnitude."""

    def build(self, **form: Any) -> Any:
        settings = {"rope_parameters": LARGE4 | form}
        model = tiny("mistral_large4", text_config=settings)
        draws = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for alpha in multipliers(model):
                alpha.copy_(0.5 * torch.randn(alpha.shape, generator=draws))
        return model

    def test_the_multiplier_stays(self) -> None:
        model = self.build()
        before, as_loaded = state(model), logits(model, IDS)
        rope.patch(model, "linear", factor=1)
        torch.testing.assert_close(logits(model, IDS), as_loaded, atol=1e-4, rtol=0)
        rope.patch(model, "theta", theta=50_000.0, over="original")
        native = self.build(rope_type="default", rope_theta=50_000.0)
        native.load_state_dict(model.state_dict())
        torch.testing.assert_close(logits(model, IDS), logits(native, IDS), atol=1e-4, rtol=0)
        without = copy.deepcopy(model)
        for alpha in multipliers(without):
            alpha.detach().zero_()
        assert (logits(without, IDS) - logits(model, IDS)).abs().max() > 1e-2
        rope.unpatch(model)
        assert state(model) == before
        assert torch.equal(logits(model, IDS), as_loaded)

    def test_it_is_saved_under_its_own_name(self, tmp_path: Path) -> None:
        model = self.build()
        keys = list(model.state_dict())
        rope.patch(model, "yarn", factor=4, attention_factor=1.0)
        assert list(model.state_dict()) == keys
        assert any(key.endswith("rotary_emb.alpha") for key in keys)
        model.save_pretrained(tmp_path)
        for load in (type(model).from_pretrained, rope.from_pretrained):
            torch.testing.assert_close(logits(load(tmp_path).eval(), IDS), logits(model, IDS), atol=1e-4, rtol=0)

    def test_weights_that_are_loaded_into_a_patched_model_count(self) -> None:
        model = rope.patch(self.build(), "yarn", factor=4, attention_factor=1.0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        other = copy.deepcopy(model)
        for alpha in multipliers(other):
            alpha.detach().zero_()
        other.load_state_dict(weights)
        assert torch.equal(logits(other, IDS), logits(model, IDS))

    def test_a_length_dependent_method_keeps_it(self) -> None:
        model = self.build()
        as_loaded = logits(model, IDS)
        rope.patch(model, "dynamic-ntk")
        torch.testing.assert_close(logits(model, IDS), as_loaded, atol=1e-4, rtol=0)
        whole = logits(model, LONG)
        with rope.fixed_length(model, LONG.shape[1]):
            torch.testing.assert_close(logits(model, LONG), whole, atol=1e-4, rtol=0)

    def test_the_length_is_not_that_of_the_window(self) -> None:
        """YaRN's original length is that of one phase of its training; what the model is for is more."""
        described = rope.describe(self.build(factor=2048.0, original_max_position_embeddings=512))
        assert described.context_length == 2048 * 512
        assert [scaling.context_length for scaling in described.underneath] == []
        patched = rope.describe(rope.patch(self.build(), "linear", factor=2))
        assert patched.extended_length == 2 * 64


def test_an_unknown_number_for_each_frequency_is_refused() -> None:
    model = build("llama")
    rotary_of(model).register_buffer("gain", torch.ones(8))
    before = state(model)
    with pytest.raises(UnsupportedModelError, match="'gain', a number for each of its 8 frequencies"):
        rope.patch(model, "yarn", factor=4)
    assert state(model) == before


def test_a_module_that_bends_its_frequencies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = type(rotary_of(model))
    plain = stock.forward

    def bent(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(self, x, 2 * position_ids)

    monkeypatch.setattr(stock, "forward", bent)
    with pytest.raises(UnsupportedModelError, match="does more with its angles"):
        rope.patch(model, "yarn", factor=4)


def test_every_family_that_scales_its_softmax_by_mscale_is_in_the_table() -> None:
    """Their classes read `mscale_all_dim`, which a native form must then keep."""
    models = Path(transformers.__file__).parent / "models"
    reading = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if "mscale_all_dim" in file.read_text(encoding="utf-8")
    }
    assert {"deepseek_v3", "mistral4"} <= reading or transformers.__version__ < "5.2"
    for name in reading:
        assert family(name).softmax_mscale or family(f"{name}_text").softmax_mscale, name


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
@pytest.mark.parametrize("method", ["yarn", "ntk", "linear"])
def test_a_temperature_counts_from_the_length_it_was_trained_with(model_type: str, method: str, tmp_path: Path) -> None:
    """1 + beta ln(1 + floor(position / original length)) multiplies the queries; a patch must not move that length."""
    settings = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    model = tiny(model_type, rope_parameters=settings)
    rope.patch(model, method, factor=4)
    text = model.config.get_text_config().rope_parameters
    assert (text["original_max_position_embeddings"], text["llama_4_scaling_beta"]) == (16, 0.5)
    patched = logits(model, LONG)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(loaded, LONG), patched, atol=1e-4, rtol=0)

"""Models with several rotary embeddings: the layers that a method changes, and those that stay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.patches.slots.slot_finding import find_slots
from tests.support.every_model import tiny
from tests.support.model_checks import state
from tests.support.models import TRAINED, build, from_config, logits, tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
IDS = tokens(40)


def equal_weights(config: Any, model: Any) -> Any:
    """Return a model of another config with the same weights."""
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def with_form(model: Any, layer_types: tuple[str, ...], **form: Any) -> Any:
    """Return a model with the same weights whose config states a scaling for these layer types."""
    config = copy.deepcopy(model.config)
    for layer_type in layer_types:
        config.rope_parameters[layer_type] |= form
    return equal_weights(config, model)


def frequencies(model: Any) -> dict[str, Tensor]:
    """Return the inverse frequencies of every rotary embedding of a model, by path and name."""
    slots = [(path, module) for path, module in model.named_modules() if hasattr(module, "tables")]
    return {f"{path} {name}": slot.table(name).frequencies().inv_freq for path, slot in slots for name in slot.tables}


class TestGemma:
    """Gemma 3, whose sliding and full-attention layers have a theta each."""

    def test_the_default_is_the_layers_that_attend_to_everything(self) -> None:
        model = build("gemma3")
        expected = logits(with_form(model, ("full_attention",), **YARN), IDS)
        torch.testing.assert_close(logits(rope.patch(model, "yarn", factor=4), IDS), expected, atol=1e-4, rtol=0)

    @pytest.mark.slow
    @pytest.mark.parametrize("layers", ["sliding_attention", ["sliding_attention"], 0, [0]])
    def test_other_layers_by_type_and_by_index(self, layers: Any, tmp_path: Path) -> None:
        model = build("gemma3")
        model.save_pretrained(tmp_path / "stock")  # which writes its class into its config
        before, as_loaded = state(model), logits(model, IDS)
        expected = logits(with_form(model, ("sliding_attention",), **YARN), IDS)
        rope.patch(model, "yarn", factor=4, layers=layers)
        patched = logits(model, IDS)
        torch.testing.assert_close(patched, expected, atol=1e-4, rtol=0)
        assert (patched - as_loaded).abs().max() > 1e-3
        described = rope.describe(model)
        assert (described.theta, described.method) == (1000.0, "yarn")
        model.save_pretrained(tmp_path)
        for load in (type(model).from_pretrained, rope.from_pretrained):
            torch.testing.assert_close(logits(load(tmp_path).eval(), IDS), patched, atol=1e-4, rtol=0)
        rope.unpatch(model)
        assert state(model) == before
        assert torch.equal(logits(model, IDS), as_loaded)

    def test_the_description_says_which_layers_changed(self) -> None:
        chosen = rope.describe(rope.patch(build("gemma3"), "yarn", factor=4, layers="sliding_attention"))
        assert chosen.notes[0].startswith("Its sliding_attention layers alone are changed.")
        usual = rope.describe(rope.patch(build("gemma3"), "yarn", factor=4))
        assert "keep their own rotary embedding" in usual.notes[0]

    def test_on_the_command_line(self, tmp_path: Path) -> None:
        model = build("gemma3")
        model.save_pretrained(tmp_path / "model")
        options = ["--method", "yarn", "--factor", "4", "--layers", "0"]
        run = CliRunner().invoke(app, ["patch", str(tmp_path / "model"), *options, "--out", str(tmp_path / "patched")])
        assert run.exit_code == 0, run.stderr
        loaded = rope.from_pretrained(tmp_path / "patched")
        expected = logits(rope.patch(model, "yarn", factor=4, layers=[0]), tokens(100))
        assert torch.equal(logits(loaded, tokens(100)), expected)
        refused = CliRunner().invoke(app, ["describe", str(tmp_path / "model"), "--layers", "0"])
        assert refused.exit_code == 2
        assert "--layers given without a method" in refused.stderr

    def test_a_length_dependent_method_in_chosen_layers_comes_back(self, tmp_path: Path) -> None:
        model, long = rope.patch(build("gemma3"), "dynamic-ntk", layers=[0]), tokens(3 * TRAINED)
        model.save_pretrained(tmp_path)
        loaded = rope.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(logits(loaded, long), logits(model, long), atol=1e-4, rtol=0)
        assert loaded.model.rotary_emb.table("full_attention").method.name == "default"

    def test_a_patch_over_a_patch_keeps_its_layers(self) -> None:
        model = rope.patch(build("gemma3"), "linear", factor=2, layers="sliding_attention")
        with pytest.raises(MethodError, match="over='patched' keeps the layers"):
            rope.patch(model, "yarn", factor=2, over="patched")
        rope.patch(model, "yarn", factor=2, over="patched", layers="sliding_attention")
        rope.unpatch(model)
        assert rope.describe(model).method == "linear"

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ("full", "no 'full' layers, only full_attention, sliding_attention"),
            (2, "numbers from 0 to 1; got 2"),
            ([], "names no layer"),
            ([True], "numbers from 0 to 1; got True"),
        ],
    )
    def test_layers_that_do_not_exist(self, layers: Any, message: str) -> None:
        model = build("gemma3")
        before = state(model)
        with pytest.raises(MethodError, match=message):
            rope.patch(model, "yarn", factor=4, layers=layers)
        assert state(model) == before

    def test_embeddings_that_differ_take_a_patch_each(self) -> None:
        with pytest.raises(UnsupportedModelError, match="one method needs one rotary embedding"):
            rope.patch(build("gemma3"), "yarn", factor=4, layers=[0, 1])


def test_layers_that_share_one_embedding_change_together() -> None:
    for name, layers in (("llama", [1]), ("gemma2", "full_attention")):
        with pytest.raises(UnsupportedModelError, match="serves layer 1 and also layer 0"):
            rope.patch(build(name), "yarn", factor=4, layers=layers)
    model, other = build("llama"), build("llama")
    rope.patch(model, "yarn", factor=4, layers=[0, 1])
    assert torch.equal(logits(model, IDS), logits(rope.patch(other, "yarn", factor=4), IDS))


V4: dict[str, Any] = {"factor": 4, "attention_factor": 1.0}


class TestDeepseekV4:
    """DeepSeek V4: sliding layers use the embedding "main"; all others, with compressors and indexers, "compress"."""

    def build(self) -> Any:
        return tiny("deepseek_v4", layer_types=["sliding_attention", *self.compressed], num_hidden_layers=3)

    compressed = ("compressed_sparse_attention", "heavily_compressed_attention")

    def test_compressed_layers_are_scaled_with_their_indexers(self) -> None:
        model = self.build()
        before, as_loaded = state(model), logits(model, IDS)
        expected = logits(with_form(model, ("compress",), **YARN, attention_factor=1.0), IDS)
        rope.patch(model, "yarn", **V4)
        torch.testing.assert_close(logits(model, IDS), expected, atol=1e-4, rtol=0)
        assert (expected - as_loaded).abs().max() > 1e-3
        actual = frequencies(model)
        assert {path.split(".")[-1] for path in actual} == {"rotary_emb main", "rotary_emb compress"}
        assert len(actual) == 2 * 4  # of the model, of two compressors, and of an indexer
        for label in ("main", "compress"):
            some = [values for path, values in actual.items() if path.endswith(label)]
            assert all(torch.equal(values, some[0]) for values in some)
        rope.unpatch(model)
        assert state(model) == before
        assert torch.equal(logits(model, IDS), as_loaded)

    def test_sliding_layers_when_asked_for(self) -> None:
        model = self.build()
        expected = logits(with_form(model, ("main",), **YARN, attention_factor=1.0), IDS)
        for layers in ("main", "sliding_attention", 0):
            rope.patch(model, "yarn", **V4, layers=layers)
            torch.testing.assert_close(logits(model, IDS), expected, atol=1e-4, rtol=0)

    def test_an_attention_factor_would_change_the_size_of_values(self) -> None:
        with pytest.raises(MethodError, match="would change their size; give attention_factor=1"):
            rope.patch(self.build(), "yarn", factor=4)


class TestThetaOfEachLayer:
    """Granite SWA computes cos and sin once for each theta of `layer_rope_theta`."""

    def build(self, thetas: list[float], types: list[str], form: dict[str, Any] | None = None) -> Any:
        settings = {"rope_type": "default", "rope_theta": 10_000.0} | (form or {})
        return tiny("granite_swa", layer_rope_theta=thetas, layer_types=types, rope_parameters=settings)

    def test_the_theta_of_full_attention_layers(self, tmp_path: Path) -> None:
        model = self.build([1_000.0, 50_000.0], ["sliding_attention", "full_attention"])
        as_loaded = logits(model, IDS)
        rope.patch(model, "yarn", factor=4)
        scaled = {slot.as_loaded[None].plain.theta for slot in find_slots(model) if slot.scaled_layers}
        assert scaled == {50_000.0}
        assert rope.describe(model).theta == 50_000.0
        patched = logits(model, IDS)
        assert (patched - as_loaded).abs().max() > 1e-3
        # The class reads one dict of settings for both thetas, so that plain loading would scale the sliding layers.
        model.save_pretrained(tmp_path)
        with pytest.raises(KeyError, match="rope_ext_hf"):
            type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(logits(rope.from_pretrained(tmp_path).eval(), IDS), patched, atol=1e-5, rtol=0)
        rope.unpatch(model)
        assert torch.equal(logits(model, IDS), as_loaded)

    @pytest.mark.parametrize("method", ["yarn", "ntk"])
    def test_one_theta_for_all_is_saved_so_that_it_loads(self, method: str, tmp_path: Path) -> None:
        model = self.build([50_000.0, 50_000.0], ["sliding_attention", "full_attention"])
        patched = logits(rope.patch(model, method, factor=4), IDS)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(logits(loaded, IDS), patched, atol=1e-4, rtol=0)

    def test_thetas_that_differ_between_full_attention_layers(self) -> None:
        model = self.build([1_000.0, 50_000.0], ["full_attention"] * 2)
        with pytest.raises(UnsupportedModelError, match="one method needs one rotary embedding"):
            rope.patch(model, "yarn", factor=4)
        rope.patch(model, "yarn", factor=4, layers=1)
        assert rope.describe(model).theta == 50_000.0


@pytest.mark.parametrize("model_type", ["beam", "cohere_compass_text"])
def test_full_attention_layers_without_rotary_settings(model_type: str) -> None:
    """Their `rope_parameters` are None for full-attention layers."""
    model = tiny(model_type)
    assert rope.describe(model).rotating_layers == (0, 1)
    with pytest.raises(UnsupportedModelError, match="none of the 1 full-attention layers"):
        rope.patch(model, "yarn", factor=4)
    as_loaded = logits(model, IDS)
    rope.patch(model, "yarn", factor=4, layers="sliding_attention")
    assert (logits(model, IDS) - as_loaded).abs().max() > 1e-3
    rope.unpatch(model)
    assert torch.equal(logits(model, IDS), as_loaded)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_scaled_with_its_attention(model_type: str) -> None:
    """The indexer's own scores choose the keys that a query sees: 8 of 40 here, so that its rotation matters."""
    model = tiny(model_type)
    config = copy.deepcopy(model.config)
    config.rope_parameters = config.rope_parameters | YARN
    expected = logits(equal_weights(config, model), IDS)
    as_loaded = logits(model, IDS)
    torch.testing.assert_close(logits(rope.patch(model, "yarn", factor=4), IDS), expected, atol=1e-4, rtol=0)
    assert (expected - as_loaded).abs().max() > 1e-3


def test_proportional_frequencies_that_are_zero_stay_zero() -> None:
    """Gemma 4's full-attention layers rotate a part of their pairs; the others have frequency 0."""
    model = tiny("gemma4_text")
    rope.patch(model, "linear", factor=4)
    table = model.model.rotary_emb.table("full_attention")
    native = from_config(_gemma4_with(model.config, factor=4.0)).model.rotary_emb.full_attention_inv_freq
    torch.testing.assert_close(table.frequencies().inv_freq.float(), native, rtol=1e-6, atol=0)
    assert (native == 0).any()
    sliding = model.model.rotary_emb.table("sliding_attention")
    assert sliding.method.name == "default"


def _gemma4_with(config: Any, **form: Any) -> Any:
    changed = copy.deepcopy(config)
    changed.rope_parameters["full_attention"] |= form
    return changed

"""Models without a slot: each refusal says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.reference import path
from tests.support.every_model import settings, tiny
from tests.support.models import build
from tests.support.tiers import needs_family

_ANGLES = "Rotary.* has no buffer inv_freq|rotates its queries and keys itself"  # the second up to transformers 5.0
SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "gptj": ({"n_layer": 1, "n_head": 2, "n_embd": 64, "rotary_dim": 16}, _ANGLES),
    "codegen": ({"n_layer": 1, "n_head": 4, "n_embd": 64, "rotary_dim": 8}, _ANGLES),
    "gpt2": ({"n_layer": 1, "n_head": 2, "n_embd": 64}, "it knows positions in another way, or not at all"),
    "bloom": ({"n_layer": 1, "n_head": 2, "hidden_size": 64}, "it knows positions in another way, or not at all"),
}


NO_MODELS = {
    "a class": (LlamaForCausalLM, "LlamaForCausalLM is a class: load a model with it"),
    "a config": (LlamaConfig(), "LlamaConfig is the config of a model: load the model"),
    "None": (None, "expected a loaded transformers model, got NoneType"),
    "weights": ({}, "expected a loaded transformers model, got dict"),
    "a module": (torch.nn.Linear(2, 2), "Linear is not a transformers model: it has no config"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_is_named(case: str) -> None:
    thing, message = NO_MODELS[case]
    calls: list[Any] = [lambda model: rope.patch(model, "yarn", factor=4.0), rope.describe]
    if case != "a module":  # nothing in it is patched, so that there is nothing to take off
        calls += [rope.unpatch, rope.reset]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=message):
            call(thing)


def test_a_pipeline_names_its_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(path())
    pipe = transformers.pipeline("text-generation", model=build("llama"), tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"TextGenerationPipeline holds a model: give its \.model"):
        rope.patch(pipe, "yarn", factor=4.0)
    rope.patch(pipe.model, "yarn", factor=4.0)


@pytest.mark.parametrize("model_type", ["t5", "mamba"])
def test_models_without_rotary_positions_are_told_nothing_untrue(model_type: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "num_hidden_layers": 1, "d_model": 16, "hidden_size": 16}
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(UnsupportedModelError, match="knows positions in another way, or not at all"):
        rope.patch(model, "yarn", factor=2)


@pytest.mark.parametrize("model_type", SIZES)
def test_a_refusal_names_why_nothing_can_be_replaced(model_type: str) -> None:
    sizes, reason = SIZES[model_type]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(UnsupportedModelError, match=reason):
        rope.patch(model, "yarn", factor=2)


def on_meta(model_type: str, **changes: Any) -> Any:
    """Return a small bare model of a type without weights."""
    needs_family(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    with torch.device("meta"):
        return AutoModel.from_config(config_class(**settings(config_class, changes)))


PLACES = "takes {} and no tokens: its .* rotates by places in an image, a video or a sound.* patch the whole model"
CHOOSES = "its {} takes {} and no position_ids, so it chooses the positions itself.* Leave it as it is"
NOT_OF_TEXT = {
    "dinov3_vit": CHOOSES.format("DINOv3ViTRopePositionEmbedding", "pixel_values"),
    "clvp": CHOOSES.format("ClvpRotaryPositionalEmbedding", "hidden_states"),
    "qwen3_vl_vision": PLACES.format("hidden_states"),
    "pixtral": PLACES.format("pixel_values"),
    "vjepa2": "VJEPA2RopeAttention rotates its queries and keys itself",
    "blt": r"belong to parts with configs of their own \(blt_local_encoder, .*Leave it as it is",
    "jamba": "it knows positions in another way, or not at all",  # its file has functions that rotate, for no class
    "wav2vec2-conformer": "it knows positions in another way, or not at all",
}


@pytest.mark.parametrize("model_type", NOT_OF_TEXT)
def test_what_is_said_of_models_of_other_things_is_true(model_type: str) -> None:
    try:
        model = on_meta(model_type)
    except ValueError:
        pytest.skip("this transformers does not build it by AutoModel")
    with pytest.raises(UnsupportedModelError, match=NOT_OF_TEXT[model_type]):
        rope.patch(model, "yarn", factor=2)


def test_esm_2_names_a_way_out() -> None:
    model = on_meta("esm", position_embedding_type="rotary", vocab_size=40)
    way_out = (
        r"(keeps its frequencies \(inv_freq\) in the weights|takes q and k and no position_ids).* Leave it as it is"
    )
    with pytest.raises(UnsupportedModelError, match=way_out):
        rope.patch(model, "yarn", factor=2)


@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope"])
def test_a_model_of_time_series_takes_static_methods(method: str) -> None:
    model = on_meta("timesfm2_5")
    with pytest.raises(UnsupportedModelError, match=r"takes past_values, and neither input_ids .* Use a static method"):
        rope.patch(model, method)
    rope.patch(model, "yarn", factor=2)


class Around(nn.Module):
    """A wrapper of somebody's own, whose model stands under a name of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"lm": model})


def test_of_a_wrapper_the_model_inside_is_named() -> None:
    model = build("llama")
    wrappers = {"module": nn.DataParallel(model), "net.lm": Around(model), "net.lm.net.lm": Around(Around(model))}
    for inside, wrapper in wrappers.items():
        with pytest.raises(UnsupportedModelError, match=rf"Give its \.{inside}, which is a LlamaForCausalLM"):
            rope.patch(wrapper, "yarn", factor=4.0)
        rope.patch(wrapper.get_submodule(inside), "yarn", factor=4.0)


class OwnRotary(nn.Module):
    """A rotary module of a class of somebody's own, which lacks one of the things that it needs."""

    def __init__(self, lacks: str, config: Any) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
        self.register_buffer("freqs" if lacks == "inv_freq" else "inv_freq", frequencies, persistent=False)
        self.config = None if lacks == "config" else config

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * next(self.buffers())
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


class OwnRotaryOfLength(OwnRotary):
    def forward(self, x: Tensor, length: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, torch.arange(length)[None])


class OwnModel(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = LlamaConfig

    def __init__(self, config: Any, lacks: str) -> None:
        super().__init__(config)
        of_length = lacks == "position_ids"
        self.inside = nn.ModuleDict({"rotary": (OwnRotaryOfLength if of_length else OwnRotary)(lacks, config)})

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("inv_freq", "OwnRotary has no buffer inv_freq"),
        ("position_ids", "OwnRotaryOfLength takes x and length and no position_ids"),
        ("config", "neither OwnRotary nor ModuleDict has the model's config"),
    ],
)
def test_of_a_rotary_module_of_ones_own_it_is_said_what_it_needs(lacks: str, reason: str) -> None:
    model = OwnModel(LlamaConfig(hidden_size=64, num_attention_heads=4), lacks)
    with pytest.raises(UnsupportedModelError, match=rf"{reason}.*keeps its frequencies in a buffer.*docs/own-models"):
        rope.patch(model, "yarn", factor=2)


class OwnDecoder(transformers.LlamaModel):  # type: ignore[misc]
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids)


class OwnAttention(nn.Module):
    """Attention that calls torch itself."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return self.attention.o_proj(self.attention.q_proj(hidden_states)), None


class OwnWhole(transformers.LlamaModel):  # type: ignore[misc]
    def forward(self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_what_a_class_of_ones_own_lacks_for_a_method_is_not_blamed_on_transformers() -> None:
    config = build("llama").config
    with pytest.raises(UnsupportedModelError, match=r"OwnDecoder takes no position_ids.*give it input_ids.*own-models"):
        rope.patch(OwnDecoder(config), "dca")
    for decoder in (OwnWhole(config), transformers.LlamaModel(config)):
        for layer in decoder.layers:
            layer.self_attn = OwnAttention(layer.self_attn)
        with pytest.raises(UnsupportedModelError, match=r"does not go .* call ALL_ATTENTION_FUNCTIONS .*own-models"):
            rope.patch(decoder, "dca")


def test_attention_of_transformers_outside_the_interface_has_no_such_way_out() -> None:
    with pytest.raises(UnsupportedModelError, match=r"interface, .*; use a frequency method$"):
        rope.patch(tiny("gpt_neox_japanese"), "dca")

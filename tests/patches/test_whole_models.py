"""A part of a model is patched, and the whole is saved: its folder states the patch as if the whole were patched."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, LengthError
from rope_ext_hf.models.config_keys import PATCH_KEY
from tests.support import every_model
from tests.support.models import build, tokens

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "longrope": {"factor": 4, "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
    "learnable": {"factor": 4},
    "dynamic-ntk": {},
    "dynamic-yarn": {},
    "rerope": {},
    "dca": {},
    "jet-long": {},
}
each_method = pytest.mark.parametrize("method", METHODS)
LONG = tokens(150)


@torch.no_grad()
def outputs(model: Any, ids: Tensor = LONG) -> Tensor:
    result: Tensor = model(input_ids=ids)[0]
    return result


def patch(model: Any, method: str) -> Any:
    return rope.patch(model, method, **METHODS[method])


def record(model: Any) -> Any:
    """The record of a patch in the config by which a model is saved."""
    return vars(model.config.get_text_config()).get(PATCH_KEY)


def read_again(model: Any, folder: Path, **kwargs: Any) -> Any:
    """The model of the folder into which a model is saved."""
    model.save_pretrained(folder, **kwargs)
    return rope.from_pretrained(folder, dtype=torch.float32)


def train(model: Any) -> None:
    """Change the parameter that the method trains, if it has one."""
    for name, parameter in model.named_parameters():
        if name.endswith(".trained"):
            parameter.data += torch.linspace(-0.3, 0.3, len(parameter))


@pytest.mark.sampled(3)
@each_method
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen2"])
def test_the_decoder_is_patched_and_the_whole_saved(method: str, family: str, tmp_path: Path) -> None:
    model = build(family)
    patch(model.model, method)
    train(model)
    assert record(model) is None
    expected = outputs(model)
    assert torch.equal(outputs(read_again(model, tmp_path / "1")), expected)
    assert record(model) is not None
    assert torch.equal(outputs(read_again(model, tmp_path / "2")), expected)
    assert (tmp_path / "1" / "config.json").read_bytes() == (tmp_path / "2" / "config.json").read_bytes()
    whole = patch(build(family), method)
    train(whole)
    whole.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "1" / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()
    assert torch.equal(outputs(rope.unpatch(model)), outputs(build(family)))
    unpatched = build(family)
    unpatched.save_pretrained(tmp_path)  # which writes its class and dtype into its config
    assert model.config.to_dict() == unpatched.config.to_dict()


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk"])
def test_plain_transformers_loads_it(method: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model.model, method)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded), outputs(model), atol=2e-4, rtol=0)


def reward_model() -> Any:
    torch.manual_seed(1)
    return LlamaForSequenceClassification(copy.deepcopy(build("llama").config)).eval()


@each_method
@pytest.mark.parametrize("when", ["before", "after", "whole"])
def test_a_decoder_is_put_into_a_reward_model(method: str, when: str, tmp_path: Path) -> None:
    """Its config is another object than that of the model which it is put into."""
    model = reward_model()
    if when == "before":
        model.model = patch(build("llama"), method).model
    else:
        model.model = build("llama").model
        patch(model.model if when == "after" else model, method)
    train(model)
    assert torch.equal(outputs(read_again(model, tmp_path)), outputs(model))
    rope.unpatch(model)
    assert record(model) is None
    model.save_pretrained(tmp_path / "plain")
    plain = LlamaForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert torch.equal(outputs(plain), outputs(model))


@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "dca"])
def test_the_text_decoder_of_a_model_of_images(method: str, tmp_path: Path) -> None:
    model: Any = every_model.tiny("gemma3")
    ids = torch.arange(3, 150)[None] % 90
    patch(model.model.language_model, method)
    loaded = read_again(model, tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded, ids), outputs(patch(every_model.tiny("gemma3"), method), ids))
    # The model around the decoder makes a mask for it, so that only a patch of the whole can read the one it was given.
    if method == "dynamic-ntk":
        with pytest.raises(LengthError, match="patch that model"):
            outputs(model, ids)
    else:
        assert torch.equal(outputs(loaded, ids), outputs(model, ids))


def test_two_models_share_a_patched_decoder(tmp_path: Path) -> None:
    model, reward = build("llama"), reward_model()
    reward.model = patch(model.model, "yarn")
    for each in (model, reward):
        assert torch.equal(outputs(read_again(each, tmp_path / type(each).__name__)), outputs(each))
    rope.unpatch(model.model)
    assert record(model) is None
    assert record(reward) is None


@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "dca"])
@pytest.mark.parametrize("part", ["whole first", "part first"])
def test_a_part_is_unpatched_alone(method: str, part: str, tmp_path: Path) -> None:
    model = build("llama")
    patch(model if part == "whole first" else model.model, method)
    model.save_pretrained(tmp_path / "patched")
    rope.unpatch(model.model)
    assert record(model) is None
    model.save_pretrained(tmp_path / "plain")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(outputs(loaded), outputs(build("llama")))
    patch(model.model, "rerope")
    assert torch.equal(outputs(read_again(model, tmp_path / "rerope")), outputs(model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@each_method
def test_adapters_around_a_patched_decoder(method: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    build("llama").save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    patch(base.model, method)
    settings = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("method", ["yarn", "learnable", "dynamic-ntk", "rerope"])
def test_a_trainer_that_hands_over_the_weights(method: str, tmp_path: Path) -> None:
    """Under FSDP and DeepSpeed a Trainer collects the weights itself, after it has called `train`."""
    model = reward_model()
    model.model = patch(build("llama"), method).model
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith(".trained")}
    model.train()
    loaded = read_again(model, tmp_path, state_dict=weights)
    assert torch.equal(outputs(loaded), outputs(model.eval()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_saved_as_well(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    model = build("llama")
    patch(model.model, "dca")
    for saved_before in (False, True):
        other = copied(model)
        assert torch.equal(outputs(read_again(other, tmp_path / str(saved_before))), outputs(model))
        assert (record(model) is not None) == saved_before
        rope.unpatch(other)
        model.save_pretrained(tmp_path / "model")
        assert record(model) is not None


def test_a_part_that_the_config_does_not_describe_is_refused(tmp_path: Path) -> None:
    """In a model of two decoders with one kind of config each, one of them alone is patched."""
    model: Any = every_model.tiny("t5gemma")
    patch(model.model.encoder, "yarn")
    with pytest.raises(CheckpointError, match=r"describes other layers, .* patch the whole model"):
        model.save_pretrained(tmp_path)
    assert model.state_dict()  # only saving needs the config
    patch(model, "yarn")
    model.save_pretrained(tmp_path / "whole")


def test_the_weights_of_a_part_alone_are_its_own(tmp_path: Path) -> None:
    model = build("llama")
    patch(model.model, "yarn")
    assert list(model.state_dict()) == list(build("llama").state_dict())
    assert nn.Sequential(model.model).state_dict()
    model.model.save_pretrained(tmp_path)
    loaded = LlamaModel.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded), outputs(model.model), atol=2e-4, rtol=0)


class Wrapper(PreTrainedModel):  # type: ignore[misc]
    """A user's model around a decoder, and a second, unpatched one; it saves the decoder alone."""

    config_class = LlamaConfig
    base_model_prefix = "student"
    _supports_sdpa = True

    def __init__(self, config: Any, student: Any = None, teacher: Any = None) -> None:
        super().__init__(config)
        self.student, self.teacher = student, teacher
        self.post_init()

    def save_pretrained(self, out: Any) -> None:
        self.student.save_pretrained(out / "student")


class WrapperWithOwnConfig(Wrapper):
    config_class = PreTrainedConfig


@each_method
@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("wrapper", [Wrapper, WrapperWithOwnConfig])
@pytest.mark.parametrize("trained", [False, True])
def test_a_model_of_ones_own_saves_the_model_inside_it(
    wrapper: type[Wrapper], teacher: bool, trained: bool, method: str, tmp_path: Path
) -> None:
    student = build("llama")
    config = copy.deepcopy(student.config) if wrapper is Wrapper else PreTrainedConfig()
    model = wrapper(config, student, build("llama") if teacher else None)
    patch(student.model, method)
    train(student)
    expected = outputs(student)
    if trained:
        model.train()
    model.save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path / "student", dtype=torch.float32)
    assert torch.equal(outputs(loaded), expected)


def test_a_model_of_ones_own_whose_config_cannot_state_the_patch_is_refused(tmp_path: Path) -> None:
    class Whole(WrapperWithOwnConfig):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            PreTrainedModel.save_pretrained(self, *args, **kwargs)

    model = Whole(PreTrainedConfig(), patch(build("llama"), "yarn"))
    with pytest.raises(CheckpointError, match=r"none of the layers, .* Save the part by itself"):
        model.save_pretrained(tmp_path)
    parts: Any = every_model.tiny("t5gemma")
    for part in (parts.model.encoder, parts.model.decoder):
        patch(part, "yarn")
    with pytest.raises(CheckpointError, match="its parts were patched one by one"):
        parts.save_pretrained(tmp_path)

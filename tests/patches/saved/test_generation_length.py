"""`max_length` of a generation config that states the context length: a patch raises it, and unpatching undoes that."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from rope_ext_hf.hub import load_empty
from tests.support.models import TRAINED, build, tokens

EXTENDED = 4 * TRAINED


def stating(length: int | None, name: str = "llama") -> Any:
    model = build(name)
    model.generation_config.max_length = length
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox", "mixtral"])
def test_generate_takes_prompts_of_the_extended_length(name: str) -> None:
    model = stating(TRAINED, name)
    own = model.generation_config
    with pytest.raises(ValueError, match="`max_length` is set to"):
        model.generate(tokens(EXTENDED - 3), do_sample=False)
    with rope.patched(model, "yarn", factor=4):
        assert model.generation_config.max_length == model.config.get_text_config().max_position_embeddings == EXTENDED
        assert model.generate(tokens(EXTENDED - 3), do_sample=False, eos_token_id=-1).shape[1] == EXTENDED
    assert model.generation_config is own
    assert own.max_length == TRAINED


@pytest.mark.parametrize(
    ("stated", "patched"),
    [
        pytest.param(TRAINED // 2, TRAINED // 2, id="shorter than the context length"),
        pytest.param(TRAINED + 1, EXTENDED, id="between"),
        pytest.param(EXTENDED, EXTENDED, id="the extended length"),
        pytest.param(10 * EXTENDED, 10 * EXTENDED, id="longer"),
        pytest.param(None, None, id="not stated"),
    ],
)
def test_a_choice_is_kept(stated: int | None, patched: int | None) -> None:
    model = rope.patch(stating(stated), "linear", factor=4)
    assert model.generation_config.max_length == patched
    assert rope.unpatch(model).generation_config.max_length == stated


@pytest.mark.parametrize(("method", "params"), [("rerope", {}), ("dynamic-yarn", {}), ("dynamic-ntk", {})])
def test_a_method_without_an_extended_length_states_none(method: str, params: dict[str, Any]) -> None:
    model = rope.patch(stating(TRAINED), method, **params)
    assert model.generation_config.max_length == model.config.max_position_embeddings == TRAINED
    rope.patch(model, method, target_length=EXTENDED, **params)
    assert model.generation_config.max_length == model.config.max_position_embeddings == EXTENDED


def test_what_the_user_changes_is_kept() -> None:
    model = rope.patch(stating(TRAINED), "yarn", factor=4)
    model.generation_config.repetition_penalty = 1.5
    other = copy.deepcopy(model)
    other.generation_config.max_length = 77
    another = copy.deepcopy(model)
    another.generation_config = GenerationConfig(max_length=TRAINED)
    configs = [rope.unpatch(patched).generation_config for patched in (model, other, another)]
    assert [(config.max_length, config.repetition_penalty) for config in configs[:2]] == [(TRAINED, 1.5), (77, 1.5)]
    assert configs[2].max_length == TRAINED
    assert configs[2].repetition_penalty is None


def test_patches_over_patches() -> None:
    model = stating(TRAINED)
    with rope.patched(model, "yarn", factor=4):
        with rope.patched(model, "linear", factor=2, over="patched"):
            assert model.generation_config.max_length == model.config.max_position_embeddings == 8 * TRAINED
        assert model.generation_config.max_length == EXTENDED
        rope.patch(model, "linear", factor=2)
        assert model.generation_config.max_length == 2 * TRAINED
    assert model.generation_config.max_length == TRAINED


@pytest.mark.filterwarnings("ignore:the folder of this model records:UserWarning")
@pytest.mark.parametrize("way", ["save_pretrained", "copy"])
@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_a_folder_states_it_and_keeps_the_way_back(way: str, method: str, tmp_path: Path) -> None:
    model = stating(TRAINED)
    model.save_pretrained(tmp_path / "source")
    if way == "copy":
        save_patched_folder(
            rope.patch(load_empty(tmp_path / "source"), method, factor=4), tmp_path / "source", tmp_path / "out"
        )
    else:
        rope.patch(model, method, factor=4).save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_length"] == EXTENDED
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_length == EXTENDED
    loaded = rope.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loaded.generation_config.max_length == EXTENDED
    assert rope.unpatch(loaded).generation_config.max_length == TRAINED
    again = rope.from_pretrained(tmp_path / "out", method="yarn", factor=8)
    assert again.generation_config.max_length == 8 * TRAINED


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_an_adapter_of_peft_generates_as_long() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(rope.patch(stating(TRAINED), "yarn", factor=4), adapter)
    ids = tokens(EXTENDED - 3)
    assert model.generate(input_ids=ids, do_sample=False, eos_token_id=-1).shape[1] == EXTENDED
    rope.unpatch(model)
    assert model.generation_config.max_length == TRAINED

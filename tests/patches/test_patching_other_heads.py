"""Patches of models with another head than a language model's: classification, bare models, embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from tests.support.every_model import settings
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference, state
from tests.support.models import tokens

CLASSES = (
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)
TYPES = ("llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "modernbert", "eurobert", "nomic_bert")
KNOWN = [
    (name, auto)
    for auto in CLASSES
    for name in TYPES
    if name in transformers.CONFIG_MAPPING
    and transformers.CONFIG_MAPPING[name] in getattr(transformers, auto)._model_mapping
]
SECOND: dict[str, dict[str, Any]] = {"modernbert": {"layer_types": ["sliding_attention", "full_attention"]}}


def build(name: str, auto: str, **rope_parameters: Any) -> Any:
    """A tiny model of a type with the head of an Auto class, all parameters random, for 64 tokens."""
    config_class = transformers.CONFIG_MAPPING[name]
    own = {"max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 2} | SECOND.get(name, {})
    config = config_class(**settings(config_class, own))
    for key in ("full_attention", None):
        form = config.rope_parameters if key is None else config.rope_parameters.get(key)
        if form is not None:
            form |= rope_parameters
            break
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).float().eval()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def output(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    return actual


@pytest.mark.parametrize(("name", "auto"), KNOWN)
def test_a_patch_is_the_native_scaling_and_is_undone(name: str, auto: str) -> None:
    model, ids = build(name, auto), tokens(LONG) % 90 + 3
    before, plain = state(model), output(model, ids)
    settings_before = copy.deepcopy(model.config.to_dict())
    rope.patch(model, "yarn", factor=4)
    native = build(name, auto, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert difference(output(model, ids), output(native, ids)) <= TOLERANCE
    assert difference(output(model, ids), plain) >= CHANGED
    rope.unpatch(model)
    assert state(model) == before
    assert model.config.to_dict() == settings_before
    assert torch.equal(output(model, ids), plain)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "auto"), [case for case in KNOWN if "Sequence" in case[1] or case[1] == "AutoModel"])
def test_a_saved_one_loads_plainly_and_with_its_own_class(name: str, auto: str, tmp_path: Path) -> None:
    model, ids = rope.patch(build(name, auto), "yarn", factor=4), tokens(LONG) % 90 + 3
    model.save_pretrained(tmp_path)
    plainly = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert difference(output(plainly, ids), output(model, ids)) <= TOLERANCE
    loaded = rope.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(loaded) is type(model)
    assert rope.describe(loaded).method == "yarn"
    assert difference(output(loaded, ids), output(model, ids)) <= TOLERANCE

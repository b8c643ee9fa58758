"""Folders of models and adapters that commit 0eb05a9 wrote load, compute what they did then, and are unpatched.

Weights are random, the same for the same seed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import rope_ext_hf as rope
from rope_ext_hf.hub import load_empty
from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.patches.saved.fingerprint import FINGERPRINT_KEY
from tests.support.models import logits, tokens

SAVED = json.loads(Path(__file__).with_name("recorded").joinpath("saved-0.1.0.json").read_text(encoding="utf-8"))
"""Of every folder its config.json or adapter_config.json as it was written, and logits of that model by length: the
first six of the last position."""
MODELS, ADAPTERS = SAVED["models"], SAVED["adapters"]
OWN = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BEFORE = {name: OWN | {"original_max_position_embeddings": 32} for name in MODELS} | {
    "longrope in its native form": {"rope_type": "default", "rope_theta": 10000.0}
}
"""The rope_parameters of each model before its patches."""


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draws) * 0.15
        for name, shape in sorted(shapes.items())
    }


def build(name: str) -> Any:
    """The model that a folder was made of."""
    sizes = {key: value for key, value in MODELS[name]["config"].items() if not key.startswith("rope_")}
    config = LlamaConfig(**sizes | {"rope_parameters": BEFORE[name], "max_position_embeddings": 128})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(weights({key: tensor.shape for key, tensor in model.state_dict().items()}))
    return model


def check(model: Any, recorded: dict[str, list[float]]) -> None:
    for length, expected in recorded.items():
        torch.testing.assert_close(
            logits(model, tokens(300)[:, : int(length)])[0, -1, :6], torch.tensor(expected), atol=1e-4, rtol=0
        )


def without_original_length(value: Any) -> Any:
    """A part of a config without the original length of longrope, which was the trained length in these folders.

    Now it is the one from which engines work out the attention factor.
    """
    if not isinstance(value, dict):
        return value
    unread = {"original_max_position_embeddings"} if value.get("rope_type") == "longrope" else set()
    return {key: without_original_length(each) for key, each in value.items() if key not in unread}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_and_is_unpatched(name: str, tmp_path: Path) -> None:
    stock = build(name)
    save_file(stock.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    model = rope.from_pretrained(tmp_path)
    check(model, MODELS[name]["logits"])
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    del again[PATCH_KEY][FINGERPRINT_KEY]  # newer than these folders
    written = {key for key in again if key.startswith("rope_")} | {"max_position_embeddings"}
    for key in written:
        assert without_original_length(again[key]) == without_original_length(MODELS[name]["config"][key])
    while rope.describe(model).patched:
        rope.unpatch(model)
    assert torch.equal(logits(model, tokens(300)), logits(stock, tokens(300)))
    assert model.config.rope_parameters == stock.config.rope_parameters
    assert model.config.max_position_embeddings == 128


REMOVED = {
    "string": {"method": "string", "window": 42, "start": 10, "max_distance": 128, "temperature": "none"},
    "profiles": {
        "method": "profiles",
        "factor": 4.0,
        "smaller": [1.0, 2.0],
        "frequency": {"method": "yarn", "factor": 4.0},
    },
}
"""Methods that this package had, as its version 0.1.0 saved them."""


@pytest.mark.parametrize("load", [rope.from_pretrained, load_empty])
@pytest.mark.parametrize("method", REMOVED)
def test_a_folder_of_a_removed_method_names_the_version_that_has_it(
    method: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    stock, config = build("self-extend"), copy.deepcopy(MODELS["self-extend"]["config"])
    config[PATCH_KEY]["method"] = REMOVED[method]
    save_file(stock.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(rope.RopeExtError, match=rf"{method}.* was removed; the last version .* is 0\.1\.0"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_loads_with_its_patch(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = ADAPTERS[name]["config"] | {"base_model_name_or_path": str(tmp_path / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{projection}_proj.lora_{half}.weight": shape
        for layer in (0, 1)
        for projection, rows in (("q", 64), ("v", 32))
        for half, shape in (("A", (4, 64)), ("B", (rows, 4)))
    }
    save_file(weights(shapes), folder / "adapter_model.safetensors")
    model = rope.from_pretrained(folder).eval()
    check(model, ADAPTERS[name]["logits"])
    check(model.merge_and_unload(), ADAPTERS[name]["logits"])

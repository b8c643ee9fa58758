"""The tiny models of conformance/models: from their seeds, by the package, and by a forward pass in numpy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conformance import forward, models

every_model = pytest.mark.parametrize("name", models.MODELS)
pytestmark = pytest.mark.filterwarnings("ignore")


def stored(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((models.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return entry


@pytest.mark.parametrize("family", models.FAMILIES)
def test_weights_are_those_of_their_seed(family: str) -> None:
    path = models.FOLDER / f"{family}.safetensors"
    kept, made = load_file(path), models.weights(family)
    assert kept.keys() == made.keys()
    assert all(torch.equal(kept[key], made[key]) for key in made)
    assert path.stat().st_size < 200_000


@pytest.mark.slow
@every_model
@pytest.mark.sampled(4)
def test_a_file_is_what_the_package_generates(name: str) -> None:
    entry, made = stored(name), json.loads(models.written(models.model_file(name)))
    for key in ("weights", "config", "ids", "positions"):
        assert entry[key] == made[key]
    assert np.allclose(entry["logits"], made["logits"], rtol=0, atol=1e-4)
    assert np.allclose(entry["logprobs"], made["logprobs"], rtol=0, atol=1e-4)
    for dtype, spread in made["rounding"].items():  # it follows the order of the sums of a processor
        assert spread / 3 < entry["rounding"][dtype] < 3 * spread
    assert [each["name"] for each in entry["mistakes"]] == [each["name"] for each in made["mistakes"]]
    for kept, again in zip(entry["mistakes"], made["mistakes"], strict=True):
        assert np.allclose(kept["logprobs"], again["logprobs"], rtol=0, atol=2e-3)


@every_model
def test_logits_are_those_of_a_forward_pass_that_shares_nothing_with_the_package(name: str) -> None:
    entry = stored(name)
    weights = {key: value.double().numpy() for key, value in load_file(models.FOLDER / entry["weights"]).items()}
    config, ids, positions = entry["config"], entry["ids"], entry["positions"]
    for at, expected in zip(positions, entry["logits"], strict=True):
        found = forward.forward(config, weights, ids[:at])[-1]
        assert np.abs(found - expected).max() < 2e-5 * entry["std"], at
    whole = torch.from_numpy(forward.forward(config, weights, ids)[[at - 1 for at in positions]])
    assert torch.allclose(models.next_logprobs(whole, ids), torch.tensor(entry["logprobs"]).double(), rtol=0, atol=1e-4)


@every_model
def test_a_mistake_changes_more_than_rounding_does(name: str) -> None:
    entry = stored(name)
    assert len(entry["mistakes"]) >= 3
    right = {"logprobs": np.array(entry["logprobs"])}
    right["alone"] = models.next_logprobs(torch.tensor(entry["logits"]).double(), entry["ids"]).numpy()
    for mistake in entry["mistakes"]:
        changes = [np.array(mistake[key]) - right[key] for key in right if key in mistake]
        assert max(np.sqrt((change**2).mean()) for change in changes) > 0.0049, mistake["name"]


def test_the_models_are_small() -> None:
    assert sum(path.stat().st_size for path in models.FOLDER.iterdir()) < 4_000_000
    assert {stored(name)["config"]["model_type"] for name in models.MODELS} == set(models.FAMILIES)

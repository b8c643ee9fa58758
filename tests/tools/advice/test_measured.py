"""`describe` says what a patch costs short inputs on a real model, as the tool box has measured it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import rope_ext_hf as rope
from tests.support.models import build

RECORD = Path("docs/results/real-models.json")


def _ratio_of_short_inputs(method: str) -> float:
    """Return the perplexity of short inputs under a patch for 2 times the context length, over the unpatched one."""
    entries = [e for e in json.loads(RECORD.read_text())["models"] if e["model"].startswith("SmolLM2")]
    entry = max(entries, key=lambda e: (sum(row["method"] == method for row in e["texts"]), len(e["texts"])))
    losses = {(row["text"], row["method"]): row["loss"]["8192"] for row in entry["texts"] if row["multiple"] == 2}
    rises = [loss - losses[text, "unpatched"] for (text, name), loss in losses.items() if name == method]
    return math.exp(sum(rises) / len(rises))


@pytest.mark.parametrize("method", ["yarn", "ntk", "linear"])
def test_the_cost_on_a_real_model_is_stated(method: str) -> None:
    patched = rope.patch(build("llama"), method, factor=2)
    _, measured = rope.describe(patched).short_inputs
    assert measured == (
        "Inputs within the context length read worse: on SmolLM2-135M-Instruct with factor 2, their perplexity per "
        f"token is {_ratio_of_short_inputs(method):.3g} times that of the unpatched model."
    )


@pytest.mark.parametrize(("method", "settings"), [("yarn", {"factor": 64}), ("dca", {}), ("rerope", {})])
def test_nothing_is_stated_where_nothing_was_measured_or_nothing_changes(method: str, settings: dict[str, int]) -> None:
    patched = rope.patch(build("llama"), method, **settings)
    assert not any("SmolLM2" in text for text in rope.describe(patched).short_inputs)

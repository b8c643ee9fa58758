"""What papers report: every number has its source, methods are named as here, and advice shows it apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.tools.advice import advise
from rope_ext_hf.tools.advice.reported import Reported, reported
from tests.support.models import build
from tests.support.wrapped_text import unwrapped

NOT_METHODS = {"unpatched"}


@pytest.mark.parametrize("table", reported(), ids=lambda table: f"{table.source}, {table.benchmark}")
def test_a_table_is_whole(table: Reported) -> None:
    assert table.url.startswith("https://")
    assert table.place
    assert table.unit.endswith((", higher is better", ", lower is better"))
    assert table.values.keys() <= {*rope.list_methods(), *NOT_METHODS}
    for numbers in table.values.values():
        assert 1 <= len(numbers) <= len(table.lengths)
        assert all(isinstance(number, str) or number > 0 for number in numbers)


def test_yarn_may_lose_to_the_model_as_loaded() -> None:
    [table] = [each for each in reported() if "dynamic-ntk" in each.values and "qwen3" in each.model_types]
    assert (table.values["unpatched"], table.values["yarn"], table.values["dynamic-ntk"]) == (
        (60.93,),
        (52.99,),
        (69.14,),
    )
    assert table.model == "Qwen3-1.7B-Base"


def test_advice_tells_the_reported_from_the_measured(tmp_path: Path) -> None:
    build("qwen3").config.save_pretrained(tmp_path)
    advice = advise(tmp_path, 256)
    assert {each.source for each in advice.reported} == {"Jet-Long"}  # the type of this model
    text = unwrapped(advice.full_text())
    assert "Measured here, without training: SmolLM2-135M-Instruct (134.5 million parameters" in text
    assert "reported by Jet-Long" in text
    assert "unpatched 60.93; yarn 52.99; dynamic-ntk 69.14" in text
    assert json.loads(json.dumps(advice.to_dict()))["reported"][0]["values"]["yarn"] == [52.99]
    build("cohere").config.save_pretrained(tmp_path)  # of which nothing is reported
    assert len(advise(tmp_path, 256).reported) > len(advice.reported)
    assert not advise(tmp_path, 32).reported  # no method is needed

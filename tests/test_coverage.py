"""The record of checks/coverage.py: complete for the installed transformers, and a sample of it measured again."""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from typing import Any

import pytest

from checks.coverage import measure
from checks.losses import RESULT
from docs.figures.models import COLUMNS, _rotating
from rope_ext_hf import list_methods
from tests.support.every_model import Entry, entries

RECORD: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
ROWS = {(row["model_type"], row["class"]): row for row in RECORD["rows"]}
SAME_VERSION = RECORD["versions"]["transformers"] == version("transformers")
MEASURED = sorted((row["seconds"], key) for key, row in ROWS.items() if row["rope"] and row["seconds"])
CHEAP = sorted(key for _, key in MEASURED[: len(MEASURED) // 4])
SAMPLE = random.Random(0).sample(CHEAP, 6)


@pytest.mark.skipif(not SAME_VERSION, reason="the record is of another version of transformers")
def test_the_record_has_every_class_of_the_installed_transformers() -> None:
    assert set(ROWS) == {(entry.model_type, entry.name) for entry in entries()}


def test_every_class_works_or_is_refused_with_a_reason() -> None:
    for row in ROWS.values():
        assert "error" not in row
        for column in COLUMNS:
            assert row[column]["works"] or row[column]["because"], row


def test_every_method_is_accepted_or_refused_with_a_reason() -> None:
    for row in _rotating():
        assert set(row["methods"]) in ({*list_methods()}, set()), row
    assert sum(bool(row["methods"]) for row in _rotating()) >= 0.95 * len(_rotating())


def test_of_classes_that_rotate_most_take_static_methods() -> None:
    rotating = _rotating()
    assert len(rotating) > 150
    assert sum(row["static"]["works"] for row in rotating) >= 0.95 * len(rotating)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "name"), SAMPLE)
def test_a_sample_is_as_recorded(model_type: str, name: str) -> None:
    entry = next((each for each in entries() if (each.model_type, each.name) == (model_type, name)), None)
    if entry is None:
        pytest.skip(f"the installed transformers has no {name}")
    assert isinstance(entry, Entry)
    row = measure(entry)
    assert "error" not in row, row
    if SAME_VERSION:
        recorded = ROWS[model_type, name]
        assert {column: row[column]["works"] for column in COLUMNS} == {
            column: recorded[column]["works"] for column in COLUMNS
        }
        assert {method for method, reason in row["methods"].items() if reason} == {
            method for method, reason in recorded["methods"].items() if reason
        }

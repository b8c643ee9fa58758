"""The command `tasks`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import run_json


@pytest.mark.slow
def test_tasks_asks_so_many_samples_of_each_task_at_each_length(tmp_path: Path) -> None:
    asked = ("tasks", "reference", "--suite", "json-kv", "--lengths", "768,1024", "--samples", "2", "--score", "rank")
    answer = run_json(*asked, "--method", "yarn", "--factor", "4", "--out", tmp_path, "--dtype", "float32")
    (folder,) = tmp_path.iterdir()
    records = [json.loads(line) for line in (folder / "records.0.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 2 * 2
    assert [each["length"] for each in answer["results"]] == [768, 1024, 768, 1024]
    assert all(0 <= each["score"] <= 1 for each in answer["results"])

"""`lm-eval`: a task of one's own on the bundled model, its score by plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.reference import path
from tests.support.commands import run, run_json

pytest.importorskip("lm_eval")

ROWS = [("def add(first, second):\n    return fir", "st"), ("import os\nimport s", "ys"), ("x = 1\ny = ", "zebra")]
TASK = """\
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {folder}/data.json
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{rest}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def is_greedy(model: Any, tokenizer: Any, text: str, rest: str) -> bool:
    """Whether the model would go on with these bytes, each the likeliest."""
    ids = torch.tensor([tokenizer(text + rest, add_special_tokens=False).input_ids])
    asked = len(rest.encode())
    with torch.no_grad():
        likeliest = model(ids).logits[0].argmax(-1)
    return torch.equal(likeliest[-asked - 1 : -1], ids[0, -asked:])


@pytest.mark.slow
def test_the_score_of_a_task_is_that_of_plain_transformers(tmp_path: Path) -> None:
    (tmp_path / "endings.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "data.json").write_text(json.dumps([{"text": text, "rest": rest} for text, rest in ROWS]))
    asked = ("lm-eval", "reference", "--tasks", "endings", "--include-path", tmp_path, "--dtype", "float32")
    kept = tmp_path / "kept"
    said = run_json(*asked, "--method", "ntk", "--factor", "2", "--output_path", kept, "--log_samples")
    ntk = {"rope_type": "default", "rope_theta": 10000.0 * 2 ** (64 / 62)}
    model = AutoModelForCausalLM.from_pretrained(path(), rope_parameters=ntk, dtype=torch.float32).eval()
    right = [is_greedy(model, AutoTokenizer.from_pretrained(path()), *row) for row in ROWS]
    assert 0 < sum(right) < len(ROWS)
    assert said["results"]["endings"]["acc,none"] == pytest.approx(sum(right) / len(ROWS))
    (results,), (samples,) = kept.glob("reference/results_*.json"), kept.glob("reference/samples_endings_*.jsonl")
    written = json.loads(results.read_text())
    assert said.items() <= written.items()
    assert (written["model_source"], written["model_name"]) == ("rope-ext", "reference")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["doc"]["text"] for row in rows] == [text for text, _ in ROWS]
    assert [row["acc"] for row in rows] == right
    assert said["max_length"] == 512


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--batch-size", "0"], "--batch-size must be a number of at least 1 or 'auto', got '0'"),
        (["--chat-template", "sometimes"], "--chat-template must be"),
        (["--max-length", "x"], "not a length in tokens"),
        (["--log-samples"], "--log-samples needs a folder for the samples; give --output-path"),
    ],
)
def test_refused(given: list[str], said: str) -> None:
    code, out, err = run("lm-eval", "reference", "--tasks", "endings", *given)
    assert (code, out, said in err) == (2, "", True), err

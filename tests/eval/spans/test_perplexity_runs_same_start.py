"""The protocol `same-start`: all lengths from one beginning, in one pass where the method allows it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.eval import measure, perplexity
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.runs.conclusions.conclusions import conclude
from rope_ext_hf.runs.conclusions.findings import Findings
from tests.runs.made_up import perplexities
from tests.support.method_examples import example_methods
from tests.support.models import THETA, TRAINED, build
from tests.support.oracles import nats

ROTARY = Rotary(dim=16, theta=THETA, trained_length=TRAINED)
LENGTHS = (32, 64, 128, 192)
TARGETS = 9


def document(count: int = 400, seed: int = 1) -> Tokens:
    ids = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))
    return Tokens(f"text {seed}", ids, tuple(range(1, count + 1)))


def mean_loss(model: Any, ids: Tensor, length: int) -> float:
    """The mean loss of the last targets of an input, by one forward of the whole input."""
    with rope.fixed_length(model, length) if rope.describe(model).method else nullcontext():
        return nats(model, ids, range(length - TARGETS, length)) / TARGETS


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", [None, *(method for _, method in example_methods(ROTARY))], ids=str)
@torch.inference_mode()
def test_every_length_has_the_loss_of_an_input_of_that_length(method: RopeMethod | None) -> None:
    """A forward of the first N tokens alone, whether they were read in a pass of their own or in the longest one."""
    model = build("llama")
    text = document()
    passes: list[int] = []
    with rope.patched(model, method) if method else nullcontext():
        results = perplexity(
            model,
            [text],
            lengths=LENGTHS,
            protocol="same-start",
            targets=TARGETS,
            bos=False,
            progress=passes.append,
        )
        for result in results:
            starts = (0, 192)  # 400 tokens hold two runs of the longest length
            losses = [mean_loss(model, text.ids[start : start + result.length], result.length) for start in starts]
            assert result.spans == 2
            assert result.loss == pytest.approx(sum(losses) / 2, abs=2e-5)
    by_length = method is not None and method.depends_on_length(ROTARY)
    expected = 2 * list(LENGTHS) if by_length else [192, 192]
    recent = [] if method else 4 * [TRAINED]  # of 128 and 192 tokens, in each of the two runs
    assert sorted(passes) == sorted(expected + recent)
    question = Perplexity(lengths=LENGTHS, data=[text], protocol="same-start", targets=TARGETS, bos=False)
    plan = replace(question.plan(build("llama")), methods=(method,))
    assert sorted(plan.passes(ModelRope.of_model(build("llama")))) == sorted(passes)  # what a forecast counts


@torch.inference_mode()
def test_the_reference_is_the_model_as_loaded_on_the_last_tokens_alone() -> None:
    model, text = build("llama"), document()
    loaded, patched = (
        perplexity(model, [text], lengths=LENGTHS, protocol="same-start", targets=TARGETS, bos=False),
        perplexity(
            rope.patch(build("llama"), "yarn", factor=4), [text], lengths=LENGTHS, protocol="same-start", bos=False
        ),
    )
    for result in loaded:
        if result.length <= TRAINED:
            assert result.recent_loss is None
            continue
        losses = []
        for start in (0, 192):
            stop = start + result.length
            losses.append(mean_loss(model, text.ids[stop - TRAINED : stop], TRAINED))
        assert result.recent_loss == pytest.approx(sum(losses) / 2, abs=2e-5)
        assert result.recent_loss != result.loss
    assert all(result.recent_loss is None for result in patched)


def test_the_reference_stands_in_the_table_and_in_the_files(tmp_path: Any) -> None:
    texts = [document(seed=seed) for seed in range(4)]
    question = Perplexity(lengths=LENGTHS, data=texts, protocol="same-start", targets=TARGETS, bos=False)
    run = measure(build("llama"), question, methods=["rerope"], out=tmp_path)
    table = run.table()
    assert table is not None
    assert run.path is not None
    rows = {str(row): values for row, *values in zip(*(column.cells for column in table.columns), strict=True)}
    reference = [str(cell).strip() for cell in rows["unpatched, last 64 tokens"]]
    values = {result.length: result.recent_loss for result in run.results if result.recent_loss is not None}
    assert [*values] == [128, 192]
    assert reference == ["", "", *(f"{math.exp(values[length]):.0f}" for length in (128, 192))]  # random weights
    assert "recent_loss_nats" in (run.path / "results.csv").read_text(encoding="utf-8")
    again = measure(build("llama"), question, methods=["rerope"], out=tmp_path)
    assert again.results == run.results


@pytest.mark.parametrize("keys", [{}, {"key_nats": 1.5, "key_tokens": 2}])
@pytest.mark.parametrize("recent", [None, 3.25])
def test_a_loss_is_read_back_from_a_journal(keys: dict[str, Any], recent: float | None) -> None:
    loss = DocumentLoss("a", 2.5, 5, 20, 1, recent_nats=recent, **keys)
    assert PerplexityRuns().parse("a", loss.to_record()) == loss


@pytest.mark.parametrize("record", [[2.5, 5, 20, 1, "x"], [2.5, 5, 20, 1, 1.5, 2, None], [2.5, 5, 20, 1, 1.5, 9, 1.0]])
def test_what_is_no_loss_is_refused(record: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected a loss"):
        PerplexityRuns().parse("a", record)


@pytest.mark.parametrize(
    ("recent", "words"), [(1.6, "better than"), (1.2, "worse than"), (1.5, "not significantly different from")]
)
def test_the_conclusion_compares_with_reading_the_last_tokens_alone(recent: float, words: str) -> None:
    rows = {"loaded": {64: 1.0, 256: 5.0}, "yarn": {64: 1.0, 256: 1.5}}
    reference = perplexities({"reference": {256: [recent + s for s in (0.04, -0.03, 0.02, -0.02, -0.01)]}}).items[
        "reference"
    ]
    measure_ = perplexities(rows, recent=reference)
    names = {"loaded": "unpatched", "yarn": "yarn"}
    text = conclude(Findings(measures=(measure_,), names=names, loaded="loaded", context_length=64)).text
    assert f"Reading all 256 tokens is {words} reading the last 64 unpatched (perplexity 4.48 against " in text

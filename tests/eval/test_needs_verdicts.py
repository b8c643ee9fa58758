"""What `need` concludes, from made-up numbers: it reads, it does not, it cannot be told, there is no measure."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from rope_ext_hf.eval import NeedReport
from rope_ext_hf.eval.needs import ALL_TASKS
from rope_ext_hf.runs.statistics import Estimate, estimate_share
from rope_ext_hf.runs.verdicts import Outcome
from tests.support.wrapped_text import unwrapped

FLAT, RISEN = Estimate(0.01, 0.005, 0.015, 16), Estimate(0.30, 0.20, 0.40, 16)
UNSURE, FEW = Estimate(0.01, -0.20, 0.22, 16), Estimate(0.01, None, None, 2)
GAINS, BELOW_GUESSING = Estimate(0.20, 0.15, 0.25, 16), Estimate(-1.8, -2.0, -1.6, 16)


def answered(right: int, of: int = 64) -> Estimate:
    return estimate_share([1.0] * right + [0.0] * (of - right))


GOOD = {256: answered(62), 512: answered(62), 1024: answered(61)}


def make(
    last: Estimate = FLAT,
    scores: dict[str, dict[int, Estimate]] | None = None,
    target: int | None = 1024,
    **more: object,
) -> NeedReport:
    """A model for 256 tokens that reads 512, with other numbers at 1,024; guessing costs 3 nats per token."""
    known = {"needle": GOOD} if scores is None else scores
    found = NeedReport(256, target, 1.2, {512: FLAT, 1024: last}, GAINS, BELOW_GUESSING, known)
    return replace(found, **more)  # type: ignore[arg-type]


NO_NEED = "It needs nothing for 1,024 tokens: as it is, it reads them; the loss rises by less than 0.02"


@pytest.mark.parametrize(
    ("found", "outcome", "reads_to", "sentence"),
    [
        (make(), Outcome.BETTER, 1024, NO_NEED),
        (
            make(target=None),
            Outcome.BETTER,
            1024,
            "reads to at least 1,024 tokens as it is, 4 times its context length",
        ),
        (make(target=200), Outcome.BETTER, 1024, "It needs nothing for 200 tokens: as it is, it reads them."),
        (make(RISEN), Outcome.WORSE, 512, "reads to 512 tokens. At 1,024 tokens the loss is higher by 0.300 [0.200 to"),
        (make(RISEN, target=None), Outcome.WORSE, 512, "For 1,024 tokens it needs extending."),
        (make(RISEN, target=512), Outcome.BETTER, 512, "It needs nothing for 512 tokens"),
        (make(RISEN, {}), Outcome.WORSE, None, "At 1,024 tokens the loss is higher by 0.300"),
        (
            make(UNSURE),
            Outcome.NO_DIFFERENCE,
            512,
            "at 1,024 tokens a rise of the loss by 0.02 is not excluded: it is not told apart: +0.010",
        ),
        (make(FEW), Outcome.NO_DIFFERENCE, 512, "2 documents give no interval"),
        (make(Estimate(math.inf, None, None, 16)), Outcome.WORSE, 512, "At 1,024 tokens the loss is not finite."),
        (
            make(target=4096),
            Outcome.NO_DIFFERENCE,
            1024,
            "Whether it reads 4,096 tokens cannot be told: at 4,096 tokens it",
        ),
        (make(RISEN, target=4096), Outcome.WORSE, 512, "For 4,096 tokens it needs extending."),
        # No task that tells: the loss alone.
        (
            make(scores={}),
            Outcome.NOT_MEASURED,
            None,
            "Whether it reads 1,024 tokens cannot be told from the loss alone",
        ),
        (
            make(scores={}, target=200),
            Outcome.NOT_MEASURED,
            None,
            "Whether it reads 200 tokens cannot be told from the loss",
        ),
        (
            make(scores={"needle": {256: answered(33)}}),
            Outcome.NOT_MEASURED,
            None,
            "not surely answer half of any task",
        ),
        # Answers.
        (
            make(scores={"needle": GOOD | {1024: answered(20)}}),
            Outcome.WORSE,
            512,
            "it answers 31% [21% to 44%] of needle",
        ),
        (
            make(scores={"needle": GOOD | {1024: answered(54)}}),
            Outcome.NO_DIFFERENCE,
            512,
            "that 85% of its answers stay",
        ),
        (
            make(scores={"needle": {n: answered(16, 16) for n in GOOD}}),
            Outcome.NO_DIFFERENCE,
            256,
            "needle instead of 100%",
        ),
        (make(scores={"needle": {n: answered(2, 2) for n in GOOD}}), Outcome.NOT_MEASURED, None, "from the loss alone"),
    ],
)
def test_what_follows(found: NeedReport, outcome: Outcome, reads_to: int | None, sentence: str) -> None:
    assert (found.outcome, found.reads_to) == (outcome, reads_to)
    assert sentence in found.conclusion
    assert sentence in unwrapped(found)
    assert ("needs nothing" in found.conclusion) == (outcome is Outcome.BETTER)
    assert ("cannot be told" in found.conclusion) == (outcome in (Outcome.NOT_MEASURED, Outcome.NO_DIFFERENCE))


def test_several_tasks_decide_together_and_each_can_fail() -> None:
    """16 right answers of 16 are not surely 85%; 48 of 48 in three tasks are."""
    tasks = {task: {n: answered(16, 16) for n in GOOD} for task in ("needle", "key-value", "variable tracking")}
    together = {n: answered(48, 48) for n in GOOD}
    assert make(scores=tasks | {ALL_TASKS: together}).outcome is Outcome.BETTER
    tasks["key-value"][1024] = answered(2, 16)
    lost = make(scores=tasks | {ALL_TASKS: together | {1024: answered(34, 48)}})
    assert lost.outcome is Outcome.WORSE
    assert "12% [1% to 39%] of key-value instead of 100%" in lost.conclusion


def test_what_makes_a_flat_loss_say_less_is_said() -> None:
    assert make().doubts == []
    near = make(guessing=Estimate(-0.01, -0.02, 0.0, 16), scores={}).conclusion
    assert "1.200 nats per token, is not surely a tenth below the 1.210 of guessing each token by its share" in near
    no_gain = make(quarter=Estimate(0.001, -0.01, 0.012, 16))
    assert "It gains nothing that can be told between a quarter and the whole of its 256 tokens" in no_gain.conclusion
    assert no_gain.outcome is Outcome.BETTER  # its answers are evidence
    assert len(make(guessing=FEW, quarter=FEW).doubts) == 2


@pytest.mark.parametrize(
    ("window", "target", "reads_to", "sentence"),
    [
        (32, 512, None, "sees the last 32 tokens only, and nothing from further back than 125 tokens reaches the last"),
        (200, 512, None, "sees the last 200 tokens only, and what stands further back arrives at best in steps"),
        (512, 1024, 512, "As it is, it reads to 512 tokens. It does not read 1,024 tokens, whatever its loss is"),
        (512, 512, 512, "It needs nothing for 512 tokens"),
        (32, 16, None, "It needs nothing for 16 tokens"),
    ],
)
def test_a_window_in_every_layer_is_an_answer(window: int, target: int, reads_to: int | None, sentence: str) -> None:
    found = make(target=target, window=window, layers=4)
    assert sentence in found.conclusion
    assert found.reads_to == reads_to
    assert found.too_narrow == ("needs nothing" not in found.conclusion)


def test_what_is_written_holds_what_follows() -> None:
    written = json.loads(json.dumps(make(RISEN).to_dict()))
    assert (written["lengths"], written["reads_to"], written["outcome"]) == ([256, 512, 1024], 512, "worse")
    assert written["rises"]["1024"] == [0.3, 0.2, 0.4, 16]

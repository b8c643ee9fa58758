"""Whether what a search found is written: over made-up numbers, a case for each outcome."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.training.searching import SearchReport, decide
from tests.support.wrapped_text import unwrapped

BETTER, WORSE = Estimate(-0.2, -0.3, -0.1, 9), Estimate(0.905, 0.753, 1.095, 9)
UNCLEAR, FEW = Estimate(-0.2, -0.5, 0.1, 9), Estimate(-0.2, None, None, 2)


@pytest.mark.parametrize(
    ("change", "is_fixed", "keeps", "said"),
    [
        (BETTER, False, True, "is lower by 18.1 (9.5 to 25.9) percent: curve is written."),
        (WORSE, False, False, "is higher by 147.2 (112.3 to 198.9) percent: yarn x4 is written."),
        (
            UNCLEAR,
            False,
            False,
            "is not significantly different (-18.1 percent, 95% confidence interval -39.3 to +10.5): "
            "yarn x4 is written.",
        ),
        (FEW, False, False, "(2 passages are too few for a confidence interval): yarn x4 is written."),
        (None, False, False, "is not known: one of the two was not measured: yarn x4 is written."),
        (Estimate(math.inf, None, None, 9), False, False, "is not finite: yarn x4 is written."),
        (Estimate(-math.inf, None, None, 9), False, True, "is finite, and the other one is not: curve is written."),
        (UNCLEAR, True, True, "-39.3 to +10.5): curve is written."),  # a fixed method against another one
        (WORSE, True, False, "percent: yarn x4 is written."),
    ],
)
def test_a_decision(change: Estimate | None, is_fixed: bool, keeps: bool, said: str) -> None:
    keeps_found, why = decide("curve", "yarn x4", change, length=2048, is_fixed=is_fixed)
    assert keeps_found is keeps
    assert why.endswith(said)
    assert "at 2,048 tokens, compared with yarn x4, the best " in why


def test_without_another_method_what_was_found_is_written() -> None:
    decision = decide("curve", None, None, length=2048)
    assert decision == (True, "No other fixed method stays within the bound: curve is written.")


def report(**values: Any) -> SearchReport:
    losses = {"unpatched": 3.4, "yarn x8": 1.3, "llama3 x8": 1.2, "found": 2.1, "chosen": 1.2}
    standard: dict[str, Any] = {
        "settings": {"most_lost": 0.02}, "context_length": 256, "target_length": 2048, "method": {}, "label": "a",
        "decision": "Why.", "losses": {name: {"256": 0.9, "2048": loss} for name, loss in losses.items()},
        "gains": {name: Estimate(loss - 1.2, loss - 1.3, loss - 1.1, 9) for name, loss in losses.items()},
        "lost": Estimate(0.01, 0.005, 0.015, 9), "key_losses": {}, "key_gains": {}, "keys_by": "", "trials": 9,
        "stopped": 1, "seconds": 60.0, "cpu_seconds": 60.0, "folder": "f", "save_route": "a route",
    }  # fmt: skip
    return SearchReport(**standard | values)


def test_rows_state_how_they_compare_with_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = {line.split("  ")[0]: line for line in str(report()).splitlines()}
    assert rows["unpatched"].endswith("higher by 802.5 (716.6 to 897.4) percent")
    assert rows["found"].endswith("higher by 146.0 (122.6 to 171.8) percent")
    assert "not significantly different (+0.0 percent, 95% confidence interval" in rows["llama3 x8"]
    assert report().best_fixed == "llama3 x8"


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (Estimate(0.01, 0.005, 0.015, 9), "is higher by 1.0 (0.5 to 1.5) percent, within the bound of 2.0 percent"),
        (Estimate(0.3, 0.2, 0.4, 9), "is higher by 35.0 (22.1 to 49.2) percent, above the bound"),
        (
            Estimate(0.01, -0.01, 0.03, 9),
            "not significantly different from the bound of 2.0 percent (--most-lost-at-1x 0.02).",
        ),
        (Estimate(0.01, None, None, 2), "not significantly different from the bound of 2.0 percent"),
    ],
)
def test_what_short_inputs_lose_is_held_against_the_bound(lost: Estimate, said: str) -> None:
    assert said in unwrapped(report(lost=lost))

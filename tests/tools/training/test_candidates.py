"""A candidate reads what transformers would compute, and stops when it is surely worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import rope_ext_hf as rope
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.static import Factors, Linear, Yarn
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.runs.statistics import estimate
from rope_ext_hf.tools.training.candidates import (
    LEAST_READ,
    Candidate,
    Passage,
    Reader,
    best_candidate,
    short_passages,
    two_lists,
)
from tests.support.models import TRAINED, build, logits, tokens

LONG = 4 * TRAINED
PASSAGES = [Passage(tokens(LONG, seed=seed)[0], LONG // 2) for seed in range(6)]
SHORT = short_passages(PASSAGES, TRAINED, ())


def candidate(**values: Any) -> Candidate:
    standard: dict[str, Any] = {
        "stage": "methods", "method": {"method": "default"}, "label": "", "loss": 1.0, "losses": (1.0,), "lost": 0.0,
        "most_lost": 0.0, "stopped": False, "parameters": {}, "seconds": 1.0, "cpu_seconds": 1.0,
    }  # fmt: skip
    return Candidate(**standard | values)


@pytest.fixture
def reader() -> Reader:
    return Reader(build("llama"), PASSAGES, SHORT, 0.02, over="own", context_length=None)


def by_hand(model: Any, passages: list[Passage]) -> list[float]:
    return [
        float(functional.cross_entropy(logits(model, ids[None])[0, first - 1 : -1], ids[first:]))
        for ids, first, _ in passages
    ]


def test_losses_are_those_of_transformers_under_the_method(reader: Reader) -> None:
    method = Linear(factor=4.0)
    read = reader.read("methods", method, [], {"a": 1})
    patched, plain = rope.patch(build("llama"), method), build("llama")
    assert read.losses == pytest.approx(by_hand(patched, PASSAGES), abs=1e-4)
    assert read.loss == pytest.approx(sum(read.losses) / len(PASSAGES))
    gaps = [a - b for a, b in zip(by_hand(patched, SHORT), by_hand(plain, SHORT), strict=True)]
    assert (read.lost, read.most_lost) == pytest.approx((estimate(gaps).value, estimate(gaps).high), abs=1e-4)
    assert (read.stopped, read.parameters, read.stage, read.label) == (False, {"a": 1}, "methods", "linear x4")
    torch.testing.assert_close(logits(reader.model, tokens(LONG)), logits(plain, tokens(LONG)))  # the patch is gone


def test_two_lists_lose_nothing_at_the_context_length(reader: Reader) -> None:
    method = two_lists(Linear(factor=4.0), patch_geometry(reader.model), LONG)
    read, static = (reader.read("methods", each, [], {}) for each in (method, Linear(factor=4.0)))
    assert read.losses == pytest.approx(static.losses, abs=1e-5)
    assert read.lost == pytest.approx(0, abs=1e-6)
    assert read.most_lost == pytest.approx(0, abs=1e-6)
    assert static.lost != pytest.approx(0, abs=1e-4)


def test_a_candidate_stops_once_it_is_surely_worse(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    better = candidate(losses=tuple(loss - 1 for loss in whole.losses), loss=whole.loss - 1)
    read = reader.read("methods", Yarn(factor=4.0), [better], {})
    assert read.stopped
    assert len(read.losses) == LEAST_READ
    assert read.loss == pytest.approx(whole.loss)  # estimated: one nat above the better one
    assert (read.lost, read.most_lost) == (None, None)
    assert not read.holds(100.0)


def test_a_candidate_that_may_be_better_is_read_to_the_end(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    uneven = [loss + (3 if index % 2 else -3.1) for index, loss in enumerate(whole.losses)]
    for losses in (uneven, [loss + 1 for loss in whole.losses]):
        read = reader.read("methods", Yarn(factor=4.0), [candidate(losses=tuple(losses))], {})
        assert (read.stopped, len(read.losses)) == (False, len(PASSAGES))


def test_the_comparison_is_with_the_best_one_that_holds_the_bound(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    broken = candidate(losses=(0.0,) * len(PASSAGES), loss=0.0, most_lost=1.0)
    equal = candidate(losses=tuple(loss + 0.01 for loss in whole.losses), loss=whole.loss + 0.01)
    assert not reader.read("methods", Yarn(factor=4.0), [broken, equal], {}).stopped
    strict = Reader(reader.model, PASSAGES, SHORT, -10.0, over="own", context_length=None)
    assert strict.read("methods", Yarn(factor=4.0), [broken], {}).stopped  # where none holds it, with the nearest


def test_the_first_one_that_holds_the_bound_is_read_to_the_end(reader: Reader) -> None:
    broken = candidate(losses=(0.0,) * len(PASSAGES), loss=0.0, most_lost=1.0)
    easy = Reader(reader.model, PASSAGES, SHORT, 100.0, over="own", context_length=None)
    read = easy.read("methods", Yarn(factor=4.0), [replace(broken, most_lost=101.0)], {})
    assert (read.stopped, read.holds(100.0)) == (False, True)


def test_losses_that_are_not_finite_are_the_worst(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.scorer, "losses", lambda ids, first: torch.tensor([float("nan")]))
    assert reader.read("methods", Linear(factor=4.0), [], {}).loss == 100


def test_the_best_holds_the_bound_and_the_cost_grows_beyond_it() -> None:
    cheap, good, best, stopped = (
        candidate(loss=1.2, most_lost=0.0),
        candidate(loss=1.1, most_lost=0.02),
        candidate(loss=1.0, most_lost=0.05),
        candidate(loss=0.9, most_lost=None, lost=None, stopped=True),
    )
    assert best_candidate([cheap, good, best, stopped], 0.02) is good
    assert best_candidate([best, stopped], 0.02) is None
    assert good.cost(0.02) == 1.1
    assert best.cost(0.02) == pytest.approx(1.3)


def test_factors_are_static_and_compared_like_any_method(reader: Reader) -> None:
    rotary = patch_geometry(reader.model)
    same = reader.read("bands", Factors(factors=(4.0,) * (rotary.dim // 2)), [], {}, "divisors")
    assert same.losses == pytest.approx(reader.read("methods", Linear(factor=4.0), [], {}).losses, abs=1e-6)
    assert same.label == "divisors"
    assert resolve_method("linear", rotary, target_length=LONG) == Linear(factor=4.0)

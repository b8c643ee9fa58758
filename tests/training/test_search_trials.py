"""A trial reads what transformers would compute, and stops when it is surely worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.static import Factors, Linear, Yarn
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.reading.corpora import stdlib_held_out
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.spans import prepare, tokenize
from rope_ext_hf.reference import path as reference
from rope_ext_hf.runs.statistics import estimate
from rope_ext_hf.training.search_space import two_lists
from rope_ext_hf.training.search_trials import (
    LEAST_READ,
    Passage,
    Reader,
    Trial,
    best_of,
    best_trial,
    key_passages,
    pieces,
    prompts,
    scored_tokens,
    short_passages,
    text_passages,
)
from tests.support.models import TRAINED, build, logits, tokens
from tests.support.oracles import naive_key_tokens, token_losses

LONG = 4 * TRAINED
PASSAGES = [Passage(tokens(LONG, seed=seed)[0], LONG // 2) for seed in range(6)]
SHORT = short_passages(PASSAGES, TRAINED)


def trial(**values: Any) -> Trial:
    standard: dict[str, Any] = {
        "stage": "methods", "method": {"method": "default"}, "label": "", "loss": 1.0, "losses": (1.0,), "lost": 0.0,
        "most_lost": 0.0, "stopped": False, "parameters": {}, "seconds": 1.0, "cpu_seconds": 1.0,
    }  # fmt: skip
    return Trial(**standard | values)


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


def test_a_trial_stops_once_it_is_surely_worse(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    better = trial(losses=tuple(loss - 1 for loss in whole.losses), loss=whole.loss - 1)
    read = reader.read("methods", Yarn(factor=4.0), [better], {})
    assert read.stopped
    assert len(read.losses) == LEAST_READ
    assert read.loss == pytest.approx(whole.loss)  # estimated: one nat above the better one
    assert (read.lost, read.most_lost) == (None, None)
    assert not read.holds(100.0)


def test_a_trial_that_may_be_better_is_read_to_the_end(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    uneven = [loss + (3 if index % 2 else -3.1) for index, loss in enumerate(whole.losses)]
    for losses in (uneven, [loss + 1 for loss in whole.losses]):
        read = reader.read("methods", Yarn(factor=4.0), [trial(losses=tuple(losses))], {})
        assert (read.stopped, len(read.losses)) == (False, len(PASSAGES))


def test_the_comparison_is_with_the_best_one_that_holds_the_bound(reader: Reader) -> None:
    whole = reader.read("methods", Yarn(factor=4.0), [], {})
    broken = trial(losses=(0.0,) * len(PASSAGES), loss=0.0, most_lost=1.0)
    equal = trial(losses=tuple(loss + 0.01 for loss in whole.losses), loss=whole.loss + 0.01)
    assert not reader.read("methods", Yarn(factor=4.0), [broken, equal], {}).stopped
    strict = Reader(reader.model, PASSAGES, SHORT, -10.0, over="own", context_length=None)
    assert strict.read("methods", Yarn(factor=4.0), [broken], {}).stopped  # where none holds it, with the nearest


def test_the_first_one_that_holds_the_bound_is_read_to_the_end(reader: Reader) -> None:
    broken = trial(losses=(0.0,) * len(PASSAGES), loss=0.0, most_lost=1.0)
    easy = Reader(reader.model, PASSAGES, SHORT, 100.0, over="own", context_length=None)
    read = easy.read("methods", Yarn(factor=4.0), [replace(broken, most_lost=101.0)], {})
    assert (read.stopped, read.holds(100.0)) == (False, True)


def test_losses_that_are_not_finite_are_the_worst(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.scorer, "losses", lambda ids, first: torch.tensor([float("nan")]))
    assert reader.read("methods", Linear(factor=4.0), [], {}).loss == 100


def test_the_best_holds_the_bound_and_the_cost_grows_beyond_it() -> None:
    cheap, good, best, stopped = (
        trial(loss=1.2, most_lost=0.0),
        trial(loss=1.1, most_lost=0.02),
        trial(loss=1.0, most_lost=0.05),
        trial(loss=0.9, most_lost=None, lost=None, stopped=True),
    )
    assert best_trial([cheap, good, best, stopped], 0.02) is good
    assert best_trial([best, stopped], 0.02) is None
    assert good.cost(0.02) == 1.1
    assert best.cost(0.02) == pytest.approx(1.3)
    assert Trial.from_dict(good.to_dict()) == good


# --- passages


def document(name: str, length: int) -> Tokens:
    return Tokens(name, torch.arange(length), tuple(range(1, length + 1)))


def test_pieces_are_as_many_of_each_document_spread_over_it() -> None:
    made = pieces([document("a", 100), document("b", 25), document("c", 1000), document("d", 5)], 10, 8)
    assert [each.name[0] for each in made] == ["a", "b", "c", "a", "b", "c", "a", "c"]
    assert all(len(each.ids) == 10 for each in made)
    starts = {name: [int(each.ids[0]) for each in made if each.name[0] == name] for name in "abc"}
    assert starts == {"a": [10, 50, 80], "b": [0, 10], "c": [160, 500, 830]}
    assert len(pieces([document("b", 25)], 10, 100)) == 2


def test_short_passages_are_parts_of_the_long_ones() -> None:
    passage = Passage(torch.arange(LONG), LONG // 2)
    middle, end = short_passages([passage], TRAINED)
    assert torch.equal(middle.ids, torch.arange(LONG // 2, LONG // 2 + TRAINED))
    assert torch.equal(end.ids, torch.arange(LONG - TRAINED, LONG))
    assert middle.first == TRAINED // 2
    (only,) = short_passages([Passage(torch.arange(TRAINED + 10), 5)], TRAINED)
    assert torch.equal(only.ids, torch.arange(10, TRAINED + 10))


def test_prompts_score_the_answers_alone() -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference())
    documents = tokenize(stdlib_held_out()[:2], tokenizer)
    made = prompts("key-value", documents, 512, 5, tokenizer, seed=0)
    assert len(made) == 5
    for ids, first, _ in made:
        assert len(ids) == 512
        answer = tokenizer.decode(ids[first:])
        assert answer in tokenizer.decode(ids[:first])  # it was stated before
    with pytest.raises(MethodError, match="unknown fitness 'accuracy'; it is loss, key-tokens or a retrieval task: "):
        prompts("accuracy", documents, 512, 5, tokenizer, seed=0)
    with pytest.raises(MethodError, match="too short for task 'needle'"):
        prompts("needle", documents, 64, 5, tokenizer, seed=0)


def test_too_short_a_text_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference())
    with pytest.raises(CorpusError, match="has 3 passages of 30 tokens, and at least 4 are needed"):
        text_passages([document("a", 95)], 30, 24, tokenizer, 5)
    assert len(text_passages([document("a", 125)], 30, 24, tokenizer, 5)) == 4


def test_the_ends_of_passages_are_scored() -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference())
    made = text_passages([document("a", 125)], 30, 24, tokenizer, 5)
    assert {(len(ids), first) for ids, first, _ in made} == {(30, 25)}
    assert [scored_tokens(length) for length in (1, 2, 9, 256)] == [1, 1, 4, 128]


def test_factors_are_static_and_compared_like_any_method(reader: Reader) -> None:
    rotary = patch_geometry(reader.model)
    same = reader.read("bands", Factors(factors=(4.0,) * (rotary.dim // 2)), [], {}, "divisors")
    assert same.losses == pytest.approx(reader.read("methods", Linear(factor=4.0), [], {}).losses, abs=1e-6)
    assert same.label == "divisors"
    assert resolve_method("linear", rotary, target_length=LONG) == Linear(factor=4.0)


@pytest.mark.thorough
def test_key_tokens_alone_count_in_their_passages() -> None:
    """Their loss is the mean over the key tokens of all passages, which the model finds under the best method."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(reference(), dtype=torch.float32).eval(),
        load_tokenizer("reference"),
    )
    rotary = patch_geometry(model)
    texts = text_passages(tokenize(stdlib_held_out(), tokenizer), 512, 6, tokenizer, 128)
    methods = [resolve_method(name, rotary, target_length=512) for name in ("linear", "rerope")]
    evaluator = best_of(model, methods, texts)
    assert evaluator.label() == "rerope"
    plan = prepare(model, stdlib_held_out()[:2], tokenizer=tokenizer, lengths=[512], max_spans=4)
    read, measurement = key_passages(model, evaluator, texts, PerplexityMeasurement(plan))
    with rope.patched(model, evaluator):
        keys = [[t for t in naive_key_tokens(model, each.ids, 64, 16, 2.0, -2.0, None) if t >= 384] for each in texts]
        nats = sum(
            float(token_losses(model, each.ids)[t - 1]) for each, of in zip(texts, keys, strict=True) for t in of
        )
        measured = [
            naive_key_tokens(model, document.ids[span.start : span.stop], 64, 16, 2.0, -2.0, None)
            for document, spans in plan.documents
            for span in spans
        ]
    assert len(read) == sum(map(bool, keys))
    trial = Reader(model, read, short_passages(texts, 256), 0.02).read("methods", evaluator, [], {})
    assert trial.loss == pytest.approx(nats / sum(map(len, keys)), abs=1e-5)
    assert measurement.keys is not None
    assert sum(int(mask.sum()) for mask in measurement.keys) == sum(t >= 256 for of in measured for t in of) > 0
    assert "the model under rerope: gain above 2" in measurement.keys_from


@pytest.mark.slow
def test_too_few_key_tokens_are_refused() -> None:
    model, tokenizer = build("llama", vocab_size=259), load_tokenizer("reference")
    plan = prepare(model, stdlib_held_out()[:1], tokenizer=tokenizer, lengths=[LONG], max_spans=2)
    with pytest.raises(CorpusError, match=r"0 passages have a key token under yarn x4 .gain above 2.* at least 4"):
        key_passages(model, Yarn(factor=4.0), PASSAGES, PerplexityMeasurement(plan))


def test_an_evaluator_must_be_found() -> None:
    with pytest.raises(MethodError, match="runs none of the methods"):
        best_of(build("llama"), [], PASSAGES)

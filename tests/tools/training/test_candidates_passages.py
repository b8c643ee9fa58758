"""Passages of a search: how they are cut and spread, what is scored in them, and which of them have key tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.reading.corpora import stdlib_held_out
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.spans import prepare, tokenize
from rope_ext_hf.reference import path as reference
from rope_ext_hf.tools.training.candidates import (
    Passage,
    Reader,
    best_of,
    key_passages,
    pieces,
    prompts,
    scored_tokens,
    short_passages,
    text_passages,
)
from tests.support.models import TRAINED, build, tokens
from tests.support.oracles import naive_key_tokens, token_losses

LONG = 4 * TRAINED
PASSAGES = [Passage(tokens(LONG, seed=seed)[0], LONG // 2) for seed in range(6)]


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
    middle, end = short_passages([passage], TRAINED, ())
    assert torch.equal(middle.ids, torch.arange(LONG // 2, LONG // 2 + TRAINED))
    assert torch.equal(end.ids, torch.arange(LONG - TRAINED, LONG))
    assert middle.first == TRAINED // 2
    (only,) = short_passages([Passage(torch.arange(TRAINED + 10), 5)], TRAINED, ())
    assert torch.equal(only.ids, torch.arange(10, TRAINED + 10))
    for part, start in zip(short_passages([passage], TRAINED, (9, 8)), (LONG // 2, LONG - TRAINED), strict=True):
        assert part.ids.tolist() == [9, 8, *range(start + 2, start + TRAINED)]  # as the tokenizer begins a text


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
    candidate = Reader(model, read, short_passages(texts, 256, ()), 0.02).read("methods", evaluator, [], {})
    assert candidate.loss == pytest.approx(nats / sum(map(len, keys)), abs=1e-5)
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

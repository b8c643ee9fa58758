"""In every measurement, inputs begin as `tokenizer(text)` does: with BOS, [CLS], GLM's [gMASK]<sop>, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache

import rope_ext_hf as rope
from rope_ext_hf.eval import Passkey, Perplexity, measure, perplexity
from rope_ext_hf.hub import leading_tokens
from rope_ext_hf.reading.protocols import PROTOCOLS
from tests.support.byte_tokenizers import SPECIAL, TEMPLATES, VOCABULARY, byte_tokenizer
from tests.support.models import build

TEXT = "How much is the cheese? It is much, and the mice pay in kind; nobody counts. " * 2


def model_and_reads() -> tuple[Any, list[list[int]]]:
    """Build a model, and a list that gets the token ids of each of its inputs, with those in its cache before them."""
    model = build("llama", vocab_size=VOCABULARY)
    reads: list[list[int]] = []

    def note(_module: Any, _given: Any, named: dict[str, Any]) -> None:
        cache = next((value for value in named.values() if isinstance(value, Cache)), None)
        known = 0 if cache is None else cache.get_seq_length()
        reads.append((reads[-1][:known] if known else []) + named["input_ids"][0].tolist())

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return model, reads


def begins(template: str) -> list[int]:
    """Return the leading tokens by their definition: those before the first byte of the text."""
    tokenizer = byte_tokenizer(template)
    return list(tokenizer("H")["input_ids"])[: TEMPLATES[template]]


def loss(model: Any, ids: list[int], first: int) -> float:
    with torch.no_grad():
        likely = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -float(sum(likely[i - 1, ids[i]].item() for i in range(first, len(ids)))) / (len(ids) - first)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_before_a_text(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    assert list(leading_tokens(tokenizer)) == begins(template)
    whole = tokenizer("H")["input_ids"]
    assert [SPECIAL[token] for token in whole if token < len(SPECIAL)] == template.replace("$A", "").split()


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.sampled(11)
def test_perplexity_of_every_protocol(template: str, protocol: str, bos: bool | None) -> None:
    model, reads = model_and_reads()
    tokenizer = byte_tokenizer(template)
    own = begins(template)
    if bos and not own:
        with pytest.raises(rope.MethodError, match="puts no tokens before a text and has no BOS token; leave out bos"):
            perplexity(model, [TEXT], lengths=[16], protocol=protocol, tokenizer=tokenizer, bos=True)
        return
    found = perplexity(
        model, [TEXT], lengths=[16, 32], protocol=protocol, tokenizer=tokenizer, bos=bos, stride=16, targets=8
    )
    by_protocol = [] if bos is False or (protocol == "stream" and not bos) else own
    if protocol == "blocks" and bos is None and not own:
        by_protocol = [tokenizer.eos_token_id]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    passes = [each for each in reads if len(each) > 12]  # a trial of the model reads fewer before
    assert passes
    assert max(map(len, passes)) <= 32
    if PROTOCOLS[protocol].prefix == "span":
        assert all(each[: len(by_protocol)] == by_protocol for each in passes)
    else:
        assert [each for each in passes if each[: len(by_protocol)] == by_protocol]
    assert not [token for each in passes for token in each[len(by_protocol) :] if token < len(SPECIAL)]
    if protocol == "truncate":
        read = [*by_protocol, *ids][:16]
        assert found[0].loss == pytest.approx(loss(model, read, max(1, len(by_protocol))), rel=1e-5)
    if protocol == "blocks":
        assert found[0].documents[0].tokens == len(ids) - (not by_protocol)


def test_matched_has_the_same_targets_at_every_length_or_says_that_none_fit() -> None:
    model, _ = model_and_reads()
    tokenizer = byte_tokenizer("[gMASK] <sop> $A")
    options: dict[str, Any] = {"lengths": [8, 16], "tokenizer": tokenizer}
    short, long = perplexity(model, [TEXT], targets=6, **options)
    assert short.documents[0].tokens == long.documents[0].tokens
    with pytest.raises(
        rope.MethodError, match=r"2 tokens stand before every text \(5, 6\), and the shortest length, 8, le"
    ):
        perplexity(model, [TEXT], targets=7, **options)
    with pytest.raises(rope.MethodError, match=r"--no-bos"):
        perplexity(model, [TEXT], lengths=[2], protocol="truncate", tokenizer=tokenizer)
    assert perplexity(model, [TEXT], lengths=[2], protocol="truncate", tokenizer=tokenizer, bos=False)


QUESTIONS: dict[str, Any] = {
    "passkey": Passkey(lengths=[256], depths=[0.5], trials=2, distractors=1, haystack=[TEXT], task="passkey"),
    "ppl": Perplexity(lengths=[128], data=[TEXT], max_spans=2),
}


def check_prompts(template: str, question: Any) -> None:
    """Measure the answers to a question: every prompt must begin as the tokenizer begins a text."""
    model, reads = model_and_reads()
    measure(model, question, tokenizer=byte_tokenizer(template), chunk=2048)
    own = begins(template)
    prompts = [each for each in reads if len(each) > 80]  # answers and continued prompts are shorter
    assert prompts
    assert all(each[: len(own)] == own and each[len(own)] >= len(SPECIAL) for each in prompts)
    assert max(map(len, prompts)) <= question.lengths[0]


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_measurement(template: str, name: str) -> None:
    check_prompts(template, QUESTIONS[name])

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.corpora import Document
from rope_ext_hf.eval.perplexity import HEAD_CHUNK, Tokens, tokenize
from rope_ext_hf.reference import path
from tests.models import build, from_config


def tokens(name: str, count: int, seed: int) -> Tokens:
    ids = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))
    return Tokens(name, ids, tuple(range(1, count + 1)))


def naive(model: Any, ids: Tensor, length: int, longest: int, targets: int) -> tuple[float, int]:
    """Nats over all matched windows of one document, from full float64 logits and one probability at a time."""
    nats, scored = 0.0, 0
    for stop in range(longest, len(ids) + 1, longest):
        window = ids[stop - length : stop]
        with torch.no_grad():
            probabilities = model(window[None]).logits[0].double().softmax(-1)
        for position in range(length - targets, length):
            nats -= math.log(probabilities[position - 1, window[position]].item())
            scored += 1
    return nats, scored


def granite() -> Any:
    from transformers import GraniteConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return from_config(GraniteConfig(vocab_size=97, logits_scaling=3.0, initializer_range=0.3, **sizes))


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("llama"),
        lambda: build("gemma2", final_logit_softcapping=2.0),
        lambda: build("cohere", logit_scale=0.25),
        granite,
    ],
    ids=["plain", "soft cap", "factor", "divisor"],
)
def test_equals_a_naive_computation(make: Callable[[], Any]) -> None:
    """Whatever stands behind the head."""
    model = make()
    corpus = [tokens("a", 150, 1), tokens("b", 70, 2), tokens("short", 63, 3)]
    for result in perplexity(model, corpus, lengths=[16, 32, 64], targets=7, bos=False):
        parts = [naive(model, document.ids, result.length, 64, 7) for document in corpus]
        nats, scored = sum(p[0] for p in parts), sum(p[1] for p in parts)
        assert (result.tokens, scored, result.windows) == (21, 21, 3)
        assert result.loss == pytest.approx(nats / scored, abs=1e-5)
        assert result.perplexity == pytest.approx(math.exp(nats / scored), rel=1e-5)
        assert result.bits_per_byte == pytest.approx(nats / scored / math.log(2), abs=1e-5)
        assert [document.name for document in result.documents] == ["a", "b"]


def test_more_targets_than_one_pass_of_the_head() -> None:
    model = build("llama")
    document = tokens("a", 2 * HEAD_CHUNK, 4)
    targets = HEAD_CHUNK + 3
    (result,) = perplexity(model, [document], lengths=[2 * HEAD_CHUNK], targets=targets, bos=False)
    nats, scored = naive(model, document.ids, 2 * HEAD_CHUNK, 2 * HEAD_CHUNK, targets)
    assert result.loss == pytest.approx(nats / scored, abs=1e-5)


def test_a_head_that_cannot_be_run_apart_is_measured_through_the_whole_model() -> None:
    model = build("llama")
    model.config.logit_scale = 2.0  # a key the model's own forward does not read: run apart, logits would be doubled
    document = tokens("a", 64, 5)
    (result,) = perplexity(model, [document], lengths=[64], targets=7, bos=False)
    nats, scored = naive(model, document.ids, 64, 64, 7)
    assert result.loss == pytest.approx(nats / scored, abs=1e-5)


def test_length_dependent_methods_run_at_the_context_length() -> None:
    model = rope.patch(build("llama"), "dynamic-ntk")
    document = tokens("a", 256, 6)
    for result in perplexity(model, [document], lengths=[64, 256], targets=7, bos=False):
        with rope.fixed_length(model, result.length):
            nats, scored = naive(model, document.ids, result.length, 256, 7)
        assert result.loss == pytest.approx(nats / scored, abs=1e-5)


def test_a_loss_that_is_not_finite_is_named_not_averaged_away() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = math.nan
    bad = tokens("bad", 64, 7)
    bad.ids[3] = 95
    (result,) = perplexity(model, [tokens("good", 64, 8), bad], lengths=[64], bos=False)
    assert math.isnan(result.loss)
    assert math.isnan(result.perplexity)
    assert result.nonfinite == ("bad",)


def test_bos_takes_the_place_of_the_first_token() -> None:
    class Tokenizer:
        bos_token_id = 2

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [2, 5]}

    model = build("llama")
    document = tokens("a", 64, 9)
    tokenizer: Any = Tokenizer()
    (result,) = perplexity(model, [document], lengths=[64], targets=7, tokenizer=tokenizer)
    ids = document.ids.clone()
    ids[0] = 2
    nats, scored = naive(model, ids, 64, 64, 7)
    assert result.bos
    assert result.loss == pytest.approx(nats / scored, abs=1e-5)
    (without,) = perplexity(model, [document], lengths=[64], targets=7, tokenizer=tokenizer, bos=False)
    assert not without.bos
    assert without.loss != result.loss


def test_fewer_windows_are_taken_evenly() -> None:
    model = build("llama")
    (result,) = perplexity(model, [tokens(n, 160, 1) for n in "abc"], lengths=[16], max_windows=3, bos=False)
    assert [(document.name, document.windows) for document in result.documents] == [("a", 1), ("b", 1), ("c", 1)]


def test_refusals() -> None:
    model = build("llama")
    with pytest.raises(rope.CorpusError, match=r"no document has 128 tokens.*has 64"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[128], bos=False)
    with pytest.raises(rope.CorpusError, match="no document has"):
        perplexity(model, [], lengths=[128], bos=False)
    with pytest.raises(rope.CorpusError, match=r"token id 400 is outside the model's vocabulary of 97"):
        perplexity(model, [Tokens("a", torch.full((64,), 400), tuple(range(64)))], lengths=[64], bos=False)
    with pytest.raises(rope.MethodError, match="unknown protocol 'slide'"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[64], protocol="slide", bos=False)
    with pytest.raises(rope.MethodError, match="targets must be"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[64], targets=64, bos=False)
    with pytest.raises(rope.CorpusError, match="give tokenizer"):
        perplexity(model, [Document("a", "text")], lengths=[64])


def test_bytes_are_counted_where_characters_are_longer_than_one() -> None:
    from transformers import AutoTokenizer

    text = "naïve Grüße 漢字 " * 3
    (document,) = tokenize([Document("a", text)], AutoTokenizer.from_pretrained(path()))
    assert document.ends[-1] == len(text.encode("utf-8")) == len(document.ids)
    assert document.bytes_between(2, 4) == 2


def test_bytes_of_a_tokenizer_with_offsets() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "Grüße": 1, "漢字": 2, "a": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (document,) = tokenize([Document("x", "a Grüße 漢字")], PreTrainedTokenizerFast(tokenizer_object=words))
    assert document.ids.tolist() == [3, 1, 2]
    assert document.ends == (1, 9, 16)  # "a" ends at 1; " Grüße" is 8 bytes, " 漢字" is 7

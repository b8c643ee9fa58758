"""Protocols against the loops of the code they are named after, read with a tokenizer that adds BOS to every text.

The loops are written anew from those programs, on whole forwards of the model, with transformers' own loss.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.spans.perplexity_runs import Result
from rope_ext_hf.reading.text.documents import Document
from tests.support.models import build

BOS = 1
LENGTHS = (16, 32, 64)
TEXTS = ["".join("abcdefgh"[(i * i + 3 * i // 2 + seed) % 8] for i in range(150 + 40 * seed)) for seed in range(3)]


def letters(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per letter, `<s>` as BOS and `</s>` as EOS."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": 2} | {letter: 10 + i for i, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([10 + "abcdefgh".index(letter) for letter in text])


def loss(model: Any, ids: torch.Tensor, scored: int) -> float:
    """Return the model's own mean loss over the last `scored` of ids (N,)."""
    labels = ids.clone()
    labels[: len(ids) - scored] = -100
    with torch.no_grad():
        return float(model(ids[None], labels=labels[None]).loss)


def measured(
    model: Any, protocol: str, tokenizer: Any, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> list[Result]:
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    return perplexity(model, documents, lengths=lengths, protocol=protocol, tokenizer=tokenizer, chunk=24, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_truncate_is_yarns_loop_with_truncate(model: Any, adds_bos: bool) -> None:
    """eval/perplexity.py scores BOS and the first N - 1 tokens, if the tokenizer has BOS."""
    for result in measured(model, "truncate", letters(adds_bos=adds_bos)):
        each = []
        for text in TEXTS:
            kept = ids_of(text)[: result.length - 1]
            each.append(loss(model, torch.cat([torch.tensor([BOS]), kept]), len(kept)))
        assert result.loss == pytest.approx(sum(each) / len(each), abs=1e-5)
        assert result.tokens == len(TEXTS) * (result.length - 1)


@pytest.mark.slow
def test_sliding_is_yarns_loop_where_its_spans_are_whole(model: Any) -> None:
    """eval/perplexity.py without --truncate, but for the first span, which it scores whole, and the short last one."""
    stride = 8
    for result in measured(model, "sliding", letters(), stride=stride):
        total, count = 0.0, 0
        room = result.length - 1
        for text in TEXTS:
            ids = ids_of(text)
            for begin in range(0, len(ids), stride):
                end = min(begin + room, len(ids))
                if end - begin == room:
                    total += stride * loss(model, torch.cat([torch.tensor([BOS]), ids[begin:end]]), stride)
                    count += stride
                if end == len(ids):
                    break
        assert result.tokens == count
        assert result.loss == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_sliding_without_bos_is_the_loop_of_hugging_faces_page(model: Any) -> None:
    """The page of transformers on perplexity adds no BOS; again but for the first span and the shorter last one."""
    stride = 8
    for result in measured(model, "sliding", letters(), stride=stride, bos=False):
        total, count = 0.0, 0
        for text in TEXTS:
            ids = ids_of(text)
            begin = 0
            while begin + result.length <= len(ids):
                total += stride * loss(model, ids[begin : begin + result.length], stride)
                count += stride
                begin += stride
        assert result.tokens == count
        assert result.loss == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_stream_is_the_loop_of_longlora_and_chunkllama(model: Any) -> None:
    """eval.py and ppl/test_ppl.py put no BOS before a span, and leave out the last span or two of a text."""
    stride = 8
    for result in measured(model, "stream", letters(), stride=stride):
        n = result.length
        starts = [[*range(0, len(text) - n, stride)][:-1] for text in TEXTS]
        left_out = [
            [a for a in range(0, len(text) - n + 1, stride) if a not in kept]
            for text, kept in zip(TEXTS, starts, strict=True)
        ]
        assert all(1 <= len(spans) <= 2 for spans in left_out)
        each = [
            loss(model, ids_of(text)[a : a + n], n - 1)
            for text, kept, more in zip(TEXTS, starts, left_out, strict=True)
            for a in (*kept, *more)
        ]
        assert result.tokens == len(each) * (n - 1)
        assert result.loss == pytest.approx(sum(each) / len(each), abs=1e-5)
        assert not result.setting.bos


@pytest.mark.slow
@pytest.mark.parametrize("adds_bos", [True, False])
def test_blocks_are_the_rolling_windows_of_lm_eval(model: Any, adds_bos: bool) -> None:
    """The library itself is run; by default it also scores a second BOS if the tokenizer adds one."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = letters(adds_bos=adds_bos)

    def theirs(**options: Any) -> float:
        harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=32, batch_size=1, **options)
        requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(TEXTS)]
        return -math.fsum(harness.loglikelihood_rolling(requests, disable_tqdm=True))

    (ours,) = measured(model, "blocks", tokenizer, (32,))
    assert ours.tokens == sum(map(len, TEXTS))
    assert ours.loss * ours.tokens == pytest.approx(theirs(add_bos_token=False), abs=1e-2)
    assert (abs(theirs() - theirs(add_bos_token=False)) > 1) == adds_bos


def test_matched_and_position_begin_with_bos_and_read_no_more_than_their_length(model: Any) -> None:
    """A document is cut as if it began with BOS, which also stands first in every later span."""
    for result in measured(model, "matched", letters(), targets=6):
        each = []
        for text in TEXTS:
            ids = torch.cat([torch.tensor([BOS]), ids_of(text)])
            for stop in range(64, len(ids) + 1, 64):
                span = ids[stop - result.length : stop].clone()
                span[0] = BOS
                each.append(loss(model, span, 6))
        assert result.loss == pytest.approx(sum(each) / len(each), abs=1e-5)
    curve = measured(model, "position", letters())
    assert [result.tokens for result in curve] == [15 * 3, 16 * 3, 32 * 3]
    (whole,) = measured(model, "truncate", letters(), (64,))
    assert sum(result.loss * result.tokens for result in curve) == pytest.approx(whole.loss * whole.tokens, abs=1e-3)

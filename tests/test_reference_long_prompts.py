"""The purpose of the package: the bundled model answers questions about text beyond its trained length.

The prompts are few and fixed. Their text is this repository's LICENSE, so that they are the same under every version of
Python, with names and values that the model was not trained on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import rope_ext_hf as rope
from rope_ext_hf.eval.retrieval.statements import RETRIEVALS, ask
from rope_ext_hf.reference import path

TRAINED = 256
BYTE_OFFSET = 3  # of ByT5's tokens
LICENSE = (Path(__file__).parent.parent / "LICENSE").read_bytes()
COUNT = 8
TASK_OF_PROMPT = ("key-value", "assignment", "copy", "key-value")  # not quotes, which it carries less far
REMAPPING = ("rerope", "leaky-rerope", "self-extend", "dca")


def but(left: Sequence[str], *methods: str) -> list[Any]:
    """Return methods as parameters of a test; those of `left` are thorough."""
    return [pytest.param(each, marks=[pytest.mark.thorough] * (each in left)) for each in methods]


@cache
def prompts(length: int) -> tuple[Tensor, tuple[bytes, ...]]:
    """Return (COUNT, length) token ids and the answers; each prompt has one statement, at depths from start to end."""
    rows, answers = [], []
    for index in range(COUNT):
        task = RETRIEVALS[TASK_OF_PROMPT[index % 4]]
        drawn = ask(task, random.Random(index), wording=index // 4)
        statement, question = drawn.statements[0].encode(), drawn.question.encode()
        filler = length - len(statement) - len(question)
        text = (LICENSE[index * 1000 :] + LICENSE)[:filler]
        at = filler * index // (COUNT - 1)
        rows.append([byte + BYTE_OFFSET for byte in text[:at] + statement + text[at:] + question])
        answers.append(drawn.answer.encode())
    return torch.tensor(rows), tuple(answers)


def load(folder: Path | None = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder or path(), dtype=torch.float32).eval()


def right(generated: Tensor, answers: tuple[bytes, ...]) -> int:
    texts = [bytes(max(0, token - BYTE_OFFSET) for token in row) for row in generated.tolist()]
    return sum(text.startswith(answer) for text, answer in zip(texts, answers, strict=True))


def found(model: Any, length: int, **options: Any) -> int:
    """Return the number of prompts that `generate` answers correctly."""
    ids, answers = prompts(length)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(map(len, answers)), do_sample=False, **options
    )
    return right(made[:, ids.shape[1] :], answers)


@pytest.mark.slow
def test_as_loaded_it_answers_at_its_trained_length_and_nothing_beyond() -> None:
    model = load()
    assert found(model, TRAINED) >= 6
    assert found(model, 2 * TRAINED) == found(model, 4 * TRAINED) == 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", [pytest.param(4, marks=pytest.mark.thorough), 8])
@pytest.mark.parametrize(
    "method",
    ["rerope", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("self-extend", "leaky-rerope", "dca"))],
)
def test_remapping_methods_find_it_again(method: str, scale: int) -> None:
    model = rope.patch(load(), method, target_length=scale * TRAINED)
    assert found(model, scale * TRAINED) >= 6
    assert found(model, TRAINED) >= 6
    rope.unpatch(model)
    assert found(model, scale * TRAINED) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_scaled_frequencies_find_a_part_of_it(method: str) -> None:
    model = rope.patch(load(), method, target_length=4 * TRAINED)
    assert found(model, 4 * TRAINED) >= 3


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", but(["dca"], "dynamic-yarn", "self-extend", "dca"))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_cache": False}, marks=pytest.mark.thorough, id="no-cache"),
        pytest.param({"cache_implementation": "static"}, id="static"),
        pytest.param({"prefill_chunk_size": 100}, id="prefill-in-chunks"),
    ],
)
def test_every_cache_finds_as_much(method: str, options: dict[str, Any]) -> None:
    model = rope.patch(load(), method, target_length=4 * TRAINED)
    usual, other = found(model, 4 * TRAINED), found(model, 4 * TRAINED, **options)
    # early chunks are read under the frequencies of a shorter text, which may change an answer
    assert other >= 3 if method == "dynamic-yarn" and "prefill_chunk_size" in options else other == usual
    assert usual >= 3


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", but(["rerope", "leaky-rerope"], *REMAPPING))
def test_prompts_of_unequal_length_in_one_batch(method: str) -> None:
    """Short prompts stand beside long ones, padded on the left."""
    model = rope.patch(load(), method, target_length=4 * TRAINED)
    (short, answers), (long, _) = prompts(TRAINED), prompts(4 * TRAINED)
    padding = torch.zeros(COUNT, 3 * TRAINED, dtype=torch.int64)
    ids = torch.cat([torch.cat([padding, short], dim=1), long])
    mask = torch.cat([torch.cat([padding, torch.ones_like(short)], dim=1), torch.ones_like(long)])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=max(map(len, answers)), do_sample=False)
    assert right(made[:COUNT, 4 * TRAINED :], answers) >= 6
    assert right(made[COUNT:, 4 * TRAINED :], answers) >= 6


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["dynamic-cache", "static-cache"])
@pytest.mark.parametrize("method", but(["rerope", "dynamic-yarn"], "dynamic-yarn", "rerope", "self-extend"))
def test_a_conversation_that_outgrows_the_trained_length(method: str, static: bool) -> None:
    """The question is answered, other text follows, and it is asked again at 4 times the length, over one cache."""
    model = rope.patch(load(), method, target_length=4 * TRAINED)
    ids, answers = prompts(TRAINED)
    near = far = 0
    for index, answer in enumerate(answers):
        drawn = ask(RETRIEVALS[TASK_OF_PROMPT[index % 4]], random.Random(index), wording=index // 4)
        cache = StaticCache(config=model.config, max_cache_len=5 * TRAINED) if static else DynamicCache()
        exactly = {"max_new_tokens": len(answer), "min_new_tokens": len(answer), "do_sample": False}
        once = model.generate(ids[index : index + 1], past_key_values=cache, **exactly)
        near += right(once[:, TRAINED:], (answer,))
        text = LICENSE[7000 : 7000 + 3 * TRAINED - 60] + drawn.question.encode()
        more = torch.cat([once, torch.tensor([[byte + BYTE_OFFSET for byte in text]])], dim=1)
        again = model.generate(more, past_key_values=cache, **exactly)
        far += right(again[:, more.shape[1] :], (answer,))
    assert near >= 6
    assert far >= 4


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", but(["rerope", "dca"], "dynamic-yarn", "rerope", "self-extend", "dca"))
def test_a_saved_model_finds_as_much(method: str, tmp_path: Path) -> None:
    model = rope.patch(load(), method, target_length=4 * TRAINED)
    expected = found(model, 4 * TRAINED)
    model.save_pretrained(tmp_path)
    assert found(rope.from_pretrained(tmp_path, dtype=torch.float32), 4 * TRAINED) == expected >= 3


@pytest.mark.thorough
@pytest.mark.slow
def test_in_bfloat16_it_finds_as_much() -> None:
    model = rope.patch(load(), "self-extend", target_length=4 * TRAINED).to(torch.bfloat16)
    assert found(model, 4 * TRAINED) >= 6

"""Prompts of task suites at several context lengths, as token ids.

Answers are generated greedily and searched for the references; for models too small to answer, the right answer is
ranked among others by likelihood. The suites are files: see `rope_ext_hf.suites`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError, did_you_mean, short
from rope_ext_hf.eval.questions import Tasks
from rope_ext_hf.eval.task_runs import TaskMeasurement, TaskPrompt, TaskSetting
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.spans import check_prompts, encode, own_tokenizer, prefix_token, text_of
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunPlan
from rope_ext_hf.suites.base import Sample, count_tokens
from rope_ext_hf.suites.base import suite as find_suite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RANKED = 20  # answers that the right one is ranked among, itself counted


def plan_tasks(
    question: Tasks, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[TaskMeasurement]:
    """Make the prompts and check them; see `Tasks.plan`."""
    suite, samples, extra_tokens = question.suite, question.samples, question.extra_tokens
    chosen = find_suite(suite)
    score = chosen.score_by if question.score is None else question.score
    wanted = chosen.tasks if question.tasks is None else question.tasks
    if unknown := next((name for name in wanted if name not in chosen.tasks), None):
        raise MethodError(
            f"suite {suite!r} has no task {short(unknown)!r}.{did_you_mean(unknown, chosen.tasks)} "
            f"Its tasks: {', '.join(chosen.tasks)}"
        )
    names = tuple(name for name in chosen.tasks if name in wanted)
    if not names:
        raise MethodError(f"no task was chosen; those of suite {suite!r} are {', '.join(chosen.tasks)}")
    if score not in ("generate", "rank"):
        raise MethodError(f"score must be 'generate' or 'rank', got {short(repr(score))}")
    if score == "rank" and samples < 2:
        raise MethodError(f"samples must be a whole number of at least 2 where answers are ranked, got {samples}")
    chosen_seed = chosen.seed if question.seed is None else question.seed
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    documents = load(question.haystack)
    text = text_of(documents, reader)
    encode = _Encoder(reader, chat=question.chat_template == "auto" and bool(getattr(reader, "chat_template", None)))
    prompts: dict[Cell, list[TaskPrompt]] = {}
    for length in sorted(set(question.lengths)):
        for name in names:
            made = chosen.samples(
                name,
                reader,
                length=length,
                count=samples,
                seed=chosen_seed,
                haystack=text,
                reserved=encode.reserved + extra_tokens,
            )
            prompts[length, float(names.index(name))] = [
                encode(sample, _candidates(sample, made) if score == "rank" else (), extra_tokens) for sample in made
            ]
    every = [prompt for of_cell in prompts.values() for prompt in of_cell]
    check_prompts(model, [ids for each in every for ids in (each.ids, *each.candidates)], max(p.tokens for p in every))
    chance = fmean(1 / len(each.candidates) if each.candidates else 0.0 for each in every)
    setting = TaskSetting(suite, ",".join(names), score, chosen_seed, encode.chat, extra_tokens, chance)
    measurement = TaskMeasurement(setting, prompts, chosen.score, encode.decode, _stop_tokens(model, reader))
    return RunPlan(measurement, f"suite {suite} in {documents.source}", **settings)


def _candidates(sample: Sample, made: Sequence[Sample]) -> tuple[str, ...]:
    """The first right answer, and wrong ones: those of its prompt first, then the right ones of other prompts."""
    elsewhere = chain.from_iterable(other.references for other in made)
    wrong = (
        text
        for text in dict.fromkeys([*sample.others, *(() if sample.closed else elsewhere)])
        if text not in sample.references
    )
    return sample.references[0], *[text for _, text in zip(range(_RANKED - 1), wrong, strict=False)]


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the chat template around a user's message; 0 without one."""
    return count_tokens(tokenizer, _as_message(tokenizer, "")) if getattr(tokenizer, "chat_template", None) else 0


def _as_message(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    message: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return str(message)


class _Encoder:
    """Samples as token ids, with the tokenizer's chat template or without it, which takes `reserved` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        prefix = prefix_token(tokenizer, None)
        self.first = [] if chat or prefix is None else [prefix]
        self.reserved = template_tokens(tokenizer) if chat else 0

    def __call__(self, sample: Sample, candidates: Sequence[str], extra: int) -> TaskPrompt:
        text = (_as_message(self.tokenizer, sample.prompt) if self.chat else sample.prompt) + sample.prefix
        ids = [*self.first, *encode(self.tokenizer, text)]
        gap = "" if not text or text[-1].isspace() else " "
        answers = [[*self.first, *encode(self.tokenizer, f"{text}{gap}{answer}")] for answer in candidates]
        # A tokenizer may merge the end of the prompt with an answer: what all have in common is the prompt.
        shared = next((i for i, some in enumerate(zip_longest(ids, *answers)) if len(set(some)) > 1), len(ids))
        shared = min(shared, len(ids))
        return TaskPrompt(
            torch.tensor(ids[:shared], dtype=torch.int32),
            sample.budget + extra,
            sample.references,
            tuple(torch.tensor(answer[shared:], dtype=torch.int32) for answer in answers),
            sample.others,
        )

    def decode(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer: of the model's generation config and of the tokenizer."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # some classes have none
    tokens = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id}
    return frozenset(int(token) for token in tokens if token is not None)

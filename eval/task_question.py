"""Task suites at several context lengths: does a model answer what a long prompt asks for, and up to which length.

    from rope_ext_hf.eval import tasks
    for result in tasks(model, suite="ruler", lengths=[4096, 8192], samples=20, haystack="essays.txt"):
        print(result.length, result.task, result.score)

Answers are generated greedily and searched for the references; for models too small to answer, the right answer is
ranked among others by likelihood. The suites are files: see `suites.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.bounds import Length, listed, parse_lengths
from rope_ext_hf.errors import MethodError, did_you_mean, short
from rope_ext_hf.eval.task_runs import TaskMeasurement, TaskPrompt, TaskResult, TaskSetting
from rope_ext_hf.hub import model_by_name
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Corpus, Tokens
from rope_ext_hf.reading.preflight import sliding_window_warning
from rope_ext_hf.reading.spans import check_vocabulary, own_tokenizer, prefix_token, text_of
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import Results, RunPlan
from rope_ext_hf.runs.runner import measure, progress_of_tokens
from rope_ext_hf.suites.base import Sample, count_tokens
from rope_ext_hf.suites.base import suite as find_suite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_RANKED = 20
"""Answers that the right one is ranked among, itself counted."""
_MOST_SAMPLES = 10_000


def tasks(
    model: PreTrainedModel | str | Path,
    *,
    lengths: Length | Sequence[Length],
    suite: str = "ruler",
    tasks: str | Sequence[str] | None = None,
    samples: int = 20,
    seed: int | None = None,
    haystack: Corpus = "stdlib",
    score: str | None = None,
    chat_template: str = "auto",
    extra_tokens: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Callable[[int], None] | bool | None = None,
) -> Results[TaskResult]:
    """Measure a suite of tasks at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device; or a folder, a Hub id or
            "reference", which is loaded.
        lengths: tokens of prompt and generation together, at most, 4096 or "4k"; one, or several.
        suite: "ruler", "json-kv", "graphwalks", "babilong", "short", or a suite of your own.
        tasks: which of the suite's; default: all.
        samples: prompts per task and length.
        seed: of the prompts; default: the suite's own, 42 for RULER.
        haystack: the text that facts are hidden in, of tasks with one, as `rope_ext_hf.reading.corpora.load` takes it.
        score: "generate": greedy decoding, scored by the share of the right answers that it holds; "rank": whether the
            first right answer has the highest likelihood per token, among up to 19 others. Default: "generate"; of the
            suite "short" "rank".
        chat_template: "auto": applied where the tokenizer has one, its tokens counted in the length; "never".
        extra_tokens: tokens that may be generated beyond each task's own budget, for models that reason first; they are
            taken from the length.
        tokenizer: default: the one beside the model's weights. Its BOS token stands first if it adds one itself, and is
            not counted, as in RULER.
        chunk, offload_cache, out: as `perplexity` takes them.
        progress: called with the number of tokens read, after each prompt; True: a bar of tqdm.

    Returns:
        One TaskResult per length and task, as a list that a notebook shows as a table; `.run.table()` has the suite's
        scores and effective lengths.

    Raises:
        CorpusError: no haystack, or token ids the model's vocabulary lacks.
        FileError: the run's folder cannot be written, or is damaged.
        ImportError: a package that makes the prompts is not installed.
        MethodError: an unknown suite or task, a length too short for a task, or impossible numbers.

    Length-dependent methods are held at the tokens of the prompt and its budget (`fixed_length`). Nothing is
    downloaded.
    """
    model = model_by_name(model)
    plan = plan_tasks(
        model,
        lengths=lengths,
        suite=suite,
        tasks=tasks,
        samples=samples,
        seed=seed,
        haystack=haystack,
        score=score,
        chat_template=chat_template,
        extra_tokens=extra_tokens,
        tokenizer=tokenizer,
        settings={"chunk": chunk, "offload_cache": offload_cache},
    )
    return Results(measure(model, plan, out=out, progress=progress_of_tokens(progress, plan)))


def plan_tasks(
    model: PreTrainedModel,
    *,
    lengths: Length | Sequence[Length],
    suite: str = "ruler",
    tasks: str | Sequence[str] | None = None,
    samples: int = 20,
    seed: int | None = None,
    haystack: Corpus = "stdlib",
    score: str | None = None,
    chat_template: str = "auto",
    extra_tokens: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RunPlan[TaskMeasurement]:
    """Make the prompts and check them, before any weights are read: the model may be on the meta device.

    Args:
        settings: further fields of the plan; methods are bound to the model.
        others: as `tasks` takes them.
    """
    chosen, lengths = find_suite(suite), parse_lengths(lengths)
    score = chosen.score_by if score is None else score
    wanted = chosen.tasks if tasks is None else tuple(listed(tasks))
    names = tuple(name for name in chosen.tasks if name in wanted)
    for name in wanted:
        if name not in chosen.tasks:
            raise MethodError(
                f"suite {suite!r} has no task {short(str(name))!r}.{did_you_mean(str(name), chosen.tasks)} "
                f"Its tasks: {', '.join(chosen.tasks)}"
            )
    if not names:
        raise MethodError(f"no task was chosen; those of suite {suite!r} are {', '.join(chosen.tasks)}")
    for value, allowed, what in (
        (score, ("generate", "rank"), "score"),
        (chat_template, ("auto", "never"), "chat_template"),
    ):
        if value not in allowed:
            raise MethodError(f"{what} must be {' or '.join(map(repr, allowed))}, got {short(repr(value))}")
    _check_number("samples", samples, 2 if score == "rank" else 1, _MOST_SAMPLES)
    _check_number("extra_tokens", extra_tokens, 0, 2**20)
    if not lengths:
        raise MethodError("lengths must be one or more whole numbers, got none")
    for length in lengths:
        _check_number("lengths", length, 1, 2**40)
    if seed is not None:
        _check_number("seed", seed, 0, 2**32 - 1)
    chosen_seed = chosen.seed if seed is None else seed
    if tokenizer is None:
        tokenizer = own_tokenizer(model, needed=True)
        assert tokenizer is not None
    documents = load(haystack)
    text = text_of(documents, tokenizer)
    encode = _Encoder(tokenizer, chat=chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None)))
    prompts: dict[Cell, list[TaskPrompt]] = {}
    for length in sorted(set(lengths)):
        for name in names:
            made = chosen.samples(
                name,
                tokenizer,
                length=length,
                count=samples,
                seed=chosen_seed,
                haystack=text,
                reserved=encode.reserved + extra_tokens,
            )
            ranked = score == "rank"
            prompts[length, float(names.index(name))] = [
                encode(sample, _candidates(sample, made) if ranked else (), extra_tokens) for sample in made
            ]
    check_vocabulary(
        model,
        [Tokens("prompt", ids, ()) for some in prompts.values() for p in some for ids in (p.ids, *p.candidates)],
    )
    longest = max(prompt.tokens for some in prompts.values() for prompt in some)
    if (warning := sliding_window_warning(model, longest)) is not None:
        warnings.warn(warning, stacklevel=3)
    chance = fmean(1 / len(p.candidates) if p.candidates else 0.0 for some in prompts.values() for p in some)
    setting = TaskSetting(suite, ",".join(names), score, chosen_seed, encode.chat, extra_tokens, chance)
    measurement = TaskMeasurement(setting, prompts, chosen.score, encode.decode, _stop_tokens(model, tokenizer))
    return RunPlan(measurement, f"suite {suite} in {documents.source}", **(settings or {}))


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
    """Samples as token ids, with the tokenizer's chat template or without it.

    Attributes:
        chat: whether the template is applied.
        reserved: tokens of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        prefix = prefix_token(tokenizer, None)
        self.first = [] if chat or prefix is None else [prefix]
        self.reserved = template_tokens(tokenizer) if chat else 0

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.first + ids

    def __call__(self, sample: Sample, candidates: Sequence[str], extra: int) -> TaskPrompt:
        text = (_as_message(self.tokenizer, sample.prompt) if self.chat else sample.prompt) + sample.prefix
        ids = self._ids(text)
        gap = "" if not text or text[-1].isspace() else " "
        answers = [self._ids(f"{text}{gap}{answer}") for answer in candidates]
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
    given = getattr(model.generation_config, "eos_token_id", None)
    tokens = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id}
    return frozenset(int(token) for token in tokens if token is not None)


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise MethodError(f"{name} must be a whole number from {least} to {most:,}, got {short(repr(value))}")

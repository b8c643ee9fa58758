"""Retrieval of a secret from a long text, at every depth of every context length.

    from rope_ext_hf.eval.retrieval import passkey
    for result in passkey(model, lengths=[1024, 4096], task="needle"):
        print(result.length, result.depth, result.exact_match, result.top1)

A prompt states a five-digit number somewhere in a long text and asks for it at the end. Two things are measured:
whether greedy decoding would answer with that number, and how likely the model finds it among other numbers. The
second gives a signal from models too small to answer. The wording is data (`TASKS`).
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, did_you_mean
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.journal import Cell
from rope_ext_hf.eval.plan import Tokens, check_vocabulary, own_tokenizer, prefix_token, tokenize
from rope_ext_hf.eval.preflight import sliding_window_warning
from rope_ext_hf.eval.results import Cost, Retrieval, RetrievalSetting, TrialScore
from rope_ext_hf.eval.runner import Measurement, measure, run_methods
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.patches.patching import patched_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "SECRETS",
    "TASKS",
    "RetrievalMeasurement",
    "Task",
    "Trial",
    "haystack_name",
    "make_trials",
    "passkey",
    "plan_passkey",
]

SECRETS = range(10_000, 100_000)


@dataclass(frozen=True)
class Task:
    """The wording of a prompt: head, haystack with the needle in it, question, answer.

    Attributes:
        needle, answer: with `{secret}` where the number stands.
        filler: the haystack where none is given, repeated; None: the held-out modules of Python's library.
    """

    head: str
    needle: str
    question: str
    answer: str
    filler: str | None = None


TASKS: dict[str, Task] = {
    "passkey": Task(  # Mohtashami & Jaggi 2023, arXiv 2305.16300
        head="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there.\n",
        filler="The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
        needle="\nThe pass key is {secret}. Remember it. {secret} is the pass key.\n",
        question="\nWhat is the pass key? The pass key is",
        answer=" {secret}",
    ),
    "needle": Task(
        head="",
        needle="\nThe secret number of the lighthouse is {secret}.\n",
        question="\nWhat is the secret number of the lighthouse? The secret number of the lighthouse is",
        answer=" {secret}",
    ),
    "code": Task(  # for models that know code only; after 0x nothing but digits can follow
        head="",
        needle="\nPASSKEY = 0x{secret}\n",
        question="\nassert PASSKEY == 0x",
        answer="{secret}",
    ),
}


@dataclass(frozen=True)
class Trial:
    """One secret in all its wording, as token ids; the same at every length and depth and for every method.

    Attributes:
        head, needle, question: (tokens,) int64.
        answers: (1 + distractors, A) int64, the right one first.
        start: where in the haystack its text begins, as a share.
    """

    head: Tensor
    needle: Tensor
    question: Tensor
    answers: Tensor
    start: float

    @property
    def wording(self) -> int:
        """Tokens of prompt and answer besides the haystack."""
        return sum(map(len, (self.head, self.needle, self.question, self.answers[0])))

    def prompt(self, haystack: Tensor, length: int, depth: float) -> Tensor:
        """(length - A,): with the answer, exactly `length` tokens; a haystack that is too short is repeated."""
        filled = length - self.wording
        hay = haystack[(int(self.start * len(haystack)) + torch.arange(filled)) % len(haystack)]
        before = round(depth * filled)
        return torch.cat([self.head, hay[:before], self.needle, hay[before:], self.question])


def make_trials(
    task: Task, tokenizer: PreTrainedTokenizerBase, *, trials: int, distractors: int, seed: int = 0
) -> list[Trial]:
    """Secrets with their distractors, which have as many tokens as the secret, so that none is likelier for its length.

    Raises:
        MethodError: a tokenizer that has not enough numbers of one length.
    """
    return [_trial(task, tokenizer, distractors, random.Random(f"{seed} {index}")) for index in range(trials)]


def _trial(task: Task, tokenizer: PreTrainedTokenizerBase, distractors: int, rng: random.Random) -> Trial:
    secret, *others = rng.sample(SECRETS, min(len(SECRETS), 100 * (distractors + 1)))
    prefix = prefix_token(tokenizer, None)
    question = _encode(tokenizer, task.question)
    # A tokenizer may merge the end of the question with the answer: what both have in common is the prompt.
    asked = [_encode(tokenizer, task.question + task.answer.format(secret=secret))]
    shared = next((i for i, (a, b) in enumerate(zip(question, asked[0], strict=False)) if a != b), len(question))
    for other in others:
        if len(asked) == distractors + 1:
            break
        ids = _encode(tokenizer, task.question + task.answer.format(secret=other))
        if len(ids) == len(asked[0]) and ids[:shared] == question[:shared]:
            asked.append(ids)
    else:
        raise MethodError(
            f"only {len(asked) - 1} numbers have the {len(asked[0]) - shared} tokens of {secret}, "
            f"asked for {distractors}; ask for fewer distractors"
        )
    return Trial(
        head=torch.tensor(([] if prefix is None else [prefix]) + _encode(tokenizer, task.head), dtype=torch.int64),
        needle=torch.tensor(_encode(tokenizer, task.needle.format(secret=secret))),
        question=torch.tensor(question[:shared], dtype=torch.int64),
        answers=torch.tensor([ids[shared:] for ids in asked]),
        start=0.0 if task.filler is not None else rng.random(),
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class RetrievalMeasurement(Measurement):
    """The ranks of secrets, at every depth of every context length; an item is one trial."""

    kind = "passkey"

    def __init__(
        self,
        setting: RetrievalSetting,
        trials: Sequence[Trial],
        haystack: Tensor,
        lengths: Sequence[int],
        depths: Sequence[float],
    ) -> None:
        self._setting, self.trials, self.haystack = setting, trials, haystack
        self._cells = [(length, float(depth)) for length in sorted(set(lengths)) for depth in sorted(set(depths))]

    @property
    def items(self) -> Sequence[str]:
        return [f"trial {index}" for index in range(len(self.trials))]

    @property
    def setting(self) -> RetrievalSetting:
        return self._setting

    @property
    def passes(self) -> Sequence[int]:
        return [int(cell[0]) for _ in self.trials for cell in self._cells]

    @property
    def scored(self) -> int:
        return sum(trial.answers.numel() for trial in self.trials) * len(self._cells)

    def cells(self, item: int) -> Sequence[Cell]:
        return self._cells

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.haystack.numpy().tobytes())
        for trial in self.trials:
            for ids in (trial.head, trial.needle, trial.question, trial.answers):
                digest.update(f"{tuple(ids.shape)}".encode() + ids.numpy().tobytes())
            digest.update(f"{trial.start}".encode())
        return digest.hexdigest()

    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Cell, TrialScore, Cost]]:
        """Read one trial's prompt at every length and depth asked for."""
        trial = self.trials[item]
        scorer.take_cost()
        for cell in cells:
            length, depth = int(cell[0]), cell[1]
            prompt = trial.prompt(self.haystack, length, depth)
            losses, likeliest = scorer.candidates(prompt, trial.answers, length=length)
            exact = torch.equal(likeliest[0], trial.answers[0])
            if progress is not None:
                progress(length)
            yield cell, TrialScore(exact, _rank(losses.double().sum(-1))), scorer.take_cost()


def plan_passkey(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    seed: int = 0,
    haystack: str | Iterable[Document] | None = None,
    task: str = "passkey",
    distractors: int = 19,
) -> RetrievalMeasurement:
    """Make the prompts and check them; the arguments are those of `passkey`.

    The model may be on the meta device: no weights are read.
    """
    wording = _known(task)
    _check_whole("lengths", lengths, 1)
    for name, value in (("trials", trials), ("distractors", distractors)):
        _check_whole(name, [value], 1)
    _check_whole("seed", [seed], None)
    if not depths or not all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in depths):
        raise MethodError(f"depths must be one or more numbers from 0 to 1, got {list(depths)!r}")
    if tokenizer is None:
        tokenizer = own_tokenizer(model, needed=True)
        assert tokenizer is not None
    if haystack is not None:
        wording = replace(wording, filler=None)
    made = make_trials(wording, tokenizer, trials=trials, distractors=distractors, seed=seed)
    least = max(trial.wording for trial in made)
    if min(lengths) < least:
        raise MethodError(f"length {min(lengths)} is too short for task {task!r}: its wording alone has {least} tokens")
    hay = _haystack(wording, haystack, tokenizer)
    every = [hay, *(ids for trial in made for ids in (trial.prompt(hay, least, 0.0), trial.answers.flatten()))]
    check_vocabulary(model, [Tokens("prompt", ids, ()) for ids in every])
    if (warning := sliding_window_warning(model, max(lengths))) is not None:
        warnings.warn(warning, stacklevel=3)
    return RetrievalMeasurement(RetrievalSetting(task, distractors, seed), made, hay, lengths, depths)


def passkey(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    seed: int = 0,
    haystack: str | Iterable[Document] | None = None,
    task: str = "passkey",
    distractors: int = 19,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Retrieval]:
    """Hide a number at several depths of several context lengths, and ask for it.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        lengths: tokens of prompt and answer together; the haystack fills what the wording leaves.
        depths: shares of the haystack that stand before the secret, 0 to 1.
        tokenizer: default: the one beside the model's weights. Its BOS token stands first if it adds one itself.
        trials: secrets per length and depth; the same ones at each.
        seed: of the secrets and of where in the haystack a prompt's text is taken from.
        haystack: what `rope_ext_hf.eval.corpora.load` takes, or documents; default: the task's own.
        task: a name of `TASKS`: "passkey" (instructions, repeated filler), "needle" (a sentence in other text), "code".
        distractors: random numbers, of as many tokens, that the right one is ranked among.
        chunk, offload_cache, out: as `perplexity` takes them.
        progress: called with the number of tokens read, after each prompt.

    Returns:
        One Retrieval per length and depth, in ascending order.

    Raises:
        CorpusError: no haystack, or token ids the model's vocabulary lacks.
        MethodError: an unknown task, a length too short for the wording, or impossible numbers.
        FileError: the run's folder cannot be written, or is damaged.

    Every prompt is read once, in fixed memory; its `distractors + 1` answers of a few tokens each start from its cache.
    Nothing is generated: greedy decoding gives the right answer exactly if each of its tokens is the likeliest after
    those before. Length-dependent methods are held at each context length (`fixed_length`). A chat template is not
    applied. Losses that are not finite count as the worst.
    """
    measurement = plan_passkey(
        model,
        lengths=lengths,
        depths=depths,
        tokenizer=tokenizer,
        trials=trials,
        seed=seed,
        haystack=haystack,
        task=task,
        distractors=distractors,
    )
    if out is None:
        return measure(model, measurement, chunk=chunk, offload_cache=offload_cache, progress=progress)
    run = run_methods(
        model,
        [patched_method(model)],
        measurement,
        data=haystack_name(task, haystack),
        out=out,
        chunk=chunk,
        offload_cache=offload_cache,
        progress=None if progress is None else lambda _, tokens: progress(tokens),
    )
    return list(run.results)


def haystack_name(task: str, haystack: str | Iterable[Document] | None) -> str:
    """What a run's folder calls the text: the task, and the haystack where one was given."""
    given = "" if haystack is None else f" in {haystack if isinstance(haystack, str) else 'documents'}"
    return f"task {task}{given}"


def _check_whole(name: str, values: Sequence[int], least: int | None) -> None:
    if not values or not all(type(value) is int and (least is None or value >= least) for value in values):
        allowed = "whole numbers" if least is None else f"whole numbers of at least {least}"
        raise MethodError(f"{name} must be {allowed}, got {', '.join(map(repr, values)) or 'none'}")


def _known(task: str) -> Task:
    if task not in TASKS:
        raise MethodError(f"unknown task {task!r}.{did_you_mean(task, TASKS)} Known tasks: {', '.join(TASKS)}")
    return TASKS[task]


def _haystack(task: Task, haystack: str | Iterable[Document] | None, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(tokens,) int64; documents end to end."""
    if haystack is None:
        haystack = "stdlib" if task.filler is None else [Document("filler", task.filler)]
    documents = load(haystack) if isinstance(haystack, str) else haystack
    ids = [document.ids for document in tokenize(documents, tokenizer)]
    if not sum(map(len, ids)):
        raise CorpusError("the haystack is empty")
    return torch.cat(ids)


def _rank(losses: Tensor) -> float:
    """The rank of the first of some losses, lowest best; ties count as half a rank."""
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    others = losses[1:]
    return 1 + float((others < losses[0]).sum()) + float((others == losses[0]).sum()) / 2

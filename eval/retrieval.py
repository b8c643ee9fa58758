"""Retrieval at every depth of every context length: what a long text stated is asked for at its end.

    from rope_ext_hf.eval.retrieval import passkey
    for result in passkey(model, lengths=[1024, 4096], task="key-value", keys=4):
        print(result.length, result.depth, result.exact_match, result.rank)

Two things are measured: whether greedy decoding gives the right answer, and the rank of the right answer among wrong
ones by likelihood. The rank shows a signal in models too small to answer. The tasks, statements with their
questions, are data: `retrieval_prompts.TASKS`.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from rope_ext_hf.eval.retrieval_prompts import TASKS, Task, ask, insert, other_answers
from rope_ext_hf.eval.runner import Measurement, measure
from rope_ext_hf.eval.scorer import TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "haystack_name",
    "make_trials",
    "passkey",
    "plan_passkey",
    "shared_trials",
]

MOST = {"trials": 10_000, "distractors": 1_000, "keys": 1_000}
"""All prompts and answers are made and tokenised before anything is measured; more would take hours."""


@dataclass
class Trial:
    """One prompt less its haystack, as token ids; the same at every length and for every method.

    Attributes:
        head, question: (tokens,) int64.
        statements: (tokens,) int64 each; the one asked for first.
        depths: of the other statements, as shares of the haystack.
        answers: (1 + distractors, A) int64, the right one first.
        start: where in the haystack its text begins, as a share.
        spare: tokens that are left free, so that the haystack is as long as under a longer question.
    """

    head: Tensor
    statements: tuple[Tensor, ...]
    depths: tuple[float, ...]
    question: Tensor
    answers: Tensor
    start: float
    spare: int = 0

    @property
    def wording(self) -> int:
        """Tokens of prompt and answer besides the haystack, and those left free."""
        return sum(map(len, (self.head, *self.statements, self.question, self.answers[0]))) + self.spare

    @property
    def tail(self) -> int:
        """Tokens of question and answer."""
        return len(self.question) + len(self.answers[0])

    def prompt(self, haystack: Tensor, length: int, depth: float) -> Tensor:
        """(length - spare - A,): with the answer `length` tokens less `spare`; a short haystack is repeated."""
        filled = length - self.wording
        hay = haystack[(int(self.start * len(haystack)) + torch.arange(filled)) % len(haystack)]
        pieces = [self.head]
        stop = 0
        for index, start, stop in insert(filled, (depth, *self.depths)):
            pieces += [hay[start:stop], self.statements[index]]
        return torch.cat([*pieces, hay[stop:], self.question])


def make_trials(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trials: int,
    distractors: int,
    keys: int = 1,
    asked: int = 0,
    depths: Sequence[float] = (),
    seed: int = 0,
    repeated: bool = False,
) -> list[Trial]:
    """Draw names and values, those that training never uses, in the task's held-out wordings, which take turns.

    Distractors have as many tokens as the right answer, so that none is likelier for its length. The answers to the
    other keys are among them, where they have.

    Args:
        asked: index of the statement that is asked for; the statements and their places are the same for each.
        depths: of the first statements, shares of the haystack; the others stand at random depths.
        repeated: the haystack is one short text again and again; every prompt then starts at its beginning.

    Raises:
        MethodError: a tokenizer without enough answers of one length, or more keys than the task can tell apart.
    """
    return [
        _trial(task, tokenizer, distractors, keys, asked, depths, index, random.Random(f"{seed} {index}"), repeated)
        for index in range(trials)
    ]


def _trial(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    distractors: int,
    keys: int,
    asked: int,
    depths: Sequence[float],
    index: int,
    rng: random.Random,
    repeated: bool,
) -> Trial:
    try:
        drawn = ask(task, rng, keys=keys, wording=index).about(asked)
    except ValueError as error:
        raise MethodError(str(error)) from error
    start = 0.0 if repeated else rng.random()
    places = [*depths, *(rng.random() for _ in range(keys - len(depths)))]
    prefix = prefix_token(tokenizer, None)
    question = _encode(tokenizer, drawn.question)
    # A tokenizer may merge the end of the question with the answer: what both have in common is the prompt.
    answers = [_encode(tokenizer, drawn.question + drawn.answer)]
    shared = next((i for i, (a, b) in enumerate(zip(question, answers[0], strict=False)) if a != b), len(question))
    others = other_answers(task, drawn, rng, wording=index)
    texts = {drawn.answer}
    for _ in range(1000 * (distractors + 1)):
        if len(answers) == distractors + 1:
            break
        if (other := next(others)) in texts:
            continue
        texts.add(other)
        ids = _encode(tokenizer, drawn.question + other)
        if len(ids) == len(answers[0]) and ids[:shared] == question[:shared]:
            answers.append(ids)
    if len(answers) <= distractors:
        raise MethodError(
            f"only {len(answers) - 1} other answers have the {len(answers[0]) - shared} tokens of {drawn.answer!r}, "
            f"asked for {distractors}; ask for fewer distractors"
        )
    return Trial(
        head=torch.tensor(([] if prefix is None else [prefix]) + _encode(tokenizer, drawn.head), dtype=torch.int64),
        statements=tuple(torch.tensor(_encode(tokenizer, statement)) for statement in drawn.statements),
        depths=tuple(places[:asked] + places[asked + 1 :]),
        question=torch.tensor(question[:shared], dtype=torch.int64),
        answers=torch.tensor([ids[shared:] for ids in answers]),
        start=start,
    )


def shared_trials(make: Callable[..., list[Trial]], depths: Sequence[float]) -> list[list[Trial]]:
    """One list of trials per depth, whose prompts hold a statement at every depth and differ in their question only.

    Args:
        make: `make_trials` less `asked` and `depths`.
    """
    lists = [make(asked=index, depths=depths) for index in range(len(depths))]
    for same in zip(*lists, strict=True):
        longest = max(trial.wording for trial in same)
        for trial in same:
            trial.spare = longest - trial.wording
    return lists


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class RetrievalMeasurement(Measurement):
    """The ranks of right answers, at every depth of every context length; an item is one trial.

    Args:
        trials: one list per depth, the same one or those of `shared_trials`.
        depths: ascending, all different.
        shared: prompts of one trial and length differ in their question only, which alone is read after the first.
    """

    kind = "passkey"

    def __init__(
        self,
        setting: RetrievalSetting,
        trials: Sequence[Sequence[Trial]],
        haystack: Tensor,
        lengths: Sequence[int],
        depths: Sequence[float],
        shared: bool,
    ) -> None:
        self._setting, self.haystack, self.shared = setting, haystack, shared
        self.trials = dict(zip(depths, trials, strict=True))
        self.lengths = sorted(set(lengths))
        self._cells = [(length, depth) for length in self.lengths for depth in depths]

    @property
    def items(self) -> Sequence[str]:
        return [f"trial {index}" for index in range(len(next(iter(self.trials.values()))))]

    @property
    def setting(self) -> RetrievalSetting:
        return self._setting

    @property
    def passes(self) -> Sequence[int]:
        return [
            length if index == 0 or not self.shared else trial.tail
            for length in self.lengths
            for index, trials in enumerate(self.trials.values())
            for trial in trials
        ]

    @property
    def scored(self) -> int:
        return sum(trial.answers.numel() for depth in self.trials.values() for trial in depth) * len(self.lengths)

    @property
    def after_each_pass(self) -> int:
        """Every answer is a pass of its own; one of a few tokens takes as long as one of 16: it reads all weights."""
        answers = next(iter(self.trials.values()))[0].answers
        return len(answers) * max(16, answers.shape[1])

    def cells(self, item: int) -> Sequence[Cell]:
        return self._cells

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.haystack.numpy().tobytes())
        for trial in (trial for trials in self.trials.values() for trial in trials):
            for ids in (trial.head, *trial.statements, trial.question, trial.answers):
                digest.update(f"{tuple(ids.shape)}".encode() + ids.numpy().tobytes())
            digest.update(f"{trial.start} {trial.depths} {trial.spare}".encode())
        return digest.hexdigest()

    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Cell, TrialScore, Cost]]:
        """Read one trial's prompt at every length and depth asked for."""
        scorer.take_cost()
        read = 0  # the length that was read last
        for cell in cells:
            length, depth = int(cell[0]), cell[1]
            trial = self.trials[depth][item]
            prompt = trial.prompt(self.haystack, length, depth)
            again = self.shared and read == length
            shared = len(prompt) - len(trial.question) if self.shared else 0
            losses, likeliest = scorer.candidates(prompt, trial.answers, length=length, shared=shared, again=again)
            exact = torch.equal(likeliest[0], trial.answers[0])
            read = length
            if progress is not None:
                progress(trial.tail if again else length)
            yield cell, TrialScore(exact, _rank(losses.double().sum(-1))), scorer.take_cost()


def plan_passkey(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    keys: int = 1,
    seed: int = 0,
    haystack: str | Iterable[Document] | None = None,
    task: str = "passkey",
    distractors: int = 19,
) -> RetrievalMeasurement:
    """Make the prompts and check them; the arguments are those of `passkey`.

    The model may be on the meta device: no weights are read.
    """
    chosen = _known(task)
    _check_whole("lengths", lengths, 1)
    for name, value in (("trials", trials), ("distractors", distractors), ("keys", keys)):
        _check_whole(name, [value], 1, MOST[name])
    _check_whole("seed", [seed], None)
    if not depths or not all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in depths):
        raise MethodError(f"depths must be one or more numbers from 0 to 1, got {list(depths)!r}")
    if tokenizer is None:
        tokenizer = own_tokenizer(model, needed=True)
        assert tokenizer is not None
    repeated = haystack is None and chosen.filler is not None
    make = partial(
        make_trials, chosen, tokenizer, trials=trials, distractors=distractors, keys=keys, seed=seed, repeated=repeated
    )
    places = sorted({float(depth) for depth in depths})
    shared = keys >= len(places) > 1
    by_depth = shared_trials(make, places) if shared else [make()] * len(places)
    made = [trial for trials_there in (by_depth if shared else by_depth[:1]) for trial in trials_there]
    least = max(trial.wording for trial in made)
    if min(lengths) < least:
        raise MethodError(f"length {min(lengths)} is too short for task {task!r}: its wording alone has {least} tokens")
    hay = _haystack(chosen, haystack, tokenizer)
    every = [hay, *(ids for trial in made for ids in (trial.prompt(hay, least, 0.0), trial.answers.flatten()))]
    check_vocabulary(model, [Tokens("prompt", ids, ()) for ids in every])
    if (warning := sliding_window_warning(model, max(lengths))) is not None:
        warnings.warn(warning, stacklevel=3)
    return RetrievalMeasurement(RetrievalSetting(task, keys, distractors, seed), by_depth, hay, lengths, places, shared)


def passkey(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    keys: int = 1,
    seed: int = 0,
    haystack: str | Iterable[Document] | None = None,
    task: str = "passkey",
    distractors: int = 19,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Retrieval]:
    """Measure retrieval from several depths of several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        lengths: tokens of prompt and answer together; the haystack fills what the wording leaves.
        depths: shares of the haystack that stand before the statement asked for, 0 to 1.
        tokenizer: default: the one beside the model's weights. Its BOS token stands first if it adds one itself.
        trials: prompts per length and depth; names and values are the same at each.
        keys: statements of the same kind in every prompt, of which one is asked for. With as many keys as depths or
            more, a statement stands at every depth, and each prompt is read once and asked about all of them: that
            takes as many times less. All others stand at random depths.
        seed: of names, values and of where in the haystack a prompt's text is taken from.
        haystack: what `rope_ext_hf.eval.corpora.load` takes, or documents; default: the task's own.
        task: a name of `TASKS`: "passkey" (instructions, repeated filler) and "needle" (a sentence in other text) for
            models of language; "key-value", "assignment", "quote" and "copy", which the bundled model is trained on.
        distractors: wrong answers, of as many tokens, that the right one is ranked among.
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
        keys=keys,
        seed=seed,
        haystack=haystack,
        task=task,
        distractors=distractors,
    )
    return measure(
        model,
        measurement,
        data=haystack_name(task, haystack),
        out=out,
        chunk=chunk,
        offload_cache=offload_cache,
        progress=progress,
    )


def haystack_name(task: str, haystack: str | Iterable[Document] | None) -> str:
    """What a run's folder calls the text: the task, and the haystack where one was given."""
    given = "" if haystack is None else f" in {haystack if isinstance(haystack, str) else 'documents'}"
    return f"task {task}{given}"


def _check_whole(name: str, values: Sequence[int], least: int | None, most: int | None = None) -> None:
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    if not values or not all(type(value) is int and low <= value <= high for value in values):
        allowed = "whole numbers" if least is None else f"whole numbers of at least {least}"
        allowed += "" if most is None else f" and at most {most:,}"
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

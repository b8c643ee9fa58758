"""Prompts of retrieval: what a long text stated is asked for at its end, at every depth of every context length.

Beside whether greedy decoding gives the right answer, its rank among wrong ones by likelihood is measured: it shows a
signal in models too small to answer. Statements and questions are data: `suites.statements.RETRIEVALS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.errors import CorpusError, MethodError, did_you_mean
from rope_ext_hf.eval.questions import Passkey
from rope_ext_hf.eval.retrieval_runs import RetrievalMeasurement, RetrievalSetting, Trial
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Document
from rope_ext_hf.reading.spans import check_prompts, encode, encode_answer, own_tokenizer, prefix_token, tokenize
from rope_ext_hf.runs.kinds import RunPlan
from rope_ext_hf.suites.statements import RETRIEVALS, RetrievalQuestion, Task, ask, other_answers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_trials(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trials: int,
    distractors: int,
    keys: int = 1,
    asked: int = 0,  # index of the statement that is asked for; statements and their places are the same for each
    depths: Sequence[float] = (),  # of the first statements, shares of the haystack; others stand at random depths
    seed: int = 0,
    repeated: bool = False,  # the haystack is a short text again and again; prompts then start at its beginning
) -> list[Trial]:
    """Draw names and values, those that training never uses, in the task's held-out wordings, which take turns.

    Distractors have as many tokens as the right answer, so that none is likelier for its length. The answers to the
    other keys are among them, where they have. MethodError: a tokenizer without enough answers of one length.
    """
    prefix = prefix_token(tokenizer, None)
    made = []
    for index in range(trials):
        rng = random.Random(f"{seed} {index}")
        try:
            drawn = ask(task, rng, keys=keys, wording=index).about(asked)
        except ValueError as error:
            raise MethodError(str(error)) from error
        start = 0.0 if repeated else rng.random()
        places = [*depths, *(rng.random() for _ in range(keys - len(depths)))]
        question, answers = _question_and_answers(task, tokenizer, drawn, rng, index, distractors)
        head = ([] if prefix is None else [prefix]) + encode(tokenizer, drawn.head)
        made.append(
            Trial(
                head=torch.tensor(head, dtype=torch.int64),
                statements=tuple(torch.tensor(encode(tokenizer, statement)) for statement in drawn.statements),
                depths=tuple(places[:asked] + places[asked + 1 :]),
                question=torch.tensor(question, dtype=torch.int64),
                answers=torch.tensor(answers),
                start=start,
            )
        )
    return made


def _question_and_answers(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    drawn: RetrievalQuestion,
    rng: random.Random,
    wording: int,
    distractors: int,
) -> tuple[list[int], list[list[int]]]:
    """The token ids of a question and of its answers, the right one first, then wrong ones of as many tokens."""
    question, right = encode_answer(tokenizer, drawn.question, drawn.answer)
    answers, shared = [right], len(question)
    others = other_answers(task, drawn, rng, wording=wording)
    texts = {drawn.answer}
    for _ in range(1000 * (distractors + 1)):
        if len(answers) == distractors + 1:
            break
        if (other := next(others)) in texts:
            continue
        texts.add(other)
        ids = encode(tokenizer, drawn.question + other)
        if len(ids) == shared + len(right) and ids[:shared] == question:
            answers.append(ids[shared:])
    if len(answers) <= distractors:
        raise MethodError(
            f"only {len(answers) - 1} other answers have the {len(right)} tokens of {drawn.answer!r}, "
            f"asked for {distractors}; ask for fewer distractors"
        )
    return question, answers


def shared_trials(make: Callable[..., list[Trial]], depths: Sequence[float]) -> list[list[Trial]]:
    """Trials by `make_trials` for each depth, whose prompts have a statement at every depth and another question."""
    lists = [make(asked=index, depths=depths) for index in range(len(depths))]
    for same in zip(*lists, strict=True):
        longest = max(trial.wording for trial in same)
        for trial in same:
            trial.spare = longest - trial.wording
    return lists


def plan_passkey(
    question: Passkey, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[RetrievalMeasurement]:
    """Make the prompts and check them; see `Passkey.plan`."""
    task = question.task or "passkey"
    chosen, lengths, haystack = _known(task), list(question.lengths), question.haystack
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    repeated = haystack is None and chosen.filler is not None
    make = partial(
        make_trials,
        chosen,
        reader,
        trials=question.trials,
        distractors=question.distractors,
        keys=question.keys,
        seed=question.seed,
        repeated=repeated,
    )
    places = sorted(set(question.depths))
    shared = question.keys >= len(places) > 1
    by_depth = shared_trials(make, places) if shared else [make()] * len(places)
    made = [trial for of_depth in (by_depth if shared else by_depth[:1]) for trial in of_depth]
    least = max(trial.wording for trial in made)
    if min(lengths) < least:
        raise MethodError(f"length {min(lengths)} is too short for task {task!r}; its wording alone has {least} tokens")
    own = "stdlib" if chosen.filler is None else Document("filler", chosen.filler)
    documents = load(own if haystack is None else haystack)
    hay = torch.cat([document.ids for document in tokenize(documents, reader)])
    if not len(hay):
        raise CorpusError("the haystack is empty")
    every = [hay, *(ids for trial in made for ids in (trial.prompt(hay, least, 0.0), trial.answers.flatten()))]
    check_prompts(model, every, max(lengths))
    setting = RetrievalSetting(task, question.keys, question.distractors, question.seed)
    measurement = RetrievalMeasurement(setting, by_depth, hay, lengths, places, shared)
    given = "" if haystack is None else f" in {documents.source}"
    return RunPlan(measurement, f"task {task}{given}", **settings)


def _known(task: str) -> Task:
    if task not in RETRIEVALS:
        raise MethodError(
            f"unknown task {task!r}.{did_you_mean(task, RETRIEVALS)} Known tasks: {', '.join(RETRIEVALS)}"
        )
    return RETRIEVALS[task]

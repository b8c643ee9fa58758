"""Retrieval at every depth of every context length: what a long text stated is asked for at its end.

    from rope_ext_hf.eval.retrieval_question import passkey
    for result in passkey(model, lengths=[1024, 4096], task="key-value", keys=4):
        print(result.length, result.depth, result.exact_match, result.rank)

Two things are measured: whether greedy decoding gives the right answer, and the rank of the right answer among wrong
ones by likelihood. The rank shows a signal in models too small to answer. The tasks, statements with their
questions, are data: `suites.statements.TASKS`.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.bounds import Length, listed, parse_lengths
from rope_ext_hf.errors import CorpusError, MethodError, did_you_mean
from rope_ext_hf.eval.retrieval_runs import Retrieval, RetrievalMeasurement, RetrievalSetting, Trial
from rope_ext_hf.hub import model_by_name
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Corpus, Document, Tokens
from rope_ext_hf.reading.preflight import sliding_window_warning
from rope_ext_hf.reading.spans import check_vocabulary, own_tokenizer, prefix_token, tokenize
from rope_ext_hf.runs.kinds import Results, RunPlan
from rope_ext_hf.runs.runner import measure, progress_of_tokens
from rope_ext_hf.suites.statements import TASKS, Question, Task, ask, other_answers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_MOST = {"trials": 10_000, "distractors": 1_000, "keys": 1_000}
"""All prompts and answers are made and tokenised before anything is measured; more would take hours."""


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
        head = ([] if prefix is None else [prefix]) + _encode(tokenizer, drawn.head)
        trial = Trial(
            head=torch.tensor(head, dtype=torch.int64),
            statements=tuple(torch.tensor(_encode(tokenizer, statement)) for statement in drawn.statements),
            depths=tuple(places[:asked] + places[asked + 1 :]),
            question=torch.tensor(question, dtype=torch.int64),
            answers=torch.tensor(answers),
            start=start,
        )
        made.append(trial)
    return made


def _question_and_answers(
    task: Task, tokenizer: PreTrainedTokenizerBase, drawn: Question, rng: random.Random, wording: int, distractors: int
) -> tuple[list[int], list[list[int]]]:
    """The token ids of a question and of its answers, the right one first, then wrong ones of as many tokens."""
    question = _encode(tokenizer, drawn.question)
    # A tokenizer may merge the end of the question with the answer: what both have in common is the prompt.
    answers = [_encode(tokenizer, drawn.question + drawn.answer)]
    shared = next((i for i, (a, b) in enumerate(zip(question, answers[0], strict=False)) if a != b), len(question))
    others = other_answers(task, drawn, rng, wording=wording)
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
    return question[:shared], [ids[shared:] for ids in answers]


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


def plan_passkey(
    model: PreTrainedModel,
    *,
    lengths: Length | Sequence[Length],
    depths: float | Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    keys: int = 1,
    seed: int = 0,
    haystack: Corpus | None = None,
    task: str = "passkey",
    distractors: int = 19,
    settings: Mapping[str, Any] | None = None,
) -> RunPlan[RetrievalMeasurement]:
    """Make the prompts and check them, before any weights are read: the model may be on the meta device.

    Args:
        settings: further fields of the plan; methods are bound to the model.
        others: as `passkey` takes them.
    """
    chosen, lengths, depths = _known(task), parse_lengths(lengths), listed(depths)
    _check_whole("lengths", lengths, 1)
    for name, value in (("trials", trials), ("distractors", distractors), ("keys", keys)):
        _check_whole(name, [value], 1, _MOST[name])
    _check_whole("seed", [seed], None)
    if not depths or not all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in depths):
        raise MethodError(f"depths must be one or more numbers from 0 to 1, got {depths!r}")
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
        raise MethodError(f"length {min(lengths)} is too short for task {task!r}; its wording alone has {least} tokens")
    own = "stdlib" if chosen.filler is None else Document("filler", chosen.filler)
    documents = load(own if haystack is None else haystack)
    hay = torch.cat([document.ids for document in tokenize(documents, tokenizer)])
    if not len(hay):
        raise CorpusError("the haystack is empty")
    every = [hay, *(ids for trial in made for ids in (trial.prompt(hay, least, 0.0), trial.answers.flatten()))]
    check_vocabulary(model, [Tokens("prompt", ids, ()) for ids in every])
    if (warning := sliding_window_warning(model, max(lengths))) is not None:
        warnings.warn(warning, stacklevel=3)
    setting = RetrievalSetting(task, keys, distractors, seed)
    measurement = RetrievalMeasurement(setting, by_depth, hay, lengths, places, shared)
    given = "" if haystack is None else f" in {documents.source}"
    return RunPlan(measurement, f"task {task}{given}", **(settings or {}))


def passkey(
    model: PreTrainedModel | str | Path,
    *,
    lengths: Length | Sequence[Length],
    depths: float | Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    tokenizer: PreTrainedTokenizerBase | None = None,
    trials: int = 10,
    keys: int = 1,
    seed: int = 0,
    haystack: Corpus | None = None,
    task: str = "passkey",
    distractors: int = 19,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Callable[[int], None] | bool | None = None,
) -> Results[Retrieval]:
    """Measure retrieval from several depths of several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device; or a folder, a Hub id or
            "reference", which is loaded.
        lengths: tokens of prompt and answer together, 4096 or "4k"; one, or several. The haystack fills what
            the wording leaves.
        depths: shares of the haystack that stand before the statement asked for, 0 to 1.
        tokenizer: default: the one beside the model's weights. Its BOS token stands first if it adds one itself.
        trials: prompts per length and depth; names and values are the same at each.
        keys: statements of the same kind in every prompt, of which one is asked for. With as many keys as depths or
            more, a statement stands at every depth, and each prompt is read once and asked about all of them: that
            takes as many times less. All others stand at random depths.
        seed: of names, values and of where in the haystack a prompt's text is taken from.
        haystack: what `rope_ext_hf.reading.corpora.load` takes; default: the task's own.
        task: a name of `TASKS`: "passkey" (instructions, repeated filler) and "needle" (a sentence in other text) for
            models of language; "key-value", "assignment", "quote" and "copy", which the bundled model is trained on.
        distractors: wrong answers, of as many tokens, that the right one is ranked among.
        chunk, offload_cache, out: as `perplexity` takes them.
        progress: called with the number of tokens read, after each prompt; True: a bar of tqdm.

    Returns:
        One Retrieval per length and depth, in ascending order, as a list that a notebook shows as a table.

    Raises:
        CorpusError: no haystack, or token ids the model's vocabulary lacks.
        MethodError: an unknown task, a length too short for the wording, or impossible numbers.
        FileError: the run's folder cannot be written, or is damaged.

    Every prompt is read once, in fixed memory; its `distractors + 1` answers of a few tokens each start from its cache.
    Nothing is generated: greedy decoding gives the right answer exactly if each of its tokens is the likeliest after
    those before. Length-dependent methods are held at each context length (`fixed_length`). A chat template is not
    applied. Losses that are not finite count as the worst.
    """
    model = model_by_name(model)
    plan = plan_passkey(
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
        settings={"chunk": chunk, "offload_cache": offload_cache},
    )
    return Results(measure(model, plan, out=out, progress=progress_of_tokens(progress, plan)))


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

"""Whether a model finds what it has read: a secret in a haystack, at every depth of every context length.

    from rope_ext_hf.eval.retrieval import passkey
    for found in passkey(model, lengths=[1024, 4096], task="needle"):
        print(found.length, found.depth, found.exact_match, found.top1)

A prompt states a five-digit number somewhere in a long text and asks for it at the end. Two things are measured:
whether greedy decoding would answer with that number, and how likely the model finds it among other numbers. The
second gives a signal from models too small to answer. The wording is data (`TASKS`).
"""

from __future__ import annotations

import difflib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, printable
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.plan import Tokens, check_vocabulary, own_tokenizer, prefix_token, tokenize
from rope_ext_hf.eval.preflight import sliding_window_warning
from rope_ext_hf.eval.results import label
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.patches.patching import patched_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SECRETS", "TASKS", "Retrieval", "Task", "Trial", "heat_map", "make_trials", "passkey", "table"]

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
class Retrieval:
    """How well a secret at one depth of one context length is found.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        length: of prompt and answer together, in tokens.
        depth: share of the haystack that stands before the secret.
        trials: prompts, each with its own secret.
        distractors: other numbers that the right one is ranked among.
        exact_match: share of trials in which greedy decoding gives the right number.
        rank: mean rank of the right number by likelihood, 1 is best; among equals, the middle.
        top1: share of trials in which it ranks first.
        chance: what `top1` is by luck.
    """

    method: dict[str, Any] | None
    task: str
    length: int
    depth: float
    trials: int
    distractors: int
    exact_match: float
    rank: float
    top1: float
    chance: float

    @property
    def chance_rank(self) -> float:
        """What `rank` is by luck."""
        return 1 + self.distractors / 2

    @property
    def found(self) -> bool:
        """Whether the rank is better than luck by 3 standard errors of a mean of uniform ranks."""
        error = math.sqrt(((self.distractors + 1) ** 2 - 1) / 12 / self.trials)
        return self.rank < self.chance_rank - 3 * error

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"chance_rank": self.chance_rank, "found": self.found}


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
        chunk, offload_cache: as `perplexity` takes them.
        progress: called with the number of tokens read, after each prompt.

    Returns:
        One Retrieval per length and depth, in ascending order.

    Raises:
        CorpusError: no haystack, or token ids the model's vocabulary lacks.
        MethodError: an unknown task, a length too short for the wording, or impossible numbers.

    Every prompt is read once, in fixed memory; its `distractors + 1` answers of a few tokens each start from its cache.
    Nothing is generated: greedy decoding gives the right answer exactly if each of its tokens is the likeliest after
    those before. Length-dependent methods are held at each context length (`fixed_length`). A chat template is not
    applied. Losses that are not finite count as the worst.
    """
    wording = _known(task)
    if not lengths or not depths or not all(0 <= depth <= 1 for depth in depths):
        raise MethodError(f"give lengths, and depths from 0 to 1; got {list(lengths)} and {list(depths)}")
    if trials < 1 or distractors < 1:
        raise MethodError(f"trials and distractors must be at least 1, got {trials} and {distractors}")
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

    if (narrow := sliding_window_warning(model, max(lengths))) is not None:
        warnings.warn(narrow, stacklevel=2)
    scorer, method = TokenScorer(model, chunk=chunk, offload_cache=offload_cache), patched_method(model)
    found: list[Retrieval] = []
    for length in sorted(set(lengths)):
        for depth in sorted(set(depths)):
            scores: list[tuple[bool, float]] = []
            for trial in made:
                losses, likeliest = scorer.candidates(trial.prompt(hay, length, depth), trial.answers, length=length)
                scores.append((torch.equal(likeliest[0], trial.answers[0]), _rank(losses.double().sum(-1))))
                if progress is not None:
                    progress(length)
            found.append(
                Retrieval(
                    method=method.to_dict() if method else None,
                    task=task,
                    length=length,
                    depth=float(depth),
                    trials=trials,
                    distractors=distractors,
                    exact_match=fmean(exact for exact, _ in scores),
                    rank=fmean(rank for _, rank in scores),
                    top1=fmean(rank == 1 for _, rank in scores),
                    chance=1 / (distractors + 1),
                )
            )
    return found


def _known(task: str) -> Task:
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise MethodError(f"unknown task {task!r}.{hint} Known tasks: {', '.join(TASKS)}")
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
    """The rank of the first of some losses, lowest best; among equals the middle one, so that a tie is no success."""
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    others = losses[1:]
    return 1 + float((others < losses[0]).sum()) + float((others == losses[0]).sum()) / 2


def table(results: Sequence[Retrieval], trained_length: int) -> Table:
    """One row per method and depth, one column per length: ranked first, mean rank and exact match."""
    one = results[0]
    lengths = sorted({result.length for result in results})
    view = Table(
        title=f"Retrieval, task {one.task}: secret ranked first, mean rank, exact match",
        caption=f"{one.trials} secrets per cell, each among {one.distractors} distractors; by luck {one.chance:.0%} "
        f"rank first and the mean rank is {one.chance_rank:g}; green: better than luck by 3 standard errors",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    view.add_column("method", overflow="fold")
    view.add_column("depth", justify="right")
    for length in lengths:
        view.add_column(f"{length:,}\n{length / trained_length:g}x", justify="right", overflow="fold")
    for name, depths in _by_method(results).items():
        for index, (depth, row) in enumerate(depths.items()):
            cells = [_cell(row.get(length)) for length in lengths]
            last = index == len(depths) - 1
            view.add_row("" if index else escape(printable(name)), f"{depth:.0%}", *cells, end_section=last)
    return view


def _cell(result: Retrieval | None) -> str:
    if result is None:
        return ""
    text = f"{result.top1:.0%} {result.rank:4.1f} {result.exact_match:4.0%}"
    return f"[green]{text}[/green]" if result.found else text


def _by_method(results: Sequence[Retrieval]) -> dict[str, dict[float, dict[int, Retrieval]]]:
    """Results by label, depth and length; methods in the order they came."""
    panels: dict[str, dict[float, dict[int, Retrieval]]] = {}
    for result in sorted(results, key=lambda result: (result.depth, result.length)):
        panels.setdefault(label(result.method), {}).setdefault(result.depth, {})[result.length] = result
    return {name: panels[name] for name in dict.fromkeys(label(result.method) for result in results)}


def heat_map(results: Sequence[Retrieval], path: Path, title: str) -> None:
    """Length x depth as a PNG, one panel per method: how often the secret ranks first, and exact matches below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    one = results[0]
    panels = _by_method(results)
    lengths = sorted({result.length for result in results})
    depths = sorted({result.depth for result in results})
    figure = Figure(
        figsize=(1.6 + len(panels) * max(2.0, 0.75 * len(lengths)), 1.9 + 0.5 * len(depths)),
        dpi=150,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, rows) in zip(grid, panels.items(), strict=True):
        cells = [[rows.get(depth, {}).get(length) for length in lengths] for depth in depths]
        values = [[math.nan if cell is None else cell.top1 for cell in row] for row in cells]
        # from luck upwards, so that luck has no colour
        image = axes.imshow(values, cmap="YlGn", vmin=one.chance, vmax=1.0, aspect="auto")
        for y, row in enumerate(cells):
            for x, cell in enumerate(row):
                if cell is not None:
                    ink = "white" if cell.top1 > 0.7 else "#222222" if cell.found else "#777777"
                    axes.text(x, y - 0.12, f"{cell.top1:.0%}", ha="center", va="center", fontsize=9, color=ink)
                    axes.text(
                        x, y + 0.25, f"{cell.exact_match:.0%} exact", ha="center", va="center", fontsize=6, color=ink
                    )
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        axes.set_xticks([x + 0.5 for x in range(len(lengths) - 1)], minor=True)
        axes.set_yticks([y + 0.5 for y in range(len(depths) - 1)], minor=True)
        axes.grid(visible=True, which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
    grid[0].set_ylabel("depth of the secret (0%: first)", fontsize=8)
    note = f"{one.trials} secrets per cell; grey: mean rank no better than luck"
    figure.supxlabel(f"context length (tokens)\n{note}", fontsize=8)
    figure.suptitle(title, fontsize=11)
    bar = figure.colorbar(image, ax=list(grid), pad=0.01)
    bar.set_label(f"ranked first among {one.distractors + 1} (luck: {one.chance:.0%})", fontsize=8)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    figure.savefig(path)

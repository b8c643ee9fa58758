"""The prompts for retrieval runs, as token ids: statements, the question at the end, and the answers to rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.retrieval.statements import RetrievalQuestion, Task, ask, insert, other_answers
from rope_ext_hf.reading.text.tokenizing import encode, encode_answer, prefix_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trial:
    """One prompt without the long text around its statements (the haystack); the same at every length.

    Head, statements and question are token ids, (tokens,) int64 each.

    Attributes:
        head: instructions before the haystack.
        statements: the statement that is asked for, then the others.
        depths: the depths of the other statements, as shares of the haystack.
        question: asks for the first statement.
        answers: (1 + distractors, answer tokens) int64, the right answer first.
        start: where in the haystack the text of this prompt begins, as a share.
        spare: number of tokens that are left free, so that the haystack is as long as under a longer question.
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
        """The number of tokens besides the haystack: those of prompt and answer, and those that are left free."""
        return sum(map(len, (self.head, *self.statements, self.question, self.answers[0]))) + self.spare

    @property
    def tail(self) -> int:
        """The number of tokens in question and answer together."""
        return len(self.question) + len(self.answers[0])

    def prompt(self, haystack: Tensor, length: int, depth: float) -> Tensor:
        """Return the token ids of the prompt: (length - spare - answer tokens,) int64.

        Args:
            haystack: (tokens,) int64, the text around the statements; a short one is repeated.
            length: the length of prompt and answer together, in tokens.
            depth: the share of the haystack that stands before the statement that is asked for.
        """
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
    target: int = 0,
    depths: Sequence[float] = (),
    seed: int = 0,
    first: int = 0,
    repeated: bool = False,
) -> list[Trial]:
    """Make prompts for retrieval, with names, values and wordings that training never uses.

    The held-out wordings of the task are used in turn. Distractors (wrong answers) have as many tokens as the right
    answer, so that none is likelier because of its length. The answers to the other keys are among them, if they have
    that many tokens.

    Args:
        task: the kind of retrieval: what is asked for, and in which words.
        tokenizer: the tokenizer of the model.
        trials: number of prompts.
        distractors: number of wrong answers.
        keys: number of statements in a prompt.
        target: index of the statement that is asked for; the statements and their places do not depend on it.
        depths: the depths of the first statements, as shares of the haystack; the others stand at random depths.
        seed: the seed for drawing names, values and places.
        first: number of the first trial; trials with other numbers have other names, values and places.
        repeated: the haystack is a short text that is repeated; then prompts start at its beginning.

    Raises:
        MethodError: the tokenizer does not give enough answers of one length.
    """
    prefix = prefix_tokens(tokenizer, None)
    prompts = []
    for index in range(first, first + trials):
        rng = random.Random(f"{seed} {index}")
        drawn = ask(task, rng, keys=keys, wording=index).about(target)
        start = 0.0 if repeated else rng.random()
        places = [*depths, *(rng.random() for _ in range(keys - len(depths)))]
        others = other_answers(task, drawn, rng, wording=index)
        question, answers = _question_and_answers(tokenizer, drawn, others, distractors)
        head = [*prefix, *encode(tokenizer, drawn.head)]
        prompts.append(
            Trial(
                head=torch.tensor(head, dtype=torch.int64),
                statements=tuple(torch.tensor(encode(tokenizer, statement)) for statement in drawn.statements),
                depths=tuple(places[:target] + places[target + 1 :]),
                question=torch.tensor(question, dtype=torch.int64),
                answers=torch.tensor(answers),
                start=start,
            )
        )
    return prompts


def _question_and_answers(
    tokenizer: PreTrainedTokenizerBase, drawn: RetrievalQuestion, others: Iterator[str], distractors: int
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a question and of its answers: the right one, then wrong ones of as many tokens."""
    question, right = encode_answer(tokenizer, drawn.question, drawn.answer)
    answers, shared = [right], len(question)
    texts = {drawn.answer}
    for _ in range(1000 * (distractors + 1)):
        if len(answers) == distractors + 1:
            break
        other = next(others)
        if other in texts:
            continue
        texts.add(other)
        ids = encode(tokenizer, drawn.question + other)
        if len(ids) == shared + len(right) and ids[:shared] == question:
            answers.append(ids[shared:])
    if len(answers) <= distractors:
        raise MethodError(
            f"only {len(answers) - 1} other answers have the {len(right)} tokens of {drawn.answer!r}, and distractors "
            f"is {distractors}; give fewer distractors"
        )
    return question, answers


def shared_trials(make: Callable[..., list[Trial]], depths: Sequence[float]) -> list[list[Trial]]:
    """Return a list of prompts for each depth; prompts at the same place in the lists differ only in their question.

    Each prompt has a statement at every depth. Prompts with a shorter question leave tokens free, so that the haystack
    is equally long in all of them.

    Args:
        make: makes prompts, given the index of the statement that is asked for, and the depths; see `make_trials`.
        depths: the depths of the statements, as shares of the haystack, the text around them.
    """
    by_depth = [make(target=index, depths=depths) for index in range(len(depths))]
    for trials_of_one_text in zip(*by_depth, strict=True):
        longest = max(trial.wording for trial in trials_of_one_text)
        for trial in trials_of_one_text:
            trial.spare = longest - trial.wording
    return by_depth

"""The prompts of retrieval runs, as token ids: statements, the question at the end, and the answers to rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.statements import RetrievalQuestion, Task, ask, insert, other_answers
from rope_ext_hf.reading.spans import encode, encode_answer, prefix_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Trial:
    """One prompt without its haystack; it is the same at every length and for every method.

    Token ids are (tokens,) int64.

    Attributes:
        head: instructions before the haystack.
        statements: the statement that is asked for, then the others.
        depths: of the other statements, as shares of the haystack.
        question: asks for the first statement.
        answers: (1 + distractors, answer tokens), the right one first.
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
        """The number of tokens of prompt and answer besides the haystack, with those that are left free."""
        return sum(map(len, (self.head, *self.statements, self.question, self.answers[0]))) + self.spare

    @property
    def tail(self) -> int:
        """The number of tokens of question and answer."""
        return len(self.question) + len(self.answers[0])

    def prompt(self, haystack: Tensor, length: int, depth: float) -> Tensor:
        """Return the token ids of the prompt, (length - spare - answer tokens,).

        Args:
            haystack: the text around the statements, (tokens,); a short one is repeated.
            length: of prompt and answer together.
            depth: share of the haystack that stands before the statement that is asked for.
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
    """Draw prompts with names and values that training never uses, in the held-out wordings of a task, in turn.

    Distractors have as many tokens as the right answer, so that none is likelier because of its length. The answers to
    the other keys are among them, if they have that many tokens.

    Args:
        task: what is asked for, and in which words.
        tokenizer: of the model.
        trials: number of prompts.
        distractors: number of wrong answers.
        keys: number of statements in a prompt.
        target: index of the statement that is asked for; the statements and their places do not depend on it.
        depths: of the first statements, as shares of the haystack; the others stand at random depths.
        seed: of names, values and places.
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
    """Return a list of trials for each depth, whose prompts differ in their question only.

    Each prompt has a statement at every depth. Prompts with a shorter question leave tokens free, so that the haystack
    is equally long in all of them.

    Args:
        make: makes trials from the index of the statement that is asked for and the depths, see `make_trials`.
        depths: shares of the haystack.
    """
    by_depth = [make(target=index, depths=depths) for index in range(len(depths))]
    for trials_of_one_text in zip(*by_depth, strict=True):
        longest = max(trial.wording for trial in trials_of_one_text)
        for trial in trials_of_one_text:
            trial.spare = longest - trial.wording
    return by_depth

"""Prompts of a suite's tasks as token ids, and checks that they fit into a context length before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError, listed
from rope_ext_hf.reading.text.tokenizing import encode, prefix_tokens
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, TooShortError, count_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RANKED = 20  # answers that are ranked at most, the right one among them


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task as token ids, with its right answers, and with the answers to rank if they are ranked."""

    ids: Tensor  # (tokens,) int32
    budget: int  # tokens to generate at most
    references: tuple[str, ...]  # strings that a right answer contains
    # Answers to rank, (tokens,) int32 each, the right one first; empty: the answer is generated.
    candidates: tuple[Tensor, ...] = ()
    others: tuple[str, ...] = ()  # wrong answers, which some suites look for in a generated answer

    @property
    def tokens(self) -> int:
        """Tokens of the prompt together with those to generate, or with those of the longest answer to rank."""
        return len(self.ids) + max(map(len, self.candidates), default=self.budget)


class PromptEncoder:
    """Converter of a suite's prompts into token ids, with the tokenizer's chat template or without it.

    Attributes:
        reserved: tokens that are added to what a suite counts. Suites do not count a BOS token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self._prefix = () if chat else prefix_tokens(tokenizer, None)
        self.reserved = template_tokens(tokenizer) if chat else max(0, len(self._prefix) - 1)

    @property
    def changes_daily(self) -> str:
        """Why the same prompts become other tokens on another day; empty if they do not."""
        dated = self.chat and "strftime_now" in str(self.tokenizer.chat_template)
        return "the chat template states today's date" if dated else ""

    def encode(self, sample: Sample, candidates: Sequence[str], extra_tokens: int) -> TaskPrompt:
        """Return a prompt as token ids; `candidates` are the answers to rank, if answers are ranked.

        `extra_tokens` may be generated beyond the number that the sample states.
        """
        text = (_as_message(self.tokenizer, sample.prompt) if self.chat else sample.prompt) + sample.prefix
        ids = self._encode(text)
        gap = "" if not text or text[-1].isspace() else " "
        whole = [self._encode(f"{text}{gap}{answer}") for answer in candidates]
        # A tokenizer may merge the end of the prompt with the start of an answer: the prompt is what all begin with.
        shared = min(_shared_prefix([ids, *whole]), len(ids))
        return TaskPrompt(
            torch.tensor(ids[:shared], dtype=torch.int32),
            sample.budget + extra_tokens,
            sample.references,
            tuple(torch.tensor(tokens[shared:], dtype=torch.int32) for tokens in whole),
            sample.others,
        )

    def _encode(self, text: str) -> list[int]:
        return [*self._prefix, *encode(self.tokenizer, text)]

    def decode(self, ids: Tensor) -> str:
        """Return generated tokens as text, without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _shared_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all sequences have in common at the beginning."""
    for index, tokens in enumerate(zip_longest(*sequences)):
        if len(set(tokens)) > 1:
            return index
    return len(sequences[0])


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that the chat template adds to a user's message; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    return count_tokens(tokenizer, _as_message(tokenizer, ""))


def _as_message(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text as a user's message in the chat template, followed by the template's beginning of the answer."""
    message: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return str(message)


def candidates(sample: Sample, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the answers to rank for a prompt: the first right answer, followed by wrong ones.

    The wrong answers are first those that stand in the prompt itself, then the right answers of other prompts.
    """
    wrong = list(sample.others)
    if not sample.closed:
        wrong += chain.from_iterable(other.references for other in samples)
    distinct = (text for text in dict.fromkeys(wrong) if text not in sample.references)
    return sample.references[0], *islice(distinct, _RANKED - 1)


def check_tasks(suite: Suite, names: Sequence[str], lengths: Sequence[int], settings: PromptSettings) -> None:
    """Raise MethodError if a task does not fit into every context length.

    The message lists all such tasks, and says what to type instead.
    """
    failures: dict[str, list[TooShortError]] = {}  # by task, one for each length that is too short
    needs: dict[str, int | None] = {}  # by task, the length that it needs when the longest such length is too short
    for name in names:
        for length in lengths:
            at_length = replace(settings, length=length)
            try:
                suite.check(name, at_length)
            except TooShortError as error:
                failures.setdefault(name, []).append(error)
                needs[name] = suite.least_length(name, at_length)
    if not failures:
        return
    known_needs = {name: need for name, need in needs.items() if need is not None}
    at_none = [name for name in known_needs if len(failures[name]) == len(lengths)]
    at_some = [name for name in known_needs if name not in at_none]
    never = [name for name in needs if name not in known_needs]
    clauses = []
    if at_none:
        clauses.append(", ".join(f"{name} needs {known_needs[name]:,} tokens" for name in at_none))
    if at_some:
        at_some_text = ", ".join(f"{name} needs {known_needs[name]:,} tokens" for name in at_some)
        clauses.append(f"at some of these lengths: {at_some_text}")
    if never:
        clauses.append(f"at any length: {', '.join(f'{name} ({failures[name][-1].reason})' for name in never)}")
    raise MethodError(
        f"{len(failures)} of {len(names)} tasks do not fit into {listed(f'{length:,}' for length in lengths)} tokens "
        f"with this tokenizer: {'; '.join(clauses)}. {_way_out(suite, names, lengths, needs)}"
    )


def _way_out(suite: Suite, names: Sequence[str], lengths: Sequence[int], needs: dict[str, int | None]) -> str:
    """Return advice on what to type instead: the tasks that fit into every length, or else those that fit into some."""
    fitting = [name for name in names if name not in needs]
    works = list(lengths)
    if not fitting:
        known_needs = {name: need for name, need in needs.items() if need is not None}
        if not known_needs:
            return "Give another --suite"
        fitting, least = list(known_needs), max(known_needs.values())
        works = [length for length in lengths if length >= least] or [least]
    return f"Try: --suite {suite.name} --lengths {','.join(map(str, works))} --tasks {','.join(fitting)}"


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that end an answer, from the model's generation config and the tokenizer."""
    generation_config = getattr(model, "generation_config", None)  # some classes have none
    from_config = getattr(generation_config, "eos_token_id", None)
    tokens = {*(from_config if isinstance(from_config, list) else [from_config]), tokenizer.eos_token_id}
    return frozenset(int(token) for token in tokens if token is not None)

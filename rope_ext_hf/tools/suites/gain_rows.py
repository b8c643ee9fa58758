"""Rows of a data set, each a text with evidence that answers a question, and the prompts that are made of them.

    {"context": "... The bridge opened in 1937. ...", "evidence": "The bridge opened in 1937.",
     "question": "\nThe bridge opened in", "answer": " 1937"}

For each length and each distance that is measured, a row gives two prompts: one with its evidence, and one with other
text of as many tokens in its place. Between evidence and answer stand `distance` tokens, which begin with the text that
follows the evidence in its context.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, short
from rope_ext_hf.reading.text.documents import utf8_bytes
from rope_ext_hf.reading.text.load import load, stdlib_held_out
from rope_ext_hf.reading.text.tokenizing import encode, encode_answer, prefix_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = ("context", "evidence", "question", "answer")
_LEAST_LINE = 20  # characters of a docstring's first line; shorter ones make no row


class TextRow(NamedTuple):
    """One row as text: a context with the evidence in it, a question and the answer."""

    name: str
    before: str  # the context's text before the evidence
    evidence: str
    after: str  # the context's text after the evidence
    question: str
    answer: str

    @property
    def context(self) -> str:
        """The whole context, evidence included."""
        return self.before + self.evidence + self.after


class _Prompts(NamedTuple):
    """The two prompts made of a row: with the evidence, and with other text in its place; neither has the answer."""

    with_evidence: Tensor  # (length - answer tokens,) int64
    without_evidence: Tensor  # the same shape and dtype
    shared: int  # tokens that both begin with


@dataclass(frozen=True)
class TokenRow:
    """One row as token ids, with other texts (`fillers`) that make its prompts as long as needed.

    Each part is a (tokens,) int64 tensor.
    """

    head: Tensor  # the first tokens of every prompt: a BOS token, or none
    before: Tensor
    evidence: Tensor
    after: Tensor
    question: Tensor
    answer: Tensor
    fillers: tuple[Tensor, ...]  # texts without the evidence, in the order in which they follow the row's context

    def prompts(self, length: int, distance: int) -> _Prompts:
        """Return the row's two prompts: with the evidence, and with other text in its place.

        With the answer each has `length` tokens, and there are `distance` tokens from the evidence to the answer.
        """
        replacements = self.fillers[len(self.fillers) // 2 :] + self.fillers  # not the texts that stand next to it
        replacement = _first_tokens(cycle(replacements), len(self.evidence))
        after = _first_tokens(chain([self.after], cycle(self.fillers)), distance - len(self.question))
        room = length - len(self.head) - len(self.evidence) - distance - len(self.answer)
        backwards = chain([self.before.flip(0)], cycle([text.flip(0) for text in reversed(self.fillers)]))
        before = _first_tokens(backwards, room).flip(0)
        shared = torch.cat([self.head, before])
        with_evidence = torch.cat([shared, self.evidence, after, self.question])
        without_evidence = torch.cat([shared, replacement, after, self.question])
        return _Prompts(with_evidence, without_evidence, len(shared))


def _first_tokens(texts: Iterable[Tensor], count: int) -> Tensor:
    """Return the first `count` tokens of the texts joined together."""
    pieces = []
    for text in texts:
        pieces.append(text[:count])
        count -= len(pieces[-1])
        if not count:
            break
    return torch.cat(pieces)


class RowTokenizer:
    """A tokenizer for rows that remembers the tokens of each text, since one context fills the prompts of many rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.head = torch.tensor(prefix_tokens(tokenizer, None), dtype=torch.int64)
        self._tokens: dict[str, Tensor] = {}

    def tokens(self, text: str) -> Tensor:
        """Return the token ids of a text as a (tokens,) int64 tensor."""
        if text not in self._tokens:
            self._tokens[text] = torch.tensor(encode(self.tokenizer, text), dtype=torch.int64)
        return self._tokens[text]

    def question_and_answer(self, row: TextRow) -> tuple[Tensor, Tensor]:
        """Return the token ids of a row's question and of the answer after it, as two (tokens,) int64 tensors."""
        question, answer = encode_answer(self.tokenizer, row.question, row.answer)
        return torch.tensor(question, dtype=torch.int64), torch.tensor(answer, dtype=torch.int64)

    def row(self, row: TextRow, texts: Sequence[str], enough: int) -> TokenRow:
        """Turn a row of text into token ids.

        Args:
            row: the row.
            texts: other texts that may fill up the row's prompts, in the order in which they are used. Texts that
                contain the evidence are left out.
            enough: the number of tokens at which no further text is taken.

        Raises:
            CorpusError: each of the texts contains the evidence, or is empty.
        """
        fillers = tuple(self._fillers(row.evidence, texts, enough))
        if not fillers:
            raise CorpusError(f"{row.name}: no other row has a context without its evidence; give text with --haystack")
        before, evidence, after = map(self.tokens, (row.before, row.evidence, row.after))
        return TokenRow(self.head, before, evidence, after, *self.question_and_answer(row), fillers)

    def _fillers(self, evidence: str, texts: Sequence[str], enough: int) -> Iterator[Tensor]:
        for text in texts:
            if enough <= 0:
                return
            if evidence in text:
                continue
            ids = self.tokens(text)
            if len(ids):
                enough -= len(ids)
                yield ids


def read_rows(data: Any) -> tuple[dict[str, TextRow], str]:
    """Return the rows of a data set by name, in order, and the data set's name in results.

    `data` is anything that `rope_ext_hf.reading.text.load.load` takes and that has the four columns context, evidence,
    question and answer.

    Raises:
        CorpusError: a column is missing or has no text, or the evidence does not stand exactly once in its context.
    """
    columns = [load(data, column=name) for name in _COLUMNS]
    rows = [_text_row(*cells) for cells in zip(*columns, strict=False)]
    return {row.name: row for row in rows}, columns[0].source


def _text_row(context: Any, evidence: Any, question: Any, answer: Any) -> TextRow:
    """Return a row made of four documents: one from each of the columns context, evidence, question and answer."""
    for column, document in zip(_COLUMNS, (context, evidence, question, answer), strict=True):
        if document.name != context.name or document.ids is not None or not utf8_bytes(document.name, document.text):
            raise CorpusError(f"{context.name}: the column {column!r} has no text")
    parts = context.text.split(evidence.text)
    if len(parts) != 2:
        times = "does not stand" if len(parts) == 1 else f"stands {len(parts) - 1} times"
        raise CorpusError(
            f"{context.name}: the evidence {short(evidence.text)!r} {times} in the context; it must stand "
            "there exactly once"
        )
    return TextRow(context.name, parts[0], evidence.text, parts[1], question.text, answer.text)


def docstring_rows() -> list[dict[str, str]]:
    """Return rows made of the docstrings of Python modules that the bundled model was not trained on.

    A context is the name of a class or function with its docstring. The docstring's first line is the evidence; the
    question is the name, and the answer is that line. If two docstrings have the same first line, they make no rows.
    """
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: dict[str, str] = {}
    for module in stdlib_held_out():
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                docstrings[node.name] = text
    first_lines = {name: text.partition("\n")[0] for name, text in docstrings.items()}
    occurrences = Counter(first_lines.values())
    return [
        {
            "context": f"{name}: {docstrings[name]}\n\n",
            "evidence": f"{name}: {line}",
            "question": f"\n\n{name}:",
            "answer": f" {line}",
        }
        for name, line in first_lines.items()
        if occurrences[line] == 1 and len(line) >= _LEAST_LINE
    ]

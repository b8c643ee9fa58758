"""RULER's two tasks of question answering, `qa_1` over SQuAD and `qa_2` over HotpotQA, as a suite for `ruler_table.py`.

The package has the 11 tasks that need no data set. Prompts and answers are those of `main` of
https://github.com/NVIDIA/RULER (Apache License 2.0, from which wording and order of draws are adapted) for the same
seed, tokenizer and length. The questions come from the Hub, or from the files that RULER downloads: give their paths in
RULER_SQUAD (dev-v2.0.json) and RULER_HOTPOTQA (hotpot_dev_distractor_v1.json).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rope_ext_hf.tools.suites.base import (
    PromptSettings,
    Sample,
    Suite,
    TooShortError,
    count_tokens,
    largest_fitting,
    register_suite,
)

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
TEMPLATE = (
    INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n" + INSTRUCTION + "\n\nQuestion: {query}"
)
PREFIX, BUDGET = " Answer:", 32
STEP = 10
"""The number of documents that a search begins with, and how many fewer are tried where a prompt is too long."""
TRIES = 100
"""Draws of a prompt with the fewest documents before the task counts as too long; upstream tries for ever."""


class Question(NamedTuple):
    """A question with its right answers, the documents that it is about, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    article: tuple[str, ...] = ()


Questions = tuple[list[Question], list[str]]
"""Questions, and all documents in order."""


def read_squad() -> Questions:
    """The answerable questions of SQuAD 2.0, development set."""
    if file := os.environ.get("RULER_SQUAD"):
        articles = json.loads(Path(file).read_text(encoding="utf-8"))["data"]
    else:
        articles = squad_articles(_from_hub("rajpurkar/squad_v2"))
    questions, documents = list[Question](), set[str]()
    for article in articles:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        documents.update(texts)
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            others = tuple(text for text in texts if text != own)
            questions += [
                Question(each["question"], tuple(answer["text"] for answer in each["answers"]), (own,), others)
                for each in paragraph["qas"]
                if not each["is_impossible"]
            ]
    return questions, sorted(documents)


def squad_articles(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows of the Hub's squad_v2, one a question, as the articles of SQuAD's own file."""
    titles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        texts = row["answers"]["text"]
        question = {
            "question": row["question"],
            "answers": [{"text": each} for each in texts],
            "is_impossible": not texts,
        }
        titles.setdefault(row["title"], {}).setdefault(row["context"], []).append(question)
    return [{"paragraphs": [{"context": text, "qas": qas} for text, qas in of.items()]} for of in titles.values()]


def read_hotpotqa() -> Questions:
    """The questions of HotpotQA, development set with distractors."""
    if file := os.environ.get("RULER_HOTPOTQA"):
        rows: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    else:
        rows = _from_hub("hotpotqa/hotpot_qa", "distractor")
    questions = []
    for row in rows:
        context = row["context"]
        pairs = context if isinstance(context, list) else zip(context["title"], context["sentences"], strict=True)
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in pairs)
        questions.append(Question(row["question"], (row["answer"],), documents))
    return questions, sorted({text for each in questions for text in each.documents})


def _from_hub(*name: str) -> Any:
    from datasets import load_dataset

    return load_dataset(*name, split="validation")


@cache
def _questions(task: str) -> Questions:
    return {"qa_1": read_squad, "qa_2": read_hotpotqa}[task]()


@register_suite
class RulerQA(Suite):
    """RULER's tasks of question answering."""

    name = "ruler-qa"
    tasks = ("qa_1", "qa_2")
    seed = 42

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        questions, documents = _questions(task)
        index = {text: at for at, text in enumerate(documents)}
        draws = random.Random(wanted.seed)

        def prompt(at: int, count: int) -> str:
            question = questions[at]
            own, more = ([index[text] for text in some] for some in (question.documents, question.article))
            if count >= len(documents):
                shown = (documents * -(-count // len(documents)))[:count]
            else:
                if count - len(own) > len(more):
                    known = {*own, *more}
                    others = [each for each in range(len(documents)) if each not in known]
                    chosen = own + more + draws.sample(others, count - len(own) - len(more))
                else:
                    chosen = own + draws.sample(more, count - len(own))
                shown = [documents[each] for each in chosen]
            random.Random(wanted.seed).shuffle(shown)
            context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(shown, 1))
            return TEMPLATE.format(context=context, query=question.text) + PREFIX

        def length(text: str) -> int:
            return count_tokens(wanted.tokenizer, text) + BUDGET

        each = (length(prompt(0, STEP)) - BUDGET) / STEP
        most = max(int(wanted.room / each * 3), 2 * STEP)
        size = largest_fitting(STEP, most, lambda count: length(prompt(0, count)) <= wanted.room) or STEP
        samples = []
        for at in range(wanted.count):
            count = size
            for _ in range(TRIES + size // STEP):
                if len(questions[at].documents) <= count and length(text := prompt(at, count)) <= wanted.room:
                    cut = text.rfind(PREFIX)
                    samples.append(Sample(text[:cut], text[cut:], questions[at].answers, BUDGET, length(text)))
                    break
                if count > STEP:
                    count -= STEP
            else:
                raise TooShortError(task, wanted.length, None)
        return samples

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """Return 1.0 if the answer contains any of the references, else 0.0: RULER's `string_match_part`."""
        return float(any(reference.lower() in answer.lower() for reference in references))

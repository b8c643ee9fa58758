"""The text and the tokenizers that the stored hashes of RULER's prompts were made with."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from rope_ext_hf.hub import load_tokenizer

LETTERS = "etaoinshrdlucmfwypvbgk"


def haystack(sentences: int = 600) -> str:
    """Prose of made-up words; nltk cuts it into the same sentences with its English model and without one."""
    rng = random.Random("haystack")
    words = ["".join(rng.choices(LETTERS, k=rng.randint(4, 9))) for _ in range(400)]
    return "\n".join(
        " ".join(rng.choices(words, k=rng.randint(5, 14))).capitalize() + rng.choice([".", ".", "?", "!"])
        for _ in range(sentences)
    )


def squad() -> dict[str, Any]:
    """Articles of made-up sentences in the form of SQuAD 2.0; a third of the questions has no answer."""
    rng = random.Random("squad")
    return {
        "data": [
            {
                "title": f"article {number}",
                "paragraphs": [
                    {
                        "context": text,
                        "qas": [
                            {
                                "question": f"Which word follows {text.split()[at]}?",
                                "answers": [] if at == 1 else [{"text": text.split()[at + n]} for n in (1, 2)],
                                "is_impossible": at == 1,
                            }
                            for at in range(3)
                        ],
                    }
                    for text in _paragraphs(rng, rng.randint(1, 8))
                ],
            }
            for number in range(12)
        ]
    }


def hotpotqa() -> list[dict[str, Any]]:
    """Questions over ten made-up documents each, in the form of HotpotQA."""
    rng = random.Random("hotpotqa")
    return [
        {
            "question": f"Which word is the first of document {number} 0?",
            "answer": texts[0].split()[0],
            "context": [[f"Document {number} {place}", [f"{text} ", "Then."]] for place, text in enumerate(texts)],
        }
        for number in range(20)
        for texts in [_paragraphs(rng, 10)]
    ]


def _paragraphs(rng: random.Random, count: int) -> list[str]:
    return [" ".join(rng.choices(haystack().split("\n"), k=rng.randint(1, 3))) for _ in range(count)]


def make_tokenizer(name: str) -> Any:
    """`bytes`: the bundled model's; `pieces`: words in pieces of four letters, each an unknown token."""
    if name == "bytes":
        return load_tokenizer("reference")
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"\s?\w{1,4}|\s|[^\w\s]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")

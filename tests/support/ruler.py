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


def make_tokenizer(name: str) -> Any:
    """`bytes`: the bundled model's; `pieces`: words in pieces of four letters, each an unknown token."""
    if name == "bytes":
        return load_tokenizer("reference")
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"\s?\w{1,4}|\s|[^\w\s]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")

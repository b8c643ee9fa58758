"""A small model and texts in a folder, as commands take them."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from rope_ext_hf.reference import path as reference
from tests.support.models import build

__all__ = ["write_inputs", "write_model"]


def write_model(folder: Path) -> Path:
    """A tiny Llama with random weights and the tokenizer of bytes; the folder again."""
    build("llama", vocab_size=259).save_pretrained(folder)
    AutoTokenizer.from_pretrained(reference()).save_pretrained(folder)
    return folder


def write_inputs(root: Path, *, texts: int = 12, held_out: int = 3) -> None:
    """The folders "model", "texts" and "held-out", with so many texts of about 1,000 bytes in each."""
    write_model(root / "model")
    for folder, numbers in (("texts", range(texts)), ("held-out", range(texts, texts + held_out))):
        (root / folder).mkdir()
        for number in numbers:
            text = "".join(f"def f{i}(x):\n    return x * {i * number % 97}\n" for i in range(30))
            (root / folder / f"{number}.txt").write_text(text, encoding="utf-8")

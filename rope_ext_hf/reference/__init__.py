"""The bundled pretrained model: a small Llama over bytes, trained at 256 tokens on Python's standard library.

from rope_ext_hf.reference import path
model = AutoModelForCausalLM.from_pretrained(path())
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder_of", "path"]


def path() -> Path:
    """Return the folder of the model, its tokenizer and its model card; it loads with plain transformers."""
    return Path(__file__).parent


def folder_of(name: str | Path) -> str | Path:
    """Return the folder of the bundled model for the name "reference", and any other name as it is."""
    return path() if str(name) == "reference" else name

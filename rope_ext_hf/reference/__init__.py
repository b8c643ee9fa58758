"""The bundled pretrained model: a small Llama over bytes, trained at 256 tokens on Python's standard library.

from rope_ext_hf.reference import path
model = AutoModelForCausalLM.from_pretrained(path())
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder_of", "path"]


def path() -> Path:
    """Return the folder with the bundled model, its tokenizer and its model card; plain transformers can load it."""
    return Path(__file__).parent


def folder_of(name: str | Path) -> str | Path:
    """Return the folder of the bundled model if `name` is "reference"; any other name is returned as it is."""
    return path() if str(name) == "reference" else name

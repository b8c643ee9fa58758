"""The bundled pretrained model: a small Llama over bytes, trained at 256 tokens on Python's standard library.

from rope_ext_hf.reference import path
model = AutoModelForCausalLM.from_pretrained(path())
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder_of", "path"]


def path() -> Path:
    """The folder of the model, tokenizer and model card; it loads with plain transformers."""
    return Path(__file__).parent


def folder_of(name: str | Path) -> str | Path:
    """The folder that "reference" means; any other name as it is."""
    return path() if str(name) == "reference" else name

"""ms-swift: the model that it makes of a folder, as `swift sft --model FOLDER --max_length N` does."""

from __future__ import annotations

import tempfile
from importlib.metadata import version as installed
from typing import Any

import loaded
from swift.arguments import BaseArguments
from swift.utils import get_logger

get_logger().setLevel("ERROR")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt_oss", "deepseek_v3")
"""Families whose names are also model types of ms-swift: a user states one where several match."""


def version() -> str:
    return f"ms-swift {installed('ms-swift')}, transformers {installed('transformers')}"


def load(config: loaded.Config, **arguments: Any) -> Any:
    """Return the model of a folder with this config, under arguments of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        family = loaded.write(config, folder)
        if family not in FAMILIES:
            raise NotImplementedError
        given = BaseArguments(model=folder, model_type=family, template="dummy", **arguments)
        return given.get_model_processor()[0]


inv_freq, magnitude = loaded.functions(
    lambda config, context_length, original_length: load(config, max_length=context_length)
)

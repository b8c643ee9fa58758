"""LLaMA-Factory: the model that it makes of a folder, as `llamafactory-cli train` does with `cutoff_len`."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version as installed
from typing import Any

os.environ["LLAMAFACTORY_VERBOSITY"] = "ERROR"

import loaded
from llamafactory.hparams import get_train_args
from llamafactory.model import load_model, load_tokenizer


def version() -> str:
    return f"LLaMA-Factory {installed('llamafactory')}, transformers {installed('transformers')}"


def load(config: loaded.Config, cutoff_len: int, **arguments: Any) -> Any:
    """Return the model of a folder with this config, under arguments of a file of settings."""
    with tempfile.TemporaryDirectory() as folder:
        loaded.write(config, folder)
        usual = {"stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "any", "template": "default"}
        usual |= {"model_name_or_path": folder, "output_dir": f"{folder}/made", "report_to": "none"}
        model, _, _, tuned, _ = get_train_args(usual | {"cutoff_len": cutoff_len} | arguments)
        return load_model(load_tokenizer(model)["tokenizer"], model, tuned, is_trainable=True)


inv_freq, magnitude = loaded.functions(lambda config, context_length, original_length: load(config, context_length))

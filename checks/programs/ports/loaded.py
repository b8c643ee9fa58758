"""A small folder of transformers for programs that load one, and the frequencies of the model that they make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
Config = dict[str, Any]
SAME_ROTATION = {"internlm3": "llama"}
"""Families that older releases of transformers lack, and another that rotates in the same way."""
SOME_LAYERS = ("gemma3_text", "olmo3")
"""Families that scale some of their layers, which no word on a command line asks for."""


def write(config: Config, folder: str) -> str:
    """Write a folder with this config.json, random weights and a tokenizer, and return the family of the model."""
    name: str = config["model_type"]
    family = SAME_ROTATION.get(name, name)
    if family not in CONFIG_MAPPING:
        raise NotImplementedError
    config = config | {"model_type": family}
    sizes = {key: value for key, value in config.items() if not key.startswith("rope_")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    model.save_pretrained(folder)
    given = config | {"architectures": [type(model).__name__], "dtype": "float32"}
    Path(folder, "config.json").write_text(json.dumps(given), encoding="utf-8")
    words = WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0")
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
    return family


def without_scaling(config: Config, original_length: int) -> tuple[Config, str]:
    """Return a config as it was before the extension, and the kind of scaling that extended it."""
    if config["model_type"] in SOME_LAYERS:
        raise NotImplementedError
    kept, rope = config | {"rope_scaling": None}, config.get("rope_parameters") or {}
    settings = config.get("rope_scaling") or rope
    if rope:
        kept["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    kind = settings.get("rope_type", settings.get("type", "default"))
    return kept | {"max_position_embeddings": original_length}, kind


def functions(make: Callable[[Config, int, int], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions `inv_freq` and `magnitude` of a port.

    `make` returns a model of transformers for a config, the length that a user asks for, and the original length.
    """

    @cache
    def model(written: str, *lengths: int) -> Any:
        return make(json.loads(written), *lengths)

    def first_angles(config: Config, lengths: tuple[int, int], layer_type: str | None, length: int | None) -> Any:
        """Return cos and sin of position 1, (pairs,) each, in a text of this length."""
        rotary = model(json.dumps(config), *lengths).base_model.rotary_emb
        several = hasattr(rotary, f"{layer_type}_inv_freq")
        pairs = getattr(rotary, f"{layer_type}_inv_freq" if several else "inv_freq").numel()
        positions = torch.tensor([[1, (length or 2) - 1]])
        tables = rotary(torch.zeros(1), positions, **({"layer_type": layer_type} if several else {}))
        return (table[0, 0, :pairs].double() for table in tables)

    def inv_freq(
        config: Config, context_length: int, original_length: int, layer_type: str | None = None,
        length: int | None = None,
    ) -> list[float]:  # fmt: skip
        cos, sin = first_angles(config, (context_length, original_length), layer_type, length)
        return list(torch.arctan2(sin, cos).tolist())

    def magnitude(
        config: Config, context_length: int, original_length: int, layer_type: str | None = None,
        length: int | None = None,
    ) -> float:  # fmt: skip
        cos, sin = first_angles(config, (context_length, original_length), layer_type, length)
        return float(torch.hypot(cos, sin)[0])

    return inv_freq, magnitude

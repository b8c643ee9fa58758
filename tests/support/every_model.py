"""Every language model class of the installed transformers, and a tiny random model of each.

    for entry in entries():
        model = build(entry)

Sizes and the settings of single model types stand in every_model.toml.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from tests.support.tiers import needs_family

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""transformers' tables of classes; a model type counts under the first that has it."""

ROTARY = re.compile(r"rotary|rope(?!r)|roformersinusoidal", re.IGNORECASE)
"""The name of a class that computes rotary embeddings."""


@dataclass(frozen=True)
class Entry:
    """One model class: the model type of its config, the class, and the table that has it."""

    model_type: str
    name: str
    kind: str


@cache
def data() -> dict[str, Any]:
    """The tables of every_model.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def entries() -> list[Entry]:
    """Every class of the tables, and of the table of bare models the encoders of text named in every_model.toml."""
    every: dict[str, Entry] = {}
    for kind, table in KINDS.items():
        for model_type, name in getattr(modeling_auto, table).items():
            if kind != "base" or model_type in data()["base"]:
                first = name if isinstance(name, str) else name[0]
                every.setdefault(f"{model_type} {first}", Entry(model_type, first, kind))
    return list(every.values())


def fields_of(cls: type) -> set[str]:
    """Return the settings that a config class takes: its fields, or in 5.0 the arguments of its constructor.

    There some classes do not name the padding token, without which their models cannot be built.
    """
    if is_dataclass(cls):
        return {item.name for item in fields(cls)}
    named = set(inspect.signature(cls).parameters)
    return named | {"pad_token_id"} if "vocab_size" in named else named


def settings(cls: type, of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Small settings for a config class, those of the configs inside it too.

    Args:
        of: what takes precedence.
    """
    known = fields_of(cls) | set(getattr(cls, "attribute_map", ()))
    chosen = {key: value for key, value in data()["sizes"].items() if key in known}
    own = data()["models"].get(cls.model_type, {})  # type: ignore[attr-defined]
    try:
        default = cls()
    except Exception:  # a config that cannot be built without arguments: every_model.toml has them
        default = None
    if "kv_lora_rank" in known:  # latent attention has a key for every query
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    if (rope := getattr(default, "rope_parameters", None)) and "rope_parameters" in known:
        if cls.model_type in data()["sections"] and "mrope_section" not in rope:  # type: ignore[attr-defined]
            rope = {**rope, "mrope_section": []}
        chosen["rope_parameters"] = _small_rope(rope, chosen | own, getattr(default, "partial_rotary_factor", None))
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if (
        kinds
        and "num_hidden_layers" in chosen
        and isinstance(default.layer_types, list)
        and "layer_types" in fields_of(cls)
    ):
        kinds = sorted(kinds, key=lambda kind: kind == "full_attention")
        kinds = kinds if len(kinds) > 1 else kinds * chosen["num_hidden_layers"]
        chosen |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name in getattr(cls, "sub_configs", ()):
        part = getattr(default, name, None)
        stated = own.get(name, {}).get("model_type")
        if part is not None or stated:
            kind: Any = transformers.CONFIG_MAPPING[stated] if stated else type(part)
            chosen[name] = settings(kind) | {"model_type": kind.model_type}
    return merged(merged(chosen, own), of or {})


def _small_rope(rope: Mapping[str, Any], sizes: Mapping[str, Any], partial: float | None) -> dict[str, Any]:
    """A config's rope settings for a small head and a short context: YaRN x 4 over 16 tokens, sections of few pairs."""
    small = {}
    for key, value in rope.items():
        small[key] = _small_rope(value, sizes, partial) if isinstance(value, Mapping) else value
    if "mrope_section" in rope:
        width = sizes.get("qk_rope_head_dim") or sizes.get("head_dim") or 16
        pairs = int(width * (rope.get("partial_rotary_factor") or partial or 1.0)) // 2
        third = pairs // 3
        small["mrope_section"] = [pairs - 2 * third, third, third]
    if "original_max_position_embeddings" in rope:
        small |= {"original_max_position_embeddings": 16, "factor": 4.0}
    return small


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The second over the first, tables inside them alike; "none" there leaves a key at None."""
    result = dict(one)
    for key, value in other.items():
        if isinstance(value, Mapping):
            inside = isinstance(result.get(key), Mapping) and "rope" not in key
            result[key] = merged(result[key] if inside else {}, value)
        else:
            result[key] = None if value == "none" else value
    return result


def stand_in_for_timm() -> None:
    """Let the models whose vision tower comes from timm be built without it; text does not reach that tower."""
    from transformers.models.timm_wrapper import modeling_timm_wrapper

    if not modeling_timm_wrapper.is_timm_available():
        modeling_timm_wrapper.requires_backends = lambda *_: None
        modeling_timm_wrapper._create_timm_model_with_error_handling = lambda *_, **__: nn.Linear(3, 64)


def tiny(model_type: str, **overrides: Any) -> Any:
    """A tiny causal language model of a type, or the first class that transformers' tables have of it."""
    needs_family(model_type)
    return build(next(entry for entry in entries() if entry.model_type == model_type), **overrides)


def build(entry: Entry, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model in float32 and eval mode, every parameter random.

    Args:
        **overrides: settings of its config.
    """
    stand_in_for_timm()
    config_class = transformers.CONFIG_MAPPING[entry.model_type]
    config = config_class(**settings(config_class, merged(data()["classes"].get(entry.name, {}), overrides)))
    cls = getattr(transformers, entry.name)
    parts = [config, *(getattr(config, name) for name in getattr(config_class, "sub_configs", ()))]
    config = next((part for part in parts if isinstance(part, cls.config_class)), config)
    draws = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():  # RoFormer's table of angles is no weight
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def inputs(entry: Entry, length: int, seed: int = 1) -> dict[str, Any]:
    """What a model reads: token ids (1, length), and what else every_model.toml names for it."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (1, length), generator=draws)
    named = data()["inputs"].get(entry.model_type, {"input_ids": "ids"})
    made: dict[str, Any] = {}
    for name, value in named.items():
        if value == "ids":
            made[name] = ids
        elif value == "ones":
            made[name] = torch.ones(1, length, 1)
        elif isinstance(value, dict) and "codes" in value:  # a number of codes beside each token
            made[name] = torch.randint(3, 30, (1, length, value["codes"]), generator=draws)
        elif isinstance(value, dict):  # a number of frames for each token
            made[name] = torch.randn((1, length * value["frames"], data()["sizes"]["hidden_size"]), generator=draws)
        else:
            made[name] = torch.randn(value, generator=draws) if isinstance(value, list) else value
    return made


def image_inputs(entry: Entry, seed: int = 1) -> dict[str, Any] | None:
    """What a model reads of one image beside its tokens; None where every_model.toml does not say.

    Returns:
        Random numbers and integers by the names of the model's arguments; "ids", the tokens that stand for the image in
        the text; and "token_types", the argument that says which tokens these are, where the model takes one.
    """
    named = next((table for table in data()["images"] if entry.name in table["classes"]), None)
    if named is None:
        return None
    draws, sizes = torch.Generator().manual_seed(seed), data()["sizes"]
    ids = [sizes["vision_start_token_id"], *[sizes["image_token_id"]] * named["tokens"], sizes["vision_end_token_id"]]
    made: dict[str, Any] = {"ids": torch.tensor(ids)}
    if entry.name in data()["token_types"]:
        made["token_types"] = data()["token_types"][entry.name]
    for name, value in named["inputs"].items():
        shape = isinstance(value[0], int)
        made[name] = torch.randn(value, generator=draws) if shape else torch.tensor(value)
    return made


def text_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that belong to its own config or to that of its text part."""
    config: Any = model.config
    types = {config.model_type, config.get_text_config().model_type}
    chosen: list[nn.Module] = []
    type_of: dict[str, str] = {}
    for path, module in model.named_modules():
        own = module.__dict__.get("config")
        above = type_of.get(path.rpartition(".")[0], config.model_type)
        type_of[path] = getattr(own, "model_type", None) or above
        if type_of[path] in types:
            chosen.append(module)
    return chosen


def holds_rope(model: nn.Module) -> bool:
    """Whether a part of the model that reads text rotates, by names of its modules and buffers alone."""
    return any(
        ROTARY.search(type(module).__name__)
        or any(
            name.endswith("inv_freq") or name == "embed_positions" for name, _ in module.named_buffers(recurse=False)
        )
        for module in text_modules(model)
    )

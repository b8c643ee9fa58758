"""The installed transformers as a port: rotary and attention classes of its models, and the tiny models."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit("transformers computes with torch, which is not installed: pip install torch") from error
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.simplefilter("ignore")
torch.set_num_threads(1)  # the models are tiny
Config = dict[str, Any]


def version() -> str:
    """Return the name and the version of the program."""
    return f"transformers {transformers.__version__}"


@cache
def _model(config_text: str) -> Any:
    """Return a model with random weights and the sizes of a config, which is given as JSON text."""
    config = json.loads(config_text)
    if config["model_type"] not in CONFIG_MAPPING:
        raise NotImplementedError
    text = AutoConfig.for_model(config.pop("model_type"), **config).get_text_config()
    return AutoModel.from_config(text).eval()


def _attention(config: Config, layer_type: str | None) -> Any:
    """Return the attention of the first layer of a type, or without a type of the last layer that has attention."""
    model = _model(json.dumps(config))
    attentions = {
        int(name.split(".")[-2]): module
        for name, module in model.named_modules()
        if name.endswith((".self_attn", ".attention"))
    }
    types = getattr(model.config, "layer_types", None)
    return attentions[types.index(layer_type) if layer_type and types else max(attentions)]


def _rotary(config: Config, layer_type: str | None) -> tuple[Any, Config]:
    """Return a rotary module that remembers no earlier calls, and the keyword arguments of its forward."""
    model = _model(json.dumps(config))
    names = ("rotary_emb_local", "rotary_embs", "rotary_emb")  # the first two: transformers 4
    first, several, usual = (getattr(model, name, None) for name in names)
    module = usual
    if several is not None:
        module = several[layer_type]
    elif first is not None and layer_type == "sliding_attention":
        return first, {}
    fresh = type(module)(module.config) if several is None else module
    return fresh, {"layer_type": layer_type} if hasattr(fresh, f"{layer_type}_inv_freq") else {}


def _forward(config: Config, positions: torch.Tensor, layer_type: str | None, length: int | None) -> Any:
    """Return the rotary module after a forward, the forward's keyword arguments, and its cos and sin.

    `positions` are (axes, tokens), and lie in a row of `length` tokens.
    """
    module, keywords = _rotary(config, layer_type)
    if length is not None:
        positions = torch.cat([positions, torch.full_like(positions[:, :1], length - 1)], 1)
    has_axes = "mrope_section" in str(config)
    return module, keywords, module(torch.zeros(1), positions[:, None] if has_axes else positions[:1], **keywords)


def inv_freq(config: Config, layer_type: str | None = None, length: int | None = None) -> list[float]:
    """Return the frequencies in the buffer of the rotary module."""
    module, keywords, _ = _forward(config, torch.zeros(3, 1, dtype=torch.int64), layer_type, length)
    prefix = f"{layer_type}_" if keywords else ""
    return list(getattr(module, f"{prefix}inv_freq").double().tolist())


def magnitude(config: Config, layer_type: str | None = None) -> float:
    """Return the attention scaling of the rotary module."""
    module, keywords = _rotary(config, layer_type)
    return float(getattr(module, f"{layer_type}_attention_scaling" if keywords else "attention_scaling"))


def softmax_scale(config: Config, layer_type: str | None = None) -> float:
    """Return the scaling of an attention module."""
    attention = _attention(config, layer_type)
    if not hasattr(attention, "scaling"):  # the forward computes it
        raise NotImplementedError
    return float(attention.scaling)


def rotate(
    config: Config, vector: list[float], position: int, layer_type: str | None = None, length: int | None = None
) -> list[float]:
    """Return a vector as the function rotates it that the attention module calls."""
    at = torch.full((3, 1), position)
    rows: torch.Tensor = _rotated(config, torch.tensor([vector]), at, layer_type, length)
    return list(rows[:, 0].double().flatten().tolist())


def _rotated(
    config: Config, vectors: torch.Tensor, at: torch.Tensor, layer_type: str | None, length: int | None
) -> torch.Tensor:
    """Return vectors, (vectors, width), rotated for positions (axes, tokens): (vectors, tokens, width)."""
    home = sys.modules[type(_attention(config, layer_type)).__module__]
    tables = _forward(config, at, layer_type, length)[2]
    tokens = at.shape[1]
    heads = vectors[None, :, None].expand(-1, -1, tokens, -1)  # (1, heads, tokens, width)
    if isinstance(tables, torch.Tensor):  # of complex numbers
        tables, dim = tables[:, :tokens], 2 * tables.shape[-1]
        transposed = "llama4" in home.__name__  # its function takes (1, tokens, heads, width)
        part = heads[..., :dim].transpose(1, 2) if transposed else heads[..., :dim]
        turned = home.apply_rotary_emb(part.contiguous(), part.contiguous(), tables)[0]
        turned = turned.transpose(1, 2) if transposed else turned
    else:
        cos, sin = (table[..., :tokens, :] for table in tables)
        dim = min(heads.shape[-1], 2 * cos.shape[-1] if "gpt_oss" in home.__name__ else cos.shape[-1])
        apply, sections = getattr(home, "apply_rotary_pos_emb", None), []
        if getattr(home, "apply_multimodal_rotary_pos_emb", None) is not None:  # transformers 4
            apply = home.apply_multimodal_rotary_pos_emb
            sections = [config["text_config"]["rope_scaling"]["mrope_section"]]
        if hasattr(home, "apply_rotary_pos_emb_interleave"):
            apply = home.apply_rotary_pos_emb_interleave
        part = heads[..., :dim]
        single = "k" not in inspect.signature(apply).parameters
        turned = apply(part, cos, sin) if single else apply(part, part, cos, sin, *sections)[0]
    return torch.cat([turned, heads[..., dim:]], -1)[0]


def cos_sin(
    config: Config, positions: list[Any], layer_type: str | None = None, length: int | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Return cos and sin as components of rotated unit vectors: along themselves, and along the pair's other dim."""
    rows = torch.tensor(positions)
    at = rows.T if rows.ndim == 2 else rows[None].expand(3, -1)
    pairs = len(inv_freq(config, layer_type, length))
    width = 2 * pairs
    at_one = _rotated(config, torch.eye(width), torch.ones(3, 1, dtype=torch.int64), layer_type, length)[:, 0]
    # The distance of the two dims of a pair, in the output and in the input; DeepSeek reorders dims in between.
    output_stride = pairs if abs(float(at_one[0, pairs])) > 1e-3 else 1
    input_stride = output_stride
    if pairs > 1 and output_stride != 1 and abs(float(at_one[1, output_stride])) > 1e-3:
        input_stride = 1
    inputs = [pair if input_stride == pairs else 2 * pair for pair in range(pairs)]
    outputs = [pair if output_stride == pairs else 2 * pair for pair in range(pairs)]
    turned = _rotated(config, torch.eye(width)[inputs], at, layer_type, length).double()
    cos = torch.stack([turned[pair, :, dim] for pair, dim in enumerate(outputs)], 1)
    sin = torch.stack([turned[pair, :, dim + output_stride] for pair, dim in enumerate(outputs)], 1)
    return cos.tolist(), sin.tolist()


@cache
def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(folder: Path, rows: list[list[int]], chunks: list[int] | None = None) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    model = _loaded(folder)
    if getattr(model.model.rotary_emb, "rope_type", None) == "dynamic":  # it remembers the longest input
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, end, result = None, 0, None
    for size in chunks or [longest]:
        part = slice(end, end + size)
        result = model(
            input_ids=ids[:, part], attention_mask=mask[:, : end + size], position_ids=positions[:, part],
            past_key_values=cache, use_cache=bool(chunks),
        )  # fmt: skip
        cache, end = result.past_key_values, end + size
    assert result is not None
    return result.logits[:, -1].double().numpy()

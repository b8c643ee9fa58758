"""The installed transformers as a port: the rotary and attention classes of its models, and the models of models/."""

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
    raise SystemExit("transformers installs without torch, and computes with it alone: pip install torch") from error
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
    """The program and its version."""
    return f"transformers {transformers.__version__}"


@cache
def _model(written: str) -> Any:
    """A model with the sizes of a config as JSON."""
    config = json.loads(written)
    if config["model_type"] not in CONFIG_MAPPING:
        raise NotImplementedError
    text = AutoConfig.for_model(config.pop("model_type"), **config).get_text_config()
    return AutoModel.from_config(text).eval()


def _attention(config: Config, layer_type: str | None) -> Any:
    """The attention of a layer of a type; of Qwen3.5, of a layer that rotates."""
    model = _model(json.dumps(config))
    attentions = {name: each for name, each in model.named_modules() if name.endswith((".self_attn", ".attention"))}
    types = getattr(model.config, "layer_types", None)
    index = types.index(layer_type) if layer_type and types else max(int(name.split(".")[-2]) for name in attentions)
    return next(each for name, each in attentions.items() if int(name.split(".")[-2]) == index)


def _rotary(config: Config, layer_type: str | None) -> tuple[Any, Config]:
    """A rotary module without a memory of earlier calls, and what its forward takes beside positions."""
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
    """The module after a forward, its keywords, and cos and sin of positions (axes, tokens) in a row of a length."""
    module, more = _rotary(config, layer_type)
    if length is not None:
        positions = torch.cat([positions, torch.full_like(positions[:, :1], length - 1)], 1)
    several = "mrope_section" in str(config)
    return module, more, module(torch.zeros(1), positions[:, None] if several else positions[:1], **more)


def inv_freq(config: Config, layer_type: str | None = None, length: int | None = None) -> list[float]:
    """The buffer of the rotary module."""
    module, more, _ = _forward(config, torch.zeros(3, 1, dtype=torch.int64), layer_type, length)
    prefix = f"{layer_type}_" if more else ""
    return list(getattr(module, f"{prefix}inv_freq").double().tolist())


def magnitude(config: Config, layer_type: str | None = None) -> float:
    """The attention scaling of the rotary module."""
    module, more = _rotary(config, layer_type)
    return float(getattr(module, f"{layer_type}_attention_scaling" if more else "attention_scaling"))


def softmax_scale(config: Config, layer_type: str | None = None) -> float:
    """The scaling of an attention module."""
    attention = _attention(config, layer_type)
    if not hasattr(attention, "scaling"):  # it is computed in the forward
        raise NotImplementedError
    return float(attention.scaling)


def rotate(
    config: Config, vector: list[float], position: int, layer_type: str | None = None, length: int | None = None
) -> list[float]:
    """A vector by the function that the attention module calls."""
    at = torch.full((3, 1), position)
    rows: torch.Tensor = _rotated(config, torch.tensor([vector]), at, layer_type, length)
    return list(rows[:, 0].double().flatten().tolist())


def _rotated(
    config: Config, vectors: torch.Tensor, at: torch.Tensor, layer_type: str | None, length: int | None
) -> torch.Tensor:
    """(vectors, width) at positions (axes, tokens) -> (vectors, tokens, width)."""
    home = sys.modules[type(_attention(config, layer_type)).__module__]
    tables = _forward(config, at, layer_type, length)[2]
    tokens = at.shape[1]
    heads = vectors[None, :, None].expand(-1, -1, tokens, -1)  # (1, heads, tokens, width)
    if isinstance(tables, torch.Tensor):  # complex numbers
        tables, dim = tables[:, :tokens], 2 * tables.shape[-1]
        across = "llama4" in home.__name__  # (1, tokens, heads, width) there
        part = heads[..., :dim].transpose(1, 2) if across else heads[..., :dim]
        turned = home.apply_rotary_emb(part.contiguous(), part.contiguous(), tables)[0]
        turned = turned.transpose(1, 2) if across else turned
    else:
        cos, sin = (each[..., :tokens, :] for each in tables)
        dim = min(heads.shape[-1], 2 * cos.shape[-1] if "gpt_oss" in home.__name__ else cos.shape[-1])
        apply, more = getattr(home, "apply_rotary_pos_emb", None), []
        if getattr(home, "apply_multimodal_rotary_pos_emb", None) is not None:  # transformers 4
            apply = home.apply_multimodal_rotary_pos_emb
            more = [config["text_config"]["rope_scaling"]["mrope_section"]]
        if hasattr(home, "apply_rotary_pos_emb_interleave"):
            apply = home.apply_rotary_pos_emb_interleave
        part = heads[..., :dim]
        single = "k" not in inspect.signature(apply).parameters
        turned = apply(part, cos, sin) if single else apply(part, part, cos, sin, *more)[0]
    return torch.cat([turned, heads[..., dim:]], -1)[0]


def cos_sin(
    config: Config, positions: list[Any], layer_type: str | None = None, length: int | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """What becomes of unit vectors: their components along themselves and along the second member of their pair."""
    rows = torch.tensor(positions)
    at = rows.T if rows.ndim == 2 else rows[None].expand(3, -1)
    pairs = len(inv_freq(config, layer_type, length))
    width = 2 * pairs
    one = _rotated(config, torch.eye(width), torch.ones(3, 1, dtype=torch.int64), layer_type, length)[:, 0]
    apart = pairs if abs(float(one[0, pairs])) > 1e-3 else 1  # where the first vector turns to
    given = 1 if pairs > 1 and abs(float(one[1, apart])) > 1e-3 and apart != 1 else apart  # DeepSeek reorders
    inputs = [i if given == pairs else 2 * i for i in range(pairs)]
    outputs = [i if apart == pairs else 2 * i for i in range(pairs)]
    turned = _rotated(config, torch.eye(width)[inputs], at, layer_type, length).double()
    cos = torch.stack([turned[i, :, j] for i, j in enumerate(outputs)], 1)
    sin = torch.stack([turned[i, :, j + apart] for i, j in enumerate(outputs)], 1)
    return cos.tolist(), sin.tolist()


@cache
def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(folder: Path, rows: list[list[int]], chunks: list[int] | None = None) -> Any:
    """Of the last token of each row, (rows, vocabulary); a fresh model each, as some remember the longest input."""
    model = _loaded(folder)
    if getattr(model.model.rotary_emb, "rope_type", None) == "dynamic":
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

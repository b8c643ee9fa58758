"""Small model folders, their conversion by hand, and the rotation that their class does not run."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile
from tests.support.models import modeling
from tests.support.oracles import Pairing, rotate

OTHER: dict[str, Pairing] = {"half": "interleaved", "interleaved": "half"}


def convert(src: Path, dst: Path, to: str, **options: Any) -> rope.ConversionReport:
    """`convert_checkpoint`, without its warning of weights that transformers does not run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not run")
        return rope.convert_checkpoint(src, dst, to, **options)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of every tensor that is read from a safetensors file from now on."""
    names: list[str] = []
    for member in ("read_bits", "read_float32", "moved_rows"):
        read = getattr(SafetensorsFile, member)

        def watched(file: SafetensorsFile, name: str, *order: Any, read: Any = read) -> Any:
            names.append(name)
            return read(file, name, *order)

        monkeypatch.setattr(SafetensorsFile, member, watched)
    return names


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def untouched(parent: Path, dst: str = "converted") -> bool:
    """Whether nothing of a destination is there, begun or whole."""
    return not [path for path in parent.iterdir() if dst in path.name]


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


HEADS, KEYS, DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
}


def llama_tensors(prefix: str = "model.", dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random bytes of any dtype, in the order that they would have on disk."""
    draws = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        if dtype == torch.float32:
            return torch.randn(*shape, generator=draws) / 8
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape, size), generator=draws, dtype=torch.uint8)
        return raw.view(dtype)[..., 0].contiguous()

    tensors = {f"{prefix}embed_tokens.weight": some(97, HIDDEN)}
    for layer in range(LAYERS):
        for module, rows, columns in (
            ("self_attn.q_proj", HEADS * DIM, HIDDEN),
            ("self_attn.k_proj", KEYS * DIM, HIDDEN),
            ("self_attn.v_proj", KEYS * DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * DIM),
            ("mlp.gate_proj", 96, HIDDEN),
            ("mlp.up_proj", 96, HIDDEN),
            ("mlp.down_proj", HIDDEN, 96),
        ):
            tensors[f"{prefix}layers.{layer}.{module}.weight"] = some(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}layers.{layer}.{norm}.weight"] = some(HIDDEN)
    tensors[f"{prefix}norm.weight"] = some(HIDDEN)
    return tensors | {"lm_head.weight": some(97, HIDDEN)}


def write_config(folder: Path, **overrides: Any) -> None:
    config = transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"]} | overrides
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_folder(folder: Path, tensors: dict[str, Tensor] | None = None, parts: int = 1, **overrides: Any) -> Path:
    """A model folder, in so many parts; the tensors are dealt out in turn."""
    tensors = llama_tensors() if tensors is None else tensors
    folder.mkdir(parents=True)
    write_config(folder, **overrides)
    metadata = {"format": "pt", "made by": "hand"}
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return folder
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in dict.fromkeys(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file, metadata)
    write_index(folder / "model.safetensors.index.json", where)
    return folder


def write_index(path: Path, where: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1, "mine": "too"}, "weight_map": where}), encoding="utf-8")


def write_source(folder: Path) -> Path:
    """A model in two files, with other files beside them."""
    write_folder(folder, parts=2)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "deep").mkdir()
    (folder / "deep" / "note.txt").write_text("deep", encoding="utf-8")
    return folder


def moved_by_hand(tensor: Tensor, heads: int) -> Tensor:
    """Half to interleaved: of each head rows 0, 8, 1, 9, ..."""
    order = [
        head * DIM + half * DIM // 2 + pair for head in range(heads) for pair in range(DIM // 2) for half in (0, 1)
    ]
    return tensor[order]


def by_hand(tensors: dict[str, Tensor], rotating: Callable[[str], int | None] | None = None) -> dict[str, Tensor]:
    """What a conversion to interleaved makes of them."""

    def heads(name: str) -> int | None:
        return HEADS if "q_proj" in name else KEYS if "k_proj" in name else None

    count = rotating or heads
    return {name: moved_by_hand(t, n) if (n := count(name)) else t for name, t in tensors.items()}


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit, NaNs included."""
    assert found.keys() == expected.keys()
    return all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


def rotate_otherwise(monkeypatch: pytest.MonkeyPatch, model_type: str, to: Pairing, module: Any = None) -> None:
    """Have the family's own code run the other rotation, by the definition in oracles.rotate.

    Args:
        module: where that code is; None: the module of the family's causal language model.
    """
    module = module or modeling(model_type)

    def angles(cos: Tensor, sin: Tensor) -> Tensor:
        both = torch.atan2(sin, cos)
        pairs = both.shape[-1] // 2
        if torch.equal(both[..., :pairs], both[..., pairs:]):
            return both[..., :pairs]
        return both[..., ::2] if torch.equal(both[..., ::2], both[..., 1::2]) else both  # gpt-oss has each angle once

    def turn(q: Tensor, k: Tensor | None = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
        by = angles(cos, sin).unsqueeze(unsqueeze_dim) * (-1 if model_type == "nanochat" else 1)  # turns backwards
        if k is None:
            return rotate(q, by, to) if model_type.startswith("qwen4_exp") else (rotate(q, by, to), None)
        return rotate(q, by, to), rotate(k, by, to)

    def turn_complex(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        by = turns.angle().unsqueeze(2 if model_type == "llama4_text" else 1)
        return rotate(q, by, to), rotate(k, by, to)

    def turn_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        return rotate(x, angles(cos, sin).unsqueeze(unsqueeze_dim), to)

    def turn_by_pair(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:  # (batch, length, heads, dims), once a pair
        return rotate(tensor, torch.atan2(sin, cos).unsqueeze(2), to)

    def turn_by_row(row: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # [sin | cos] of each position
        sin, cos = row.chunk(2, dim=-1)
        return rotate(q, torch.atan2(sin, cos), to), rotate(k, torch.atan2(sin, cos), to)

    if model_type == "roformer":
        attention = module.RoFormerSelfAttention
        monkeypatch.setattr(attention, "apply_rotary_position_embeddings", staticmethod(turn_by_row))
        return
    names = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb")
    name = next(name for name in names if hasattr(module, name))
    first, *_, last = inspect.signature(getattr(module, name)).parameters
    by_words = {("x", "unsqueeze_dim"): turn_one, ("tensor", "cos"): turn_by_pair}
    new = turn_complex if name == "apply_rotary_emb" else by_words.get((first, last), turn)
    monkeypatch.setattr(module, name, new)


def unstated(folder: Path) -> None:
    """Take the record of the pairing out of a config, as if somebody else had written the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["rope_pairing"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

"""Query and key weights for pairing detection: from a live model, a folder, a checkpoint in Meta's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.row_layouts import Layout, RotatingRows, rotating_rows
from rope_ext_hf.checkpoints.source import read_source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing, stated_rotary
from rope_ext_hf.patches.geometry import checkpoint_geometry, patch_geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LAYERS"]
LAYERS = 8  # looked at, evenly over the depth

_INPUT_NORMS = ("input_layernorm", "ln_attn", "operator_norm", "ln_1", "norm_1", "attn_norm")
_LATENT = {"q_b_proj": ("q_a_proj", "q_a_layernorm")}  # queries that are made from a latent, and what makes that
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")


# --- where the weights come from -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """Tensors by name, wherever they come from.

    Attributes:
        path: what the report calls them.
        rows: what rotates.
        rotary: the geometry of that.
        norms: a module of each kind of norm, by the last part of its name, for what it does with its weight.
        shapes: of all tensors.
        read: one of them.
        stated: the pairing that the config or the family says.
        load: the model itself.
    """

    path: str
    rows: RotatingRows
    rotary: Rotary
    norms: dict[str, nn.Module]
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str], Tensor]
    stated: str | None
    load: Callable[[], PreTrainedModel]

    def attentions(self) -> list[str]:
        """The names of the modules that hold queries and keys, in order."""
        found = dict.fromkeys(self._attention(name) for name in self.shapes)
        return sorted((name for name in found if name is not None), key=_by_number)

    def _attention(self, name: str) -> str | None:
        parts = self.rows.parts(name)
        return None if parts is None else ".".join(filter(None, parts[:2]))

    def queries_and_keys(self, attention: str) -> tuple[Tensor, Tensor]:
        """The rows of one layer that rotate: (heads, dims, width) and (key heads, dims, width), float32.

        With the norms before and behind the projections in them, so that W_q W_k^T is what the scores are made with.
        Where queries are made from a latent, what makes that is in the keys.

        Raises:
            CheckpointError: packed, missing or not finite.
        """
        sides: dict[str, Tensor] = {}
        gains: dict[str, Tensor] = {}
        latent: tuple[str, str] | None = None
        for module, layout in self.rows.layouts.items():
            weight = self._weight(f"{attention}.{module}")
            if weight is None:
                continue
            a_norm = weight.numel() == layout.rows
            if a_norm:
                weight = self._gain(module, weight).reshape(layout.rows, 1)
            else:
                latent = _LATENT.get(module, latent)
            for side, part in _rotating(weight, layout):
                (gains if a_norm else sides)[side] = part
        if not {"q", "k"} <= set(sides):
            raise CheckpointError(f"{attention!r} has no weights that can be read: packed, or those of an adapter")
        query, key = (sides[side] * gains.get(side, 1.0) for side in ("q", "k"))
        for name in _INPUT_NORMS:
            weight = self._weight(f"{attention.rpartition('.')[0]}.{name}")
            if weight is not None:
                key = key * self._gain(name, weight).square()
        if latent is not None:
            down, norm = (self._needed(f"{attention}.{name}") for name in latent)
            key = key @ down.mT * self._gain(latent[1], norm)
        if not (query.isfinite().all() and key.isfinite().all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _weight(self, module: str) -> Tensor | None:
        """Of a module, float32: also where an adapter wraps it, or where it is a number of few bits times a scale."""
        path = next((p for p in (module, f"{module}.base_layer") if f"{p}.weight" in self.shapes), None)
        if path is None:
            return None
        weight = self.read(f"{path}.weight")
        scale = next((self.read(name) for s in _SCALES if (name := f"{path}.{s}") in self.shapes), None)
        if weight.is_meta:
            raise CheckpointError(f"'{path}.weight' is offloaded to disk; give the folder instead of the model")
        if not weight.is_floating_point() and (weight.dtype != torch.int8 or scale is None):
            raise CheckpointError(f"'{path}.weight' is packed into {weight.dtype}")
        self.rows.find(f"{path}.weight", weight.shape)  # whether config and weights agree
        return weight.float() if scale is None else _scaled(weight.float(), scale.float())

    def _needed(self, module: str) -> Tensor:
        weight = self._weight(module)
        if weight is None:
            raise CheckpointError(f"'{module}.weight' is missing")
        return weight

    def _gain(self, name: str, weight: Tensor) -> Tensor:
        """What a norm with this weight multiplies each dim by, in some families (Gemma) 1 + the weight."""
        norm = self.norms.get(name)
        if norm is None:
            return weight
        signs = 1.0 - 2.0 * (torch.arange(weight.numel(), device=weight.device) % 2).view(weight.shape)
        parameters = {key: torch.zeros(p.shape, device=weight.device) for key, p in norm.named_parameters()}
        gain: Tensor = torch.func.functional_call(norm, parameters | {"weight": weight}, (signs,)) * signs
        return gain


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """By one scale, one for each row, or one for each block of rows and columns."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scale


def _rotating(weight: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Whose heads rotate, and the rows of them that do: (heads, dims, width)."""
    groups = weight.view(layout.groups, -1, weight.shape[1])
    at = 0
    for piece in layout.pieces:
        part = groups.narrow(1, at, piece.count * piece.size)
        at += part.shape[1]
        if piece.rotary:
            heads = part.reshape(layout.groups * piece.count, piece.size, -1)
            yield piece.side, heads.narrow(1, piece.start, piece.rotary)


def _of_model(model: Any) -> _Weights:
    rotary = checkpoint_geometry(model)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return _Weights(
        path=model.name_or_path or type(model).__name__,
        rows=rotating_rows(model.config, rotary.dim),
        rotary=rotary,
        norms=_norms(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        stated=getattr(model.config, PAIRING_KEY, None) or class_pairing(model.config),
        load=lambda: model,
    )


def _of_folder(path: str | Path, revision: str | None, trust_remote_code: bool) -> _Weights:
    from transformers import AutoModelForCausalLM

    from rope_ext_hf.checkpoints.meta_import import is_meta

    folder = Path(path).expanduser()
    if folder.is_dir() and is_meta(folder):
        return _of_meta(folder)
    found = read_source(path, revision=revision, trust_remote_code=trust_remote_code)
    files = {name: file for file in found.files.values() for name in file.tensors}
    model_type = found.rows.model_type
    with_own_code = family(model_type).own_code is not None

    def load() -> PreTrainedModel:
        if with_own_code:
            raise CheckpointError(f"transformers has no class of {model_type!r} to run on a text; give no text")
        settings = {"config": found.config, "dtype": "auto", "trust_remote_code": trust_remote_code}
        return AutoModelForCausalLM.from_pretrained(found.folder, **settings)

    twin = None if with_own_code else _twin(found.config, trust_remote_code)
    rotary = stated_rotary(found.config) if twin is None else checkpoint_geometry(twin)
    assert rotary is not None  # the table has it for every family with code of its own
    return _Weights(
        path=str(path),
        rows=found.rows,
        rotary=rotary,
        norms={} if twin is None else _norms(twin),
        shapes={name: file.tensors[name].shape for name, file in files.items()},
        read=lambda name: files[name].read(name),
        stated=found.pairing,
        load=load,
    )


def _of_meta(folder: Path) -> _Weights:
    from rope_ext_hf.checkpoints.meta_import import read_meta

    source = read_meta(folder)
    weights = {weight.hf: weight for weight in source.weights()}
    config = source.llama.config("interleaved", torch.float32, None)

    def load() -> PreTrainedModel:
        raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")

    twin = _twin(config, False)
    rotary = patch_geometry(twin)
    return _Weights(
        path=str(folder),
        rows=rotating_rows(config, rotary.dim),
        rotary=rotary,
        norms=_norms(twin),
        shapes={name: weight.shape for name, weight in weights.items()},
        read=lambda name: source.read(weights[name]),
        stated="interleaved",
        load=load,
    )


def _twin(config: Any, trust_remote_code: bool) -> nn.Module:
    """The model of a config without any numbers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config.get_text_config(), trust_remote_code=trust_remote_code
        )
    return model


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}

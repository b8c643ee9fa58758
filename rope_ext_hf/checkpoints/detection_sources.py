"""Query and key weights for pairing detection: of a loaded model, a folder, or a folder in Meta's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.meta_conversion import MetaSource
from rope_ext_hf.checkpoints.row_layouts import RotaryTensors, rotary_tensors
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.hub import loading
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import checkpoint_geometry, patch_geometry
from rope_ext_hf.patches.loading import class_to_load, empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NORM_BESIDE = "hidden_norm"  # an EAGLE head reads embeddings, and after them states of the model with a norm of theirs
_INPUT_NORMS = ("input_layernorm", "ln_attn", "operator_norm", "ln_1", "norm_1", "attn_norm")
_LATENT = dict.fromkeys(("q_b_proj", "indexer.wq_b"), ("q_a_proj", "q_a_layernorm"))
"""Modules that read a latent, and the modules that compute it, where a layer has them."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of a model, read one tensor at a time."""

    path: str  # how the report names them
    tensors: RotaryTensors
    rotary: Rotary
    norms: dict[str, nn.Module]  # one of each kind, by the last part of its name, to be called
    shapes: Mapping[str, Sequence[int]]  # the shape of every tensor, by its name
    read: Callable[[str], Tensor]  # returns a tensor, by its name
    stated: str | None  # the pairing by the config or the family table
    load: Callable[[], PreTrainedModel]  # returns the model itself

    def attentions(self, *, further: bool = False) -> list[str]:
        """Attention modules that rotate as many dims as `rotary`, by layer; `further`: of layers no config counts."""
        parts = filter(None, (self.tensors.split_name(name, further=further) for name in self.shapes))
        names = {".".join(filter(None, (prefix, attention))) for prefix, attention, _ in parts}
        alike = []
        for name in names:
            layouts = self.tensors.layouts_in(name).values()
            if any(block.rotary == self.rotary.dim for layout in layouts for block in layout.blocks):
                alike.append(name)
        return sorted(alike, key=_layer_order)

    def indexers(self) -> tuple[list[str], str | None]:
        """Return the names of the attention modules with an indexer, and the pairing that it keeps; None: theirs."""
        held = {name.rpartition(".")[0].removesuffix(".base_layer") for name in self.shapes}
        found: list[tuple[str, str | None]] = []
        for name in self.attentions():
            for module, layout in self.tensors.layouts_in(name).items():
                stored = any(f"{name}.{each}" in held for each in self.tensors.stored_names(module))
                if stored and any(block.side == "index_q" for block in layout.blocks) and "norm" not in module:
                    found.append((name, layout.pairing))
        return [name for name, _ in found], next((pairing for _, pairing in found), None)

    def queries_and_keys(self, attention: str, sides: tuple[str, str] = ("q", "k")) -> tuple[Tensor, Tensor]:
        """Return the rotated rows of one attention module: (heads, dims, width) and (key heads, dims, width), float32.

        The norms before and after the projections are multiplied in, so that W_q W_k^T is the bilinear form of the
        scores. Where queries read a latent, its projection is multiplied into the keys. `sides` may be those of an
        indexer, ("index_q", "index_k").
        """
        rows: dict[str, Tensor] = {}
        gains: dict[str, Tensor] = {}
        latent: tuple[str, str] | None = None
        for module, layout in self.tensors.layouts_in(attention).items():
            if not any(block.side in sides for block in layout.blocks):
                continue
            names = (f"{attention}.{name}" for name in self.tensors.stored_names(module))
            weight = next((weight for name in names if (weight := self._weight(name)) is not None), None)
            if weight is None:
                continue
            is_norm = weight.numel() == layout.rows
            if is_norm:
                weight = self._gain(module, weight, layout.rows).reshape(layout.rows, 1)
            else:
                latent = _LATENT.get(module, latent)
            if weight.ndim != 2:
                raise CheckpointError(f"a projection of queries or keys has shape {tuple(weight.shape)}; {_DISAGREE}")
            for block, heads in layout.heads(weight):
                if block.rotary:
                    (gains if is_norm else rows)[block.side] = heads.narrow(1, block.start, block.rotary)
        if not set(sides) <= set(rows):
            raise CheckpointError(
                f"{attention!r} has no readable query and key weights: they are packed, or of an adapter"
            )
        query, key = (rows[side] * gains.get(side, 1.0) for side in sides)
        layer = attention.rpartition(".")[0]
        beside = self._weight(f"{layer}.{_NORM_BESIDE}")
        for name in _INPUT_NORMS:
            weight = self._weight(f"{layer}.{name}")
            if weight is not None:
                gain = self._gain(name, weight, key.shape[-1] - (0 if beside is None else beside.numel()))
                key = key * (gain if beside is None else torch.cat((gain, beside))).square()
        if latent is not None and ("q" in sides or query.shape[-1] != key.shape[-1]):  # some indexers read no latent
            down, norm = (self._weight(f"{attention}.{name}") for name in latent)
            if down is None or norm is None:
                missing = latent[0] if down is None else latent[1]
                raise CheckpointError(f"'{attention}.{missing}.weight' is missing")
            if down.ndim != 2 or down.shape[1] != key.shape[-1]:
                raise CheckpointError(f"{latent[0]!r} of {attention!r} has shape {tuple(down.shape)}; {_DISAGREE}")
            key = key @ down.mT * self._gain(latent[1], norm, len(down))
        if key.shape[-1] != query.shape[-1]:
            raise CheckpointError(
                f"queries and keys of {attention!r} read {query.shape[-1]} and {key.shape[-1]} inputs; {_DISAGREE}"
            )
        if not (query.isfinite().all() and key.isfinite().all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _weight(self, module: str) -> Tensor | None:
        """Read the weight of a module as float32, also if an adapter wraps it or it is quantised with a scale."""
        path = next((p for p in (module, f"{module}.base_layer") if f"{p}.weight" in self.shapes), None)
        if path is None:
            return None
        weight = self.read(f"{path}.weight")
        scale = next((self.read(name) for s in _SCALES if (name := f"{path}.{s}") in self.shapes), None)
        if is_traceable_wrapper_subclass(weight):
            kind = type(weight).__name__
            raise CheckpointError(
                f"'{path}.weight' is packed or sharded ({kind}); give the folder instead of the model"
            )
        if weight.is_meta:
            raise CheckpointError(f"'{path}.weight' is offloaded to disk; give the folder instead of the model")
        if not weight.is_floating_point() and (weight.dtype != torch.int8 or scale is None):
            raise CheckpointError(f"'{path}.weight' is packed into {weight.dtype}")
        self.tensors.find(f"{path}.weight", weight.shape)  # raises if config and weights disagree
        return weight.float() if scale is None else _scaled(weight.float(), scale.float())

    def _gain(self, name: str, weight: Tensor, size: int) -> Tensor:
        """What a norm with this weight multiplies each dim by: the weight, or in some families (Gemma) 1 + weight."""
        if weight.numel() != size:
            raise CheckpointError(f"the norm {name!r} has a weight of shape {tuple(weight.shape)}; {_DISAGREE}")
        norm = self.norms.get(name)
        if norm is None:
            return weight
        signs = 1.0 - 2.0 * (torch.arange(size, device=weight.device) % 2).view(weight.shape)
        parameters = {key: torch.zeros(p.shape, device=weight.device) for key, p in norm.named_parameters()}
        try:
            gain: Tensor = torch.func.functional_call(norm, parameters | {"weight": weight}, (signs,)) * signs
        except RuntimeError as error:  # a norm of a fixed shape
            raise CheckpointError(
                f"the norm {name!r} has a weight of shape {tuple(weight.shape)}; {_DISAGREE}"
            ) from error
        return gain


_DISAGREE = "config and weights disagree"


def _layer_order(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply a weight by one scale, one per row, or one per block of rows and columns."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scale


def weights_from_model(model: Any) -> AttentionWeights:
    rotary = checkpoint_geometry(model)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return AttentionWeights(
        path=model.name_or_path or type(model).__name__,
        tensors=rotary_tensors(model.config, rotary.dim),
        rotary=rotary,
        norms=_norms(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        stated=getattr(model.config, PAIRING_KEY, None) or class_pairing(model.config),
        load=lambda: model,
    )


def weights_from_source(source: Source | MetaSource, path: str, *, trust_remote_code: bool = False) -> AttentionWeights:
    if isinstance(source, Source):
        model, rotary, view, stated, tensors = source.model, source.rotary, source.view, source.pairing, source.tensors
    else:
        model = empty_model(source.llama.to_config("interleaved", torch.float32, source.llama.context_length()))
        rotary, view, stated = patch_geometry(model), source.view(), "interleaved"
        tensors = rotary_tensors(model.config, rotary.dim)

    def load() -> PreTrainedModel:
        if not isinstance(source, Source):
            raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")
        if model is None:
            model_type = tensors.model_type
            raise CheckpointError(f"transformers has no class of {model_type!r} that could read a text; give no text")
        settings = {"config": source.config, "dtype": "auto", "trust_remote_code": trust_remote_code}
        with loading(f"the model in {path!r}"):
            loaded: PreTrainedModel = class_to_load(source.config).from_pretrained(source.folder, **settings)
        return loaded

    return AttentionWeights(
        path=path,
        tensors=tensors,
        rotary=rotary,
        norms={} if model is None else _norms(model),
        shapes={name: info.shape for name, info in view.tensors.items()},
        read=view.read,
        stated=stated,
        load=load,
    )


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}

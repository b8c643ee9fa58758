"""The weights that rotary embeddings rotate, read from a loaded model, a folder, or a folder in Meta's format.

They are read as the attention scores use them: `RotatedWeights.queries_and_keys` returns the rows of W_q and W_k with
the norms around them multiplied in, so that W_q W_k^T is the bilinear form of the scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.files.weight_files import TensorView, WeightFile
from rope_ext_hf.checkpoints.meta.meta_source import MetaSource
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors, rotary_tensors
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.hub import loading
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.models.config import PAIRING_KEY
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import class_pairing
from rope_ext_hf.models.model_classes import class_to_load, empty_model
from rope_ext_hf.patches.model_rope import ModelRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INPUT_NORMS = ("input_layernorm", "ln_attn", "operator_norm", "ln_1", "norm_1", "attn_norm")
"""Names of the norm whose output the attention of a layer reads."""
_STATES_NORM = "hidden_norm"
"""An EAGLE head reads embeddings behind its input norm, and beside them states of the model behind this norm."""
_LATENT = dict.fromkeys(("q_b_proj", "indexer.wq_b"), ("q_a_proj", "q_a_layernorm"))
"""Projections of queries that read a latent, and the projection and the norm that compute the latent."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")  # of quantised weights
_DISAGREE = "config and weights disagree"


@dataclass(frozen=True)
class RotatedWeights:
    """The weights of a model that rotate, read one tensor at a time.

    Attributes:
        path: the name of the model in reports.
        tensors: the rows that rotate in each of its tensors.
        rotary: the parameters of its rotary embedding.
        norms: one norm module of each kind, by the last part of its name. It is called with the weights of norms of the
            same kind.
        shapes: the shape of every tensor, by its name.
        read: returns a tensor, given its name.
        stated: the pairing by the config or the family table.
        runs: the pairing that the model's class in transformers runs; None: it is unknown.
        load: returns the model itself.
    """

    path: str
    tensors: RotaryTensors
    rotary: Rotary
    norms: dict[str, nn.Module]
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str], Tensor]
    stated: str | None
    runs: str | None
    load: Callable[[], PreTrainedModel]

    def attentions(self, *, further: bool = False) -> list[str]:
        """Return the names of the attention modules that rotate as many dims as `rotary` has, in the order of layers.

        `further`: return those in layers that predict further tokens (MTP), which no config counts; else those in all
        other layers.
        """
        names = set()
        for tensor in self.shapes:
            parts = self.tensors.split_name(tensor, further=further)
            if parts is not None:
                prefix, attention, _ = parts
                names.add(".".join(filter(None, (prefix, attention))))
        return sorted(filter(self._rotates_alike, names), key=_numbers_by_value)

    def _rotates_alike(self, attention: str) -> bool:
        """Return whether an attention module, given its name, rotates as many dims as `rotary` has."""
        layouts = self.tensors.layouts_in(attention).values()
        return any(block.rotary == self.rotary.dim for layout in layouts for block in layout.blocks)

    def indexers(self) -> tuple[list[str], str | None]:
        """Return the names of the attention modules that have an indexer, and the pairing that indexers always have.

        An indexer chooses the keys that attention reads. The pairing is None if a conversion moves the rows of indexers
        like those of the attention.
        """
        stored = {name.rpartition(".")[0].removesuffix(".base_layer") for name in self.shapes}
        names: list[str] = []
        pairings: list[str | None] = []
        for attention in self.attentions():
            for module, layout in self.tensors.layouts_in(attention).items():
                is_query = any(block.side == "index_q" for block in layout.blocks) and "norm" not in module
                if is_query and any(f"{attention}.{name}" in stored for name in self.tensors.stored_names(module)):
                    names.append(attention)
                    pairings.append(layout.pairing)
        return names, next(iter(pairings), None)

    def queries_and_keys(self, attention: str, sides: tuple[str, str] = ("q", "k")) -> tuple[Tensor, Tensor]:
        """Return the rows that rotate in the query and the key projection of one attention module.

        The norms before and after the projections are multiplied in, so that W_q W_k^T is the bilinear form of the
        scores. Where queries are computed from a latent (a low-rank projection of the input), the projection that
        computes it is multiplied into the keys.

        Args:
            attention: the name of the module.
            sides: the kinds of rows: ("q", "k"), or ("index_q", "index_k") of an indexer.

        Returns:
            The rows for queries, (heads, dims, width), and for keys, (key heads, dims, width), float32.

        Raises:
            CheckpointError: the weights are packed, missing, not finite, or contradict the config.
        """
        query, key, latent = self._projections(attention, sides)
        key = self._with_input_norm(attention, key)
        # Only queries may read a latent, and those of some indexers do not.
        if latent is not None and ("q" in sides or query.shape[-1] != key.shape[-1]):
            key = self._through_latent(attention, key, *latent)
        if key.shape[-1] != query.shape[-1]:
            raise CheckpointError(
                f"queries and keys of {attention!r} read {query.shape[-1]} and {key.shape[-1]} inputs; {_DISAGREE}"
            )
        if not (query.isfinite().all() and key.isfinite().all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _projections(self, attention: str, sides: tuple[str, str]) -> tuple[Tensor, Tensor, tuple[str, str] | None]:
        """Return the rotated rows of the query and key projections, with the norms of q and k multiplied in.

        The third result names the two modules, a projection and a norm, that compute the latent from which queries are
        computed; None if there is no latent.
        """
        rows: dict[str, Tensor] = {}  # by side
        gains: dict[str, list[Tensor]] = defaultdict(list)  # of the norms of q and k, by side
        latent: tuple[str, str] | None = None
        for module, layout in self.tensors.layouts_in(attention).items():
            if not any(block.side in sides for block in layout.blocks):
                continue
            weight = self._first_weight([f"{attention}.{name}" for name in self.tensors.stored_names(module)])
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
                    of_heads = heads.narrow(1, block.start, block.rotary)
                    if is_norm:
                        gains[block.side].append(of_heads)
                    else:
                        rows[block.side] = of_heads
        if not set(sides) <= set(rows):
            raise CheckpointError(
                f"{attention!r} has no readable query and key weights: they are packed, or of an adapter"
            )
        # One norm for all heads, or one for each of them (StableLM).
        query, key = (rows[side] * torch.cat(gains[side]) if gains[side] else rows[side] for side in sides)
        return query, key, latent

    def _with_input_norm(self, attention: str, key: Tensor) -> Tensor:
        """Return key weights times the squared weight of the norm before the attention.

        The weight of that norm scales the input of both projections, of queries and of keys, so a score has it twice.
        """
        layer = attention.rpartition(".")[0]
        states_gain = self._weight(f"{layer}.{_STATES_NORM}")
        for name in _INPUT_NORMS:
            weight = self._weight(f"{layer}.{name}")
            if weight is None:
                continue
            if states_gain is None:
                gain = self._gain(name, weight, key.shape[-1])
            else:
                gain = torch.cat((self._gain(name, weight, key.shape[-1] - states_gain.numel()), states_gain))
            key = key * gain.square()
        return key

    def _through_latent(self, attention: str, key: Tensor, down_name: str, norm_name: str) -> Tensor:
        """Return key weights times the projection and the norm that compute the latent for the queries.

        `down_name` and `norm_name` name that projection and that norm.
        """
        down, norm = self._weight(f"{attention}.{down_name}"), self._weight(f"{attention}.{norm_name}")
        if down is None or norm is None:
            missing = down_name if down is None else norm_name
            raise CheckpointError(f"'{attention}.{missing}.weight' is missing")
        if down.ndim != 2 or down.shape[1] != key.shape[-1]:
            raise CheckpointError(f"{down_name!r} of {attention!r} has shape {tuple(down.shape)}; {_DISAGREE}")
        return key @ down.mT * self._gain(norm_name, norm, len(down))

    def _first_weight(self, modules: list[str]) -> Tensor | None:
        """Return the weight of the first of these modules that has one; None if none has."""
        for module in modules:
            weight = self._weight(module)
            if weight is not None:
                return weight
        return None

    def _weight(self, module: str) -> Tensor | None:
        """Return the weight of a module as float32, also if an adapter wraps it or it is quantised with a scale.

        None: the checkpoint has no such module.
        """
        path = next((path for path in (module, f"{module}.base_layer") if f"{path}.weight" in self.shapes), None)
        if path is None:
            return None
        weight = self.read(f"{path}.weight")
        scale_name = next((f"{path}.{suffix}" for suffix in _SCALES if f"{path}.{suffix}" in self.shapes), None)
        if is_traceable_wrapper_subclass(weight):
            kind = type(weight).__name__
            raise CheckpointError(
                f"'{path}.weight' is packed or sharded ({kind}); give the folder instead of the model"
            )
        if weight.is_meta:
            raise CheckpointError(f"'{path}.weight' is offloaded to disk; give the folder instead of the model")
        if not weight.is_floating_point() and (weight.dtype != torch.int8 or scale_name is None):
            raise CheckpointError(
                f"'{path}.weight' is quantised: its numbers are packed into {weight.dtype}, so its rows cannot be "
                "read; give the model before it was quantised"
            )
        self.tensors.find(f"{path}.weight", weight.shape)  # raises if config and weights disagree
        return weight.float() if scale_name is None else _scaled(weight.float(), self.read(scale_name).float())

    def _gain(self, name: str, weight: Tensor, size: int) -> Tensor:
        """Return the factor of each dim in a norm with this weight: the weight itself, or 1 + weight (as in Gemma).

        The factor is measured: the norm module of the model is called on signs, whose root mean square is 1, with its
        other parameters zero.
        """
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


def weights_from_model(model: Any) -> RotatedWeights:
    """Return the rotated weights of a loaded model, which may be patched or under PEFT."""
    rotary = ModelRope.of_checkpoint(model.config, model).rotary
    rows = rotary_tensors(model, rotary)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return RotatedWeights(
        path=model.name_or_path or type(model).__name__,
        tensors=rows,
        rotary=rotary,
        norms=_norms(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        stated=getattr(model.config, PAIRING_KEY, None) or rows.pairing,
        runs=class_pairing(model.config) or rows.pairing,
        load=lambda: model,
    )


def weights_in_files(model: Any, files: Iterable[WeightFile], path: str) -> RotatedWeights:
    """Return the rotated weights in files, of a model that may be on the meta device; `path` is its name in reports."""
    view = TensorView.from_files(files)
    shapes = {name: info.shape for name, info in view.tensors.items()}
    return replace(weights_from_model(model), path=path, shapes=shapes, read=view.read)


def weights_from_source(source: Source | MetaSource, path: str, *, trust_remote_code: bool = False) -> RotatedWeights:
    """Return the rotated weights of a model whose folder was opened; `path` is its name in reports."""
    if isinstance(source, MetaSource):
        return _weights_from_meta(source, path)
    model = source.model

    def load() -> PreTrainedModel:
        model_type = source.tensors.model_type
        if family(model_type).remote:
            raise CheckpointError(
                f"transformers has no class that runs a {model_type!r} on a text: leave out the text, and the "
                "weights alone are looked at"
            )
        with loading(f"the model in {path!r}"):
            config = source.class_config
            settings = {"config": config, "dtype": "auto", "trust_remote_code": trust_remote_code}
            loaded: PreTrainedModel = class_to_load(config).from_pretrained(source.folder, **settings)
        return loaded

    return RotatedWeights(
        path=path,
        tensors=source.tensors,
        rotary=source.rotary,
        norms={} if model is None else _norms(model),
        shapes={name: info.shape for name, info in source.view.tensors.items()},
        read=source.view.read,
        stated=source.pairing,
        runs=source.class_pairing,
        load=load,
    )


def _weights_from_meta(source: MetaSource, path: str) -> RotatedWeights:
    """Return the rotated weights of a model in Meta's format, which are interleaved; `path` is its name in reports."""
    model = empty_model(source.llama.to_config("interleaved", torch.float32, source.llama.context_length()))
    rotary, view = ModelRope.of_model(model).rotary, source.view()

    def load() -> PreTrainedModel:
        raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")

    return RotatedWeights(
        path=path,
        tensors=RotaryTensors(model.config, rotary.dim),
        rotary=rotary,
        norms=_norms(model),
        shapes={name: info.shape for name, info in view.tensors.items()},
        read=view.read,
        stated="interleaved",
        runs="half",
        load=load,
    )


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return one norm module of each kind in a model, by the last part of its name."""
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}


def _numbers_by_value(name: str) -> list[tuple[bool, str]]:
    """Return a sort key by which the numbers in a module's name are ordered by value: layer 10 after layer 2."""
    return [(part.isdigit(), part.zfill(9) if part.isdigit() else part) for part in name.split(".")]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Return a quantised weight times its scale: one number, one per row, or one per block of rows and columns."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scale

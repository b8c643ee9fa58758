"""The weights that rotary embeddings rotate, as the scores of attention use them, in arrays of numpy.

`source_weights` reads them from a folder, `model_weights` from a loaded model. They are combined here:
`RotatedWeights.queries_and_keys` returns the rows of W_q and W_k with the norms around them multiplied in, so that
W_q W_k^T is the bilinear form of the scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rope_ext_hf.checkpoints.files.numbers import TORCH_NAMES, is_floating_point
from rope_ext_hf.checkpoints.files.weight_files import TensorView
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Numbers = NDArray[np.float32]

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
        inv_freq: its inverse frequencies in radians per token, one for each pair of dims, float64.
        trained_length: returns the length in tokens that its rotary embedding is for without any scaling.
        gains: for norms of the model, by the last part of their names: a function that returns the factor of each dim,
            given the weight of such a norm. Other norms multiply by their weight.
        shapes: the shape of every tensor, by its name.
        read: returns the numbers of a tensor, given its name and that of the tensor with its scales, if it has one; it
            raises CheckpointError where they cannot be read.
        stated: the pairing by the config or the family table.
        runs: the pairing that the model's class in transformers runs; None: it is unknown.
        load: returns the model itself.
    """

    path: str
    tensors: RotaryTensors
    inv_freq: NDArray[np.float64]
    trained_length: Callable[[], int]
    gains: Mapping[str, Callable[[Numbers], Numbers]]
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str, str | None], Numbers]
    stated: str | None
    runs: str | None
    load: Callable[[], PreTrainedModel]

    def attentions(self, *, further: bool = False) -> list[str]:
        """Return the names of the attention modules that rotate as many dims as the model, in the order of layers.

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
        """Return whether an attention module, given its name, rotates as many dims as the model as a whole."""
        layouts = self.tensors.layouts_in(attention).values()
        return any(block.rotary == 2 * len(self.inv_freq) for layout in layouts for block in layout.blocks)

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

    def queries_and_keys(self, attention: str, sides: tuple[str, str] = ("q", "k")) -> tuple[Numbers, Numbers]:
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
        if not (np.isfinite(query).all() and np.isfinite(key).all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _projections(self, attention: str, sides: tuple[str, str]) -> tuple[Numbers, Numbers, tuple[str, str] | None]:
        """Return the rotated rows of the query and key projections, with the norms of q and k multiplied in.

        The third result names the two modules, a projection and a norm, that compute the latent from which queries are
        computed; None if there is no latent.
        """
        rows: dict[str, Numbers] = {}  # by side
        gains: dict[str, list[Numbers]] = defaultdict(list)  # of the norms of q and k, by side
        latent: tuple[str, str] | None = None
        for module, layout in self.tensors.layouts_in(attention).items():
            if not any(block.side in sides for block in layout.blocks):
                continue
            weight = self._first_weight([f"{attention}.{name}" for name in self.tensors.stored_names(module)])
            if weight is None:
                continue
            is_norm = weight.size == layout.rows
            if is_norm:
                weight = self._gain(module, weight, layout.rows).reshape(layout.rows, 1)
            else:
                latent = _LATENT.get(module, latent)
            if weight.ndim != 2:
                raise CheckpointError(f"a projection of queries or keys has shape {tuple(weight.shape)}; {_DISAGREE}")
            for block, heads in layout.heads(weight):
                if block.rotary:
                    of_heads = heads[:, block.start : block.start + block.rotary]
                    if is_norm:
                        gains[block.side].append(of_heads)
                    else:
                        rows[block.side] = of_heads
        if not set(sides) <= set(rows):
            raise CheckpointError(
                f"{attention!r} has no readable query and key weights: they are packed, or of an adapter"
            )
        # One norm for all heads, or one for each of them (StableLM).
        query, key = (rows[side] * np.concatenate(gains[side]) if gains[side] else rows[side] for side in sides)
        return query, key, latent

    def _with_input_norm(self, attention: str, key: Numbers) -> Numbers:
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
                own = self._gain(name, weight, key.shape[-1] - states_gain.size)
                gain = np.concatenate((own.reshape(-1), states_gain.reshape(-1)))
            key = key * np.square(gain)
        return key

    def _through_latent(self, attention: str, key: Numbers, down_name: str, norm_name: str) -> Numbers:
        """Return key weights times the projection and the norm that compute the latent for the queries.

        `down_name` and `norm_name` name that projection and that norm.
        """
        down, norm = self._weight(f"{attention}.{down_name}"), self._weight(f"{attention}.{norm_name}")
        if down is None or norm is None:
            missing = down_name if down is None else norm_name
            raise CheckpointError(f"'{attention}.{missing}.weight' is missing")
        if down.ndim != 2 or down.shape[1] != key.shape[-1]:
            raise CheckpointError(f"{down_name!r} of {attention!r} has shape {tuple(down.shape)}; {_DISAGREE}")
        return key @ down.T * self._gain(norm_name, norm, len(down))

    def _first_weight(self, modules: list[str]) -> Numbers | None:
        """Return the weight of the first of these modules that has one; None if none has."""
        for module in modules:
            weight = self._weight(module)
            if weight is not None:
                return weight
        return None

    def _weight(self, module: str) -> Numbers | None:
        """Return the weight of a module as float32, also if an adapter wraps it or it is quantised with a scale.

        None: the checkpoint has no such module.
        """
        path = next((path for path in (module, f"{module}.base_layer") if f"{path}.weight" in self.shapes), None)
        if path is None:
            return None
        scale_name = next((f"{path}.{suffix}" for suffix in _SCALES if f"{path}.{suffix}" in self.shapes), None)
        weight = self.read(f"{path}.weight", scale_name)
        self.tensors.find(f"{path}.weight", weight.shape)  # raises if config and weights disagree
        return weight if scale_name is None else _scaled(weight, self.read(scale_name, scale_name))

    def _gain(self, name: str, weight: Numbers, size: int) -> Numbers:
        """Return the factor of each dim in a norm with this weight: the weight itself, or 1 + weight (as in Gemma).

        The factor is measured where the class of the model is known; else it is the weight.
        """
        disagrees = f"the norm {name!r} has a weight of shape {tuple(weight.shape)}; {_DISAGREE}"
        if weight.size != size:
            raise CheckpointError(disagrees)
        gain = self.gains.get(name)
        if gain is None:
            return weight
        try:
            return gain(weight)
        except RuntimeError as error:  # a norm of a fixed shape
            raise CheckpointError(disagrees) from error


def numbers_in_files(view: TensorView) -> Callable[[str, str | None], Numbers]:
    """Return a function that reads the numbers of tensors in files, as `RotatedWeights.read` does."""

    def read(name: str, scale_name: str | None) -> Numbers:
        dtype = view.tensors[name].dtype
        if name != scale_name and dtype in TORCH_NAMES:
            check_readable(name, scale_name, floating=is_floating_point(dtype), dtype=TORCH_NAMES[dtype])
        return view.read_float32(name)

    return read


def check_readable(name: str, scale_name: str | None, *, floating: bool, dtype: str) -> None:
    """Raise CheckpointError for a weight whose numbers do not stand for themselves, because they are packed.

    Args:
        name: the name of the tensor.
        scale_name: the tensor with its scales; None: it has none.
        floating: whether its numbers have an exponent.
        dtype: the dtype, as torch names it.
    """
    if not floating and (dtype != "int8" or scale_name is None):
        raise CheckpointError(
            f"{name!r} is quantised: its numbers are packed into torch.{dtype}, so its rows cannot be read; give the "
            "model before it was quantised"
        )


def _numbers_by_value(name: str) -> list[tuple[bool, str]]:
    """Return a sort key by which the numbers in a module's name are ordered by value: layer 10 after layer 2."""
    return [(part.isdigit(), part.zfill(9) if part.isdigit() else part) for part in name.split(".")]


def _scaled(weight: Numbers, scale: Numbers) -> Numbers:
    """Return a quantised weight times its scale: one number, one per row, or one per block of rows and columns."""
    if scale.size == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat(block, dim).take(range(size), dim)
    return weight * scale

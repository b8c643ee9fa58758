"""The heads that the rows of a weight make up, and how they are listed for a class of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from rope_ext_hf.patches.rows.rotated_pairs import Dim, NotUnderstoodError, Score


@dataclass(frozen=True)
class _Head:
    """Consecutive rows of a weight: one head, or rows that are of no head.

    Attributes:
        size: the number of rows.
        rotary: how many of them rotate.
        start: the first row that rotates.
        side: "q" or "k", or "index_q" or "index_k" of an indexer; "": rows that become neither queries nor keys.
    """

    size: int
    rotary: int = 0
    start: int = 0
    side: str = ""


@dataclass(frozen=True)
class ModuleRows:
    """The rows of one module or parameter inside an attention module.

    Attributes:
        heads: its heads in the order of their rows.
        pairing: "half" or "interleaved"; None: its heads rotate one pair only, so that both are the same.
    """

    heads: tuple[_Head, ...]
    pairing: str | None


@dataclass(frozen=True)
class LayerRows:
    """The weights of one layer.

    Attributes:
        rotated: the modules and parameters with rows that rotate, by their names inside the layer, such as
            "self_attn.q_proj"; empty: the layer does not rotate.
        saved: the same by the names under which transformers saves them, where these names differ, or where it joins
            several weights in one.
        parts: for each name in `saved`, the names in `rotated` of the weights that it holds.
        names: the names of all tensors inside the layer, such as "self_attn.q_proj.weight", in both forms.
    """

    rotated: dict[str, ModuleRows]
    saved: dict[str, ModuleRows]
    parts: dict[str, tuple[str, ...]]
    names: tuple[str, ...]


@dataclass(frozen=True)
class ClassRows:
    """The rows that rotate in the weights of a model.

    Attributes:
        layers: those of every layer.
        stack: the path of the list of layers in the class.
        pairing: the pairing of the attention, "half" or "interleaved".
    """

    layers: tuple[LayerRows, ...]
    stack: str
    pairing: str


def heads_of_rows(
    name: str, dims: list[Dim | None], scores: dict[int, Score], attended: set[int]
) -> tuple[tuple[_Head, ...], str | None]:
    """Return the heads of a weight and their pairing, from the dim that each of its rows becomes."""
    heads: list[_Head] = []
    pairings: set[str] = set()
    for run in _runs(dims):
        first = run[0]
        if first is None:
            heads.append(_Head(len(run)))
            continue
        pair_of = scores[first.score].pair_of(first.side)
        numbers = [None if dim is None else pair_of.get(dim.dim) for dim in run]
        turning = [place for place, number in enumerate(numbers) if number is not None]
        side = ("" if attended.intersection(scores[first.score].products) else "index_") + "qk"[first.side]
        if not turning:
            heads.append(_Head(len(run)))
            continue
        start, count = turning[0], len(turning)
        order = numbers[start : start + count]
        arranged = {"half": [*range(count // 2)] * 2, "interleaved": [at // 2 for at in range(count)]}
        fitting = {pairing for pairing, expected in arranged.items() if expected == order}
        if not fitting or count != len(pair_of):
            raise NotUnderstoodError(f"the rows of a head of {name!r} that rotate are in no order that is known here")
        heads.append(_Head(len(run), count, start, side))
        if len(fitting) == 1:
            pairings |= fitting
    if len(pairings) > 1:
        raise NotUnderstoodError(f"the heads of {name!r} are in several pairings")
    return tuple(_unrotated_joined(heads)), next(iter(pairings), None)


def _runs(dims: list[Dim | None]) -> Iterator[list[Dim | None]]:
    """Yield consecutive rows that belong together: those of one head, or those that become no dim."""
    run: list[Dim | None] = []
    for dim in dims:
        last = run[-1] if run else None
        same = dim is last if dim is None or last is None else dim[:2] == last[:2] and dim not in run
        if run and not same:
            yield run
            run = []
        run.append(dim)
    yield run


def _unrotated_joined(heads: Iterable[_Head]) -> Iterator[_Head]:
    """Yield the heads; consecutive rows that belong to no head are joined into one entry."""
    for rotates, group in groupby(heads, lambda head: bool(head.rotary)):
        some = list(group)
        yield from some if rotates else [_Head(sum(head.size for head in some))]


def joined_rows(name: str, origins: list[tuple[str, int]], rotated: dict[str, ModuleRows]) -> ModuleRows:
    """Return the rows of a saved tensor from those of the modules that it holds.

    `origins`: for each row the module that it is of, and its number there.
    """
    heads: list[_Head] = []
    while origins:
        module, row = origins[0]
        if module in rotated:
            starts = accumulate((head.size for head in rotated[module].heads), initial=0)
            head = next(
                (head for head, start in zip(rotated[module].heads, starts, strict=False) if start == row), None
            )
        else:
            head = _Head(next((at for at, (other, _) in enumerate(origins) if other in rotated), len(origins)))
        if head is None or (
            module in rotated and origins[: head.size] != [(module, row + n) for n in range(head.size)]
        ):
            raise NotUnderstoodError(f"transformers reorders the rows of {name!r} when it loads and saves them")
        heads.append(head)
        origins = origins[head.size :]
    pairings = {rotated[module].pairing for module in rotated if any(head in heads for head in rotated[module].heads)}
    return ModuleRows(tuple(heads), next(iter(pairings - {None}), None))


# --- names of weights in files ------------------------------------------------------------------------------------


_LAYER = re.compile(r"(?:.*?\.)??\w+\.\d+\.(?P<inside>.+)")


def saved_rows(model: nn.Module, layer: str, attentions: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the tensors in the attention of a layer as transformers saves them, by their names inside the layer.

    Args:
        model: the model.
        layer: the path of the layer.
        attentions: the names that modules around rotated weights have inside layers of the model.

    Returns:
        For each row of each tensor, the name of the module that it is of, and its number there. It is empty where
        transformers saves everything under the names of the class.
    """
    numbered: dict[str, Tensor] = {}
    origins: list[tuple[str, int]] = []
    for name, tensor in model.get_submodule(layer).state_dict().items():
        if tensor.ndim and any(name.startswith(f"{attention}.") for attention in attentions):
            first, rows = len(origins), tensor.shape[0]
            numbers = torch.arange(first, first + rows, dtype=torch.float64)
            numbered[f"{layer}.{name}"] = numbers.reshape(-1, *[1] * (tensor.ndim - 1))
            origins += [(name.rpartition(".")[0] or name, row) for row in range(rows)]
    saved: dict[str, Tensor] = {}
    with suppress(Exception):  # transformers does not document what this does with a part of the weights
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(model, dict(numbered))
    if saved.keys() == numbered.keys():
        return {}
    named = {name: _LAYER.fullmatch(name) for name in saved}
    return {
        match["inside"]: [origins[int(number)] for number in saved[name].flatten().tolist()]
        for name, match in named.items()
        if match is not None
    }

"""Gradients that show which dim of queries or keys each row of a weight becomes.

Every dim of the queries and the keys gets a random code of signs, and the gradient of a row of a weight shows the code
of the dim that the row becomes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.patches.rows.rotated_pairs import Dim, NotUnderstoodError, Score

_CODES, CODES_AT_ONCE = 64, 16
"""The number of signs in the code of a dim, and of codes that are followed at once, which takes memory."""
_LIKE = (0.95, 0.75, 0.55)
"""The least correlations with the code of a dim at which a row counts as that dim, tried in this order.

In models with few rows, norms lower those of queries and keys to 0.8, and rows that are mixed afterwards, as compressed
keys are, may reach 0.9 by chance.
"""


@dataclass(frozen=True)
class _Target:
    """A weight with rows: of the module `name`, or the parameter of that name.

    Attributes:
        name: the path.
        tensors: the outputs of the module, one for each time that it ran, (..., rows); or the parameter, (rows, ...).
        is_output: whether they are outputs of the module.
    """

    name: str
    tensors: tuple[Tensor, ...]
    is_output: bool

    @property
    def is_matrix(self) -> bool:
        """True if the weight makes its rows from something else; a norm only multiplies the dims that it is given."""
        return self.is_output or self.tensors[0].ndim > 1

    def by_row(self, gradients: Iterable[Tensor | None]) -> Tensor | None:
        """Return the derivatives with respect to a factor of each row, (n, rows), from n gradients of each tensor.

        `gradients`: (n, ...) each; None for a tensor on which nothing depends. The result is None if all are.
        """
        rows = [
            (tensor.detach() * gradient).flatten(1, -2).sum(1) if self.is_output else gradient.flatten(1)
            for tensor, gradient in zip(self.tensors, gradients, strict=True)
            if gradient is not None
        ]
        return sum(rows[1:], rows[0]) if rows else None


@dataclass(frozen=True)
class Gradients:
    """The ways in which rows enter queries and keys.

    Attributes:
        dims: the dims of all queries and keys.
        codes: the code of each dim, (codes, dims).
        targets: the weights.
        responses: of each weight, the responses of its rows to the codes, (codes, rows); None: there are none.
        beside: of each weight, how its rows enter the output of their layer by another way than the scores, (rows,).
        attended: the numbers of the products that the output of the layer depends on; others choose keys.
        used: the paths of the modules that ran.
    """

    dims: list[Dim]
    codes: Tensor
    targets: list[_Target]
    responses: list[Tensor | None]
    beside: list[Tensor | None]
    attended: set[int]
    used: set[str]

    def rows(self, layer: str, scores: dict[int, Score]) -> Iterator[tuple[_Target, list[Dim | None]]]:
        """Yield the weights of a layer that rotate, and for each row the dim that it becomes; None: it becomes none."""
        at = [place for place, dim in enumerate(self.dims) if dim.score in scores]
        dims = [self.dims[place] for place in at]
        rotating = {dim for dim in dims if dim.dim in scores[dim.score].pair_of(dim.side)}
        codes = self.codes[:, at] / _CODES**0.5
        for target, response, beside in zip(self.targets, self.responses, self.beside, strict=True):
            if response is None or not target.name.startswith(f"{layer}."):
                continue
            size = response.norm(dim=0)
            likeness = (response / size.clamp(min=1e-30)).T @ codes  # (rows, dims)
            best, place = (likeness if target.is_output else likeness.abs()).max(1)
            best[size <= 1e-4 * size.max()] = 0
            nearest = [dims[index] for index in place.tolist()]
            becomes = _rows_of_whole_heads(nearest, best.tolist(), dims, rotating)
            if becomes is None:
                continue
            turning = torch.tensor([dim in rotating for dim in becomes])
            if beside is not None and bool((beside[turning].abs() > 1e-6 * beside.abs().max()).any()):
                raise NotUnderstoodError(
                    f"something else than queries and keys is computed from rows of {target.name!r} that rotate "
                    "(values, for example), so that its rows cannot be moved alone"
                )
            yield target, becomes


class Recording:
    """Keeps what the modules of some layers compute in a forward, each layer apart from those before it."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self._model, self._layers = model, layers
        self._computed: dict[str, list[Tensor]] = defaultdict(list)
        self.used: set[str] = set()
        self.outputs: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Recording:
        for path in self._layers:
            layer = self._model.get_submodule(path)
            self._handles += [
                layer.register_forward_pre_hook(_detach, with_kwargs=True),
                layer.register_forward_hook(lambda _, __, out: self.outputs.append(_first(out))),
            ]
            for name, module in layer.named_modules(prefix=path):
                self._handles.append(module.register_forward_hook(lambda *_, name=name: self.used.add(name)))
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                    self._handles.append(module.register_forward_hook(self._keep(name, weight.shape[0])))
        return self

    def _keep(self, name: str, rows: int) -> Callable[[Any, Any, Any], None]:
        def keep(_: Any, __: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.requires_grad and out.shape[-1] == rows:
                self._computed[name].append(out)

        return keep

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def targets(self) -> list[_Target]:
        """Return the weights of the layers: outputs of projections, and all other parameters."""
        targets = [_Target(name, tuple(out), True) for name, out in self._computed.items()]
        for path in self._layers:
            for name, parameter in self._model.get_submodule(path).named_parameters(prefix=path):
                module, _, kind = name.rpartition(".")
                if module not in self._computed and kind != "bias" and parameter.requires_grad:
                    targets.append(_Target(module if kind == "weight" else name, (parameter,), False))
        return targets


def _detach(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def apart(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return tuple(map(apart, args)), {key: apart(value) for key, value in kwargs.items()}


def _first(out: Any) -> Tensor:
    """Return the first tensor of a layer's output."""
    return out if isinstance(out, Tensor) else next(each for each in out if isinstance(each, Tensor))


def _rows_of_whole_heads(
    nearest: Sequence[Dim], likeness: Sequence[float], dims: Sequence[Dim], rotating: set[Dim]
) -> list[Dim | None] | None:
    """Return the dim that each row of a weight becomes (None: no dim); None if its rows make up no whole heads.

    Args:
        nearest: for each row the dim that it resembles most.
        likeness: how closely it resembles that dim, from 0 to 1.
        dims, rotating: all dims, and those that rotate.
    """
    most: dict[tuple[int, int], int] = {}
    rows: Counter[Dim] = Counter()
    chosen: list[Dim | None] = []
    for least in _LIKE:
        becomes = [dim if like > least else None for dim, like in zip(nearest, likeness, strict=True)]
        of_dim = Counter(dim for dim in becomes if dim is not None)
        heads = _heads_by_side(of_dim, rotating)
        if sum(heads.values()) > sum(most.values()):
            most, rows, chosen = heads, of_dim, becomes
    whole: set[Dim] = set()
    for side, count in most.items():
        # Of keys that several weights make, one may have rows of the rotated dims alone (latent attention).
        of_side = [dim for dim in dims if dim[:2] == side]
        has_all = all(rows[dim] == count for dim in of_side)
        whole |= {dim for dim in of_side if count and (has_all or dim in rotating)}
    return [dim if dim in whole else None for dim in chosen] if whole else None


def _heads_by_side(rows: Counter[Dim], rotating: set[Dim]) -> dict[tuple[int, int], int]:
    """Return how many heads of each score and side the rows of a weight become, given the number of rows of each dim.

    It is empty if they become no whole heads. Rows of weights that all dims depend on may resemble single dims by
    chance.
    """
    heads: dict[tuple[int, int], int] = {}
    for side in {dim[:2] for dim in rotating}:
        counts = {rows[dim] for dim in rotating if dim[:2] == side}
        if len(counts) > 1 and 0 not in counts:
            return {}
        heads[side] = min(counts)
    return heads


def balanced_codes(dims: int, seed: int) -> Tensor:
    """Return random signs (codes, dims) with as many pluses as minuses in each row.

    A norm lowers all dims alike when one row grows. The sum of such changes over a row of signs is 0, so that the norm
    does not hide the dim that the row becomes, however large the row is.
    """
    draws = torch.Generator().manual_seed(seed)
    order = torch.rand(_CODES, dims, generator=draws).argsort(1)
    return torch.where(order % 2 == 0, 1.0, -1.0)


def joined(parts: list[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def shares(vectors: Tensor) -> Tensor:
    """Return a sum for each dim, (dims,), to which every row of a weight that becomes the dim contributes alike.

    `vectors`: (..., n, dims).
    """
    fixed = vectors.detach()
    return (vectors * fixed / fixed.square().sum(-2, keepdim=True).clamp(min=1e-30)).flatten(0, -2).sum(0)

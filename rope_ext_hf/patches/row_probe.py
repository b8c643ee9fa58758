"""Find out which rows of a class's weights rotate, by running a small random model of it on the CPU.

    rows = probe_rows(config)
    rows.layers[0].rotated["q_proj"]        # its heads, in the order in which their rows are stored

No name of a module is known here, and no class is changed. The small model has as many heads of the same size as the
config states, few layers and a small width. Three forwards over a few tokens show everything:

1. at angle 0;
2. with an angle of its own for every pair of dims. The products whose operands differ are the scores of queries and
   keys (`score_products`), and the dims that differ show which two of them each angle has mixed;
3. at angle 0 with gradients. Every dim of the queries and the keys gets a random code of signs, and the gradient of a
   row of a weight shows the code of the dim that the row becomes. Norms, which mix the rows a little, do not hide it.

Rows from which anything else is computed too (values that are the keys) cannot be moved, and are refused.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError, one_line
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.model_classes import class_of_part
from rope_ext_hf.patches.patch_records import before_patches
from rope_ext_hf.patches.saved_names import saved_rows
from rope_ext_hf.patches.score_products import Product, watched
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import Slot
from rope_ext_hf.patches.small_models import kinds_of_layers, small_model, usual_values

_TEXTS = 4
"""The number of texts that are run at once, so that a pair of dims is seen with many values."""
_TOKENS = (11, 139)
"""The lengths of the texts: the second one where the first is too short for some weight to be used. They are prime, so
that no size of a model is equal to one, and tell keys from dims."""
_CODES, _CODES_AT_ONCE = 64, 16
"""The number of signs in the code of a dim, and of codes that are followed at once, which takes memory."""
_LIKE = (0.95, 0.75, 0.55)
"""The correlations with the code of a dim from which on a row becomes that dim, tried in this order.

In models with few rows, norms lower those of queries and keys to 0.8, and rows that are mixed afterwards, as compressed
keys are, may reach 0.9 by chance.
"""

_ROUNDING = 1e-8
"""The part of the square of a dim that rounding may leave over."""


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
        saved: the same by the names under which transformers saves them, where those are others, or where it joins
            several in one.
        parts: for each name in `saved`, the names in `rotated` of what it holds.
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


class _NotUnderstoodError(UnsupportedModelError):
    """The error for a class of which the probe cannot tell what rotates."""


class _TooShortError(_NotUnderstoodError):
    """The error for texts that are too short for some weight of an attention module to be used."""


def probe_rows(config: Any, model_class: type[Any] | None = None) -> ClassRows:
    """Return which rows of the weights rotate in the model that a text config describes.

    Args:
        config: the text config.
        model_class: the class of the model; None: the one that transformers loads for the config.

    Raises:
        UnsupportedModelError: the small model cannot be built or run, or what it computes is not understood.
    """
    try:
        plain = before_patches(config)
        return _probe_rows(type(plain), plain.to_json_string(use_diff=False), model_class)  # type: ignore[arg-type]
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"which rows of the weights of {config.model_type!r} rotate could not be found out: {error}. Without that, "
            "they cannot be converted, and their pairing cannot be detected; a patch does not need it"
        ) from error


def run_pairing(config: Any, model_class: type[Any] | None = None) -> str | None:
    """Return which dims a class rotates together, by the family table, else by a probe: "half" or "interleaved".

    None: the table does not state it, and the probe does not understand the class. The arguments are those of
    `probe_rows`; the config may hold a text config. The model that is probed has few heads, and is fast.
    """
    text = config.get_text_config()
    known = family(text.model_type)
    if known.pairing is not None or known.remote_attention is not None:
        return class_pairing(config)
    try:
        plain = before_patches(text)
        return _pairing(type(plain), plain.to_json_string(use_diff=False), model_class)  # type: ignore[arg-type]
    except (CheckpointError, UnsupportedModelError):
        return None


def pairing_of(model: Any, config: Any | None = None) -> str | None:
    """Return which dims the class of a model rotates together, see `run_pairing`.

    Some text configs load no class by themselves (Emu3); then the class that the model has for them is probed.

    Args:
        model: a model of transformers, or the base of one with adapters.
        config: its text config, if that is another one than its config names.
    """
    text = model.config.get_text_config() if config is None else config
    return run_pairing(text, class_of_part(model, text))


@lru_cache(maxsize=64)
def _pairing(config_class: type[Any], config: str, model_class: type[Any] | None) -> str:
    return _rows_of_small(config_class, config, model_class, all_heads=False).pairing


@lru_cache(maxsize=64)
def _probe_rows(config_class: type[Any], config: str, model_class: type[Any] | None) -> ClassRows:
    kinds = kinds_of_layers(usual_values(config_class, config))
    first = sorted(set(kinds))
    rows = _rows_of_small(config_class, config, model_class)
    if len(rows.layers) == len(kinds):
        return rows
    if len(rows.layers) == len(first):
        of_all = tuple(rows.layers[first.index(kind)] for kind in kinds)
        rotating = {number for number, layer in enumerate(of_all) if layer.rotated}
        if _rotating_layers(config_class, config, model_class) in (rotating, None):
            return replace(rows, layers=of_all)
    # The class makes another number of layers than the config states, or layers that the config describes alike differ:
    # it runs each several times, for example, or skips the rotation in every fourth one.
    return _rows_of_small(config_class, config, model_class, all_layers=True)


def _rotating_layers(config_class: type[Any], config: str, model_class: type[Any] | None) -> set[int] | None:
    """Return the numbers of the layers that rotate in a model with few heads and all layers.

    None: no such model can be built, or its scores are not understood.
    """
    model = small_model(config_class, config, model_class, layers=True)
    if model is None:
        return None
    with warnings.catch_warnings(action="ignore"):
        try:
            return _Probe(model, _TOKENS[0]).rotating_layers()
        except (_NotUnderstoodError, TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError):
            return None


def _rows_of_small(
    config_class: type[Any],
    config: str,
    model_class: type[Any] | None,
    *,
    all_heads: bool = True,
    all_layers: bool = False,
) -> ClassRows:
    """Return the rows that rotate in a small model.

    `all_heads`, `all_layers`: it has as many as the config states; else few heads, and one layer of each kind.
    """
    model = small_model(config_class, config, model_class, heads=all_heads, layers=all_layers)
    if model is None:
        raise _NotUnderstoodError("no small model of its class can be built and run")
    with warnings.catch_warnings(action="ignore"):
        try:
            try:
                return _Probe(model, _TOKENS[0]).rows()
            except _TooShortError:
                return _Probe(model, _TOKENS[1]).rows()
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise _NotUnderstoodError(f"a small model of its class does not run: {one_line(error)}") from error


class _Dim(NamedTuple):
    """One dim of queries or keys."""

    score: int  # the number of the scores
    side: int  # 0: queries, 1: keys
    dim: int


@dataclass(frozen=True)
class _Score:
    """The scores of queries and keys in one module.

    Attributes:
        layer: the path of its layer.
        products: the numbers of the products that compute them: one, or one for each part of them.
        pairs: the two dims that each angle mixes, of the queries and of the keys.
        dims: the number of dims.
    """

    layer: str
    products: list[int]
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]]
    dims: int

    def pair_of(self, side: int) -> dict[int, int]:
        """Return the number of its pair for each dim that rotates."""
        return {dim: pair for pair, both in enumerate(self.pairs[side]) for dim in both}


class _Probe:
    """One small model, and what three forwards of it show."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.model = model
        self.tokens = tokens
        self.computed_by: list[str] = []  # the module of each product of a forward
        self.slots = find_slots(model)
        with suppress(AttributeError, ValueError):
            model.set_attn_implementation("eager")  # type: ignore[operator]

    def rows(self) -> ClassRows:
        """Return the rows that rotate in the small model."""
        scores = self._scores()
        by_layer: dict[str, dict[int, _Score]] = defaultdict(dict)
        for number, score in enumerate(scores):
            by_layer[score.layer][number] = score
        gradients = self._gradients(scores)
        rows = {layer: self._rows_of_layer(layer, of_layer, gradients) for layer, of_layer in by_layer.items()}
        modules = {name.rpartition(".")[0] for rotated, _ in rows.values() for name in rotated}
        attentions = sorted(modules - {""})
        pairings = {pairing for _, pairing in rows.values()}
        if len(pairings) != 1 or None in pairings:
            raise _NotUnderstoodError(
                f"its layers rotate in several pairings ({', '.join(sorted(map(str, pairings)))})"
            )
        first = next(iter(rows))
        stack = first.rpartition(".")[0]
        layers = []
        for number, _ in enumerate(self.model.get_submodule(stack).children()):
            path = f"{stack}.{number}"
            rotated, _ = rows.pop(path, ({}, None))
            layers.append(self._as_saved(path, rotated, attentions))
        if rows:
            raise _NotUnderstoodError(f"layers of {stack!r} and {next(iter(rows))!r} rotate")
        return ClassRows(tuple(layers), stack, str(pairings.pop()))

    def rotating_layers(self) -> set[int]:
        """Return the numbers of the layers that rotate."""
        return {int(score.layer.rpartition(".")[2]) for score in self._scores()}

    def _names(self, layer: str) -> tuple[str, ...]:
        return tuple(self.model.get_submodule(layer).state_dict())

    def _run(self, texts: int) -> Any:
        draws = torch.Generator().manual_seed(0)
        vocabulary = min(128, self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        ids = torch.randint(3, vocabulary, (texts, self.tokens), generator=draws)
        return self.model(input_ids=ids, use_cache=False)

    def _scores(self) -> list[_Score]:
        """Return the scores of queries and keys, by two forwards that differ in the angles only."""
        with torch.no_grad():
            with _rotating(self.slots, torch.zeros_like):
                plain = watched(self.model, partial(self._run, _TEXTS))
            with _rotating(self.slots, _angle):
                rotated = watched(self.model, partial(self._run, _TEXTS), [product.out for product in plain])
        if [product.module for product in plain] != [product.module for product in rotated]:
            raise _NotUnderstoodError("what it computes depends on the angles in another way than by its scores")
        parts: dict[tuple[str, int], list[int]] = defaultdict(list)
        for number, (before, after) in enumerate(zip(plain, rotated, strict=True)):
            if torch.equal(before.left, after.left) and _equal(before.right, after.right):
                continue
            if before.right is None or after.right is None or before.left.shape[-1] == self.tokens:
                raise _NotUnderstoodError(
                    f"the rotation reaches {before.module!r} beside the scores of queries and keys: its values or its "
                    "output rotate too"
                )
            parts[before.module, before.left.shape[-1]].append(number)
        if not parts:
            raise _NotUnderstoodError("no product of queries and keys changes with the angles")
        self.computed_by = [product.module for product in plain]
        scores = []
        for (module, dims), numbers in parts.items():
            sides = []
            for vectors in (_left, _right):
                operands = [[vectors(products[number]) for number in numbers] for products in (plain, rotated)]
                sides.append(_pairs_of_heads(*operands))
            scores.append(_Score(self._layer_of(module), numbers, (sides[0], sides[1]), dims))
        return scores

    def _check_used(self, layer: str, rotated: list[str], used: set[str]) -> None:
        """Check that all weights beside those that rotate were used: of one that was not, nothing is known.

        An indexer that has few keys to choose from is not asked, for example.
        """
        attention = ".".join([layer, *common_path(rotated)])
        for path, module in self.model.get_submodule(attention).named_modules(prefix=attention):
            if path not in used and path != layer and any(True for _ in module.parameters(recurse=False)):
                raise _TooShortError(f"{path!r} is not used for {self.tokens} tokens")

    def _layer_of(self, path: str) -> str:
        """Return the path of the layer that a module is in: of the first module on the way that is one of a list."""
        parts = path.split(".")
        for end in range(1, len(parts)):
            if isinstance(self.model.get_submodule(".".join(parts[:end])), nn.ModuleList):
                return ".".join(parts[: end + 1])
        raise _NotUnderstoodError(f"{path!r} is in no numbered layer")

    def _gradients(self, scores: list[_Score]) -> _Gradients:
        """Return for every weight of the layers how its rows enter queries, keys and anything else."""
        cut = [product for score in scores for product in score.products]
        layers = list(dict.fromkeys(score.layer for score in scores))
        for texts in (1, _TEXTS):
            with _rotating(self.slots, torch.zeros_like), _Recording(self.model, layers) as recording:
                products = watched(self.model, partial(self._run, texts), cut=cut)
            if [product.module for product in products] == self.computed_by:
                break  # else it computes something for each text on its own, and the products are numbered otherwise
        targets = recording.targets()
        dims: list[_Dim] = []
        sums: list[Tensor] = []
        for number, score in enumerate(scores):
            for side, vectors in enumerate((_left, _right)):
                sums.append(sum(_shares(vectors(products[product])) for product in score.products))  # type: ignore[arg-type]
                dims += [_Dim(number, side, dim) for dim in range(score.dims)]
        total = torch.cat(sums)
        codes = torch.cat([_balanced_codes(len(sums[place]), seed=place) for place in range(len(sums))], 1)
        tensors = [tensor for target in targets for tensor in target.tensors]
        responses: list[list[Tensor | None]] = [[] for _ in targets]
        for some in torch.split(codes, _CODES_AT_ONCE):
            gradients = iter(
                torch.autograd.grad(total, tensors, some, retain_graph=True, allow_unused=True, is_grads_batched=True)
            )
            for target, response in zip(targets, responses, strict=True):
                response.append(target.by_row(islice(gradients, len(target.tensors))))
        leaves = [products[number].out for number in cut]
        ends = torch.stack([out.float().square().sum() for out in recording.outputs]).sum()
        beside = torch.autograd.grad(ends, [*tensors, *leaves], allow_unused=True)
        of_tensors = iter([None if gradient is None else gradient[None] for gradient in beside[: len(tensors)]])
        by_row = [target.by_row(islice(of_tensors, len(target.tensors))) for target in targets]
        return _Gradients(
            dims=dims,
            codes=codes,
            targets=targets,
            responses=[_joined(response) for response in responses],
            used=recording.used,
            beside=[None if rows is None else rows[0] for rows in by_row],
            attended={product for product, g in zip(cut, beside[len(tensors) :], strict=True) if g is not None},
        )

    def _rows_of_layer(
        self, layer: str, scores: dict[int, _Score], gradients: _Gradients
    ) -> tuple[dict[str, ModuleRows], str | None]:
        """Return the rows of one layer that rotate, and the pairing of its attention.

        `scores`: those of the layer, by number.
        """
        rotated: dict[str, ModuleRows] = {}
        pairings: dict[bool, set[str]] = {True: set(), False: set()}
        covered: set[_Dim] = set()
        for target, dims in gradients.rows(layer, scores):
            heads, pairing = _heads(target.name, dims, scores, gradients.attended)
            rotated[target.name.removeprefix(f"{layer}.")] = ModuleRows(heads, pairing)
            if target.is_matrix:
                covered |= {dim for dim in dims if dim is not None}
            if pairing is not None:
                pairings[any(head.side in ("q", "k") for head in heads)].add(pairing)
        for number, score in scores.items():
            for side in (0, 1):
                if not all(_Dim(number, side, dim) in covered for dim in score.pair_of(side)):
                    vectors = ("queries", "keys")[side]
                    raise _NotUnderstoodError(
                        f"no weight of {layer!r} has a row for every rotated dim of its {vectors}"
                    )
        self._check_used(layer, list(rotated), gradients.used)
        own = pairings[True]
        if len(own) > 1:
            raise _NotUnderstoodError(f"{layer!r} rotates queries and keys in several pairings")
        return rotated, next(iter(own), None)

    def _as_saved(self, layer: str, rotated: dict[str, ModuleRows], attentions: list[str]) -> LayerRows:
        """Return the rows of a layer, also by the names under which transformers saves them."""
        saved: dict[str, ModuleRows] = {}
        parts: dict[str, tuple[str, ...]] = {}
        names = list(self._names(layer))
        for name, origins in saved_rows(self.model, layer, attentions).items():
            names.append(name)
            module = name.removesuffix(".weight")
            of_modules = tuple(dict.fromkeys(origin for origin, _ in origins if origin in rotated))
            if module == name or module in rotated or not of_modules:
                continue
            saved[module], parts[module] = _joined_rows(name, origins, rotated), of_modules
        return LayerRows(rotated, saved, parts, tuple(names))


@dataclass(frozen=True)
class _Target:
    """A weight with rows: of the module `name`, or the parameter of that name.

    Attributes:
        name: the path.
        tensors: the outputs of the module, one for each time that it ran, (..., rows); or the parameter, (rows, ...).
        is_output: which of both they are.
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
class _Gradients:
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

    dims: list[_Dim]
    codes: Tensor
    targets: list[_Target]
    responses: list[Tensor | None]
    beside: list[Tensor | None]
    attended: set[int]
    used: set[str]

    def rows(self, layer: str, scores: dict[int, _Score]) -> Iterator[tuple[_Target, list[_Dim | None]]]:
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
                raise _NotUnderstoodError(
                    f"something else than queries and keys is computed from rows of {target.name!r} that rotate "
                    "(values, for example), so that its rows cannot be moved alone"
                )
            yield target, becomes


def _rows_of_whole_heads(
    nearest: Sequence[_Dim], likeness: Sequence[float], dims: Sequence[_Dim], rotating: set[_Dim]
) -> list[_Dim | None] | None:
    """Return the dim that each row of a weight becomes (None: no dim); None if its rows make up no whole heads.

    Args:
        nearest: for each row the dim that it resembles most.
        likeness: how much, 0 to 1.
        dims, rotating: all dims, and those that rotate.
    """
    most: dict[tuple[int, int], int] = {}
    rows: Counter[_Dim] = Counter()
    chosen: list[_Dim | None] = []
    for least in _LIKE:
        becomes = [dim if like > least else None for dim, like in zip(nearest, likeness, strict=True)]
        of_dim = Counter(dim for dim in becomes if dim is not None)
        heads = _heads_by_side(of_dim, rotating)
        if sum(heads.values()) > sum(most.values()):
            most, rows, chosen = heads, of_dim, becomes
    whole: set[_Dim] = set()
    for side, count in most.items():
        # Of keys that several weights make, one may have rows of the rotated dims alone (latent attention).
        of_side = [dim for dim in dims if dim[:2] == side]
        has_all = all(rows[dim] == count for dim in of_side)
        whole |= {dim for dim in of_side if count and (has_all or dim in rotating)}
    return [dim if dim in whole else None for dim in chosen] if whole else None


def _heads_by_side(rows: Counter[_Dim], rotating: set[_Dim]) -> dict[tuple[int, int], int]:
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


def _balanced_codes(dims: int, seed: int) -> Tensor:
    """Return random signs (codes, dims) with as many pluses as minuses in each row.

    A norm lowers all dims alike when one row grows. The sum of such changes over a row of signs is 0, so that the norm
    does not hide the dim that the row becomes, however large the row is.
    """
    draws = torch.Generator().manual_seed(seed)
    order = torch.rand(_CODES, dims, generator=draws).argsort(1)
    return torch.where(order % 2 == 0, 1.0, -1.0)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _shares(vectors: Tensor) -> Tensor:
    """Return a sum for each dim, (dims,), to which every row of a weight that becomes the dim contributes alike.

    `vectors`: (..., n, dims).
    """
    fixed = vectors.detach()
    return (vectors * fixed / fixed.square().sum(-2, keepdim=True).clamp(min=1e-30)).flatten(0, -2).sum(0)


def _left(product: Product) -> Tensor:
    return product.left


def _right(product: Product) -> Tensor:
    assert product.right is not None
    return product.right


def common_path(names: Sequence[str]) -> list[str]:
    """Return the parts of the path that the modules around several modules have in common."""
    first, *others = [name.split(".")[:-1] for name in names]
    common = [part for at, part in enumerate(first) if all(other[at : at + 1] == [part] for other in others)]
    return common[: next((at for at, part in enumerate(common) if part != first[at]), None)]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _angle(pairs: Tensor) -> Tensor:
    """Return angles in radians for pairs with these numbers: between 0.3 and 1.2, and far from each other."""
    return 0.3 + 0.9 * torch.frac(pairs * 0.6180339887)


@contextmanager
def _rotating(slots: Sequence[Slot], angle: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Rotate each pair by an angle, the same at every position, inside the with block.

    `angle`: returns the angles of pairs, given their numbers.
    """

    def hook(slot: Slot, output: Any) -> Any:
        one = output[0] if isinstance(output, tuple) else output
        bare = slot.layout in ("bare", "complex")
        angles = angle(torch.arange(one.shape[-1] if bare else one.shape[-1] // 2, dtype=torch.float64))
        if slot.layout == "half":
            angles = torch.cat((angles, angles))
        elif slot.layout == "interleaved":
            angles = angles.repeat_interleave(2)
        if slot.layout == "complex":
            return torch.polar(torch.ones_like(angles), angles).to(one.dtype).expand_as(one)
        return tuple(part.to(one.dtype).expand_as(one) for part in (angles.cos(), angles.sin()))

    with ExitStack() as stack:
        for slot in slots:
            handle = slot.module.register_forward_hook(lambda _, __, output, slot=slot: hook(slot, output))
            stack.callback(handle.remove)
        yield


def _pairs_of_heads(before: list[Tensor], after: list[Tensor]) -> list[tuple[int, int]]:
    """Return the two dims that each angle has mixed, from the operands of a few products before and after.

    If the heads have factors of their own (Dory), each head is looked at alone: (texts, heads, tokens, dims).
    """
    try:
        return _pairs(*(torch.cat([x.flatten(0, -2) for x in parts]) for parts in (before, after)))
    except _NotUnderstoodError:
        if any(x.ndim != 4 or x.shape[1:] != before[0].shape[1:] for x in before):
            raise
        heads = zip(torch.cat(before).unbind(1), torch.cat(after).unbind(1), strict=True)
        first, *others = [_pairs(one.flatten(0, -2), other.flatten(0, -2)) for one, other in heads]
        if any(other != first for other in others):
            raise
        return first


def _pairs(before: Tensor, after: Tensor) -> list[tuple[int, int]]:
    """Return the two dims that each angle has mixed, from vectors (n, dims) before and after.

    The list is empty if nothing was rotated. A factor of a dim after the rotation does not matter.
    """
    one, other = before.double(), after.double()
    dims = (one != other).any(0).nonzero().flatten()
    one, other = one[:, dims], other[:, dims]
    # Each dim after the rotation is a sum of itself and of one other dim before it. For every two dims, the factors of
    # the best such sum, and what it leaves over.
    own, with_own = one.square().sum(0), (one * other).sum(0)
    products, with_others = one.T @ one, other.T @ one  # (dims after or before, dims before)
    determinant = own[:, None] * own - products.square()
    factor = (with_own[:, None] * own - with_others * products) / determinant
    other_factor = (with_others * own[:, None] - with_own[:, None] * products) / determinant
    left = other.square().sum(0)[:, None] - factor * with_own[:, None] - other_factor * with_others
    left = (left / other.square().sum(0)[:, None]).fill_diagonal_(torch.inf).nan_to_num(torch.inf, torch.inf, torch.inf)
    rest, partner = left.min(1) if len(dims) > 1 else (torch.full((len(dims),), torch.inf), dims)
    count = len(dims) // 2
    cosines = _angle(torch.arange(count, dtype=torch.float64)).cos()
    pairs: dict[int, tuple[int, int]] = {}
    for dim, second in enumerate(partner.tolist()):
        error, pair = (cosines - factor[dim, second]).abs().min(0) if count else (torch.inf, -1)
        if rest[dim] > _ROUNDING or error > _ROUNDING**0.5 or partner[second] != dim:
            raise _NotUnderstoodError("its queries or keys are not rotated pair by pair, or a norm with a mean follows")
        pairs[int(pair)] = tuple(sorted((int(dims[dim]), int(dims[second]))))  # type: ignore[assignment]
    return [pairs[pair] for pair in sorted(pairs)]


class _Recording:
    """Keeps what the modules of some layers compute in a forward, each layer apart from those before it."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self._model, self._layers = model, layers
        self._computed: dict[str, list[Tensor]] = defaultdict(list)
        self.used: set[str] = set()
        self.outputs: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Recording:
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


def _joined_rows(name: str, origins: list[tuple[str, int]], rotated: dict[str, ModuleRows]) -> ModuleRows:
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
            raise _NotUnderstoodError(f"transformers reorders the rows of {name!r} when it loads and saves them")
        heads.append(head)
        origins = origins[head.size :]
    pairings = {rotated[module].pairing for module in rotated if any(head in heads for head in rotated[module].heads)}
    return ModuleRows(tuple(heads), next(iter(pairings - {None}), None))


def _heads(
    name: str, dims: list[_Dim | None], scores: dict[int, _Score], attended: set[int]
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
            raise _NotUnderstoodError(f"the rows of a head of {name!r} that rotate are in no order that is known here")
        heads.append(_Head(len(run), count, start, side))
        if len(fitting) == 1:
            pairings |= fitting
    if len(pairings) > 1:
        raise _NotUnderstoodError(f"the heads of {name!r} are in several pairings")
    return tuple(_unrotated_joined(heads)), next(iter(pairings), None)


def _unrotated_joined(heads: Iterable[_Head]) -> Iterator[_Head]:
    """Yield heads, with rows of no head that follow each other as one."""
    for rotates, group in groupby(heads, lambda head: bool(head.rotary)):
        some = list(group)
        yield from some if rotates else [_Head(sum(head.size for head in some))]


def _runs(dims: list[_Dim | None]) -> Iterator[list[_Dim | None]]:
    """Yield consecutive rows that belong together: those of one head, or those that become no dim."""
    run: list[_Dim | None] = []
    for dim in dims:
        last = run[-1] if run else None
        same = dim is last if dim is None or last is None else dim[:2] == last[:2] and dim not in run
        if run and not same:
            yield run
            run = []
        run.append(dim)
    yield run

"""Find out which rows of a class's weights rotate, by running a small random model of it on the CPU.

    rows = probe_rows(config)
    rows.layers[0].rotated["q_proj"]        # its heads, in the order in which their rows are stored

No name of a module is known here, and no class is changed. The small model has as many heads of the same size as the
config states, few layers and a small width. Three forwards over a few tokens show everything:

1. at angle 0;
2. with an angle of its own for every pair of dims. The products whose operands differ are the scores of queries and
   keys (score_products.py), and the dims that differ show which two of them each angle has mixed (rotated_pairs.py);
3. at angle 0 with gradients. Every dim of the queries and the keys gets a random code of signs, and the gradient of a
   row of a weight shows the code of the dim that the row becomes (row_gradients.py). Norms, which mix the rows a
   little, do not hide it.

Rows from which anything else is computed too (values that are the keys) cannot be moved, and are refused.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError, one_line
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import class_pairing
from rope_ext_hf.models.model_classes import class_of_part
from rope_ext_hf.models.patch_records import before_patches
from rope_ext_hf.models.small_models import kinds_of_layers, small_model, usual_values
from rope_ext_hf.patches.rows.rotated_pairs import (
    Dim,
    NotUnderstoodError,
    Score,
    distinct_angles,
    left_operand,
    pairs_of_heads,
    right_operand,
    rotating,
)
from rope_ext_hf.patches.rows.row_gradients import CODES_AT_ONCE, Gradients, Recording, balanced_codes, joined, shares
from rope_ext_hf.patches.rows.row_heads import ClassRows, LayerRows, ModuleRows, heads_of_rows, joined_rows, saved_rows
from rope_ext_hf.patches.rows.score_products import watched
from rope_ext_hf.patches.slots.slot_finding import find_slots

_TEXTS = 4
"""The number of texts that are run at once, so that a pair of dims is seen with many values."""
_TOKENS = (11, 139)
"""The lengths of the texts: the second one where the first is too short for some weight to be used. They are prime, so
that no size of a model is equal to one, and keys cannot be confused with dims."""


class _TooShortError(NotUnderstoodError):
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
    if known.pairing is not None or known.remote:
        return class_pairing(config)
    try:
        plain = before_patches(text)
        return _pairing(type(plain), plain.to_json_string(use_diff=False), model_class)  # type: ignore[arg-type]
    except (CheckpointError, UnsupportedModelError):
        return None


def published_pairing(config: Any) -> str | None:
    """Return the pairing in which the weights of a family are published, "half" or "interleaved"; None: unknown.

    It is the one that the class runs, unless the config has a switch: then it is the one of the switch's default.
    """
    text = config.get_text_config()
    return run_pairing(text) if family(text.model_type).pairing_switch is None else "interleaved"


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
        except (NotUnderstoodError, TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError):
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
        raise NotUnderstoodError("no small model of its class can be built and run")
    with warnings.catch_warnings(action="ignore"):
        try:
            try:
                return _Probe(model, _TOKENS[0]).rows()
            except _TooShortError:
                return _Probe(model, _TOKENS[1]).rows()
        except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise NotUnderstoodError(f"a small model of its class does not run: {one_line(error)}") from error


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
        by_layer: dict[str, dict[int, Score]] = defaultdict(dict)
        for number, score in enumerate(scores):
            by_layer[score.layer][number] = score
        gradients = self._gradients(scores)
        rows = {layer: self._rows_of_layer(layer, of_layer, gradients) for layer, of_layer in by_layer.items()}
        modules = {name.rpartition(".")[0] for rotated, _ in rows.values() for name in rotated}
        attentions = sorted(modules - {""})
        pairings = {pairing for _, pairing in rows.values()}
        if len(pairings) != 1 or None in pairings:
            raise NotUnderstoodError(f"its layers rotate in several pairings ({', '.join(sorted(map(str, pairings)))})")
        first = next(iter(rows))
        stack = first.rpartition(".")[0]
        layers = []
        for number, _ in enumerate(self.model.get_submodule(stack).children()):
            path = f"{stack}.{number}"
            rotated, _ = rows.pop(path, ({}, None))
            layers.append(self._as_saved(path, rotated, attentions))
        if rows:
            raise NotUnderstoodError(f"layers of {stack!r} and {next(iter(rows))!r} rotate")
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

    def _scores(self) -> list[Score]:
        """Return the scores of queries and keys, by two forwards that differ in the angles only."""
        with torch.no_grad():
            with rotating(self.slots, torch.zeros_like):
                plain = watched(self.model, partial(self._run, _TEXTS))
            with rotating(self.slots, distinct_angles):
                rotated = watched(self.model, partial(self._run, _TEXTS), [product.out for product in plain])
        if [product.module for product in plain] != [product.module for product in rotated]:
            raise NotUnderstoodError("what it computes depends on the angles in another way than by its scores")
        parts: dict[tuple[str, int], list[int]] = defaultdict(list)
        for number, (before, after) in enumerate(zip(plain, rotated, strict=True)):
            if torch.equal(before.left, after.left) and _equal(before.right, after.right):
                continue
            if before.right is None or after.right is None or before.left.shape[-1] == self.tokens:
                raise NotUnderstoodError(
                    f"the rotation reaches {before.module!r} beside the scores of queries and keys: its values or its "
                    "output rotate too"
                )
            parts[before.module, before.left.shape[-1]].append(number)
        if not parts:
            raise NotUnderstoodError("no product of queries and keys changes with the angles")
        self.computed_by = [product.module for product in plain]
        scores = []
        for (module, dims), numbers in parts.items():
            sides = []
            for vectors in (left_operand, right_operand):
                operands = [[vectors(products[number]) for number in numbers] for products in (plain, rotated)]
                sides.append(pairs_of_heads(*operands))
            scores.append(Score(self._layer_of(module), numbers, (sides[0], sides[1]), dims))
        return scores

    def _check_used(self, layer: str, rotated: list[str], used: set[str]) -> None:
        """Check that all weights beside those that rotate were used: nothing is known about a weight that was not.

        An indexer that has few keys to choose from is not run, for example.
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
        raise NotUnderstoodError(f"{path!r} is in no numbered layer")

    def _gradients(self, scores: list[Score]) -> Gradients:
        """Return for every weight of the layers how its rows enter queries, keys and anything else."""
        cut = [product for score in scores for product in score.products]
        layers = list(dict.fromkeys(score.layer for score in scores))
        for texts in (1, _TEXTS):
            with rotating(self.slots, torch.zeros_like), Recording(self.model, layers) as recording:
                products = watched(self.model, partial(self._run, texts), cut=cut)
            if [product.module for product in products] == self.computed_by:
                break  # else it computes something for each text by itself, and the numbers of the products do not fit
        targets = recording.targets()
        dims: list[Dim] = []
        sums: list[Tensor] = []
        for number, score in enumerate(scores):
            for side, vectors in enumerate((left_operand, right_operand)):
                sums.append(sum(shares(vectors(products[product])) for product in score.products))  # type: ignore[arg-type]
                dims += [Dim(number, side, dim) for dim in range(score.dims)]
        total = torch.cat(sums)
        codes = torch.cat([balanced_codes(len(sums[place]), seed=place) for place in range(len(sums))], 1)
        tensors = [tensor for target in targets for tensor in target.tensors]
        responses: list[list[Tensor | None]] = [[] for _ in targets]
        for some in torch.split(codes, CODES_AT_ONCE):
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
        return Gradients(
            dims=dims,
            codes=codes,
            targets=targets,
            responses=[joined(response) for response in responses],
            used=recording.used,
            beside=[None if rows is None else rows[0] for rows in by_row],
            attended={product for product, g in zip(cut, beside[len(tensors) :], strict=True) if g is not None},
        )

    def _rows_of_layer(
        self, layer: str, scores: dict[int, Score], gradients: Gradients
    ) -> tuple[dict[str, ModuleRows], str | None]:
        """Return the rows of one layer that rotate, and the pairing of its attention.

        `scores`: those of the layer, by number.
        """
        rotated: dict[str, ModuleRows] = {}
        pairings: dict[bool, set[str]] = {True: set(), False: set()}
        covered: set[Dim] = set()
        for target, dims in gradients.rows(layer, scores):
            heads, pairing = heads_of_rows(target.name, dims, scores, gradients.attended)
            rotated[target.name.removeprefix(f"{layer}.")] = ModuleRows(heads, pairing)
            if target.is_matrix:
                covered |= {dim for dim in dims if dim is not None}
            if pairing is not None:
                pairings[any(head.side in ("q", "k") for head in heads)].add(pairing)
        for number, score in scores.items():
            for side in (0, 1):
                if not all(Dim(number, side, dim) in covered for dim in score.pair_of(side)):
                    vectors = ("queries", "keys")[side]
                    raise NotUnderstoodError(f"no weight of {layer!r} has a row for every rotated dim of its {vectors}")
        self._check_used(layer, list(rotated), gradients.used)
        own = pairings[True]
        if len(own) > 1:
            raise NotUnderstoodError(f"{layer!r} rotates queries and keys in several pairings")
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
            saved[module], parts[module] = joined_rows(name, origins, rotated), of_modules
        return LayerRows(rotated, saved, parts, tuple(names))


def common_path(names: Sequence[str]) -> list[str]:
    """Return the parts of the path that the modules around several modules have in common."""
    first, *others = [name.split(".")[:-1] for name in names]
    common = [part for at, part in enumerate(first) if all(other[at : at + 1] == [part] for other in others)]
    return common[: next((at for at, part in enumerate(common) if part != first[at]), None)]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))

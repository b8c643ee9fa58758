"""Kinds of runs by name: perplexity, passkey, and those of plug-ins.

A kind of run is one file with two classes: a `RunKind` makes and shows the results, and a `measurement.Measurement`
says what is read and scored. An entry point of the group rope_ext_hf.run_kinds names the `RunKind`, so that results
can be shown that an earlier process measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rope_ext_hf.errors import MethodError, did_you_mean, short
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.chosen_methods import resolve_choice
from rope_ext_hf.runs.journal import Cell, Value
from rope_ext_hf.runs.labels import Method, MethodResult
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.run import RunDisplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

K = TypeVar("K", bound="type[RunKind]")


class RunKind(RunDisplay):
    """One kind of run: how a question becomes a plan, how results are made, and how they are shown.

    Attributes:
        setting: the dataclass, of plain values, that says how the items of a run are read.
    """

    setting: ClassVar[type]

    def fit(self, question: Any, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        """Return the question as it is asked of this model, and the methods that are measured.

        By default the question stays the same, and there is a method for each name and each factor; a method without a
        factor is fitted to the longest length.
        """
        return question, resolve_choice(methods, model, max(question.lengths))

    def plan(
        self, question: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return what a run reads and scores to answer a question of this kind; no weights are read.

        Args:
            question: a `rope_ext_hf.eval.questions.LengthsQuestion` whose `kind` is this kind's name.
            model: may be on the meta device.
            tokenizer: default: the one beside the model's weights.
            **settings: further fields of `RunPlan`: methods, over, context_length, chunk, offload_cache.

        Raises:
            MethodError, CorpusError: the question does not fit this model, or this text.
        """
        raise MethodError(f"runs of the kind {self.name!r} answer no question of their own")

    @abstractmethod
    def parse(self, item: str, value: Any) -> Value:
        """Return the value of an item of this name from the JSON of a journal's record; ValueError if it is none."""

    @abstractmethod
    def result(
        self, method: Method, setting: Any, cell: Cell, values: Sequence[Any], costs: Sequence[Cost]
    ) -> MethodResult:
        """Return the result of one method in one cell.

        Args:
            method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
            setting: how the items were read, an instance of the class `setting`.
            cell: a context length in tokens, alone or with a depth, a distance or a task.
            values: the value of each item of this cell.
            costs: tokens, time and memory that each of these took.
        """


_KINDS: dict[str, RunKind] = {}


def register_run_kind(kind: K) -> K:
    """Add a kind of run under its name; a class decorator. ValueError where the name is taken."""
    if kind.name in _KINDS:
        raise ValueError(f"there is a kind of run called {kind.name!r} already; choose another name")
    _KINDS[kind.name] = kind()
    return kind


def run_kind(name: str) -> RunKind:
    """Return the kind of run of this name, loading the plug-in that has it where needed.

    Raises:
        ValueError: no kind of run has this name; the message names the nearest one.
    """
    if name not in _KINDS:
        plug_in("run_kinds", name)  # loads its module, which registers the kind
    if name not in _KINDS:
        raise ValueError(f"unknown kind {short(name)!r}.{did_you_mean(name, {*_KINDS, *plug_in_names('run_kinds')})}")
    return _KINDS[name]

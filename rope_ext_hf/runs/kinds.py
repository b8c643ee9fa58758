"""Kinds of runs by name: perplexity, passkey, and those of plug-ins.

Each kind is one file with two classes: a `RunKind` makes and shows the results, and a `measurement.Measurement` says
what is read and scored. An entry point in the group rope_ext_hf.run_kinds names the `RunKind`, so that a later process
can show the results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rope_ext_hf.errors import MethodError, did_you_mean, short
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.chosen_methods import resolve_choice
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult
from rope_ext_hf.runs.measurement import Cell, RunPlan, Value
from rope_ext_hf.runs.run import RunDisplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["RunKind", "register_run_kind", "run_kind"]

K = TypeVar("K", bound="type[RunKind]")


class RunKind(RunDisplay):
    """One kind of run, such as perplexity: it plans a measurement, makes results from measured values, and shows them.

    Attributes:
        setting: a dataclass of plain values, whose instances say how the documents or prompts of a run are read.
    """

    setting: ClassVar[type]

    def fit(self, options: Any, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        """Return the options of the measurement adapted to a model, and the methods to measure.

        By default the options stay the same, and each chosen name gives one method per factor; a method without a
        factor is fitted to the longest length.
        """
        return options, resolve_choice(methods, model, max(options.lengths))

    def plan(
        self, options: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return the plan for a run: what it reads and scores; no weights are read.

        Args:
            options: the options of the measurement, of the class that `rope_ext_hf.eval` has for this kind.
            model: the model; it may be on the meta device.
            tokenizer: default: the one beside the model's weights.
            **settings: further fields of `RunPlan`: methods, over, context_length, chunk, offload_cache.

        Raises:
            MethodError, CorpusError: the arguments do not fit this model or this text.
        """
        raise MethodError(f"runs of the kind {self.name!r} cannot be started by a command of their own")

    @abstractmethod
    def parse(self, item: str, value: Any) -> Value:
        """Return the value that a line of a journal holds for the item with this name; ValueError if it is not a value.

        `value` is the JSON value in that line.
        """

    @abstractmethod
    def result(
        self, method: Method, setting: Any, cell: Cell, values: Sequence[Any], costs: Sequence[Cost]
    ) -> MethodResult:
        """Return the result for one method in one cell (a context length, alone or with a depth, a distance or a task).

        Args:
            method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
            setting: how the documents or prompts were read, an instance of the class `setting`.
            cell: a context length in tokens, alone or with a depth, a distance or a task.
            values: the values of all items (documents or prompts) in this cell.
            costs: the tokens, time and memory that each value took.
        """


_KINDS: dict[str, RunKind] = {}


def register_run_kind(kind: K) -> K:
    """Register a class as a kind of run under its `name`; a class decorator. ValueError if the name is taken."""
    if kind.name in _KINDS:
        raise ValueError(f"there is a kind of run called {kind.name!r} already; choose another name")
    _KINDS[kind.name] = kind()
    return kind


def run_kind(name: str) -> RunKind:
    """Return the kind of run with this name; if a plug-in provides it, load the plug-in.

    Raises:
        ValueError: no kind of run has this name; the message names the nearest one.
    """
    if name not in _KINDS:
        plug_in("run_kinds", name)  # loads its module, which registers the kind
    if name not in _KINDS:
        raise ValueError(f"unknown kind {short(name)!r}.{did_you_mean(name, {*_KINDS, *plug_in_names('run_kinds')})}")
    return _KINDS[name]

"""Listeners that show the progress of a run, and several listeners as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.runs.conclusions.labels import Method
from rope_ext_hf.runs.measurement import Listener, Record, RunPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Listeners(Listener):
    """Several listeners as one, each of which is told everything, in their order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any], rope: ModelRope) -> None:
        for listener in self._listeners:
            listener.planned(model, plan, rope)

    def started(self, folder: Path, done: int, units: int) -> None:
        for listener in self._listeners:
            listener.started(folder, done, units)

    def reading(self, scorer: Any) -> None:
        for listener in self._listeners:
            listener.reading(scorer)

    def begins(self, method: Method, scorer: Any) -> None:
        for listener in self._listeners:
            listener.begins(method, scorer)

    def passed(self, method: str, tokens: int) -> None:
        for listener in self._listeners:
            listener.passed(method, tokens)

    def measured(self, record: Record) -> None:
        for listener in self._listeners:
            listener.measured(record)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


class _Called(Listener):
    """A listener that calls a function after each pass, with the method's label and the number of tokens read."""

    def __init__(self, call: Callable[[str, int], object]) -> None:
        self._call = call

    def passed(self, method: str, tokens: int) -> None:
        self._call(method, tokens)


class _TqdmBar(Listener):
    """A progress bar of tqdm: a widget in a notebook, elsewhere a line on standard error."""

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any], rope: ModelRope) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=sum(plan.passes(rope)), unit=" tokens", unit_scale=True)

    def started(self, folder: Path, done: int, units: int) -> None:
        self._bar.n = self._bar.initial = round(self._bar.total * done / max(1, units))
        self._bar.refresh()

    def passed(self, method: str, tokens: int) -> None:
        self._bar.set_description(method, refresh=False)
        self._bar.update(tokens)

    def close(self) -> None:
        self._bar.close()


def as_listener(progress: Listener | Callable[[str, int], object] | bool | None) -> Listener:
    """Return a listener for what a caller passed as `progress`.

    That is a listener already, a function, True for a tqdm bar, or None to show nothing.
    """
    if isinstance(progress, Listener):
        return progress
    if progress is True:
        return _TqdmBar()
    return _Called(progress) if progress else Listener()

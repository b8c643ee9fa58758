"""The one loop of every measurement: methods x items x cells, in memory or in a run's folder.

    run = run_methods(model, [None, Yarn(factor=8.0)], measurement, data="stdlib", out="rope-ext-results")

A run's folder is named after everything that its numbers depend on (model, patches, text, protocol, code: see
`run_key.py`), so that a changed setting starts another run. Each finished piece of work is one line of the folder's
journal, on disk before it is reported; the same call continues after the last whole line. Tables, pictures and pages
are made from the folder alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import distributed

from rope_ext_hf.errors import FileError, MethodError
from rope_ext_hf.eval.journal import (
    Cell,
    Layout,
    Record,
    Value,
    agree_on_chunks,
    exclusive,
    open_journal,
    read_plain,
    read_records,
    replace_chunks,
)
from rope_ext_hf.eval.report import write_files
from rope_ext_hf.eval.results import Cost, label, method_key, provenance
from rope_ext_hf.eval.run_folder import KINDS, SETTINGS, Run, check_settings, read_run, results_from_records
from rope_ext_hf.eval.run_key import Basis, find_basis, model_key
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.files import atomic_file, disk_errors, parse_json_object
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.patches.patching import patched, patched_method
from rope_ext_hf.patches.slots import present_specs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.results import RetrievalSetting, Setting
    from rope_ext_hf.methods.base import RopeMethod

__all__ = ["Measurement", "Workers", "length_of_model", "measure", "run_methods"]


_LONGEST_WAIT = timedelta(days=30)


class Measurement(ABC):
    """What is measured with each method: the items, and how one item is scored.

    Attributes:
        kind: a key of `run_folder.KINDS`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def items(self) -> Sequence[str]:
        """Names of the documents or trials."""

    @property
    @abstractmethod
    def setting(self) -> Setting | RetrievalSetting:
        """How the items are read, as results record it."""

    @property
    @abstractmethod
    def passes(self) -> Sequence[int]:
        """Tokens of each pass through the model, with one method."""

    @property
    @abstractmethod
    def scored(self) -> int:
        """Tokens that go through the model's head, with one method."""

    @property
    def after_each_pass(self) -> int:
        """Tokens that are read from the cache of each pass, which estimates of time count in."""
        return 0

    @abstractmethod
    def cells(self, item: int) -> Sequence[Cell]:
        """The cells that one item has values for."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of all token ids that are read, of the bytes they stand for, and of how they are scored."""

    @abstractmethod
    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Cell, Value, Cost]]:
        """Score one item at some of its cells.

        Args:
            scorer: reads the tokens.
            item: index of the item.
            cells: the cells to score.
            progress: called with the number of tokens read, after each pass.

        Yields:
            (cell, value, cost), as soon as a cell is complete.
        """

    @property
    def layout(self) -> Layout:
        """Items and cells of a complete run."""
        counts: dict[Cell, int] = {}
        for item in range(len(self.items)):
            for cell in self.cells(item):
                counts[cell] = counts.get(cell, 0) + 1
        return Layout(tuple(self.items), dict(sorted(counts.items())))


@dataclass(frozen=True)
class Workers:
    """The processes that share a run; items are dealt out among them.

    Attributes:
        rank: which of them this process is.
        count: how many there are.
        wait: called when this process has done its part; returns when all have.
    """

    rank: int = 0
    count: int = 1
    wait: Callable[[], object] | None = None

    @classmethod
    def from_launcher(cls, expected: int | None = None) -> Workers:
        """The processes that torchrun or accelerate launched; one where there was no launcher.

        Args:
            expected: how many processes the user asked for.

        Raises:
            MethodError: another number of processes is running, or a launcher that does not say where they meet.

        They wait for each other once, at the end, over gloo: one may be done days before another, and NCCL ends all
        of them after ten minutes.
        """
        workers = cls()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
                raise MethodError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; launch the "
                    "processes with torchrun or accelerate, or unset WORLD_SIZE"
                )
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", timeout=_LONGEST_WAIT)
            group = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
            wait = partial(distributed.barrier, group=group)
            workers = cls(distributed.get_rank(), distributed.get_world_size(), wait)
        if expected is not None and workers.count != expected:
            raise MethodError(
                f"{expected} processes were asked for, {workers.count} are running; launch with "
                f"torchrun --nproc-per-node {expected} -m rope_ext_hf sweep ..."
            )
        return workers

    def share(self, items: int) -> range:
        """The indices of this process's items."""
        return range(self.rank, items, self.count)


def length_of_model(model: PreTrainedModel) -> int:
    """The length in tokens that the model as loaded is for; labels such as 2x are multiples of it."""
    return patch_geometry(model).context_length


def measure(
    model: PreTrainedModel,
    measurement: Measurement,
    *,
    data: str,
    out: str | Path | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Any]:
    """Measure a model as it is: one result per cell.

    Args:
        model: patched or not.
        measurement: what is measured.
        data: what the text is called in a run's folder.
        out: the folder that the run's folder is made in; None: no files.
        chunk, offload_cache: as `TokenScorer` takes them.
        progress: called with the number of tokens read, after each pass.

    Raises:
        FileError: as `run_methods` does, with `out`.
    """
    method = patched_method(model)
    if out is not None:
        run = run_methods(
            model,
            [method],
            measurement,
            data=data,
            out=out,
            chunk=chunk,
            offload_cache=offload_cache,
            progress=None if progress is None else lambda _, tokens: progress(tokens),
        )
        return list(run.results)
    scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache, longest=max(measurement.passes, default=1))
    saved = method.to_dict() if method else None
    records = [
        Record(saved, item, cell, value, cost)
        for item in range(len(measurement.items))
        for cell, value, cost in measurement.measure(scorer, item, measurement.cells(item), progress)
    ]
    return results_from_records(KINDS[measurement.kind], measurement.setting, measurement.layout, records)


def run_methods(
    model: PreTrainedModel,
    methods: Sequence[RopeMethod | None],
    measurement: Measurement,
    *,
    data: str,
    out: str | Path,
    chunk: int | None = None,
    offload_cache: bool = False,
    over: str = "own",
    context_length: int | None = None,
    workers: Workers | None = None,
    progress: Callable[[str, int], None] | None = None,
    started: Callable[[Path, int, int], None] | None = None,
    reading: Callable[[str], None] | None = None,
) -> Run[Any]:
    """Measure every method in a run's folder, whatever is there already left out; then write its tables and pages.

    Args:
        model: the model with its weights; None among the methods is the model as it is.
        methods: in the order in which they are measured and shown.
        measurement: what is measured with each.
        data: what the text is called.
        out: the folder that the run's folder is made in.
        chunk, offload_cache: as `TokenScorer` takes them.
        over, context_length: what the methods extend, as `patch` takes them.
        workers: the processes that share the run; default: this one alone.
        progress: called with the method's label and the tokens read, after each pass.
        started: called with the run's folder, and how many of how many values are there already.
        reading: called with how the model is read (`TokenScorer.reading`).

    Returns:
        The run, with the results of these methods; complete where the workers waited for each other.

    Raises:
        FileError: another process is writing this run, the folder is damaged, or the disk refuses.
    """
    workers = workers or Workers()
    loaded = patched_method(model)
    base = loaded.to_dict() if loaded is not None and None in methods else None
    basis = find_basis(model, methods, over, context_length)
    settings = _settings(model, measurement, data, base) | model_key(model, methods, basis, over)
    settings["context_length"] = basis.rotary.context_length
    settings = check_settings(json.loads(json.dumps(settings)))
    folder = Path(out) / f"{Path(settings['model']).name or 'model'}-{measurement.kind}-{_digest(settings)}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = {method_key(saved): (method, saved) for method in methods for saved in [_saved(method, base)]}
    if base is not None and chosen[method_key(base)][0] is not None and basis != Basis.from_specs(present_specs(model)):
        raise MethodError(
            f"{label(base)} is what the model runs as loaded; to measure it with another over or context_length, give "
            "the model without its patch"
        )
    with exclusive(folder, workers.rank):
        _write_settings(folder, settings)
        records = read_records(folder, measurement.layout, KINDS[measurement.kind].parse)
        done = {(method_key(record.method), record.item, record.cell) for record in records}
        mine = workers.share(len(measurement.items))
        units = [(key, item, cell) for key in chosen for item in mine for cell in measurement.cells(item)]
        if started is not None:
            started(folder, sum(unit in done for unit in units), len(units))
        longest = max(measurement.passes, default=1)
        scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache, longest=longest)
        if chunk is None:
            scorer.chunk, scorer.head_bytes = agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
        agreed = scorer.chunk, scorer.head_bytes
        if reading is not None:
            reading(scorer.reading)
        with open_journal(folder, workers.rank) as write:
            for key, (method, saved) in chosen.items():
                report = None if progress is None else partial(progress, label(saved))
                with _applied(model, method, basis, {"over": over, "context_length": context_length}):
                    for item in mine:
                        if left := [cell for cell in measurement.cells(item) if (key, item, cell) not in done]:
                            for cell, value, cost in measurement.measure(scorer, item, left, report):
                                if chunk is None and (sizes := (scorer.chunk, scorer.head_bytes)) != agreed:
                                    agreed = sizes  # the scorer ran out of memory, and went on with less
                                    replace_chunks(folder, *agreed)
                                write(Record(saved, item, cell, value, cost))
    if workers.wait is not None:
        workers.wait()
    run = read_run(folder)
    if workers.rank == 0:
        write_files(run)
    return run.select([saved for _, saved in chosen.values()])


def _saved(method: RopeMethod | None, loaded: dict[str, Any] | None) -> dict[str, Any] | None:
    return loaded if method is None else method.to_dict()


def _applied(
    model: PreTrainedModel, method: RopeMethod | None, basis: Basis, under: dict[str, Any]
) -> AbstractContextManager[Any]:
    """The model under a method; a method that it has already, on the same basis, is not patched in a second time."""
    specs = present_specs(model)
    present = bool(specs) and method == specs[-1].method and basis == Basis.from_specs(specs)
    return nullcontext() if method is None or present else patched(model, method, **under)


def _settings(
    model: PreTrainedModel, measurement: Measurement, data: str, loaded: dict[str, Any] | None
) -> dict[str, Any]:
    """What is read, how, where, and what the model as loaded is called."""
    layout = measurement.layout
    return provenance(model, data) | {
        "kind": measurement.kind,
        "text": measurement.fingerprint(),
        "loaded": loaded,
        "setting": asdict(measurement.setting),
        "items": list(layout.items),
        "cells": [list(cell) for cell in layout.counts],
        "per_cell": list(layout.counts.values()),
        "tokens": sum(measurement.passes),
    }


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write run.json, or check that it is this run's."""
    path = folder / SETTINGS
    if os.path.lexists(path):
        try:
            if _key(parse_json_object(read_plain(path))) == _key(settings):
                return
        except (ValueError, RecursionError):
            pass
        raise FileError(f"{str(path)!r} describes another run or is damaged; move {str(folder)!r} away")
    with atomic_file(path) as part:
        part.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _key(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the numbers depend on: all but where the model was loaded from."""
    return {name: value for name, value in settings.items() if name != "model"}


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_key(settings), sort_keys=True).encode()).hexdigest()[:10]

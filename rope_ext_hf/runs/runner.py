"""The loop that carries out every measurement, over methods, items and cells: in memory, or in a run's folder.

    plan = RunPlan(measurement, "stdlib", methods=(None, Yarn(factor=8.0)))
    run = carry_out(model, plan, out="rope-ext-results")

An item is a document or a prompt; a cell is a context length, alone or with a depth or task. A run's folder is named
after everything that its numbers depend on (see `identity.py`). Each value is a line of the folder's journal, on disk
before progress is reported; the same call continues after the last whole line. Tables, pictures and pages are made from
what the folder holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import FileError, MethodError
from rope_ext_hf.files.whole import disk_errors, json_digest, parse_json_object, write_text
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.models.temporary import evaluating
from rope_ext_hf.patches.patching import patched, patched_method
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.runs.conclusions.labels import Method, label, method_key
from rope_ext_hf.runs.folder import journal
from rope_ext_hf.runs.folder.earlier_runs import warn_if_begun_anew
from rope_ext_hf.runs.folder.folder import (
    SETTINGS,
    check_settings,
    exclusive,
    identifying,
    other_settings,
    read_run,
    results_from_records,
    setting_name,
)
from rope_ext_hf.runs.folder.identity import BaseRotary, find_base_rotary, model_key, provenance
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.folder.run_file import RunFile, check_inputs, inputs_of
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.measurement import Cell, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Progress:
    """Base class for listeners: a run calls these methods as it goes on, and subclasses show its progress.

    Args:
        call: called with the method's label and the number of tokens read, after each pass; default: nothing is called.
    """

    def __init__(self, call: Callable[[str, int], object] | None = None) -> None:
        self._call = call

    @classmethod
    def of(cls, progress: Progress | Callable[[str, int], object] | bool | None) -> Progress:
        """Return a listener for what a caller passed as `progress`.

        That is a listener already, a function, True for a tqdm bar, or None to show nothing.
        """
        if isinstance(progress, Progress):
            return progress
        return _TqdmProgress() if progress is True else Progress(progress or None)

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        """Take note that the run begins; nothing has been read yet."""

    def started(self, folder: Path, done: int, units: int) -> None:
        """Take note that the run's folder exists, with `done` of the `units` values that this process measures."""

    def reading(self, scorer: Any) -> None:
        """Take note that the first pass follows.

        `scorer`: what reads, a `TokenScorer` or what `RunPlan.scorer` makes; its property `reading` says how.
        """

    def passed(self, method: str, tokens: int) -> None:
        """Take note of one pass through the model; `method` is the label of the method, `tokens` the number it read."""
        if self._call is not None:
            self._call(method, tokens)

    def close(self) -> None:
        """Take note that the run is complete, or has failed."""


class _TqdmProgress(Progress):
    """A progress bar of tqdm: a widget in a notebook, elsewhere a line on standard error."""

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        from tqdm.auto import tqdm

        total = sum(plan.passes(model))
        self._bar = tqdm(total=total, unit=" tokens", unit_scale=True)

    def started(self, folder: Path, done: int, units: int) -> None:
        self._bar.n = self._bar.initial = round(self._bar.total * done / max(1, units))
        self._bar.refresh()

    def passed(self, method: str, tokens: int) -> None:
        self._bar.set_description(method, refresh=False)
        self._bar.update(tokens)

    def close(self) -> None:
        self._bar.close()


class _Job:
    """A plan together with the model on which it is carried out.

    Attributes:
        model, plan: the model, and the plan for the measurement.
        loaded: `RopeMethod.to_dict` for the method that the model is patched with already, if the plan also measures
            the model as it is; else None.
        base_rotary: the state of the model that the methods are applied to.
        methods: the methods by key, in the order in which they are measured. Each is a pair: the method (None: the
            model as it is), and the dict that stands for it in results.

    Raises:
        MethodError: the method that the model is patched with would be measured twice, on two different states of the
            model.
    """

    def __init__(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        self.model, self.plan = model, plan
        present = patched_method(model)
        methods = plan.methods or (present,)
        self.loaded: Method = None
        if present is not None and None in methods:
            self.loaded = present.to_dict()
        self.base_rotary = find_base_rotary(model, methods, plan.over, plan.context_length)
        self.methods: dict[str, tuple[RopeMethod | None, Method]] = {}
        for method in methods:
            saved = self.loaded if method is None else method.to_dict()
            self.methods[method_key(saved)] = (method, saved)
        patched_in_again = self.loaded is not None and self.methods[method_key(self.loaded)][0] is not None
        if patched_in_again and self.base_rotary != BaseRotary.from_specs(active_patches(model)):
            raise MethodError(
                f"the model is patched with {label(self.loaded)} already; to measure that method with another over or "
                "context_length, give the model without its patch"
            )

    def settings(self, *, in_folder: bool) -> dict[str, Any]:
        """Return the settings of the run: what is read, how and where. In a folder, they also identify the model.

        Runs in memory do without the identity, because its digest needs to read all weights.
        """
        measurement = self.plan.measurement
        contents = measurement.contents
        settings = (
            provenance(self.model, self.plan.data)
            | self.plan.reader
            | {
                "kind": measurement.kind,
                "text": measurement.fingerprint(),
                "cell_texts": {json.dumps(cell): text for cell, text in measurement.cell_fingerprints.items()},
                "loaded": self.loaded,
                "setting": asdict(measurement.setting),
                "items": list(contents.items),
                "cells": [list(cell) for cell in contents.counts],
                "per_cell": list(contents.counts.values()),
                "tokens": sum(measurement.passes),
            }
        )
        settings |= {"over": self.plan.over, "basis": self.base_rotary.to_dict()}
        if in_folder:
            methods = [method for method, _ in self.methods.values()]
            modules = (*measurement.computed_by, *self.plan.reader_modules)
            settings |= model_key(self.model, methods, self.base_rotary, self.plan.over, *modules)
        return settings | {"context_length": self.base_rotary.rotary.context_length}

    def scorer(self) -> TokenScorer:
        """Return the object that reads tokens through the model and scores them."""
        plan = self.plan
        longest = max(plan.measurement.passes, default=1)
        options: dict[str, Any] = {"chunk": plan.chunk, "offload_cache": plan.offload_cache, "longest": longest}
        scorer: TokenScorer = (plan.scorer or TokenScorer)(self.model, **options)
        return scorer

    def score(
        self,
        scorer: TokenScorer,
        items: Sequence[int],
        done: Container[tuple[str, int, Cell]],
        write: Callable[[journal.Record], object],
        progress: Progress,
        folder: Path | None = None,
    ) -> None:
        """Score documents or prompts with every method.

        Args:
            scorer: reads the tokens.
            items: indices of the documents or prompts.
            done: the values that are known already and left out: key of the method, index of the item, cell.
            write: called with each value.
            progress: called after each pass.
            folder: the run's folder; None: the run is without files.
        """
        measurement = self.plan.measurement
        for key, (method, saved) in self.methods.items():
            report = partial(progress.passed, label(saved))
            with self._applied(method):
                cells = {item: [c for c in measurement.cells(item) if (key, item, c) not in done] for item in items}
                missing = [(item, left) for item, left in cells.items() if left]
                if missing:
                    measurement.begin(folder, saved, scorer)
                for item, cell, value, cost in measurement.measure_items(scorer, missing, report):
                    write(journal.Record(saved, item, cell, value, cost))

    def _applied(self, method: RopeMethod | None) -> AbstractContextManager[Any]:
        """Patch the model with a method inside the `with` block, unless the model already has it in the same place."""
        specs = active_patches(self.model)
        is_present = bool(specs) and method == specs[-1].method and self.base_rotary == BaseRotary.from_specs(specs)
        if method is None or is_present:
            return nullcontext()
        return patched(self.model, method, over=self.plan.over, context_length=self.plan.context_length)


def carry_out(
    model: PreTrainedModel,
    plan: RunPlan[Any],
    *,
    out: str | Path | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
    file: RunFile | None = None,
) -> Run[Any]:
    """Measure every method of a plan, in a run's folder or without files.

    In a folder, values that it holds already are not measured again; tables, pictures and a page are written at the
    end.

    Args:
        model: measured in eval mode; afterwards its modules have the modes that they had before.
        plan: the measurement and its methods.
        out: the folder in which the run's folder is created; None: no files.
        workers: the processes that share the run; default: this one alone.
        progress: called while the run goes on; default: nothing is shown.
        file: the description of this run that its folder keeps as run.yaml.

    Returns:
        The run, with the results of these methods.

    Raises:
        FileError: another process is writing this run, the folder is damaged, a file cannot be written, or a run file
            is repeated whose model or text has changed.
        MethodError: one of the workers has another text, model, method or protocol.
        RopeExtError: one of the workers has ended.
    """
    workers = workers or Workers()
    measurement = plan.measurement
    with closing(progress or Progress()) as listener, evaluating(model):
        listener.planned(model, plan)
        job = _Job(model, plan)
        settings = job.settings(in_folder=out is not None)
        if out is None:
            scorer, records = job.scorer(), list[journal.Record]()
            listener.reading(scorer)
            job.score(scorer, range(len(measurement.items)), set(), records.append, listener)
            kind = run_kind(measurement.kind)
            results = results_from_records(kind, measurement.setting, measurement.contents, records)
            return _in_unit(Run(None, settings, results, kind), plan)
        settings = check_settings(json.loads(json.dumps(settings)))
        inputs = inputs_of(settings)
        check_inputs(measurement.kind, inputs)
        if workers.count > 1:
            workers.agree(_in_words(settings, job))
        name, digest = Path(settings["model"]).name or "model", json_digest(identifying(settings))[:10]
        folder = Path(out) / f"{name}-{measurement.kind}-{digest}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder, workers.rank):
            if workers.rank == 0:
                if file is not None and not (folder / SETTINGS).exists():
                    warn_if_begun_anew(file, folder, settings, measurement.changes_daily)
                _write_settings(folder, settings)
            with disk_errors(folder):
                # processes on different machines must share a disk: the inode of the folder is the same there
                workers.agree({"the folder of --out": str(folder.stat().st_ino)})
            _write_settings(folder, settings)
            if file is not None and workers.rank == 0:
                file.with_inputs(measurement.kind, inputs).write(folder, beside_others=True)
            _add_to_folder(job, folder, workers, listener)
            workers.agree()
            run = _in_unit(read_run(folder), plan)
            if workers.rank == 0:
                write_files(run)
    return run.select([saved for _, saved in job.methods.values()])


def _in_unit(run: Run[Any], plan: RunPlan[Any]) -> Run[Any]:
    """Return the run, shown in the unit that its plan names."""
    return run if plan.unit is None else run.in_unit(plan.unit)


def _add_to_folder(job: _Job, folder: Path, workers: Workers, progress: Progress) -> None:
    """Measure those of this process's items whose values are not in the run's folder yet, and add them."""
    measurement, chunk_is_fixed = job.plan.measurement, job.plan.chunk is not None
    records = journal.read_records(folder, measurement.contents, run_kind(measurement.kind).parse)
    done = {(method_key(record.method), record.item, record.cell) for record in records}
    items = workers.share(len(measurement.items))
    units = [(key, item, cell) for key in job.methods for item in items for cell in measurement.cells(item)]
    progress.started(folder, sum(unit in done for unit in units), len(units))
    scorer = job.scorer()
    if not chunk_is_fixed:
        if workers.rank == 0:
            journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
        workers.agree()
        scorer.chunk, scorer.head_bytes = journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
    agreed = scorer.chunk, scorer.head_bytes
    progress.reading(scorer)
    with journal.open_journal(folder, workers.rank) as write:

        def add(record: journal.Record) -> None:
            nonlocal agreed
            sizes = scorer.chunk, scorer.head_bytes
            if not chunk_is_fixed and sizes != agreed:  # the scorer ran out of memory, and continues with less
                agreed = sizes
                journal.replace_chunks(folder, *agreed)
            write(record)
            workers.check()

        job.score(scorer, items, done, add, progress, folder)


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write run.json; if it exists, raise FileError unless it describes this run."""
    path = folder / SETTINGS
    if os.path.lexists(path):
        try:
            if not other_settings(identifying(parse_json_object(journal.read_plain(path))), identifying(settings)):
                return
        except (ValueError, RecursionError):
            pass
        raise FileError(f"{str(path)!r} describes another run, or is damaged; move {str(folder)!r} away")
    write_text(path, json.dumps(settings, indent=1) + "\n")


def _in_words(settings: dict[str, Any], job: _Job) -> dict[str, str]:
    """Return the values that all processes of a run must share, by name in messages; long values become digests."""
    values: dict[str, list[Any]] = {}
    for name, value in identifying(settings).items():
        values.setdefault(setting_name(name), []).append(value)
    values["the methods"] = [[label(saved), saved] for _, saved in job.methods.values()]
    values["--chunk"], values["--offload-cache"] = [job.plan.chunk], [job.plan.offload_cache]
    return {name: _short(group[0] if len(group) == 1 else group) for name, group in values.items()}


def _short(value: Any) -> str:
    """Return a value as text; if the text is long, return its digest instead."""
    text = json.dumps(value, sort_keys=True)
    return text.strip('"') if len(text) < 40 else json_digest(value)

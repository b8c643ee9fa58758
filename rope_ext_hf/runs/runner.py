"""The one loop of every measurement: methods x items x cells, in memory or in a run's folder.

    plan = RunPlan(measurement, "stdlib", methods=(None, Yarn(factor=8.0)))
    run = carry_out(model, plan, out="rope-ext-results")

A run's folder is named after everything that its numbers depend on (see `identity.py`). Each finished piece of work is
one line of its journal, on disk before it is reported; the same call continues after the last whole line. Tables,
pictures and pages are made from the folder alone.
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
from rope_ext_hf.files import disk_errors, json_digest, parse_json_object, write_text
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.attention_interface import evaluating
from rope_ext_hf.patches.patching import patched, patched_method
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.runs import journal
from rope_ext_hf.runs.folder import SETTINGS, check_settings, other_settings, read_run, results_from_records
from rope_ext_hf.runs.identity import Basis, find_basis, model_key, provenance
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.labels import label, method_key
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.report import write_files
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.run_file import RunFile
from rope_ext_hf.runs.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Progress:
    """What a run reports while it goes on; `call` gets the method's label and the tokens read, after each pass."""

    def __init__(self, call: Callable[[str, int], object] | None = None) -> None:
        self._call = call

    @classmethod
    def of(cls, given: Progress | Callable[[str, int], object] | bool | None) -> Progress:
        """One of what `measure` takes: True is a bar of tqdm."""
        if isinstance(given, Progress):
            return given
        return _TqdmProgress() if given is True else Progress(given or None)

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        """This plan is carried out now."""

    def started(self, folder: Path, done: int, units: int) -> None:
        """The run's folder is there, with so many of so many values."""

    def reading(self, how: str) -> None:
        """The first pass begins; `how` is `TokenScorer.reading`."""

    def passed(self, method: str, tokens: int) -> None:
        """A pass of so many tokens has ended, with the method of this label."""
        if self._call is not None:
            self._call(method, tokens)

    def close(self) -> None:
        """The run is complete, or was stopped."""


class _TqdmProgress(Progress):
    """A bar of tqdm: in a notebook a widget, elsewhere a line on standard error."""

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        from tqdm.auto import tqdm

        total = sum(plan.measurement.passes) * max(1, len(plan.methods))
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
    """A plan on a model."""

    def __init__(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        self.model, self.plan, present = model, plan, patched_method(model)
        methods = plan.methods or (present,)
        # the method of the model as it is, where that is measured
        self.loaded = present.to_dict() if present is not None and None in methods else None
        self.basis = find_basis(model, methods, plan.over, plan.context_length)  # what the methods are applied to
        saved = [(method, self.loaded if method is None else method.to_dict()) for method in methods]
        # each with its `to_dict`, by its key, in the order in which they are measured
        self.methods = {method_key(each[1]): each for each in saved}
        changed = self.loaded is not None and self.methods[method_key(self.loaded)][0] is not None
        if changed and self.basis != Basis.from_specs(present_specs(model)):
            raise MethodError(
                f"{label(self.loaded)} is what the model runs as loaded; to measure it with another over or "
                "context_length, give the model without its patch"
            )

    def settings(self, *, in_folder: bool) -> dict[str, Any]:
        """What is read, how, where, and what the model as loaded is called; in a folder also what the model is."""
        measurement, contents = self.plan.measurement, self.plan.measurement.contents
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
        methods, over = [method for method, _ in self.methods.values()], self.plan.over
        settings |= {"over": over, "basis": self.basis.to_dict()}
        computed_by = (*measurement.computed_by, *self.plan.reader_modules)
        settings |= model_key(self.model, methods, self.basis, over, *computed_by) if in_folder else {}
        return settings | {"context_length": self.basis.rotary.context_length}

    def scorer(self) -> TokenScorer:
        plan = self.plan
        longest = max(plan.measurement.passes, default=1)
        options: dict[str, Any] = {"chunk": plan.chunk, "offload_cache": plan.offload_cache, "longest": longest}
        scorer: TokenScorer = (plan.scorer or TokenScorer)(self.model, **options)
        return scorer

    def score(
        self,
        scorer: TokenScorer,
        items: Sequence[int],
        done: Container[tuple[str, int, journal.Cell]],
        write: Callable[[journal.Record], object],
        progress: Progress,
    ) -> None:
        measurement = self.plan.measurement
        for key, (method, saved) in self.methods.items():
            report = partial(progress.passed, label(saved))
            with self._applied(method):
                for item in items:
                    if left := [cell for cell in measurement.cells(item) if (key, item, cell) not in done]:
                        scorer.take_cost()  # of whatever went before
                        for cell, value, cost in measurement.measure(scorer, item, left, report):
                            write(journal.Record(saved, item, cell, value, cost))

    def _applied(self, method: RopeMethod | None) -> AbstractContextManager[Any]:
        """The model under a method; one that it has already, on the same basis, is not patched in a second time."""
        specs = present_specs(self.model)
        present = bool(specs) and method == specs[-1].method and self.basis == Basis.from_specs(specs)
        if method is None or present:
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
    """Measure every method of a plan: in a run's folder, whatever is there already left out, or without files.

    Args:
        model: measured in eval mode; its modules have their own modes afterwards.
        out: the folder that the run's folder is made in, with tables and pages at the end; None: no files.
        workers: the processes that share the run; default: this one alone.
        file: what was asked, which the run's folder keeps.

    Returns:
        The run, with the results of these methods; complete where the workers waited for each other.

    Raises:
        FileError: another process is writing this run, the folder is damaged, or the disk refuses.
        MethodError, RopeExtError: one of the workers has another text, model, method or protocol, or has ended.
    """
    workers = workers or Workers()
    measurement = plan.measurement
    with closing(progress or Progress()) as shown, evaluating(model):
        shown.planned(model, plan)
        job = _Job(model, plan)
        settings = job.settings(in_folder=out is not None)
        if out is None:
            scorer, records = job.scorer(), list[journal.Record]()
            shown.reading(scorer.reading)
            job.score(scorer, range(len(measurement.items)), set(), records.append, shown)
            kind = run_kind(measurement.kind)
            results = results_from_records(kind, measurement.setting, measurement.contents, records)
            return _in_unit(Run(None, settings, results, kind), plan)
        settings = check_settings(json.loads(json.dumps(settings)))
        if workers.count > 1:
            workers.agree(_in_words(settings, job))
        name, digest = Path(settings["model"]).name or "model", json_digest(_key(settings))[:10]
        folder = Path(out) / f"{name}-{measurement.kind}-{digest}"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with journal.exclusive(folder, workers.rank):
            if workers.rank == 0:
                _write_settings(folder, settings)
            with disk_errors(folder):
                workers.agree({"the folder of --out": str(folder.stat().st_ino)})  # its number is the same everywhere
            _write_settings(folder, settings)
            if file is not None and workers.rank == 0:
                file.write(folder, beside_others=True)
            _add_to_folder(job, folder, workers, shown)
            workers.agree()
            run = _in_unit(read_run(folder), plan)
            if workers.rank == 0:
                write_files(run)
    return run.select([saved for _, saved in job.methods.values()])


def _in_unit(run: Run[Any], plan: RunPlan[Any]) -> Run[Any]:
    return run if plan.unit is None else run.in_unit(plan.unit)


def _add_to_folder(job: _Job, folder: Path, workers: Workers, progress: Progress) -> None:
    """Score what a run's folder lacks of this process's items, each value a line of the journal."""
    measurement, fixed = job.plan.measurement, job.plan.chunk is not None
    records = journal.read_records(folder, measurement.contents, run_kind(measurement.kind).parse)
    done = {(method_key(record.method), record.item, record.cell) for record in records}
    items = workers.share(len(measurement.items))
    units = [(key, item, cell) for key in job.methods for item in items for cell in measurement.cells(item)]
    progress.started(folder, sum([unit in done for unit in units]), len(units))
    scorer = job.scorer()
    if not fixed:
        if workers.rank == 0:
            journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
        workers.agree()
        scorer.chunk, scorer.head_bytes = journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
    agreed = scorer.chunk, scorer.head_bytes
    progress.reading(scorer.reading)
    with journal.open_journal(folder, workers.rank) as write:

        def add(record: journal.Record) -> None:
            nonlocal agreed
            if not fixed and (sizes := (scorer.chunk, scorer.head_bytes)) != agreed:
                agreed = sizes  # the scorer ran out of memory, and went on with less
                journal.replace_chunks(folder, *agreed)
            write(record)
            workers.check()

        job.score(scorer, items, done, add, progress)


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write run.json, or check that it is this run's."""
    path = folder / SETTINGS
    if os.path.lexists(path):
        try:
            if not other_settings(_key(parse_json_object(journal.read_plain(path))), _key(settings)):
                return
        except (ValueError, RecursionError):
            pass
        raise FileError(f"{str(path)!r} describes another run or is damaged; move {str(folder)!r} away")
    write_text(path, json.dumps(settings, indent=1) + "\n")


def _key(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the numbers depend on: all but where the model was loaded from."""
    return {name: value for name, value in settings.items() if name != "model"}


_WORDS = {
    **dict.fromkeys(("weights", "parameters", "patches", "of_patch", "loaded"), "the model"),
    **dict.fromkeys(("basis", "context_length"), "what the methods extend"),
    **dict.fromkeys(("text", "items", "cell_texts"), "the text"),
    **dict.fromkeys(("setting", "per_cell", "tokens"), "the protocol"),
    **{"cells": "the lengths", "kind": "the kind of measurement", "code": "the source of the packages"},
    **{"data": "the name of the text", "over": "--over"},
}
"""What settings of a run are called in a message."""


def _in_words(settings: dict[str, Any], job: _Job) -> dict[str, str]:
    """What all processes of a run must have in common, by what it is called, long values as digests."""
    values: dict[str, list[Any]] = {}
    for name, value in _key(settings).items():
        values.setdefault(_WORDS.get(name, name), []).append(value)
    values["the methods"] = [[label(saved), saved] for _, saved in job.methods.values()]
    values["--chunk"], values["--offload-cache"] = [job.plan.chunk], [job.plan.offload_cache]
    return {name: _short(each[0] if len(each) == 1 else each) for name, each in values.items()}


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text.strip('"') if len(text) < 40 else json_digest(value)

"""Measuring in a run's folder, whose journal holds each value: several processes may share a run, and continue it.

A run's folder is named after everything that its numbers depend on (see `identity.py`). Each value is a line of the
folder's journal, on disk before progress is reported; the same call continues after the last whole line. Tables,
pictures and pages are made from what the folder holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError
from rope_ext_hf.files.whole import disk_errors, json_digest, parse_json_object, write_text
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.folder import journal
from rope_ext_hf.runs.folder.earlier_runs import warn_if_begun_anew
from rope_ext_hf.runs.folder.folder import (
    SETTINGS,
    check_settings,
    exclusive,
    identifying,
    other_settings,
    read_run,
    setting_name,
)
from rope_ext_hf.runs.folder.identity import model_key
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.folder.run_file import RunFile, check_inputs, inputs_of
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.listeners import Listeners
from rope_ext_hf.runs.loop import measure_methods
from rope_ext_hf.runs.measured_methods import MeasuredMethods
from rope_ext_hf.runs.measurement import Listener, Record, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.workers import Workers


def record_run(
    plan: RunPlan[Any],
    methods: MeasuredMethods,
    settings: dict[str, Any],
    listener: Listener,
    out: Path,
    workers: Workers,
    file: RunFile | None,
) -> Run[Any]:
    """Measure what the folder of a run does not hold yet, and write its tables, picture and page.

    Args:
        plan, methods: the plan of the run, and its methods on the model.
        settings: what is read, how and where, with digests of the text.
        listener: shows the progress.
        out: the folder in which the run's folder is created.
        workers: the processes that share the run.
        file: the description of this run that its folder keeps as run.yaml; None: none is kept.

    Returns:
        The run as its folder holds it, with the results of all methods that it has.

    Raises:
        FileError, MethodError, RopeExtError: as `carry_out` raises them.
    """
    measurement = plan.measurement
    settings = check_settings(json.loads(json.dumps(settings | _model_key(plan, methods))))
    inputs = inputs_of(settings)
    check_inputs(measurement.kind, inputs)
    if workers.count > 1:
        workers.agree(_in_words(settings, plan, methods))
    name, digest = Path(settings["model"]).name or "model", json_digest(identifying(settings))[:10]
    folder = out / f"{name}-{measurement.kind}-{digest}"
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
        _measure_rest(plan, methods, listener, folder, workers)
        workers.agree()
        run = read_run(folder)
        run = run if plan.unit is None else run.in_unit(plan.unit)
        if workers.rank == 0:
            write_files(run)
    return run


def _measure_rest(
    plan: RunPlan[Any], methods: MeasuredMethods, listener: Listener, folder: Path, workers: Workers
) -> None:
    """Measure those of this process's items whose values are not in the run's folder yet, and add them."""
    measurement = plan.measurement
    records = journal.read_records(folder, measurement.contents, run_kind(measurement.kind).parse)
    done = {(method_key(record.method), record.item, record.cell) for record in records}
    items = workers.share(len(measurement.items))
    units = [(method.key, item, cell) for method in methods for item in items for cell in measurement.cells(item)]
    follows = Listeners([*measurement.listeners, listener])
    follows.started(folder, sum(unit in done for unit in units), len(units))
    scorer = plan.scorer_of(methods.model)
    if plan.chunk is None:
        _agree_on_chunks(folder, scorer, workers)
    follows.reading(scorer)
    with journal.open_journal(folder, workers.rank) as write:
        kept = _Journal(folder, scorer, write, workers, chunk_is_fixed=plan.chunk is not None)
        # what is stored beside a value is on disk before the journal has the value
        all_listeners = Listeners([*measurement.listeners, kept, listener])
        measure_methods(measurement, methods, scorer, all_listeners, items=items, done=done)


def _agree_on_chunks(folder: Path, scorer: TokenScorer, workers: Workers) -> None:
    """Let the scorers of all processes read chunks of the size that the first of them wrote into the folder."""
    if workers.rank == 0:
        journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)
    workers.agree()
    scorer.chunk, scorer.head_bytes = journal.agree_on_chunks(folder, scorer.chunk, scorer.head_bytes)


class _Journal(Listener):
    """A listener that writes each value into the journal of a run's folder.

    Args:
        folder: the folder.
        scorer: what reads; it takes smaller chunks when it has run out of memory, and then the folder states them.
        write: appends a record to the journal.
        workers: the processes that share the run; if another one has ended, this one ends as well.
        chunk_is_fixed: the user has given the size of chunks.
    """

    def __init__(
        self,
        folder: Path,
        scorer: TokenScorer,
        write: Callable[[Record], None],
        workers: Workers,
        *,
        chunk_is_fixed: bool,
    ) -> None:
        self._folder, self._scorer, self._write, self._workers = folder, scorer, write, workers
        self._chunk_is_fixed = chunk_is_fixed
        self._agreed = scorer.chunk, scorer.head_bytes

    def measured(self, record: Record) -> None:
        sizes = self._scorer.chunk, self._scorer.head_bytes
        if not self._chunk_is_fixed and sizes != self._agreed:
            self._agreed = sizes
            journal.replace_chunks(self._folder, *sizes)
        self._write(record)
        self._workers.check()


def _model_key(plan: RunPlan[Any], methods: MeasuredMethods) -> dict[str, Any]:
    """Return the settings that identify the model: digests of its weights and of the code that measures it."""
    modules = (*plan.measurement.computed_by, *plan.reader_modules)
    return model_key(methods.model, [each.method for each in methods], methods.basis, plan.over, *modules)


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


def _in_words(settings: dict[str, Any], plan: RunPlan[Any], methods: MeasuredMethods) -> dict[str, str]:
    """Return the values that all processes of a run must share, by name in messages; long values become digests."""
    values: dict[str, list[Any]] = {}
    for name, value in identifying(settings).items():
        values.setdefault(setting_name(name), []).append(value)
    values["the methods"] = [[method.label, method.saved] for method in methods]
    values["--chunk"], values["--offload-cache"] = [plan.chunk], [plan.offload_cache]
    return {name: _short(group[0] if len(group) == 1 else group) for name, group in values.items()}


def _short(value: Any) -> str:
    """Return a value as text; if the text is long, return its digest instead."""
    text = json.dumps(value, sort_keys=True)
    return text.strip('"') if len(text) < 40 else json_digest(value)

"""Carry out a planned run, in memory or in a run's folder; both go through the one loop in `loop`.

    plan = RunPlan(measurement, "stdlib", methods=(None, Yarn(factor=8.0)))
    run = carry_out(model, plan, out="rope-ext-results")

An item is a document or a prompt; a cell is a context length, alone or with a depth or task.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.methods.registry import rotary_from_dict
from rope_ext_hf.models.temporary import evaluating
from rope_ext_hf.runs.folder.folder import results_from_records
from rope_ext_hf.runs.folder.identity import provenance
from rope_ext_hf.runs.folder.run_file import RunFile
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.listeners import Listeners
from rope_ext_hf.runs.loop import measure_methods
from rope_ext_hf.runs.measured_methods import MeasuredMethods
from rope_ext_hf.runs.measurement import Listener, Record, RunPlan
from rope_ext_hf.runs.recorded_run import record_run
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def carry_out(
    model: PreTrainedModel,
    plan: RunPlan[Any],
    *,
    out: str | Path | None = None,
    workers: Workers | None = None,
    progress: Listener | None = None,
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
        progress: is told how the run goes on; default: nothing is shown.
        file: the description of this run that its folder keeps as run.yaml.

    Returns:
        The run, with the results of these methods.

    Raises:
        FileError: another process is writing this run, the folder is damaged, a file cannot be written, or a run file
            is repeated whose model or text has changed.
        MethodError: one of the workers has another text, model, method or protocol.
        RopeExtError: one of the workers has ended.
    """
    with closing(progress or Listener()) as listener, evaluating(model):
        methods = MeasuredMethods(model, plan)
        listener.planned(model, plan, methods.rope)
        settings = _settings(plan, methods)
        if out is None:
            run = _in_memory(plan, methods, settings, listener)
        else:
            run = record_run(plan, methods, settings, listener, Path(out), workers or Workers(), file)
    return run.select([method.saved for method in methods])


def _in_memory(plan: RunPlan[Any], methods: MeasuredMethods, settings: dict[str, Any], listener: Listener) -> Run[Any]:
    """Measure without files, and return the run; the arguments are those of `record_run`."""
    measurement, kind = plan.measurement, run_kind(plan.measurement.kind)
    scorer, kept = plan.scorer_of(methods.model), _Kept()
    listener.reading(scorer)
    follows = Listeners([*measurement.listeners, kept, listener])
    measure_methods(measurement, methods, scorer, follows, items=range(len(measurement.items)))
    results = results_from_records(kind, measurement.setting, measurement.contents, kept.records)
    run = Run(None, settings, results, kind)
    return run if plan.unit is None else run.in_unit(plan.unit)


class _Kept(Listener):
    """A listener that keeps each value in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def measured(self, record: Record) -> None:
        self.records.append(record)


def _settings(plan: RunPlan[Any], methods: MeasuredMethods) -> dict[str, Any]:
    """Return the settings of a run: what is read, how and where. In a folder, digests of the model join them.

    By the digests of its text a run is compared with others, also in memory.
    """
    measurement, contents = plan.measurement, plan.measurement.contents
    return {
        **provenance(methods.model, plan.data),
        **plan.reader,
        "kind": measurement.kind,
        "text": measurement.fingerprint(),
        "cell_texts": {json.dumps(cell): text for cell, text in measurement.cell_fingerprints.items()},
        "loaded": methods.loaded,
        "setting": asdict(measurement.setting),
        "items": list(contents.items),
        "cells": [list(cell) for cell in contents.counts],
        "per_cell": list(contents.counts.values()),
        "tokens": sum(measurement.passes),
        "over": plan.over,
        "basis": methods.basis,
        "context_length": rotary_from_dict(methods.basis["rotary"]).context_length,
    }

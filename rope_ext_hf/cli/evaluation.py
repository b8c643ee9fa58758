"""Commands that measure how far a model reads: `ppl`, `sweep`, `passkey`, `report`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import print_error, print_note, print_table, print_text, progress_bar
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, Out, command
from rope_ext_hf.errors import MethodError, count_text, duration, short
from rope_ext_hf.eval.questions import LengthsQuestion, Passkey, Perplexity, Sweep
from rope_ext_hf.files import json_text
from rope_ext_hf.installing import install_command
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.questions import Question, argument
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.reading.preflight import Forecast
    from rope_ext_hf.runs.measurement import Measurement, RunPlan
    from rope_ext_hf.runs.run import Run
    from rope_ext_hf.runs.run_file import RunFile
    from rope_ext_hf.runs.runner import Progress
    from rope_ext_hf.runs.workers import Workers

_RESULTS = Path("rope-ext-results")


@dataclass(frozen=True)
class RunOptions:
    """What every measurement is given: the model, the methods, and where results are kept."""

    model: Model
    methods: MethodChoice
    load: EvalOptions
    out: Out = _RESULTS
    dry_run: DryRun = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Question):
    """The processes that share a measurement."""

    PANEL = "Processes and engines"

    processes: int | None = argument(
        None, "Expected number of processes of torchrun; stop if there are others.", least=1, metavar="N"
    )

    def launched(self, load: EvalOptions) -> tuple[Workers, EvalOptions]:
        """The processes, and how this one loads the model: on a device of its own."""
        import torch

        from rope_ext_hf.runs.workers import Workers

        workers = Workers.from_launcher(self.processes)
        if workers.count > 1 and load.device == "auto":
            own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
            load = replace(load, device=own)
        return workers, load

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> RunPlan[Any]:
        """Return the plan with what reads its text; print what is left out. `empty` has no weights."""
        return plan


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(ProcessOptions):
    """The processes, and the engine that reads in place of transformers."""

    engine: str | None = argument(
        None,
        "What reads the text in place of transformers, once both agree on the first span of each length, e.g. vllm.",
        metavar="NAME",
    )
    gpus: int | None = argument(None, "GPUs that share the model in vLLM (tensor parallelism).", least=1, metavar="N")

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> RunPlan[Any]:
        from rope_ext_hf.hub import is_adapter

        if self.engine is None:
            if self.gpus is not None:
                raise MethodError("--gpus is for --engine; transformers takes --device-map auto")
            return plan
        read_by_engine = plug_in("readers", self.engine)
        if read_by_engine is None:
            known = ", ".join(plug_in_names("readers")) or "no engine, for no package with one is installed"
            raise MethodError(f"--engine takes {known}, got {short(self.engine)!r}; without it transformers reads")
        if is_adapter(model, revision=load.revision):
            raise MethodError(
                f"{short(model)!r} is an adapter, and --engine reads whole models: save the merged one "
                "(merge_and_unload of PEFT) and give that folder, or leave out --engine"
            )
        alone = workers.count == 1 and load.device_map is None
        gpus = self.gpus or 1
        plan, left_out = read_by_engine(empty, plan, alone=alone, gpus=gpus, **load.version)
        if left_out is not None and workers.rank == 0:
            print_note("without", left_out)
        return plan


@command("Measure", interrupted=CONTINUES)
def ppl(given: RunOptions, question: Perplexity, reader: ReaderOptions) -> None:
    """Measure perplexity by context length, under each method.

    All methods, and the unpatched model, are scored on the same tokens.

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    Prepared(given, question, reader).measure()


@command("Measure", interrupted=CONTINUES)
def sweep(given: RunOptions, question: Sweep, reader: ReaderOptions) -> None:
    """Measure the perplexity of every method with every factor.

    The same command continues where it was stopped. Without --method: linear, ntk, dynamic-ntk, by-parts, yarn,
    dynamic-yarn and llama3. Without --factor and --target-length, each length beyond the context length gets the factor
    that it needs: lengths 4k,8k,16k of a model for 4k measure every method with factors 2 and 4, at every length.

    Example: `rope-ext sweep reference --method ntk,yarn --factor 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    Prepared(given, question, reader).measure()


@command("Measure", interrupted=CONTINUES)
def passkey(given: RunOptions, question: Passkey, shared: ProcessOptions) -> None:
    """Hide a statement in a long text, and ask for it.

    Measured by length and depth: exact answers, and the rank of the right answer among wrong ones.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    if question.task is None and given.model == "reference":
        question = replace(question, task="key-value")
    Prepared(given, question, shared).measure()


@command("Measure")
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of runs, as `ppl`, `sweep`, `tasks` and others print them."),
    ],
    out: Path | None = argument(None, "The page of several runs. Default: comparison.html beside the first folder."),
    unit: str | None = argument(
        None,
        "How losses are shown: perplexity, nats (per token) or bits (per byte). Default: perplexity.",
        metavar="UNIT",
    ),
    as_json: Json = False,
) -> None:
    """Print and draw a run again, or compare several runs.

    One run, finished or not: its table, CSV, picture and HTML page are written anew. Several runs of one model, of
    perplexity, tasks and retrieval: one page that says which method is best, up to what length, and at what cost.

    Example: `rope-ext report rope-ext-results/reference-perplexity-0123456789`
    """
    from rope_ext_hf.runs.comparison import compare_runs
    from rope_ext_hf.runs.folder import read_run
    from rope_ext_hf.runs.report import write_files

    if len(folders) == 1:
        if out is not None:
            raise MethodError("--out names the page of several runs; the files of one run stand in its folder")
        run = read_run(folders[0])
        run = run if unit is None else run.in_unit(unit)
        write_files(run)
        _print_run(run, as_json)
        _stop_if_not_finite(run)
        return
    comparison = compare_runs(folders, unit)
    page = comparison.write_page(out or folders[0].parent / "comparison.html")
    if as_json:
        print_text(json_text(comparison.to_dict()))
        return
    print_table(comparison.table())
    if (agreement := comparison.agreement_table()) is not None:
        print_table(agreement)
    print_text(f"{wrapped(str(comparison.conclusion))}\nreport   {page}")


class Prepared:
    """A measurement, planned from the model on the meta device, that fits into memory; what it needs is printed."""

    def __init__(self, given: RunOptions, question: LengthsQuestion, shared: ProcessOptions) -> None:
        from rope_ext_hf.hub import foreign_errors
        from rope_ext_hf.runs.run_file import run_file

        self.given = given
        workers, load = shared.launched(given.load)
        with workers.in_step(leave=False), foreign_errors(f"the model {short(given.model)!r} could not be measured"):
            empty = load.empty_model(given.model)
            plan = question.plan(empty, given.methods, tokenizer=load.tokenizer(given.model), **load.reading)
            self.file = run_file(question, given.model, given.methods, given.load, shared, out=given.out)
            if isinstance(question, Perplexity):
                plan = _with_keys(plan, question, given, load, workers, self.file)
            plan = shared.reading(plan, given.model, empty, load, workers)
            most_spans = getattr(question, "max_spans", None)
            self.forecast = _preflight(empty, load, plan, workers, most_spans, given)  # what a dry run takes
        self.load, self.plan, self.workers = load, plan, workers

    def measure(self) -> Run[Any]:
        """Measure, and print from the first process; of a dry run print what it would take, and end."""
        from rope_ext_hf.hub import foreign_errors
        from rope_ext_hf.runs.runner import carry_out

        if self.forecast is not None:
            print_forecast(self.forecast, self.given.as_json)
            raise typer.Exit
        name, shown = self.given.model, shown_progress(self.workers)
        kept: dict[str, Any] = {"out": self.given.out, "workers": self.workers, "file": self.file}
        with self.workers.in_step(), foreign_errors(f"the model {short(name)!r} could not be measured"):
            run = carry_out(self.load.model(name), self.plan, progress=shown, **kept)
        if self.workers.rank == 0:
            _print_run(run, self.given.as_json)
        _stop_if_not_finite(run)
        return run


def _with_keys(
    plan: RunPlan[Any], question: Perplexity, given: RunOptions, load: EvalOptions, workers: Workers, file: RunFile
) -> RunPlan[Any]:
    """The plan with its key tokens, which another model finds before the measured one is loaded."""
    from rope_ext_hf.runs.runner import carry_out

    evaluator = replace(load, revision=None)  # that one is of the measured model

    def measure_with(source: str, make: Callable[[Any, Any], RunPlan[Any]]) -> Run[Any] | None:
        empty = evaluator.empty_model(source)
        of_keys = make(empty, evaluator.tokenizer(source))
        forecast = _preflight(empty, evaluator, of_keys, workers, None, given)
        if forecast is not None:
            print_forecast(forecast, given.as_json)
            return None
        shown = shown_progress(workers)
        run = carry_out(evaluator.model(source), of_keys, out=given.out, workers=workers, progress=shown, file=file)
        if workers.rank == 0:
            print_note(run.kind.name, run.kind.outcome(run))
        return run

    return question.with_key_tokens(plan, measure_with)


def _preflight(
    empty: PreTrainedModel,
    load: EvalOptions,
    plan: RunPlan[Any],
    workers: Workers,
    most_spans: int | None,
    given: RunOptions,
) -> Forecast | None:
    """Print what memory and time a measurement needs, before weights are read; stop where it cannot fit. Of a dry run
    return it instead.
    """
    import torch

    from rope_ext_hf.hub import find_device, loaded_dtype
    from rope_ext_hf.reading.preflight import Forecast, check_memory, estimate_memory, measure_flops
    from rope_ext_hf.runs.labels import label

    device, dtype = find_device(load.device), loaded_dtype(empty, load.dtype)
    passes, repeats = plan.measurement.passes, max(1, len(plan.methods))
    how: dict[str, Any] = {"offload_cache": load.offload_cache}
    if given.dry_run:
        needed = estimate_memory(empty, max(passes), dtype, device=device, **how)
    else:
        needed = check_memory(empty, max(passes), dtype, device, spread=load.device_map is not None, **how)
    work = repeats * _work(empty, plan.measurement, *passes) / workers.count
    seconds = work / measure_flops(device, dtype)
    if given.dry_run:
        named = [label(method.to_dict() if method else None) for method in plan.methods] or ["unpatched"]
        lengths = sorted({int(cell[0]) for cell in plan.measurement.contents.counts})
        at = ", ".join(f"{length:,}" for length in lengths)
        return Forecast(
            does=(f"measure {plan.measurement.kind} of {plan.data} at {at} tokens: {', '.join(named)}",),
            tokens=repeats * sum(passes),
            seconds=seconds,
            device=device,
            memory=needed,
            gpu=estimate_memory(empty, max(passes), dtype, device=torch.device("cuda"), **how),
            disk=0,
            folder=str(given.out),
        )
    if workers.rank == 0:
        if not needed.is_ample(device):
            print_note("needs", str(needed))
        print_note("reads", f"{count_text(sum(passes))} tokens{_readers(plan)}: about {duration(seconds)}")
        if too_short := getattr(plan.measurement.setting, "left_out", 0):
            are = "document is" if too_short == 1 else "documents are"
            print_note("without", f"{too_short} {are} too short and left out")
        if most_spans:
            print_note("spans", f"at most {most_spans} per length; --max-spans all reads the whole text")
    return None


def _readers(plan: RunPlan[Any]) -> str:
    """Return what reads the text, as the rest of a clause: ", unpatched and patched"."""
    patched = sum(method is not None for method in plan.methods)
    unpatched = ", unpatched" if None in plan.methods else ""
    if not patched:
        return unpatched
    with_methods = "patched" if patched == 1 else f"with each of {patched} methods"
    return f"{unpatched} and {with_methods}" if unpatched else f", {with_methods}"


def print_forecast(forecast: Forecast, as_json: bool) -> None:
    print_text(json_text(forecast.to_dict()) if as_json else str(forecast))


def _work(model: PreTrainedModel, measurement: Measurement, *passes: int) -> float:
    """Floating-point operations of some of a measurement's passes, and of what is read after each."""
    from rope_ext_hf.reading.preflight import estimate_flops

    after = [1] * (measurement.after_each_pass * len(passes))
    scored = measurement.scored * len(passes) // len(measurement.passes)
    return estimate_flops(model, [*passes, *after], scored)


def shown_progress(workers: Workers | None = None) -> Progress:
    """The progress of runs on standard error, of the first of the processes that share one: a bar, the time left."""
    from rope_ext_hf.runs.runner import Progress
    from rope_ext_hf.runs.workers import Workers

    sharing = workers or Workers()
    first = sharing.rank == 0

    class Shown(Progress):
        closing = ExitStack()

        def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
            self.bar = self.closing.enter_context(progress_bar("unpatched", show=first))
            self.plan, self.share = plan, max(1, len(plan.methods)) / sharing.count
            self.work = cache(partial(_work, model, plan.measurement))
            passes = plan.measurement.passes
            self.bar.left.total = self.share * self.work(*passes)
            self.bar.left.largest, self.bar.left.count = self.work(max(passes, default=0)), self.share * len(passes)

        def started(self, folder: Path, done: int, units: int) -> None:
            self.bar.left.total *= 1 - done / max(1, units)  # fewer items than processes
            self.bar.left.count *= 1 - done / max(1, units)
            if first:
                self.bar.set_total(round(self.share * sum(self.plan.measurement.passes)))
                print_note("run", f"{folder}{f' ({done} of {units} parts were done before)' if done else ''}")

        def reading(self, how: str) -> None:
            if first:
                print_note("read", how)
                self.bar.left.begin()

        def passed(self, method: str, tokens: int) -> None:
            timed = "engine" not in self.plan.reader  # which starts in the first pass of each method
            self.bar.advance(method, tokens, self.work(tokens) if timed else 0.0)

        def close(self) -> None:
            self.closing.close()

    return Shown()


def _print_run(run: Run[Any], as_json: bool) -> None:
    if as_json:
        print_text(json_text(run.to_dict()))
        return
    if (table := run.table()) is not None:
        print_table(table)
        if speed := run.kind.speed(run):
            print_text(f"speed    {speed}")
        if text := str(run.conclusion):
            print_text(f"\n{wrapped(text)}\n")
    print_text(f"results  {run.folder / 'results.csv'}\nreport   {run.folder / 'report.html'}")
    if run.chart is not None and not (run.folder / f"{run.kind.name}.png").exists():
        print_text(f"picture  none; pictures need matplotlib: {install_command('eval')}")


def _stop_if_not_finite(run: Run[Any]) -> None:
    if bad := run.kind.not_finite(run):
        print_error(f"the loss is not finite: {'; '.join(bad)}")
        raise typer.Exit(1)

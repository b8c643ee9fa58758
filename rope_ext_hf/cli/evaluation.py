"""The commands that measure at which lengths a model reads well: `ppl`, `sweep`, `passkey`, `report`.

`Prepared` holds the steps that all of them share: plan, check that the model fits into memory, measure, print.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import print_error, print_note, print_result, print_table, print_text, progress_bar
from rope_ext_hf.cli.dataclass_options import STATED
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, Out, command
from rope_ext_hf.errors import MethodError, count_text, duration, short, size_text
from rope_ext_hf.eval.questions import LengthsQuestion, Passkey, Perplexity, PerplexityOrDivergence, Sweep
from rope_ext_hf.files import json_text
from rope_ext_hf.installing import install_command
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.questions import Question, argument, option_words
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.reading.forecast import Forecast
    from rope_ext_hf.reading.memory import MemoryEstimate
    from rope_ext_hf.reading.operations import ReadingSpeed
    from rope_ext_hf.runs.measurement import Measurement, RunPlan
    from rope_ext_hf.runs.run import Run
    from rope_ext_hf.runs.run_file import RunFile
    from rope_ext_hf.runs.runner import Progress
    from rope_ext_hf.runs.workers import Workers

__all__ = ["Prepared", "ProcessOptions", "ReaderOptions", "RunOptions", "shown_progress"]


@dataclass(frozen=True)
class RunOptions:
    """Options that every measurement takes: the model, the methods, and the folder for results."""

    model: Model
    methods: MethodChoice
    load: EvalOptions
    out: Out = Path("rope-ext-results")
    dry_run: DryRun = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Question):
    """Options about the processes that share a measurement."""

    PANEL = "Processes and engines"

    processes: int | None = argument(
        None, "Expected number of processes of torchrun; stop if there are others.", least=1, metavar="N"
    )

    def launched(self, load: EvalOptions) -> tuple[Workers, EvalOptions]:
        """Return the processes that torchrun started, and loading options in which this process has its own device."""
        import torch

        from rope_ext_hf.runs.workers import Workers

        workers = Workers.from_launcher(self.processes)
        if workers.count > 1 and load.device == "auto":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
            load = replace(load, device=device)
        return workers, load

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> RunPlan[Any]:
        """Return the plan, set to be read by the chosen program; by default transformers reads it.

        `empty` is the model without weights.
        """
        return plan


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(ProcessOptions):
    """Options about the processes that share a measurement, and the engine that reads instead of transformers."""

    engine: str | None = argument(
        None,
        "Let an engine (vllm, sglang) read the text, after it agrees with transformers on one span of each length.",
        metavar="NAME",
    )
    gpus: int | None = argument(
        None, "GPUs that share the model in the engine, by tensor parallelism.", least=1, metavar="N"
    )

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> RunPlan[Any]:
        from rope_ext_hf.hub import is_adapter

        if self.engine is None:
            if self.gpus is not None:
                raise MethodError("--gpus is for --engine; transformers takes --device-map auto")
            return plan
        if plan.measurement.takes_outputs:
            raise MethodError(
                "--store-states and --against need last hidden states, which an engine does not give; leave out "
                "--engine, so that transformers reads the text"
            )
        read_by_engine = plug_in("readers", self.engine)
        if read_by_engine is None:
            engines = ", ".join(plug_in_names("readers"))
            if not engines:
                raise MethodError(
                    f"no package with engines for --engine is installed, got {short(self.engine)!r}; leave it out to "
                    "read with transformers"
                )
            raise MethodError(
                f"--engine takes {engines}, got {short(self.engine)!r}; leave it out to read with transformers"
            )
        if is_adapter(model, revision=load.revision):
            raise MethodError(
                f"{short(model)!r} is an adapter, and --engine reads whole models: merge it (merge_and_unload of "
                "PEFT), save the model, and give that folder; or leave out --engine"
            )
        alone = workers.count == 1 and load.device_map is None
        gpus = self.gpus or 1
        plan, left_out = read_by_engine(empty, plan, alone=alone, gpus=gpus, **load.version)
        if left_out is not None and workers.rank == 0:
            print_note("without", left_out)
        return plan


@command("Measure", interrupted=CONTINUES)
def ppl(context: typer.Context, options: RunOptions, question: PerplexityOrDivergence, reader: ReaderOptions) -> None:
    """Measure perplexity by context length, under each method.

    All methods, and the unpatched model, are scored on the same tokens. With --against, the distributions of MODEL are
    compared with those of an earlier run that has stored its last hidden states (--store-states).

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    Prepared(options, question.chosen(context.meta[STATED]), reader).measure()


@command("Measure", interrupted=CONTINUES)
def sweep(options: RunOptions, question: Sweep, reader: ReaderOptions) -> None:
    """Measure the perplexity of every method with every factor.

    The same command continues where it was stopped. Without --method it measures linear, ntk, dynamic-ntk, by-parts,
    yarn, dynamic-yarn and llama3. Without --factor and --target-length it takes the factors that the lengths need: for
    a model with a context length of 4k, the lengths 4k,8k,16k give the factors 2 and 4.

    Example: `rope-ext sweep reference --method ntk,yarn --factor 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    Prepared(options, question, reader).measure()


@command("Measure", interrupted=CONTINUES)
def passkey(options: RunOptions, question: Passkey, processes: ProcessOptions) -> None:
    """Hide a statement in a long text, and ask for it.

    Three things are measured at each length and depth: how many answers are exact, how the right answer ranks among
    wrong ones, and its loss in nats per token.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    if question.task is None and options.model == "reference":  # the bundled model knows this form
        question = replace(question, task="key-value")
    Prepared(options, question, processes).measure()


@command("Measure")
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of runs, as `ppl`, `sweep`, `tasks` and others print them."),
    ],
    out: Path | None = argument(
        None, "The page that compares several runs. Default: comparison.html beside the first folder."
    ),
    unit: str | None = argument(
        None,
        "The unit of losses: perplexity, nats (per token) or bits (per byte). Default: perplexity.",
        metavar="UNIT",
    ),
    as_json: Json = False,
) -> None:
    """Print and draw a run again, or compare several runs.

    For one run, finished or not, its table is printed, and its CSV, picture and HTML page are written anew. Several
    runs of one model (perplexity, tasks, retrieval) become one page, which says which method is best, up to what
    length, and at what cost.

    Example: `rope-ext report rope-ext-results/reference-perplexity-0123456789`
    """
    from rope_ext_hf.runs.comparison import compare_runs
    from rope_ext_hf.runs.folder import read_run
    from rope_ext_hf.runs.report import write_files

    if len(folders) == 1:
        if out is not None:
            raise MethodError(
                "--out names the page that compares several runs; the files of one run stay in its folder"
            )
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


# --- the steps that the commands share --------------------------------------------------------------------------------


class Prepared:
    """A measurement that is planned, and known to fit into memory, before the weights of the model are read.

    Attributes:
        forecast: for a dry run, the time, memory and disk space that the measurement would take; else None.
    """

    def __init__(self, options: RunOptions, question: LengthsQuestion, processes: ProcessOptions) -> None:
        """Plan a measurement on the model without weights; print the memory needed, or raise an error for too much."""
        from rope_ext_hf.eval.forecasting import forecast_plan
        from rope_ext_hf.files import foreign_errors
        from rope_ext_hf.runs.run_file import run_file

        self.options = options
        name = options.model
        workers, load = processes.launched(options.load)
        with workers.in_step(leave=False), foreign_errors(f"the model {short(name)!r} could not be measured"):
            empty = load.empty_model(name)
            make = partial(forecast_plan, question) if options.dry_run else question.plan
            plan = make(empty, options.methods, tokenizer=load.tokenizer(name), **load.reading)
            self.file = run_file(question, name, options.methods, options.load, processes, out=options.out)
            if isinstance(question, Perplexity):
                plan = _with_key_tokens(plan, question, options, load, workers, self.file)
            plan = processes.reading(plan, name, empty, load, workers)
            self.forecast: Forecast | None = None
            self.needed = _memory(name, empty, load, plan, check=not options.dry_run)
            if options.dry_run:
                self.forecast = _forecast(self.needed, empty, load, plan, workers, options.out, question)
            else:
                _print_needs(self.needed, empty, load, plan, workers, question, options.out)
        self.empty, self.load, self.plan, self.workers = empty, load, plan, workers

    def measure(self) -> Run[Any]:
        """Carry out the measurement and print its result; in a dry run, print the forecast and end the program."""
        from rope_ext_hf.files import foreign_errors
        from rope_ext_hf.runs.runner import carry_out

        if self.forecast is not None:
            print_result(self.forecast, self.options.as_json)
            raise typer.Exit
        name = self.options.model
        with self.workers.in_step(), foreign_errors(f"the model {short(name)!r} could not be measured"):
            run = carry_out(
                _loaded(name, self.empty, self.load, self.needed),
                self.plan,
                out=self.options.out,
                workers=self.workers,
                file=self.file,
                progress=shown_progress(self.workers),
            )
        if self.workers.rank == 0:
            _print_run(run, self.options.as_json)
        _stop_if_not_finite(run)
        return run


def _with_key_tokens(
    plan: RunPlan[Any], question: Perplexity, options: RunOptions, load: EvalOptions, workers: Workers, file: RunFile
) -> RunPlan[Any]:
    """Return the plan with key tokens (those that need the long context), if the question asks for them.

    Another model finds them, in a run of its own before this one.
    """
    from rope_ext_hf.runs.runner import carry_out

    evaluator = replace(load, revision=None)  # --revision is one of the measured model

    def measure_with(source: str, make: Callable[[Any, Any], RunPlan[Any]]) -> Run[Any] | None:
        empty = evaluator.empty_model(source)
        key_plan = make(empty, evaluator.tokenizer(source))
        needed = _memory(source, empty, evaluator, key_plan, check=not options.dry_run)
        if options.dry_run:
            print_result(_forecast(needed, empty, evaluator, key_plan, workers, options.out), options.as_json)
            return None
        _print_needs(needed, empty, evaluator, key_plan, workers)
        run = carry_out(
            _loaded(source, empty, evaluator, needed),
            key_plan,
            out=options.out,
            workers=workers,
            file=file,
            progress=shown_progress(workers),
        )
        if workers.rank == 0:
            print_note(run.kind.name, run.kind.outcome(run))
        return run

    return question.with_key_tokens(plan, measure_with)


def _memory(
    name: str, empty: PreTrainedModel, load: EvalOptions, plan: RunPlan[Any], *, check: bool = True
) -> MemoryEstimate:
    """Return the memory that a measurement needs; raise an error if less is free, unless `check` is false.

    Args:
        name: the model, as the command line has it.
        empty: the model, without its weights.
        load: the options for loading it.
        plan: the plan of the measurement.
        check: whether to raise an error.
    """
    from rope_ext_hf.hub import find_device, loaded_dtype
    from rope_ext_hf.runs.preflight import run_memory

    dtype, device = loaded_dtype(empty, load.dtype), find_device(load.device)
    return run_memory(name, empty, plan, dtype, device, spread=load.device_map is not None, check=check)


def _print_needs(
    needed: MemoryEstimate,
    empty: PreTrainedModel,
    load: EvalOptions,
    plan: RunPlan[Any],
    workers: Workers,
    question: LengthsQuestion | None = None,
    out: Path | None = None,
) -> None:
    """Print the memory and time that a measurement needs.

    Args:
        needed: the memory.
        empty: the model, without its weights.
        load: the options for loading it.
        plan: the plan of the measurement.
        workers: the processes that share the run; the first one prints.
        question: the options of the measurement; with others of them it would take less time.
        out: the folder for results; given where anything besides results is written there.
    """
    from rope_ext_hf.hub import find_device
    from rope_ext_hf.reading.forecast import free_bytes

    seconds, moving = _seconds(empty, load, plan, workers), _moving_seconds(needed, empty, load, plan, workers)
    if workers.rank != 0:
        return
    if not needed.is_ample(find_device(load.device)):
        print_note("needs", f"{needed}{f'; moving them takes about {duration(moving)}' if moving else ''}")
    passes = plan.measurement.passes
    all_passes = sum(plan.passes(empty))
    if all_passes == max(1, len(plan.methods)) * sum(passes):
        tokens = f"{count_text(sum(passes))} tokens{_readers_clause(plan)}"
    else:  # some methods need fewer passes
        tokens = f"{count_text(all_passes)} tokens in all"
    print_note("reads", f"{tokens}: about {duration(seconds + moving)}")
    if out is not None and (size := _stored_bytes(empty, load, plan)):
        print_note(
            "writes", f"{size_text(size)} of hidden states into {out}, where {size_text(free_bytes(out))} are free"
        )
    if question is not None and (faster := _faster(empty, load, plan, workers, question, seconds)):
        print_note("faster", faster)
    too_short = getattr(plan.measurement.setting, "left_out", 0)
    if too_short:
        are = "document is" if too_short == 1 else "documents are"
        print_note("without", f"{too_short} {are} too short and left out")
    if most_spans := getattr(question, "max_spans", None):
        print_note("spans", f"at most {most_spans} per length; --max-spans all reads the whole text")


def _loaded(name: str, empty: PreTrainedModel, load: EvalOptions, needed: MemoryEstimate) -> PreTrainedModel:
    """Return the model with its weights; those that do not fit the device wait in main memory or on disk."""
    from rope_ext_hf.hub import find_device, loaded_dtype
    from rope_ext_hf.reading.memory import weight_places

    return load.model(name, weight_places(empty, needed, loaded_dtype(empty, load.dtype), find_device(load.device)))


def _forecast(
    needed: MemoryEstimate,
    empty: PreTrainedModel,
    load: EvalOptions,
    plan: RunPlan[Any],
    workers: Workers,
    out: Path,
    question: LengthsQuestion | None = None,
) -> Forecast:
    """Return the time, memory and disk space that a measurement would take.

    The arguments are those of `_print_needs`; `out` is the folder for results.
    """
    import torch

    from rope_ext_hf.hub import find_device, loaded_dtype
    from rope_ext_hf.reading.forecast import Forecast
    from rope_ext_hf.reading.memory import estimate_memory
    from rope_ext_hf.runs.labels import label

    longest, dtype = max(plan.measurement.passes), loaded_dtype(empty, load.dtype)
    how: dict[str, Any] = {"offload_cache": load.offload_cache, "by_layer": plan.measurement.by_layer}
    how["further_weights"] = plan.measurement.weight_bytes
    memory_on_gpu = estimate_memory(empty, longest, dtype, device=torch.device("cuda"), **how)
    seconds = _seconds(empty, load, plan, workers)
    methods = [label(method.to_dict() if method else None) for method in plan.methods] or ["unpatched"]
    lengths = sorted({int(cell[0]) for cell in plan.measurement.contents.counts})
    at = ", ".join(f"{length:,}" for length in lengths)
    return Forecast(
        does=(f"measure {plan.measurement.kind} of {plan.data} at {at} tokens: {', '.join(methods)}",),
        tokens=sum(plan.passes(empty)),
        seconds=seconds + _moving_seconds(needed, empty, load, plan, workers),
        device=find_device(load.device),
        memory=needed,
        gpu=memory_on_gpu,
        disk=_stored_bytes(empty, load, plan),
        folder=str(out),
        faster="" if question is None else _faster(empty, load, plan, workers, question, seconds),
    )


def _stored_bytes(empty: PreTrainedModel, load: EvalOptions, plan: RunPlan[Any]) -> int:
    """Return the bytes that a measurement writes besides results."""
    from rope_ext_hf.hub import loaded_dtype

    dtype, methods = loaded_dtype(empty, load.dtype), max(1, len(plan.methods))
    size: int = plan.measurement.stored_bytes(empty, dtype, methods)
    return size


def _faster(
    empty: PreTrainedModel,
    load: EvalOptions,
    plan: RunPlan[Any],
    workers: Workers,
    question: LengthsQuestion,
    seconds: float,
) -> str:
    """Return options with which a measurement takes minutes, and how long it takes then; empty if it does already.

    They are fewer spans of text or prompts, and float32 where the CPU is at least twice as fast in it. `seconds` is how
    long the measurement takes as it is.
    """
    from rope_ext_hf.hub import find_device
    from rope_ext_hf.reading.operations import MINUTES

    option = "trials" if isinstance(question, Passkey) else "max_spans"
    if seconds <= MINUTES or not hasattr(question, option):
        return ""
    changed: dict[str, Any] = {}
    if find_device(load.device).type == "cpu":
        in_float32 = _seconds(empty, replace(load, dtype="float32"), plan, workers)
        if in_float32 < seconds / 2:
            changed["dtype"], seconds = "float32", in_float32
    per_cell = plan.measurement.plan.most_spans if isinstance(question, Perplexity) else getattr(question, option)
    count = min(per_cell, max(1, int(per_cell * MINUTES / seconds)))
    if count < per_cell:
        changed[option] = count
    least = seconds * count / per_cell
    advice = "; shorter --lengths or a GPU take less" if least > 2 * MINUTES else ""
    if not changed:
        return advice.removeprefix("; ")
    return f"with {option_words(**changed)} about {duration(least)}{advice}"


def _seconds(empty: PreTrainedModel, load: EvalOptions, plan: RunPlan[Any], workers: Workers) -> float:
    """Estimate the seconds that a measurement takes, from the measured speed of the device."""
    from rope_ext_hf.hub import find_device, loaded_dtype
    from rope_ext_hf.reading.operations import measure_speed

    speed = measure_speed(empty, find_device(load.device), loaded_dtype(empty, load.dtype))
    return _pass_seconds(empty, plan.measurement, speed, *plan.passes(empty)) / workers.count


def _moving_seconds(
    needed: MemoryEstimate, empty: PreTrainedModel, load: EvalOptions, plan: RunPlan[Any], workers: Workers
) -> float:
    """Estimate the seconds of moving hidden states to where they wait and back, from measured speeds."""
    from rope_ext_hf.hub import find_device
    from rope_ext_hf.reading.operations import moving_seconds

    longest, device = max(plan.measurement.passes), find_device(load.device)
    return moving_seconds(empty, plan.passes(empty), longest, needed, device) / workers.count


def _pass_seconds(model: PreTrainedModel, measurement: Measurement, speed: ReadingSpeed, *passes: int) -> float:
    """Estimate the seconds that passes through a model take, with the answers that follow each pass.

    `passes` are the numbers of tokens of the passes.
    """
    scored = measurement.scored * len(passes) // len(measurement.passes)
    return speed.seconds(model, passes, scored, measurement.short_passes * len(passes))


def _readers_clause(plan: RunPlan[Any]) -> str:
    """Return a clause on how often the text is read: ", unpatched and patched", or ", with each of 3 methods"."""
    patched = sum(method is not None for method in plan.methods)
    unpatched = ", unpatched" if None in plan.methods else ""
    if not patched:
        return unpatched
    with_methods = "patched" if patched == 1 else f"with each of {patched} methods"
    return f"{unpatched} and {with_methods}" if unpatched else f", {with_methods}"


# --- progress and results ---------------------------------------------------------------------------------------------


def shown_progress(workers: Workers | None = None) -> Progress:
    """Return a listener that shows the progress of runs on standard error, with a bar and the time left.

    If several processes share a run, only the first one shows it.
    """
    # torch is imported with the base class, so that the class cannot stand at the top of this module
    from rope_ext_hf.reading.memory import estimate_memory, estimate_whole_memory
    from rope_ext_hf.reading.operations import measure_speed
    from rope_ext_hf.runs.runner import Progress
    from rope_ext_hf.runs.workers import Workers

    processes = workers or Workers()
    first = processes.rank == 0

    class ShownProgress(Progress):
        closing = ExitStack()

        def planned(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
            self.bar = self.closing.enter_context(progress_bar("unpatched", show=first))
            self.model, self.plan, self.passes = model, plan, plan.passes(model)
            speed = measure_speed(model, model.device, model.dtype)
            self.work = cache(partial(_pass_seconds, model, plan.measurement, speed))
            self.bar.left.total = self.work(*self.passes) / processes.count
            self.bar.left.largest = self.work(max(self.passes, default=0))
            self.bar.left.count = len(self.passes) / processes.count

        def started(self, folder: Path, done: int, units: int) -> None:
            remaining = 1 - done / max(1, units)  # there may be no unit for this process
            self.bar.left.total *= remaining
            self.bar.left.count *= remaining
            if first:
                self.bar.set_total(round(sum(self.passes) / processes.count))
                print_note("run", f"{folder}{f' ({done} of {units} parts were done before)' if done else ''}")

        def reading(self, how: str) -> None:
            if first:
                print_note("read", how)
                if how.startswith("whole") and self.passes:
                    scored = self.plan.measurement.scored // max(1, len(self.plan.measurement.passes))
                    needed = estimate_whole_memory(self.model, max(self.passes), scored)
                    if not needed.is_ample(self.model.device):
                        print_note("needs", f"{needed}, because texts are read whole")
                elif self.plan.measurement.by_layer and "layer" not in how and self.passes:
                    needed = estimate_memory(self.model, max(self.passes), offload_cache=self.plan.offload_cache)
                    if not needed.is_ample(self.model.device):
                        print_note("needs", f"{needed}, because this model is not read layer by layer")
                self.bar.left.begin()

        def passed(self, method: str, tokens: int) -> None:
            timed = "engine" not in self.plan.reader  # an engine starts within the first pass of each method
            self.bar.advance(method, tokens, self.work(tokens) if timed else 0.0)

        def close(self) -> None:
            self.closing.close()

    return ShownProgress()


def _print_run(run: Run[Any], as_json: bool) -> None:
    """Print the table of a run, its speed, its conclusion, and the names of the files with its results."""
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
        print_text(f"picture  none, because matplotlib is not installed: {install_command('eval')}")


def _stop_if_not_finite(run: Run[Any]) -> None:
    """End the program with exit code 1 if a loss of a run is not a finite number."""
    if bad := run.kind.not_finite(run):
        print_error(f"the loss is not finite: {'; '.join(bad)}")
        raise typer.Exit(1)

"""The commands that measure at which lengths a model reads well: `ppl`, `sweep`, `passkey`, `report`.

`Prepared` holds the steps that all of them share: plan, check that the model fits into memory, measure, print. The plan
cuts the tokenised text into spans (reading/spans.py) by a protocol (reading/protocols.py): by default `matched`, where
the last tokens of each stretch of the longest length are scored at every length. The loop over methods, documents and
spans is `measure_methods` (runs/loop.py). For each span `PerplexityMeasurement` (eval/spans/perplexity_measurement.py)
gets the losses of its tokens from `TokenScorer` (reading/scorer.py), which computes them from the outputs of the
decoder with `HeadLosses.losses` (reading/through/head_losses.py): logsumexp of the logits, less that of the token. The
perplexity of a length is exp(sum of losses / number of tokens) over all documents: in tables by `Measure`
(runs/conclusions/measures.py), in files by `PerplexityRuns.result` (eval/spans/perplexity_runs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import print_error, print_note, print_result, print_table, print_text
from rope_ext_hf.cli.dataclass_options import STATED
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, Out, command
from rope_ext_hf.cli.planned_runs import PlannedRun
from rope_ext_hf.cli.run_progress import shown_progress
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.eval.measurement_options import MeasurementOptions, Passkey, Perplexity, PplOptions, Sweep
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.installing import install_command
from rope_ext_hf.options.arguments import Options, argument
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.reading.cost.forecast import Forecast
    from rope_ext_hf.reading.cost.memory import MemoryEstimate
    from rope_ext_hf.runs.folder.run_file import RunFile
    from rope_ext_hf.runs.measurement import RunPlan
    from rope_ext_hf.runs.run import Run
    from rope_ext_hf.runs.workers import Workers

__all__ = ["Prepared", "ProcessOptions", "ReaderOptions", "RunOptions"]


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
class ProcessOptions(Options):
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
def ppl(context: typer.Context, run_options: RunOptions, options: PplOptions, reader: ReaderOptions) -> None:
    """Measure perplexity by context length, under each method.

    All methods, and the unpatched model, are scored on the same tokens. With --against, the distributions of MODEL are
    compared with those of an earlier run that has stored its last hidden states (--store-states).

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    Prepared(run_options, options.chosen(context.meta[STATED]), reader).measure()


@command("Measure", interrupted=CONTINUES)
def sweep(run_options: RunOptions, options: Sweep, reader: ReaderOptions) -> None:
    """Measure the perplexity of every method with every factor.

    The same command continues where it was stopped. Without --method it measures linear, ntk, dynamic-ntk, by-parts,
    yarn, dynamic-yarn and llama3. Without --factor and --target-length it takes the factors that the lengths need: for
    a model with a context length of 4k, the lengths 4k,8k,16k give the factors 2 and 4.

    Example: `rope-ext sweep reference --method ntk,yarn --factor 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    Prepared(run_options, options, reader).measure()


@command("Measure", interrupted=CONTINUES)
def passkey(run_options: RunOptions, options: Passkey, processes: ProcessOptions) -> None:
    """Hide a statement in a long text, and ask for it.

    Three things are measured at each length and depth: how many answers are exact, how the right answer ranks among
    wrong ones, and its loss in nats per token.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    if options.task is None and run_options.model == "reference":  # the bundled model knows this form
        options = replace(options, task="key-value")
    Prepared(run_options, options, processes).measure()


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

    For one run, finished or not, its table is printed, and its CSV files and HTML page are written anew, with a picture
    if it has more than two lengths. Several runs of one model (perplexity, tasks, retrieval) become one page, which
    says which method is best, up to what length, and at what cost.

    Example: `rope-ext report rope-ext-results/reference-perplexity-0123456789`
    """
    from rope_ext_hf.runs.comparison import compare_runs
    from rope_ext_hf.runs.folder.folder import read_run
    from rope_ext_hf.runs.folder.report import write_files

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

    def __init__(self, run_options: RunOptions, options: MeasurementOptions, processes: ProcessOptions) -> None:
        """Plan a measurement on the model without weights; print the memory needed, or raise an error for too much."""
        from rope_ext_hf.cli.planned_runs import forecast_plan
        from rope_ext_hf.files.whole import foreign_errors
        from rope_ext_hf.runs.folder.run_file import run_file

        self.options = run_options
        name = run_options.model
        workers, load = processes.launched(run_options.load)
        failure = f"the model {short(name)!r} could not be measured"
        with workers.in_step(leave=run_options.dry_run), foreign_errors(failure):
            workers.agree({"--dry-run": "yes" if run_options.dry_run else "no"})
            empty = load.empty_model(name)
            make = partial(forecast_plan, options) if run_options.dry_run else options.plan
            plan = make(empty, run_options.methods, tokenizer=load.tokenizer(name), **load.reading)
            self.file = run_file(options, name, run_options.methods, run_options.load, processes, out=run_options.out)
            if isinstance(options, Perplexity):
                plan = _with_key_tokens(plan, options, run_options, load, workers, self.file)
            plan = processes.reading(plan, name, empty, load, workers)
            self.run = PlannedRun(name, empty, load, plan, workers, options)
            self.forecast: Forecast | None = None
            self.needed = self.run.memory(check=not run_options.dry_run)
            if run_options.dry_run:
                self.forecast = self.run.forecast(self.needed, run_options.out)
            else:
                self.run.print_needs(self.needed, run_options.out)

    def measure(self) -> Run[Any]:
        """Carry out the measurement and print its result; in a dry run, print the forecast and end the program."""
        from rope_ext_hf.files.whole import foreign_errors

        workers = self.run.workers
        if self.forecast is not None:
            if workers.rank == 0:
                print_result(self.forecast, self.options.as_json)
            raise typer.Exit
        with workers.in_step(), foreign_errors(f"the model {short(self.run.name)!r} could not be measured"):
            run = _carried_out(self.run, self.needed, self.options.out, self.file)
        if workers.rank == 0:
            _print_run(run, self.options.as_json)
        _stop_if_not_finite(run)
        return run


def _carried_out(planned: PlannedRun, needed: MemoryEstimate, out: Path, file: RunFile) -> Run[Any]:
    """Load the model, measure, and show the progress.

    Args:
        planned: the measurement.
        needed: the memory that it needs.
        out: the folder for results.
        file: what run.yaml will hold.
    """
    from rope_ext_hf.runs.runner import carry_out

    model, workers = planned.loaded(needed), planned.workers
    return carry_out(model, planned.plan, out=out, workers=workers, file=file, progress=shown_progress(workers))


def _with_key_tokens(
    plan: RunPlan[Any], options: Perplexity, run_options: RunOptions, load: EvalOptions, workers: Workers, file: RunFile
) -> RunPlan[Any]:
    """Return the plan with key tokens (those that need the long context), if the options ask for them.

    Another model finds them, in a run of its own before this one.
    """
    evaluator = replace(load, revision=None)  # --revision is one of the measured model

    def measure_with(source: str, make: Callable[[Any, Any], RunPlan[Any]]) -> Run[Any] | None:
        empty = evaluator.empty_model(source)
        planned = PlannedRun(source, empty, evaluator, make(empty, evaluator.tokenizer(source)), workers)
        needed = planned.memory(check=not run_options.dry_run)
        if run_options.dry_run:
            print_result(planned.forecast(needed, run_options.out), run_options.as_json)
            return None
        planned.print_needs(needed)
        run = _carried_out(planned, needed, run_options.out, file)
        if workers.rank == 0:
            print_note(run.kind.name, run.kind.outcome(run))
        return run

    return options.with_key_tokens(plan, measure_with)


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
    has_picture = run.chart is not None and run.chart.adds_to_table
    if has_picture and not (run.folder / f"{run.kind.name}.png").exists():
        print_text(f"picture  none, because matplotlib is not installed: {install_command('eval')}")


def _stop_if_not_finite(run: Run[Any]) -> None:
    """End the program with exit code 1 if a loss of a run is not a finite number."""
    if bad := run.kind.not_finite(run):
        print_error(f"the loss is not finite: {'; '.join(bad)}")
        raise typer.Exit(1)

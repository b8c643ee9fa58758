"""Commands that measure how far a model reads: `demo`, `ppl`, `sweep`, `passkey`, `tasks`, `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import (
    make_folder,
    print_error,
    print_note,
    print_table,
    print_text,
    progress_bar,
    quiet_transformers,
)
from rope_ext_hf.cli.options import ARGUMENTS, EvalOptions, Json, Model, Out
from rope_ext_hf.cli.run_options import ProcessOptions, ReaderOptions
from rope_ext_hf.errors import MethodError, duration, short
from rope_ext_hf.eval.questions import LengthsQuestion, Passkey, Perplexity, Sweep, Tasks
from rope_ext_hf.files import json_text
from rope_ext_hf.installing import install_command
from rope_ext_hf.method_choice import MethodChoice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.runs.kinds import Measurement, Run, RunPlan
    from rope_ext_hf.runs.workers import Workers


_RESULTS = Path("rope-ext-results")
_DEMO_METHODS = ("yarn", "dynamic-yarn", "rerope", "self-extend")


@dataclass(frozen=True)
class RunOptions:
    """What every measurement is given: the model, the methods, and where results are kept."""

    model: Model
    methods: MethodChoice
    load: EvalOptions
    out: Out = _RESULTS
    as_json: Json = False


def demo(
    context: typer.Context,
    out: Out = _RESULTS,
    spans: Annotated[int, typer.Option(min=1, help="Spans of text per length; more is slower and steadier.")] = 8,
    trials: Annotated[int, typer.Option(min=1, help="Retrieval prompts per length, each with five questions.")] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, ...")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show what the bundled model loses beyond its trained length and what methods bring back: loss, and retrieval.

    Offline, two to three minutes on two CPU cores.

    Example: `rope-ext demo`
    """
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.runs.comparison import Comparison

    quiet_transformers()
    model = load_model("reference", dtype="float32", device=device)
    trained = patch_geometry(model).context_length
    lengths = [trained * 2**doublings for doublings in range(4)]
    methods = MethodChoice(method=_DEMO_METHODS)
    text = Perplexity(lengths=lengths, max_spans=spans).plan(model, methods)
    questions = Passkey(lengths=lengths, task="key-value", keys=5, trials=trials, distractors=4).plan(model, methods)
    make_folder(out)
    loss = _measure(context.meta[ARGUMENTS], model, text, out)
    if not as_json:
        _print_run(loss, as_json)
    _stop_if_not_finite(loss)
    retrieval = _measure(context.meta[ARGUMENTS], model, questions, out)
    if not as_json:
        _print_run(retrieval, as_json)
    comparison = Comparison([loss, retrieval])
    page, picture = comparison.write_page(out / "comparison.html"), out / "demo.png"
    try:
        comparison.draw(picture, f"A small model trained at {trained} bytes, as loaded and with methods that extend it")
    except ImportError as error:
        note = f"none; {error}"
    else:
        note = str(picture)
    if as_json:
        whole = {"perplexity": loss.to_dict(), "passkey": retrieval.to_dict()}
        print_text(json_text(whole | {"conclusion": str(comparison.conclusion)}))
    else:
        print_text(f"\n{comparison.conclusion}\n\nreport   {page}\npicture  {note}")


def ppl(context: typer.Context, given: RunOptions, question: Perplexity, reader: ReaderOptions) -> None:
    """Perplexity and bits per byte by context length, as loaded and with each method, on the same target tokens.

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    answer(given, question, reader, context.meta[ARGUMENTS])


def sweep(context: typer.Context, given: RunOptions, question: Sweep, reader: ReaderOptions) -> None:
    """`ppl` of methods x factors that are fitted to the lengths; the same command continues where it was stopped.

    Without --method: linear, ntk, dynamic-ntk, by-parts, yarn, dynamic-yarn and llama3. Without --factor and
    --target-length, each length beyond the context length gets the factor that it needs: lengths 4k,8k,16k of a model
    for 4k measure every method with factors 2 and 4, at every length.

    Example: `rope-ext sweep reference --method ntk,yarn --factor 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    answer(given, question, reader, context.meta[ARGUMENTS])


def passkey(context: typer.Context, given: RunOptions, question: Passkey, shared: ProcessOptions) -> None:
    """Hide a statement in a long text and ask for it: exact match and rank among wrong answers, by length and depth.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    if question.task is None and given.model == "reference":
        question = replace(question, task="key-value")
    answer(given, question, shared, context.meta[ARGUMENTS])


def tasks(context: typer.Context, given: RunOptions, question: Tasks, shared: ProcessOptions) -> None:
    """Ask a suite of tasks at each length: scores, and up to which length 85% of the shortest one's score is kept.

    Example: `rope-ext tasks reference --suite json-kv --lengths 768,1024 --score rank --samples 4`
    """
    answer(given, question, shared, context.meta[ARGUMENTS])


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of runs, as `ppl`, `sweep`, `tasks` and others print them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page of several runs. Default: comparison.html beside the first folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rebuild the table, CSV, picture and HTML page of a run, finished or not; or compare several runs of one model.

    Several runs, of perplexity, tasks and retrieval, come on one page: which method, up to what length, at what cost.

    Example: `rope-ext report rope-ext-results/reference-perplexity-0123456789`
    """
    from rope_ext_hf.runs.comparison import compare_runs
    from rope_ext_hf.runs.folder import read_run
    from rope_ext_hf.runs.report import write_files

    if len(folders) == 1:
        if out is not None:
            raise MethodError("--out names the page of several runs; the files of one run stand in its folder")
        run = read_run(folders[0])
        write_files(run)
        _print_run(run, as_json)
        _stop_if_not_finite(run)
        return
    comparison = compare_runs(folders)
    page = comparison.write_page(out or folders[0].parent / "comparison.html")
    if as_json:
        print_text(json_text(comparison.to_dict()))
        return
    print_table(comparison.table())
    if (agreement := comparison.agreement_table()) is not None:
        print_table(agreement)
    print_text(f"{comparison.conclusion}\nreport   {page}")


def answer(given: RunOptions, question: LengthsQuestion, shared: ProcessOptions, words: Sequence[str]) -> Run[Any]:
    """Plan from the model on the meta device, measure, and print from the first process.

    Args:
        words: the command, which the run's folder keeps.
    """
    from rope_ext_hf.hub import foreign_errors

    workers, load = shared.launched(given.load)
    quiet_transformers()
    with workers.in_step(), foreign_errors(f"the model {short(given.model)!r} could not be measured"):
        empty = load.empty_model(given.model)
        plan = question.plan(empty, given.methods, tokenizer=load.tokenizer(given.model), **load.reading)
        make_folder(given.out)
        if isinstance(question, Perplexity):
            plan = _with_keys(plan, question, load, given.out, workers, words)
        plan, workers = shared.reading(plan, given.model, empty, load, workers)
        _preflight(empty, load, plan, workers, getattr(question, "max_spans", None))
        run = _measure(words, load.model(given.model), plan, given.out, workers)
    if workers.rank == 0:
        _print_run(run, given.as_json)
    _stop_if_not_finite(run)
    return run


def _with_keys(
    plan: RunPlan[Any], question: Perplexity, load: EvalOptions, out: Path, workers: Workers, words: Sequence[str]
) -> RunPlan[Any]:
    """The plan with its key tokens, which another model finds before the measured one is loaded."""
    from rope_ext_hf.eval.key_token_runs import KEYS_FILE
    from rope_ext_hf.eval.perplexity_plans import with_keys

    evaluator = replace(load, revision=None)  # that one is of the measured model

    def find(source: str, planned: Callable[..., RunPlan[Any]]) -> tuple[Run[Any], RunPlan[Any]]:
        empty = evaluator.empty_model(source)
        of_keys = planned(empty, evaluator.tokenizer(source))
        _preflight(empty, evaluator, of_keys, workers)
        run = _measure(words, evaluator.model(source), of_keys, out, workers)
        if workers.rank == 0:
            (found,) = run.results
            text = f"{found.keys:,} of {found.compared:,} tokens are key tokens: {found.setting}"
            print_note("keys", f"{text}. They are in {run.folder / KEYS_FILE}")
        return run, of_keys

    return with_keys(plan, question, find, write=workers.rank == 0)


def _preflight(
    empty: PreTrainedModel,
    load: EvalOptions,
    plan: RunPlan[Any],
    workers: Workers,
    most_spans: int | None = None,
) -> None:
    """Print the memory and time that a measurement needs before any weights are read; stop where it cannot fit.

    Args:
        empty: the model on the meta device.
        load: how the model will be loaded.
        plan: what is measured.
        workers: the processes that share it; the first one prints.
        most_spans: how many spans per length were asked for, None for all.
    """
    from rope_ext_hf.hub import find_device, find_dtype
    from rope_ext_hf.reading.preflight import check_memory, measure_flops

    device, given = find_device(load.device), find_dtype(load.dtype)
    dtype = (getattr(empty.config, "dtype", None) or empty.dtype) if isinstance(given, str) else given
    passes, repeats = plan.measurement.passes, len(plan.methods)
    needed = check_memory(
        empty,
        max(passes),
        dtype,
        device,
        spread=load.device_map is not None,
        offload_cache=load.offload_cache,
        together=workers.count if workers.together else 1,
    )
    work = repeats * _work(empty, plan.measurement, passes) / workers.count
    seconds = work / measure_flops(device, dtype)
    if workers.rank == 0:
        print_note("needs", str(needed))
        times = f" {repeats} times" if repeats > 1 else ""
        too_short = getattr(plan.measurement.setting, "left_out", 0)
        are = "document is" if too_short == 1 else "documents are"
        without = f"; {too_short} {are} too short and left out" if too_short else ""
        bounded = f"; at most {most_spans} spans per length, --max-spans all for the whole text" if most_spans else ""
        print_note("reads", f"{sum(passes):,} tokens{times}, very roughly {duration(seconds)}{without}{bounded}")


def _work(model: PreTrainedModel, measurement: Measurement, passes: Sequence[int]) -> float:
    """Floating-point operations of some of a measurement's passes, and of what is read after each."""
    from rope_ext_hf.reading.preflight import estimate_flops

    after = [1] * (measurement.after_each_pass * len(passes))
    scored = measurement.scored * len(passes) // len(measurement.passes)
    return estimate_flops(model, [*passes, *after], scored)


def _measure(
    words: Sequence[str], model: PreTrainedModel, plan: RunPlan[Any], out: Path, workers: Workers | None = None
) -> Run[Any]:
    """Carry out a plan in a run's folder, which keeps the words of the command, and show progress."""
    from rope_ext_hf.cli.time_left import TimeLeft
    from rope_ext_hf.runs.commands import add_command
    from rope_ext_hf.runs.runner import Progress, carry_out
    from rope_ext_hf.runs.workers import Workers

    workers = workers or Workers()
    first = workers.rank == 0
    passes = plan.measurement.passes
    share = len(plan.methods) / (1 if workers.together else workers.count)
    total = share * _work(model, plan.measurement, passes)
    left = TimeLeft(lambda tokens: _work(model, plan.measurement, [tokens]), total, partial(print_note, "time"))
    with progress_bar("as loaded", show=first) as bar:

        class Shown(Progress):
            """On standard error, of the first process."""

            def started(self, folder: Path, done: int, units: int) -> None:
                left.total *= 1 - done / max(1, units)  # fewer items than processes
                if first:
                    add_command(folder, words)
                    bar.set_total(round(share * sum(passes)))
                    print_note("run", f"{folder}{f' ({done} of {units} parts were done before)' if done else ''}")

            def reading(self, how: str) -> None:
                if first:
                    print_note("read", how)
                    left.begin()

            def passed(self, method: str, tokens: int) -> None:
                bar.advance(method, tokens)
                if first and "engine" not in plan.reader:  # which starts in the first pass of each method
                    left.passed(tokens)

        return carry_out(model, plan, out=out, workers=workers, progress=Shown())


def _print_run(run: Run[Any], as_json: bool) -> None:
    """Print a run's table, or the content of its results.json, and where its files are."""
    if as_json:
        print_text(json_text(run.to_dict()))
        return
    if (table := run.table()) is not None:
        print_table(table)
        if speed := run.kind.speed(run):
            print_text(f"speed    {speed}")
        if text := str(run.conclusion):
            print_text(f"\n{text}\n")
    print_text(f"results  {run.folder / 'results.csv'}\nreport   {run.folder / 'report.html'}")
    if run.kind.has_picture and not (run.folder / f"{run.kind.name}.png").exists():
        print_text(f"picture  none; pictures need matplotlib: {install_command('eval')}")


def _stop_if_not_finite(run: Run[Any]) -> None:
    if bad := run.kind.not_finite(run):
        print_error(f"the loss is not finite: {'; '.join(bad)}")
        raise typer.Exit(1)

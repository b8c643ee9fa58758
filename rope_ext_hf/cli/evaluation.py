"""Commands that measure how far a model reads: `demo`, `ppl`, `sweep`, `passkey`, `report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import (
    duration,
    json_text,
    make_folder,
    print_error,
    print_note,
    print_table,
    print_text,
    progress_bar,
    quiet_transformers,
)
from rope_ext_hf.cli.options import (
    EvalOptions,
    Json,
    Lengths,
    MethodOptions,
    Model,
    Out,
    SpanOptions,
    parse_lengths,
    parse_numbers,
)
from rope_ext_hf.errors import MethodError, short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.plan import EvalPlan
    from rope_ext_hf.eval.results import Result
    from rope_ext_hf.eval.sweeps import Run
    from rope_ext_hf.methods.base import RopeMethod

__all__ = ["demo", "passkey", "ppl", "report", "sweep"]

_RESULTS = Path("rope-ext-results")
_NO_PICTURE = "none: install matplotlib with the extra [eval] of this package"


def demo(
    out: Out = _RESULTS,
    spans: Annotated[int, typer.Option(min=1, help="Spans per length; more is slower and steadier.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, ...")] = "cpu",
    as_json: Json = False,
) -> None:
    """See the bundled model fail beyond its trained length, and the methods repair it; offline, in a few minutes.

    Example: `rope-ext demo`
    """
    from rope_ext_hf.eval.plan import prepare
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn
    from rope_ext_hf.methods.remapping import DualChunk, LeakyReRoPE
    from rope_ext_hf.methods.static import NTK, Linear, Yarn
    from rope_ext_hf.patches.geometry import patch_geometry

    quiet_transformers()
    model = load_model("reference", dtype="float32", device=device)
    trained = patch_geometry(model).context_length
    methods: list[RopeMethod | None] = [
        None,
        Linear(factor=8.0),
        NTK(factor=8.0),
        DynamicNTK(growth="hf", factor=4.0),
        DynamicYarn(),
        Yarn(factor=4.0),
        Yarn(factor=8.0),
        LeakyReRoPE(),
        DualChunk(),
    ]
    lengths = [trained, 2 * trained, 4 * trained, 8 * trained]
    plan = prepare(model, "stdlib", lengths=lengths, max_spans=spans)
    make_folder(out)
    _stop_if_not_finite(_measure(model, methods, plan, "stdlib", out, as_json))


def ppl(
    model: Model,
    lengths: Lengths,
    methods: MethodOptions,
    spans: SpanOptions,
    load: EvalOptions,
    out: Out = _RESULTS,
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte by context length, as loaded and with each method, on the same target tokens.

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    from rope_ext_hf.eval.plan import prepare
    from rope_ext_hf.hub import foreign_errors

    wanted = parse_lengths(lengths)
    span_arguments = spans.arguments()
    quiet_transformers()
    empty = load.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be measured"):
        requested = [None, *methods.resolve(empty, max(wanted))]
        tokenizer = load.tokenizer(model)
        plan = prepare(empty, spans.data, lengths=wanted, tokenizer=tokenizer, **span_arguments)
        make_folder(out)
        _preflight(empty, load, plan.passes, plan.scored, len(requested), spans.most_spans)
        loaded = load.model(model)
        results = _measure(loaded, requested, plan, spans.data, out, as_json, load.tokens_per_pass, load.offload_cache)
    _stop_if_not_finite(results)


def sweep(
    model: Model,
    lengths: Lengths,
    methods: MethodOptions,
    spans: SpanOptions,
    load: EvalOptions,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop unless N processes were launched.")
    ] = None,
    out: Out = _RESULTS,
    as_json: Json = False,
) -> None:
    """Methods x factors x lengths; the same command continues where it was stopped; ends with a report.

    Without --method: linear, ntk, dynamic-ntk, by-parts, yarn, dynamic-yarn and llama3. Without --factor: the factor
    that the longest length needs.

    Example: `rope-ext sweep reference --method ntk,yarn --factor 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    from rope_ext_hf.eval.sweeps import DEFAULT_METHODS, plan_sweep, run_sweep
    from rope_ext_hf.hub import foreign_errors

    wanted = parse_lengths(lengths)
    span_arguments = spans.arguments()
    methods.check(factor_alone=True)
    rank, world, wait = _processes(processes)
    if world > 1 and load.device == "auto":
        load = replace(load, device=_own_device())
    quiet_transformers()
    empty = load.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be measured"):
        plan = plan_sweep(
            empty,
            spans.data,
            methods=methods.resolve(empty, max(wanted)) if methods.names else DEFAULT_METHODS,
            factors=methods.factors or None,
            lengths=wanted,
            tokenizer=load.tokenizer(model),
            **span_arguments,
        )
        make_folder(out)
        reading, count = plan.plan, len(plan.methods)
        show = rank == 0
        _preflight(empty, load, reading.passes, reading.scored, count, spans.most_spans, processes=world, show=show)
        loaded = load.model(model)
        with progress_bar("as loaded", show=show) as bar:

            def started(folder: Path, done: int, units: int) -> None:
                if show:
                    bar.set_total(count * reading.tokens // world)
                    print_note("run", f"{folder}{f' ({done} of {units} parts were done before)' if done else ''}")

            run = run_sweep(
                loaded,
                plan,
                out=out,
                chunk=load.tokens_per_pass,
                offload_cache=load.offload_cache,
                rank=rank,
                world=world,
                wait=wait,
                progress=bar.advance,
                started=started,
            )
    if rank == 0:
        _print_run(run, as_json)
    _stop_if_not_finite(run.results)


def passkey(
    model: Model,
    lengths: Lengths,
    methods: MethodOptions,
    load: EvalOptions,
    depths: Annotated[
        str, typer.Option(metavar="SHARES", help="Where the secret stands: 0 at the start, 1 at the end of the text.")
    ] = "0,0.25,0.5,0.75,1",
    trials: Annotated[int, typer.Option(min=1, help="Secrets per length and depth.")] = 10,
    distractors: Annotated[int, typer.Option(min=1, help="Wrong numbers that the right one is ranked among.")] = 19,
    task: Annotated[
        str | None, typer.Option(help="passkey, needle or code. Default: passkey; code for the bundled model.")
    ] = None,
    haystack: Annotated[
        str | None, typer.Option(help="Text to hide it in, named as in --data of ppl. Default: the task's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the secrets and the text around them.")] = 0,
    out: Out = _RESULTS,
    as_json: Json = False,
) -> None:
    """Find a secret in a long text: exact match and rank among distractors, over length x depth, as a heat map.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    from rope_ext_hf.eval.results import label, provenance
    from rope_ext_hf.eval.retrieval import Retrieval, heat_map, table
    from rope_ext_hf.eval.retrieval import passkey as measure
    from rope_ext_hf.hub import foreign_errors
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.patches.patching import patched

    wanted = parse_lengths(lengths)
    shares = parse_numbers("--depths", depths, "0,0.5,1")
    wording = task or ("code" if model == "reference" else "passkey")
    make_folder(out)
    quiet_transformers()
    empty = load.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be measured"):
        requested = [None, *methods.resolve(empty, max(wanted))]
        tokenizer = load.tokenizer(model)
        passes = [length for length in set(wanted) for _ in range(len(set(shares)) * trials)]
        _preflight(empty, load, passes, len(passes), len(requested))
        loaded = load.model(model)
        results: list[Retrieval] = []
        with progress_bar("as loaded") as bar:
            bar.set_total(len(requested) * sum(passes))
            for method in requested:
                with patched(loaded, method) if method else nullcontext():
                    results += measure(
                        loaded,
                        lengths=wanted,
                        depths=shares,
                        tokenizer=tokenizer,
                        trials=trials,
                        seed=seed,
                        haystack=haystack,
                        task=wording,
                        distractors=distractors,
                        chunk=load.tokens_per_pass,
                        offload_cache=load.offload_cache,
                        progress=partial(bar.advance, label(method.to_dict() if method else None)),
                    )
    source = provenance(loaded, haystack or f"task {wording}")
    text = json_text({"provenance": source, "results": [result.to_dict() for result in results]})
    (out / "passkey.json").write_text(text + "\n", encoding="utf-8")
    picture: Path | None = out / "passkey.png"
    try:
        heat_map(results, out / "passkey.png", f"{Path(loaded.name_or_path).name}, task {wording}")
    except ImportError:
        picture = None
    if as_json:
        print_text(text)
    else:
        print_table(table(results, patch_geometry(loaded).context_length))
        print_text(f"results  {out / 'passkey.json'}\npicture  {picture or _NO_PICTURE}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder, as `sweep` prints it.")],
    as_json: Json = False,
) -> None:
    """Make the table, CSV, curves and HTML page of a run anew, finished or not.

    Example: `rope-ext report rope-ext-results/reference-0123456789`
    """
    from rope_ext_hf.eval.sweeps import read_run

    run = read_run(folder)
    _print_run(run, as_json)
    _stop_if_not_finite(run.results)


def _preflight(
    empty: PreTrainedModel,
    load: EvalOptions,
    passes: Sequence[int],
    scored: int,
    repeats: int,
    most_spans: int | None = None,
    *,
    processes: int = 1,
    show: bool = True,
) -> None:
    """Print what reading these windows so many times needs before any weights are read; stop where it cannot fit.

    Args:
        empty: the model on the meta device.
        passes: the size of every window that goes through the model, in tokens.
        scored: tokens that go through its head.
        repeats: how many times, once per method.
        most_spans: how many spans per length were asked for, None for all.
    """
    from rope_ext_hf.eval.preflight import check_memory, estimate_flops, measure_flops
    from rope_ext_hf.hub import find_device, find_dtype

    device, given = find_device(load.device), find_dtype(load.dtype)
    dtype = (getattr(empty.config, "dtype", None) or empty.dtype) if isinstance(given, str) else given
    needed = check_memory(
        empty, max(passes), dtype, device, spread=load.device_map is not None, offload_cache=load.offload_cache
    )
    seconds = repeats * estimate_flops(empty, passes, scored) / measure_flops(device, dtype) / processes
    if show:
        print_note("needs", str(needed))
        times = f" {repeats} times" if repeats > 1 else ""
        bounded = f"; at most {most_spans} spans per length, --max-spans all for the whole text" if most_spans else ""
        print_note("reads", f"{sum(passes):,} tokens{times}, very roughly {duration(seconds)}{bounded}")


def _processes(expected: int | None) -> tuple[int, int, Any]:
    """This process's rank, their number, and a function that waits for all; one alone unless a launcher started more.

    Raises:
        MethodError: another number of processes than expected.
    """
    rank, world, wait = 0, 1, None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        rank, world, wait = state.process_index, state.num_processes, state.wait_for_everyone
    if expected is not None and world != expected:
        raise MethodError(
            f"{expected} processes were asked for, {world} are running; launch with "
            f"torchrun --nproc-per-node {expected} -m rope_ext_hf sweep ..."
        )
    return rank, world, wait


def _own_device() -> str:
    """The device of this process among those of a launcher."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _print_run(run: Run, as_json: bool) -> None:
    from rope_ext_hf.eval.report import write_report
    from rope_ext_hf.eval.results import label, write_json
    from rope_ext_hf.eval.tables import table, throughput_text

    write_json(run.folder / "results.json", run.settings, run.results)
    rows, page = run.write_csv(), write_report(run)
    if as_json:
        print_text((run.folder / "results.json").read_text(encoding="utf-8"))
        return
    if run.results:
        costs = {label(result.method): run.loss_increase(result.method) for result in run.results}
        print_table(table(run.results, run.trained_length, costs))
        print_text(f"speed    {throughput_text(run.results)}")
    print_text(f"results  {rows}\nreport   {page}")


def _stop_if_not_finite(results: Sequence[Result]) -> None:
    from rope_ext_hf.eval.results import label

    bad = sorted({f"{label(r.method)} at {r.length} in {name}" for r in results for name in r.nonfinite})
    if bad:
        print_error(f"the loss is not finite: {'; '.join(bad)}")
        raise typer.Exit(1)


def _measure(
    model: PreTrainedModel,
    requested: Sequence[RopeMethod | None],
    plan: EvalPlan,
    data: str,
    out: Path,
    as_json: bool,
    chunk: int | None = None,
    offload_cache: bool = False,
) -> list[Result]:
    """Run every method, show progress, write and print the results."""
    from rope_ext_hf.eval.measuring import aggregate, score_plan
    from rope_ext_hf.eval.plots import curves
    from rope_ext_hf.eval.results import label, provenance, write_json
    from rope_ext_hf.eval.scorer import TokenScorer
    from rope_ext_hf.eval.tables import table, throughput_text
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.patches.patching import patched

    scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache)
    results: list[Result] = []
    with progress_bar("as loaded") as bar:
        bar.set_total(len(requested) * plan.tokens)
        for method in requested:
            saved = method.to_dict() if method else None
            with patched(model, method) if method else nullcontext():
                results += aggregate(saved, plan, score_plan(scorer, plan, partial(bar.advance, label(saved))))

    trained = patch_geometry(model).context_length
    write_json(out / "results.json", provenance(model, data), results)
    picture: Path | None = out / "perplexity.png"
    try:
        curves(results, trained, out / "perplexity.png", f"{Path(model.name_or_path).name} on {data}")
    except ImportError:
        picture = None
    if as_json:
        print_text((out / "results.json").read_text(encoding="utf-8"))
    else:
        print_table(table(results, trained))
        print_text(
            f"speed    {throughput_text(results)}\nresults  {out / 'results.json'}\npicture  {picture or _NO_PICTURE}"
        )
    return results

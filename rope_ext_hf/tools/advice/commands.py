"""The command `extend`: from a model to a folder that an engine serves; or a recommendation alone."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rope_ext_hf.cli.console import print_text, results_to
from rope_ext_hf.cli.evaluation import Prepared, ReaderOptions, RunOptions
from rope_ext_hf.cli.models import write_patched
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, command
from rope_ext_hf.cli.publishing import PublishOptions
from rope_ext_hf.errors import MethodError, RopeExtError, short, size_text
from rope_ext_hf.files import json_text
from rope_ext_hf.method_choice import parse_numbers
from rope_ext_hf.questions import argument, command_line
from rope_ext_hf.terminal import broken_command, wrapped
from rope_ext_hf.tools.serving.questions import Extending

if TYPE_CHECKING:
    from rope_ext_hf.reading.forecast import Forecast
    from rope_ext_hf.tools.advice.extending import Extension


@command("Tool box: serve", interrupted=CONTINUES)
def extend(
    model: Model,
    load: EvalOptions,
    question: Extending,
    publish: PublishOptions,
    purpose: str = argument(
        "serve", "With --dry-run: what a method is recommended for: serve, python or train.", metavar="WHAT"
    ),
    batch: str | None = argument(
        None, "With --dry-run: inputs at a time that memory is computed for. Default: 1,8.", metavar="NUMBERS"
    ),
    everything: bool = argument(
        False,
        "With --dry-run: all methods with what was measured and reported of them, engines, memory and commands.",
        names=("--all",),
    ),
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose a method, measure it, and write a folder to serve.

    With --dry-run it recommends a method, with its price and the commands of every step, and runs none of them. Every
    step is a command of its own, which is printed. The same command continues where it was stopped. No folder is
    written if perplexity at the target length does not get better, or if short inputs lose more than long ones gain.

    Example: `rope-ext extend reference --target-length 2k --engine vllm --yes`
    """
    from rope_ext_hf.runs.run_file import run_file
    from rope_ext_hf.tools.advice.advising import check_purpose
    from rope_ext_hf.tools.advice.extending import carries, judge, plan_extension
    from rope_ext_hf.tools.advice.extending import dry_run as dry_command
    from rope_ext_hf.tools.serving.configs import serving_config
    from rope_ext_hf.tools.serving.model_card import CARD, write_card

    publish.check()
    check_purpose(purpose)
    if dry_run:
        _print_dry_run(model, load, question, purpose, batch or "1,8", everything, as_json)
        return
    if purpose != "serve":
        raise MethodError(
            f"extend writes folders for serving; for --purpose {purpose} type: "
            f"{dry_command(model, question.target_length, purpose)}"
        )
    if everything or batch is not None:
        raise MethodError(
            f"{'--all' if everything else '--batch'} belongs to a dry run; add --dry-run, or leave it out"
        )
    plan = plan_extension(model, question, reading=_reading(load), **load.version)
    given = RunOptions(model, plan.patch, load)
    written, verdict, runs = carries(plan, **load.version), None, list[Any]()
    with results_to(sys.stderr) if as_json else nullcontext():
        print_text(plan.summary)
        if plan.perplexity is not None:
            prepared = Prepared(given, plan.perplexity, ReaderOptions())
        if not publish.yes:
            if as_json or not sys.stdin.isatty():
                raise MethodError("nobody can be asked here whether to go on; give --yes")
            print_text("\n".join(plan.commands.values()))
            if not typer.confirm("Go on?", default=True):
                raise typer.Exit(1)
        if plan.perplexity is not None:
            print_text(f"\n$ {plan.commands['ppl']}")
            runs = [prepared.measure()]
            verdict = judge(plan, runs[0])
            print_text(wrapped(str(verdict), "verdict   "))
            if verdict.refusal and not question.anyway:
                raise MethodError(f"{verdict.refusal}; nothing was written. Give --anyway to write the folder")
        if not written:
            print_text(f"\n$ {plan.commands['patch']}")
            described = write_patched(model, Path(plan.out), plan.patch, load, runs=runs)
            print_text(f"{described}\n  written to        {plan.out}")
        if runs:
            print_text(f"\n$ {command_line('card', plan.out, *(run.folder for run in runs))}")
            if written:
                write_card(plan.out, runs, trust_remote_code=load.trust_remote_code)
            print_text(f"  written to        {Path(plan.out) / CARD}")
        run_file(question, model, load, out=plan.out).write(Path(plan.out))
        serving = serving_config(plan.out, plan.engine, server=question)
        print_text(f"\n$ {plan.commands['serve-config']}\n{serving}")
    if as_json:
        measured = verdict.to_dict() if verdict else None
        print_text(json_text({"plan": plan.to_dict(), "verdict": measured, "serving": serving.to_dict()}))
    publish.upload(Path(plan.out), trust_remote_code=load.trust_remote_code)


def _reading(load: EvalOptions) -> dict[str, Any]:
    """Return how a model is loaded and read, without where it is, as `plan_extension` takes it."""
    return {name: value for name, value in load.options.items() if name not in load.version}


def _print_dry_run(
    model: str, load: EvalOptions, question: Extending, purpose: str, batch: str, everything: bool, as_json: bool
) -> None:
    """Print the recommendation, the steps and what they would take; the advice is given also where a step would fail.

    The weights are copied into the folder, whatever is measured before.
    """
    from rope_ext_hf.hub import foreign_errors
    from rope_ext_hf.reading.forecast import NOTHING_RUN
    from rope_ext_hf.tools.advice.advising import advise
    from rope_ext_hf.tools.advice.extending import plan_extension

    batches = parse_numbers("--batch", batch, "1,8")
    if any(number != int(number) for number in batches):
        raise MethodError(f"--batch takes whole numbers, e.g. 1,8; got {short(batch)!r}")
    advice = advise(
        model,
        question.target_length,
        **question.underneath,
        batches=[int(number) for number in batches],
        server=question.server,
        purpose=purpose,
        **load.version,
    )
    plan: Extension | None = None
    forecast: Forecast | None = None
    size, stops = None, ""
    if purpose == "serve" and advice.methods:
        try:
            with foreign_errors("what the steps take is not known"):
                plan = plan_extension(model, question, advice=advice, reading=_reading(load), **load.version)
                empty = load.empty_model(model)
                size = empty.num_parameters() * empty.dtype.itemsize
                if plan.perplexity is not None:
                    given = RunOptions(model, plan.patch, load, dry_run=True)
                    if reading := Prepared(given, plan.perplexity, ReaderOptions()).forecast:
                        forecast = replace(reading, does=(), disk=size, folder=plan.out)
        except RopeExtError as error:
            stops = str(error)
    if as_json:
        taken = forecast.to_dict() if forecast else {"disk": size, "folder": plan.out} if plan else None
        steps = {"plan": plan and plan.to_dict(), "forecast": taken, "stops": stops}
        print_text(json_text({"advice": advice.to_dict()} | steps))
        return
    closing = [wrapped(stops, "stops    ")] if stops and advice.recommended else []
    if forecast is not None:
        closing += str(forecast).splitlines()
    else:
        closing += [f"disk     about {size_text(size)}, in {plan.out}"] if plan and size else []
        closing += [NOTHING_RUN]
    shown = advice
    if plan is not None:
        shown = replace(advice, recommended=plan.method, next_steps=tuple(plan.commands.values()))
    if everything:
        lines = ["# in steps", *map(broken_command, shown.next_steps)] if shown.next_steps else []
        print_text("\n".join([advice.full_text(), "", *lines, *closing]))
    else:
        print_text(shown.short_text(plan.reason if plan else "", closing))

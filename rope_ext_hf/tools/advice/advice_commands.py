"""The command `extend`: from a model to a folder that an engine serves, or only a recommendation.

torch is imported inside the functions, so that --help answers at once.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rope_ext_hf.cli.console import print_text, results_to
from rope_ext_hf.cli.evaluation import Prepared, ReaderOptions, RunOptions
from rope_ext_hf.cli.folders import PublishOptions, write_patched
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, command
from rope_ext_hf.errors import MethodError, RopeExtError, short, size_text
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.options.arguments import argument, command_line
from rope_ext_hf.options.method_choice import parse_numbers
from rope_ext_hf.terminal import broken_command, wrapped
from rope_ext_hf.tools.serving.serving_options import Extending

if TYPE_CHECKING:
    from rope_ext_hf.reading.cost.forecast import Forecast
    from rope_ext_hf.tools.advice.extending import Extension


@command("Tool box: serve", interrupted=CONTINUES)
def extend(
    model: Model,
    load: EvalOptions,
    options: Extending,
    publish: PublishOptions,
    purpose: str = argument(
        "serve", "With --dry-run: the purpose of the recommended method: serve, python or train.", metavar="PURPOSE"
    ),
    batch: str | None = argument(
        None, "With --dry-run: numbers of inputs at a time, to compute memory for. Default: 1,8.", metavar="NUMBERS"
    ),
    everything: bool = argument(
        False,
        "With --dry-run: print also all methods, their measurements and sources, engines, memory and commands.",
        names=("--all",),
    ),
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose a method, measure it, and write a folder to serve.

    With --dry-run it only recommends a method, with its price and the command of every step. Otherwise it runs these
    commands, and prints each. The same command continues where it was stopped. No folder is written if perplexity at
    the target length does not get better, or if short inputs lose more than long ones gain.

    Example: `rope-ext extend reference --target-length 2k --engine vllm --yes`
    """
    from rope_ext_hf.runs.folder.run_file import inputs_of, run_file
    from rope_ext_hf.tools.advice.advising import check_purpose
    from rope_ext_hf.tools.advice.extending import carries, judge, plan_extension
    from rope_ext_hf.tools.advice.extending import dry_run as dry_command
    from rope_ext_hf.tools.serving.configs import serving_config
    from rope_ext_hf.tools.serving.model_card import CARD, write_card

    publish.check()
    check_purpose(purpose)
    if dry_run:
        _print_dry_run(model, load, options, purpose, batch or "1,8", everything, as_json)
        return
    if purpose != "serve":
        raise MethodError(
            f"extend writes folders for serving; for advice on --purpose {purpose} type: "
            f"{dry_command(model, options.target_length, purpose)}"
        )
    if everything or batch is not None:
        option = "--all" if everything else "--batch"
        raise MethodError(f"{option} belongs to a dry run; add --dry-run, or leave out {option}")
    plan = plan_extension(model, options, reading=_reading(load), **load.version)
    exists = carries(plan, **load.version)
    out = Path(plan.out)
    verdict = None
    runs: list[Any] = []
    with results_to(sys.stderr) if as_json else nullcontext():
        print_text(plan.summary)
        prepared = None
        if plan.perplexity is not None:
            prepared = Prepared(RunOptions(model, plan.measured, load), plan.perplexity, ReaderOptions())
        if not publish.yes:
            _ask_whether_to_go_on(plan, can_ask=not as_json and sys.stdin.isatty())
        if prepared is not None:
            print_text(f"\n$ {plan.commands['ppl']}")
            runs = [prepared.measure()]
            verdict = judge(plan, runs[0])
            print_text(wrapped(str(verdict), "verdict   "))
            if verdict.refusal and not options.anyway:
                raise MethodError(
                    f"{verdict.refusal}; nothing was written. Give --anyway to write the folder all the same"
                )
        if not exists:
            print_text(f"\n$ {plan.commands['patch']}")
            description = write_patched(model, out, plan.patch, load, runs=runs)
            print_text(f"{description}\n  written to        {out}")
        if runs:
            print_text(f"\n$ {command_line('card', out, *(run.folder for run in runs))}")
            if exists:  # else the card was written with the folder
                write_card(out, runs, trust_remote_code=load.trust_remote_code)
            print_text(f"  written to        {out / CARD}")
        file = run_file(options, model, load, out=plan.out)
        for run in runs:
            file = file.with_inputs(run.kind.name, inputs_of(run.settings))
        file.write(out)
        serving = serving_config(plan.out, plan.engine, server=options)
        print_text(f"\n$ {plan.commands['serve-config']}\n{serving}")
    if as_json:
        result = {"plan": plan.to_dict(), "verdict": verdict and verdict.to_dict(), "serving": serving.to_dict()}
        print_text(json_text(result))
    publish.upload(out, trust_remote_code=load.trust_remote_code)


def _ask_whether_to_go_on(plan: Extension, *, can_ask: bool) -> None:
    """Print the commands of a plan, and end the program unless the user agrees to run them."""
    if not can_ask:
        raise MethodError("nobody can be asked here whether to go on; give --yes")
    print_text("\n".join(plan.commands.values()))
    if not typer.confirm("Go on?", default=True):
        raise typer.Exit(1)


def _reading(load: EvalOptions) -> dict[str, Any]:
    """Return the options for loading and reading a model, except its revision, in the form `plan_extension` takes."""
    return {name: value for name, value in load.options.items() if name not in load.version}


def _print_dry_run(
    model: str, load: EvalOptions, options: Extending, purpose: str, batch: str, everything: bool, as_json: bool
) -> None:
    """Print the recommendation, the steps, and the time, memory and disk that they would take.

    If a step would fail, the advice is printed all the same, with the error.
    """
    from rope_ext_hf.files.whole import foreign_errors
    from rope_ext_hf.reading.cost.forecast import NOTHING_RUN
    from rope_ext_hf.tools.advice.advising import advise
    from rope_ext_hf.tools.advice.extending import plan_extension

    batches = parse_numbers("--batch", batch, "1,8")
    if any(number != int(number) for number in batches):
        raise MethodError(f"--batch takes whole numbers, e.g. 1,8; got {short(batch)!r}")
    advice = advise(
        model,
        options.target_length,
        **options.base_arguments,
        batches=[int(number) for number in batches],
        server=options.server,
        purpose=purpose,
        **load.version,
    )
    plan: Extension | None = None
    forecast: Forecast | None = None
    disk, stops = None, ""
    if purpose == "serve" and advice.methods:
        try:
            with foreign_errors("the time and memory of the steps are not known"):
                plan = plan_extension(model, options, advice=advice, reading=_reading(load), **load.version)
                empty = load.empty_model(model)
                disk = empty.num_parameters() * empty.dtype.itemsize  # the weights are copied into the folder
                if plan.perplexity is not None:
                    run_options = RunOptions(model, plan.measured, load, dry_run=True)
                    measuring = Prepared(run_options, plan.perplexity, ReaderOptions()).forecast
                    if measuring is not None:
                        forecast = replace(measuring, does=(), disk=disk, folder=plan.out)
        except RopeExtError as error:
            stops = str(error)
    if as_json:
        needs = None
        if forecast is not None:
            needs = forecast.to_dict()
        elif plan is not None:
            needs = {"disk": disk, "folder": plan.out}
        steps = {"plan": plan and plan.to_dict(), "forecast": needs, "stops": stops}
        print_text(json_text({"advice": advice.to_dict()} | steps))
        return
    closing = []
    if stops and advice.recommended:
        closing.append(wrapped(stops, "stops    "))
    if forecast is not None:
        closing += str(forecast).splitlines()
    else:
        if plan is not None and disk:
            closing.append(f"disk     about {size_text(disk)}, in {plan.out}")
        closing.append(NOTHING_RUN)
    planned = advice
    if plan is not None:
        planned = replace(advice, recommended=plan.method, next_steps=tuple(plan.commands.values()))
    if everything:
        steps_text = ["# these steps, one after the other", *map(broken_command, planned.next_steps)]
        lines = steps_text if planned.next_steps else []
        print_text("\n".join([advice.full_text(), "", *lines, *closing]))
    else:
        print_text(planned.short_text(plan.reason if plan else "", closing))

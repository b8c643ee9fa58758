"""The command `extend`: from a model to a folder that an engine serves."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rope_ext_hf.cli.console import print_text, results_to
from rope_ext_hf.cli.evaluation import Prepared, ReaderOptions, RunOptions
from rope_ext_hf.cli.models import write_patched
from rope_ext_hf.cli.options import CONTINUES, DryRun, EvalOptions, Json, Model, PublishOptions, SourceOptions, command
from rope_ext_hf.errors import MethodError, short, size_text
from rope_ext_hf.files import json_text
from rope_ext_hf.method_choice import parse_numbers
from rope_ext_hf.questions import asked, command_line
from rope_ext_hf.terminal import broken_command, wrapped
from rope_ext_hf.tools.serving.questions import Extending, GPUServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.reading.preflight import Forecast
    from rope_ext_hf.tools.advice.extending import Extension


@command("Tool box: serve", interrupted=CONTINUES)
def extend(
    model: Model,
    load: EvalOptions,
    question: Extending,
    publish: PublishOptions,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Extend a model into a folder that an engine serves: choose a method, measure it, write the folder.

    Every step is a command of its own and is shown. The same command continues where it was stopped. Nothing is written
    where the measurement speaks against it: perplexity at the target length does not get better, or short inputs lose
    more than long ones gain.

    Example: `rope-ext extend reference --target-length 2k --engine vllm --yes`
    """
    from rope_ext_hf.runs.run_file import run_file
    from rope_ext_hf.tools.advice.extending import carries, judge, plan_extension
    from rope_ext_hf.tools.serving.configs import serving_config
    from rope_ext_hf.tools.serving.model_card import CARD, write_card

    publish.check()
    reading = {name: value for name, value in load.options.items() if name not in load.version}
    plan = plan_extension(model, question, reading=reading, **load.version)
    given = RunOptions(model, plan.patch, load, dry_run=dry_run)
    if dry_run:
        forecast = Prepared(given, plan.perplexity, ReaderOptions()).forecast if plan.perplexity else None
        _print_extension(plan, forecast, load.empty_model(model), as_json)
        return
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


def _print_extension(plan: Extension, reading: Forecast | None, empty: PreTrainedModel, as_json: bool) -> None:
    """Print the steps of an extension and what they would take: the weights are copied, whatever is measured before."""
    from rope_ext_hf.reading.preflight import NOTHING_RUN

    size = empty.num_parameters() * empty.dtype.itemsize
    if as_json:
        taken = reading and replace(reading, disk=size, folder=plan.out).to_dict()
        print_text(json_text({"plan": plan.to_dict(), "forecast": taken or {"disk": size, "folder": plan.out}}))
        return
    lines = [plan.summary, *map(broken_command, plan.commands.values())]
    if reading is None:
        lines.append(f"disk     about {size_text(size)}, in {plan.out}\n{NOTHING_RUN}")
    else:
        lines.append(str(replace(reading, does=(), disk=size, folder=plan.out)))
    print_text("\n".join(lines))


@command("Tool box: serve")
def advise(
    model: Model,
    source: SourceOptions,
    server: GPUServer,
    target_length: str = asked(MISSING, "The length that you need, e.g. 128k.", metavar="TOKENS"),
    batch: str = asked("1,8", "Inputs at a time that memory is computed for, e.g. 1,8.", metavar="NUMBERS"),
    over: str = asked("own", "What is extended: own or original, see `rope-ext describe --help`.", metavar="WHAT"),
    context_length: str | None = asked(
        None, "The length that the model is for, instead of what its config states.", metavar="TOKENS"
    ),
    purpose: str = asked("serve", "What one method is recommended for: serve, python or train.", metavar="WHAT"),
    everything: bool = asked(
        False,
        "Print all methods with what was measured and reported of them, engines, memory and commands.",
        names=("--all",),
    ),
    as_json: Json = False,
) -> None:
    """Recommend a method for a longer context, and the commands to type next; reads no weights.

    Example: `rope-ext advise reference --target-length 1k`
    """
    from rope_ext_hf.tools.advice.advising import advise as advise_on

    batches = parse_numbers("--batch", batch, "1,8")
    if any(number != int(number) for number in batches):
        raise MethodError(f"--batch takes whole numbers, e.g. 1,8; got {short(batch)!r}")
    advice = advise_on(
        model,
        target_length,
        over=over,
        context_length=context_length,
        batches=[int(number) for number in batches],
        server=server,
        purpose=purpose,
        **source.version,
    )
    if as_json:
        print_text(json_text(advice.to_dict()))
    else:
        print_text(advice.full_text() if everything else str(advice))

"""Commands about serving: `extend`, `serve-config`, `check-server`, `audit`, `gguf`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.bounds import parse_lengths
from rope_ext_hf.cli.console import print_text, progress_bar, results_to
from rope_ext_hf.cli.evaluation import Prepared, ReaderOptions, RunOptions
from rope_ext_hf.cli.models import write_patched
from rope_ext_hf.cli.options import DryRun, EvalOptions, Json, LoadOptions, Model, PublishOptions, SourceOptions
from rope_ext_hf.engines.base import list_engines
from rope_ext_hf.errors import MethodError, RopeExtError, short, size_text
from rope_ext_hf.files import json_text
from rope_ext_hf.method_choice import PatchChoice, parse_numbers
from rope_ext_hf.questions import asked, command_line
from rope_ext_hf.serving.questions import Extending, GPUServer
from rope_ext_hf.terminal import broken_command, wrapped

if TYPE_CHECKING:
    from rope_ext_hf.advice.extending import Extension
    from rope_ext_hf.engines.base import ServingConfig
    from rope_ext_hf.reading.preflight import Forecast
    from rope_ext_hf.servers.answers import BaselineReport
    from rope_ext_hf.servers.checking import ServerReport


def extend(
    model: Model,
    load: EvalOptions,
    question: Extending,
    publish: PublishOptions,
    purpose: str = asked(
        "serve", "With --dry-run: what a method is recommended for: serve, python or train.", metavar="WHAT"
    ),
    batch: str | None = asked(
        None, "With --dry-run: inputs at a time that memory is computed for. Default: 1,8.", metavar="NUMBERS"
    ),
    everything: bool = asked(
        False,
        "With --dry-run: all methods with what was measured and reported of them, engines, memory and commands.",
        names=("--all",),
    ),
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Extend a model into a folder that an engine serves: choose a method, measure it, write the folder.

    With --dry-run it recommends a method, with its price and the commands of every step, and does none of them. Every
    step is a command of its own and is shown. The same command continues where it was stopped. Nothing is written where
    the measurement speaks against it: perplexity at the target length does not get better, or short inputs lose more
    than long ones gain.

    Example: `rope-ext extend reference --target-length 2k --engine vllm --yes`
    """
    from rope_ext_hf.advice.advising import check_purpose
    from rope_ext_hf.advice.extending import carries, judge, plan_extension
    from rope_ext_hf.advice.extending import dry_run as dry_command
    from rope_ext_hf.runs.run_file import run_file
    from rope_ext_hf.serving.configs import serving_config
    from rope_ext_hf.serving.model_card import CARD, write_card

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
    from rope_ext_hf.advice.advising import advise
    from rope_ext_hf.advice.extending import plan_extension
    from rope_ext_hf.hub import foreign_errors
    from rope_ext_hf.reading.preflight import NOTHING_RUN

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


def serve_config(
    model: Model,
    methods: PatchChoice,
    source: SourceOptions,
    server: GPUServer,
    engine: str = asked(MISSING, f"One of {', '.join(list_engines())}.", metavar="NAME"),
    engine_version: str | None = asked(None, "The version that will run it, where that is known.", metavar="VERSION"),
    plugin: bool = asked(False, "For an engine that loads a plug-in of this package."),
    as_json: Json = False,
) -> None:
    """Print the command and the keys with which a serving engine computes what was measured; reads no weights.

    Without --method it is the patch that the folder carries, else the model as published.

    Example: `rope-ext serve-config reference --method yarn --factor 4 --engine vllm`
    """
    methods.check_single()
    config = _configure(model, methods, source, engine, engine_version, plugin=plugin, server=server)
    print_text(json_text(config.to_dict()) if as_json else str(config))


def check_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, e.g. http://localhost:8000.")],
    load: LoadOptions,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The folder or Hub id that was measured; not needed with a record."),
    ] = None,
    lengths: str | None = asked(
        None,
        "Of prompts. Default: half the context length, to the extended length or ten minutes each.",
        metavar="LENGTHS",
    ),
    data: str = asked("stdlib", "What prompts are cut from, as for ppl.", metavar="TEXT"),
    served_name: str | None = asked(
        None, "What the server calls the model. Default: the first it lists.", metavar="NAME"
    ),
    seconds: float = asked(300.0, "That an answer may take.", least=1.0),
    weight_bits: int = asked(
        8, "Of the weights on the server: how much rounding is allowed.", least=2, most=32, metavar="N"
    ),
    kv_bits: int = asked(16, "Of keys and values on the server: 16, 8 or 4.", metavar="N"),
    strict: bool = asked(False, "Ask until an error of 1% of the softmax scale would show."),
    record: Path | None = asked(None, "Write what the server answers there; reads no weights.", metavar="FILE"),
    against: Path | None = asked(None, "Say what changed since --record wrote this; reads no weights.", metavar="FILE"),
    from_file: Path | None = asked(None, "Compare what --record wrote; the address is not asked.", metavar="FILE"),
    as_json: Json = False,
) -> None:
    """Say whether a running server computes what was measured, or which mistake it runs; exit code 1 if it does not.

    Of vLLM, SGLang, llama.cpp, or a program with OpenAI's completions that gives log-probabilities of prompts. The
    model is loaded here too. With --record, and later --against, it is compared with itself, and no model is needed.
    An API key is taken from the variable ROPE_EXT_API_KEY.

    Example: `rope-ext check-server http://localhost:8000 my-model-yarn`
    """
    from rope_ext_hf.servers.answers import compare_server, record_server
    from rope_ext_hf.servers.checking import check_server as check

    if sum(file is not None for file in (record, against, from_file)) > 1:
        raise MethodError("--record, --against and --from-file exclude each other; give one of them")
    reached: dict[str, Any] = {"served_name": served_name, "seconds": seconds, **load.version}
    asked: dict[str, Any] = {"lengths": parse_lengths(lengths) if lengths else None, "data": data}
    report: ServerReport | BaselineReport
    if record is not None:
        record_server(url, record, model, **asked, **reached)
        print_text(json_text({"written": str(record)}) if as_json else f"written to {record}")
        return
    if against is not None:
        report = compare_server(url, against, model, **reached)
    elif model is None:
        raise MethodError(
            "give the model that was measured: rope-ext check-server URL MODEL; or --record, or --against"
        )
    else:
        dtype = "float32" if load.dtype == "auto" else load.dtype
        asked |= {"device": load.device, "weight_bits": weight_bits, "kv_bits": kv_bits, "strict": strict}
        with progress_bar("comparing") as bar:
            report = check(url, model, dtype=dtype, progress=bar.set, from_file=from_file, **asked, **reached)
    print_text(json_text(report.to_dict()) if as_json else str(report))
    if not report.agrees:
        raise typer.Exit(1)


def gguf(
    file: Annotated[Path, typer.Argument(metavar="IN.gguf", help="The GGUF file of the model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The copy; must not exist yet.")],
    methods: PatchChoice,
    source: SourceOptions,
    model: str = asked(MISSING, "The folder or Hub id that the file was made from.", metavar="MODEL"),
    as_json: Json = False,
) -> None:
    """Write a copy of a GGUF file that carries a method: metadata and divisors change, weights are copied.

    Example: `rope-ext gguf model.gguf model-yarn.gguf --model reference --method yarn --factor 4`
    """
    from rope_ext_hf.serving.gguf_files import rewrite

    methods.check_single()
    config = _configure(model, methods, source, "gguf", None)
    rewrite(file, out, config)
    print_text(json_text(config.to_dict() | {"out": str(out)}) if as_json else f"{config}\n# written to {out}")


def audit(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder or Hub id, a config.json or a GGUF file.")],
    revision: str | None = asked(None, "Branch, tag or commit on the Hub.", metavar="NAME"),
    as_json: Json = False,
) -> None:
    """Say what each serving engine computes from a config or GGUF file; exit code 1 where they do not agree.

    Example: `rope-ext audit reference`
    """
    from rope_ext_hf.serving.audit import audit as audit_path

    result = audit_path(path, revision=revision)
    print_text(json_text(result.to_dict()) if as_json else str(result))
    if not result.agrees:
        raise typer.Exit(1)


def _configure(
    model: str, methods: PatchChoice, source: SourceOptions, engine: str, version: str | None, **how: Any
) -> ServingConfig:
    from rope_ext_hf.serving.configs import serving_config

    return serving_config(model, engine, engine_version=version, **how, **source.version, **methods.arguments_of_patch)

"""Commands about serving: `extend`, `advise`, `serve-config`, `check-server`, `audit`, `gguf`."""

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
from rope_ext_hf.errors import MethodError, short, size_text
from rope_ext_hf.files import json_text
from rope_ext_hf.method_choice import PatchChoice, parse_numbers
from rope_ext_hf.questions import asked, command_line
from rope_ext_hf.serving.questions import Extending, GPUServer
from rope_ext_hf.terminal import broken_command, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose a method, measure it, and write a folder to serve.

    Every step is a command of its own, which is printed. The same command continues where it was stopped. No folder is
    written if perplexity at the target length does not get better, or if short inputs lose more than long ones gain.

    Example: `rope-ext extend reference --target-length 2k --engine vllm --yes`
    """
    from rope_ext_hf.advice.extending import carries, judge, plan_extension
    from rope_ext_hf.runs.run_file import run_file
    from rope_ext_hf.serving.configs import serving_config
    from rope_ext_hf.serving.model_card import CARD, write_card

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


def advise(
    model: Model,
    source: SourceOptions,
    server: GPUServer,
    target_length: str = asked(MISSING, "The length that you need, e.g. 128k.", metavar="TOKENS"),
    batch: str = asked("1,8", "Numbers of inputs at a time to compute memory for, e.g. 1,8.", metavar="NUMBERS"),
    over: str = asked("own", "What is extended: own or original, see `rope-ext describe --help`.", metavar="WHAT"),
    context_length: str | None = asked(
        None, "The length that the model is for, instead of what its config states.", metavar="TOKENS"
    ),
    purpose: str = asked(
        "serve", "What you want to do: serve, python (use it in your own process) or train.", metavar="WHAT"
    ),
    everything: bool = asked(
        False,
        "Print all methods with what was measured and reported of them, engines, memory and commands.",
        names=("--all",),
    ),
    as_json: Json = False,
) -> None:
    """Recommend a method for a longer context.

    It prints the reason, the price and the commands to type next. No weights are read.

    Example: `rope-ext advise reference --target-length 1k`
    """
    from rope_ext_hf.advice.advising import advise as advise_on

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


def serve_config(
    model: Model,
    methods: PatchChoice,
    source: SourceOptions,
    server: GPUServer,
    engine: str = asked(MISSING, f"One of {', '.join(list_engines())}.", metavar="NAME"),
    engine_version: str | None = asked(None, "The version of the engine, if you know it.", metavar="VERSION"),
    plugin: bool = asked(False, "The engine loads a plug-in of this package."),
    as_json: Json = False,
) -> None:
    """Print the command that starts a serving engine with a method.

    Config keys are printed as well, where the engine needs them. Without --method they are those of the patch in the
    folder, or of the model as published. No weights are read.

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
        "Lengths of the prompts. Default: from half the context length to the extended length, as far as a prompt "
        "takes ten minutes.",
        metavar="LENGTHS",
    ),
    data: str = asked("stdlib", "The text that prompts are cut from, as in `rope-ext ppl`.", metavar="TEXT"),
    served_name: str | None = asked(
        None, "What the server calls the model. Default: the first it lists.", metavar="NAME"
    ),
    seconds: float = asked(300.0, "How many seconds an answer may take.", least=1.0),
    weight_bits: int = asked(
        8, "Bits of a weight on the server, which says how much rounding is allowed.", least=2, most=32, metavar="N"
    ),
    kv_bits: int = asked(16, "Bits of keys and values on the server: 16, 8 or 4.", metavar="N"),
    strict: bool = asked(False, "Take more prompts, until an error of 1% in the softmax scale would be noticed."),
    record: Path | None = asked(None, "Write the server's answers into this file; reads no weights.", metavar="FILE"),
    against: Path | None = asked(
        None, "Compare with the answers in this file of --record; reads no weights.", metavar="FILE"
    ),
    from_file: Path | None = asked(
        None, "Compare the answers in this file of --record with the model; the server is not asked.", metavar="FILE"
    ),
    as_json: Json = False,
) -> None:
    """Check that a running server computes what was measured.

    If it does not, the mistake is named where it is a known one, and the exit code is 1. The server is vLLM, SGLang,
    llama.cpp, or a program with OpenAI's completions API that returns log-probabilities of the prompt. The model is
    loaded here too. With --record, and later --against, the server is compared with itself, and no model is loaded. An
    API key is taken from the variable ROPE_EXT_API_KEY.

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
    """Write a copy of a GGUF file that has a method.

    Metadata and divisors change; weights are copied as they are.

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
    """Compare what serving engines compute from a config or GGUF.

    The exit code is 1 if the engines do not agree.

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

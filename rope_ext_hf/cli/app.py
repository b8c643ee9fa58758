"""The command line: `rope-ext COMMAND --help` shows an example of each.

Bad input ends with one line and exit code 2; a loss that is not finite with exit code 1. torch and transformers load
inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError
from rope_ext_hf.eval.protocols import protocol_help

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.plan import EvalPlan
    from rope_ext_hf.eval.results import Result
    from rope_ext_hf.methods.base import RopeMethod

__all__ = ["main", "parse_length", "parse_parameters"]

app = typer.Typer(
    name="rope-ext",
    help="Longer context for Hugging Face models: patch RoPE methods in, and measure what they do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_NO_PICTURE = "none: pip install rope-ext-hf[eval] for matplotlib"
# A method's further parameters keep their own names (--beta-fast 16) and are checked by the method itself.
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

Model = Annotated[str, typer.Argument(help="Hub id or local folder; 'reference' is the bundled model.")]
Method = Annotated[str | None, typer.Option("--method", "-m", help="See `rope-ext methods`.")]
Methods = Annotated[list[str] | None, typer.Option("--method", "-m", help="One or more; none: as loaded only.")]
Factor = Annotated[float | None, typer.Option(help="How many times the trained length.")]
TargetLength = Annotated[str | None, typer.Option(help="The same in tokens, e.g. 32k; give one of the two.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread a large model over all devices.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Stop unless so many processes were launched.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
Lengths = Annotated[str, typer.Option(help="Context lengths, e.g. 4k,8k,16k (4k = 4096).")]
Data = Annotated[
    str,
    typer.Option(
        help="'stdlib' (held-out modules of Python's library), a text, JSON lines or parquet file, a folder, a "
        "pattern, or hf:OWNER/NAME; then ?column=..&min_bytes=..&max_documents=..&seed=..&join=true."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
MaxSpans = Annotated[int | None, typer.Option(min=1, help="At most this many spans per length, spread evenly.")]
Targets = Annotated[str | None, typer.Option(help="Tokens scored per span; default half the shortest length.")]
Protocol = Annotated[str, typer.Option(help=f"{protocol_help()}.")]
Stride = Annotated[int, typer.Option(help="Tokens between the starts of spans, under a protocol with a stride.")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="BOS before each span; default: the tokenizer's.")]
Chunk = Annotated[int | None, typer.Option(min=16, help="Tokens per pass of the decoder; default: by free memory.")]
OffloadCache = Annotated[bool, typer.Option("--offload-cache", help="Keys and values in main memory, not on the GPU.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw wavelengths, angles, similarity and decay into this PNG.")]


def parse_length(text: str) -> int:
    """'256', '4k' (4096) or '1M' (1048576) as a number of tokens.

    Raises:
        MethodError: anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    tokens = float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else 0
    if tokens < 1 or tokens != int(tokens):
        raise MethodError(f"not a length in tokens: {text!r}; write 4096, 4k or 1M")
    return int(tokens)


def parse_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--beta-fast", "16", "--sticky"]` as `{"beta_fast": 16, "sticky": True}`; comma lists become tuples of floats.

    Raises:
        MethodError: something that is no option.
    """
    parameters: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise MethodError(f"unexpected argument {option!r}")
        name, has_value, value = option[2:].partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        parameters[name.replace("-", "_")] = _parse_value(value)
    return parameters


def _parse_value(text: str) -> Any:
    try:
        if "," in text:
            return tuple(float(number) for number in text.strip("[]").split(","))
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def _errors() -> Iterator[None]:
    """Everything a user can cause ends as one line on standard error and exit code 2; a warning is one line too."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            yield
        except RopeExtError as error:
            typer.echo(f"rope-ext: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"warning  {message}", err=True)


def _quiet() -> None:
    """transformers' own progress bars and advice would bury the table."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _load(
    name: str, dtype: str, device: str, revision: str | None, trust: bool, device_map: str | None = None
) -> PreTrainedModel:
    """The model, in evaluation mode."""
    from rope_ext_hf.patches.loading import from_pretrained

    _quiet()
    kind, place = _dtype(dtype), _device(device)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if device_map is not None:
        options["device_map"] = device_map
    with _loading(name):
        model = from_pretrained(_source(name), dtype=kind, trust_remote_code=trust, **options)
    return (model if device_map else model.to(place)).eval()


def _tokenizer(name: str, revision: str | None, trust: bool) -> Any:
    from transformers import AutoTokenizer

    _quiet()
    options: dict[str, Any] = {"revision": revision} if revision else {}
    with _loading(name):
        return AutoTokenizer.from_pretrained(_source(name), trust_remote_code=trust, **options)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, RopeExtError):
            raise
        raise CheckpointError(f"{name!r} could not be loaded: {str(error).strip().splitlines()[0]}") from error


def _source(name: str) -> str:
    from rope_ext_hf.reference import path

    return str(path()) if name == "reference" else name


def _dtype(dtype: str) -> Any:
    import torch

    kinds = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise MethodError(f"unknown dtype {dtype!r}; known: {', '.join(kinds)}")
    return kinds[dtype]


def _device(device: str) -> Any:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise MethodError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return place


def _preflight(
    empty: PreTrainedModel,
    passes: Sequence[int],
    scored: int,
    repeats: int,
    dtype: str,
    device: str,
    device_map: str | None,
    offload_cache: bool,
    *,
    processes: int = 1,
    show: bool = True,
) -> None:
    """Say what reading these windows so many times needs before any weights are read; stop where it cannot fit.

    Args:
        empty: the model on the meta device.
        passes: the size of every window that goes through the model, in tokens.
        scored: tokens that go through its head.
    """
    from rope_ext_hf.eval.preflight import check_memory, estimate_flops, measure_flops

    place, kind = _device(device), _dtype(dtype)
    if kind == "auto":
        kind = getattr(empty.config, "dtype", None) or empty.dtype
    needed = check_memory(empty, max(passes), kind, place, spread=device_map is not None, offload_cache=offload_cache)
    seconds = repeats * estimate_flops(empty, passes, scored) / measure_flops(place, kind) / processes
    if show:
        typer.echo(f"needs    {needed}", err=True)
        typer.echo(
            f"reads    {sum(passes):,} tokens"
            + (f" {repeats} times" if repeats > 1 else "")
            + f", very roughly {_duration(seconds)}",
            err=True,
        )


def _duration(seconds: float) -> str:
    """In words: seconds, minutes or hours."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def _processes(expected: int | None) -> tuple[int, int, Any]:
    """This process's rank, their number, and a function that waits for all; one alone unless a launcher says else."""
    rank, world, wait = 0, 1, None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        rank, world, wait = state.process_index, state.num_processes, state.wait_for_everyone
    if expected is not None and world != expected:
        raise MethodError(
            f"{expected} processes were asked for, {world} are running; launch with "
            f"torchrun --nproc-per-node {expected} -m rope_ext_hf.eval sweep ..."
        )
    return rank, world, wait


@app.command()
def methods(
    plot: Plot = None,
    dim: Annotated[int, typer.Option(help="Of the picture: rotated dims per head.")] = 128,
    theta: Annotated[float, typer.Option(help="Of the picture: the base.")] = 10000.0,
    trained_length: Annotated[str, typer.Option(help="Of the picture: the trained length.")] = "4k",
    factor: Annotated[float, typer.Option(help="Of the picture: the methods' factor.")] = 8.0,
    as_json: Json = False,
) -> None:
    """List the methods and their parameters; draw those that a factor is enough for over one another.

    Example: `rope-ext methods --plot methods.png`
    """
    if plot is not None:
        with _errors():
            from rope_ext_hf.eval.results import label
            from rope_ext_hf.eval.sweeps import DEFAULT_METHODS, expand
            from rope_ext_hf.methods.base import Rotary

            rotary = Rotary(dim, theta, parse_length(trained_length))
            drawn = {label(method.to_dict()): method for method in expand(DEFAULT_METHODS, [factor], rotary)}
            title = f"{dim} dims, theta {theta:g}, trained at {rotary.trained_length:,} tokens"
            _draw(plot, rotary, drawn, round(rotary.trained_length * factor), title)
    import dataclasses

    from rope_ext_hf.methods.registry import list_methods as every_method

    rows: list[dict[str, Any]] = []
    for name, cls in every_method().items():
        parameters = {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(cls)
        }
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        rows.append({"method": name, "summary": summary, "parameters": parameters, "required": required})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="RoPE methods", show_lines=True)
    for column in ("method", "what it is", "parameters (= default)"):
        table.add_column(column)
    for row in rows:
        shown = [
            name if name in row["required"] else f"{name}={'-' if value is None else value}"
            for name, value in row["parameters"].items()
        ]
        table.add_row(row["method"], row["summary"], ", ".join(shown))
    Console().print(table)


@app.command(context_settings=_EXTRA)
def describe(
    context: typer.Context,
    model: Model,
    method: Method = None,
    factor: Factor = None,
    target_length: TargetLength = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Say which RoPE method a model has, or would have with --method; reads no weights.

    Example: `rope-ext describe reference --method yarn --factor 8`
    """
    with _errors():
        empty = _without_weights(model, revision, trust_remote_code)
        if method is not None:
            _patch(empty, method, factor, target_length, parse_parameters(context.args))
        elif context.args or factor or target_length:
            raise MethodError("parameters without a method; add --method")
        from rope_ext_hf.patches.describing import describe as describe_model

        description = describe_model(empty)
        if plot is not None:
            from rope_ext_hf.eval.results import label
            from rope_ext_hf.patches.patching import patched_method

            found = patched_method(empty)
            drawn = {label(found.to_dict()): found} if found else {}
            _draw(plot, _rotary(empty), drawn, description.extended_length if found else None, Path(model).name)
        typer.echo(_json(description.to_dict()) if as_json else str(description))


@app.command(context_settings=_EXTRA)
def patch(
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="The patched folder; must not exist yet.")],
    method: Annotated[str, typer.Option("--method", "-m", help="See `rope-ext methods`.")],
    factor: Factor = None,
    target_length: TargetLength = None,
    native: Annotated[bool, typer.Option("--native", help="transformers' own form even where it differs.")] = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a copy of a model folder whose config carries a method; weights are copied as they are.

    Example: `rope-ext patch reference --method yarn --factor 8 --out reference-yarn`
    """
    with _errors():
        from rope_ext_hf.patches.describing import describe as describe_model
        from rope_ext_hf.patches.saving import save_patched_folder

        empty = _without_weights(model, revision, trust_remote_code)
        _patch(empty, method, factor, target_length, parse_parameters(context.args), native)
        save_patched_folder(empty, _folder(model, revision), out)
        description = describe_model(empty)
        typer.echo(
            _json(description.to_dict() | {"out": str(out)}) if as_json else f"{description}\n  written to        {out}"
        )


def _draw(path: Path, rotary: Any, drawn: dict[str, RopeMethod], extended: int | None, title: str) -> None:
    from rope_ext_hf.eval.rope_plots import draw

    try:
        draw(path, rotary, drawn, extended_length=extended, title=title)
    except ImportError as error:
        raise MethodError(str(error)) from error
    except (OSError, ValueError) as error:
        raise MethodError(f"the picture {str(path)!r} cannot be written: {error}") from error
    typer.echo(f"picture  {path}", err=True)


def _folder(name: str, revision: str | None) -> Path:
    """The folder of a model, fetched from the Hub if it is not one already."""
    from rope_ext_hf.reference import path

    if name == "reference":
        return path()
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision))


def _without_weights(name: str, revision: str | None, trust: bool) -> PreTrainedModel:
    """The model's modules on the meta device: all that describing and patching need."""
    import torch
    from transformers import AutoModelForCausalLM

    from rope_ext_hf.patches.geometry import check_pairing
    from rope_ext_hf.patches.loading import load_config, restore_patch
    from rope_ext_hf.reference import path

    _quiet()
    source = str(path()) if name == "reference" else name
    options: dict[str, Any] = {"revision": revision} if revision else {}
    config, record = load_config(source, trust_remote_code=trust, **options)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name!r} is no causal language model: {str(error).strip().splitlines()[0]}") from error
    check_pairing(model)
    return model if record is None else restore_patch(model, record)


def _patch(
    model: PreTrainedModel,
    method: str,
    factor: float | None,
    target_length: str | None,
    parameters: dict[str, Any],
    native: bool = False,
) -> None:
    from rope_ext_hf.patches.patching import patch as patch_model

    length = parse_length(target_length) if target_length else None
    patch_model(model, method, factor=factor, target_length=length, native=native, **parameters)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str).replace("Infinity", "null")


@app.command(context_settings=_EXTRA)
def ppl(
    context: typer.Context,
    model: Model,
    lengths: Lengths,
    method: Methods = None,
    factor: Factor = None,
    target_length: TargetLength = None,
    data: Data = "stdlib",
    protocol: Protocol = "matched",
    targets: Targets = None,
    stride: Stride = 256,
    max_spans: MaxSpans = None,
    bos: Bos = None,
    chunk: Chunk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_cache: OffloadCache = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    out: Out = Path("rope-ext-results"),
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte by context length, as loaded and with each method, on the same target tokens.

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-spans 16`
    """
    with _errors():
        from rope_ext_hf.eval.plan import prepare

        wanted = [parse_length(length) for length in lengths.split(",")]
        scored = parse_length(targets) if targets else None
        empty = _without_weights(model, revision, trust_remote_code)
        chosen = _chosen(context, empty, method, factor, target_length)
        tokenizer = _tokenizer(model, revision, trust_remote_code)
        reading = prepare(
            empty,
            data,
            lengths=wanted,
            tokenizer=tokenizer,
            protocol=protocol,
            targets=scored,
            stride=stride,
            bos=bos,
            max_spans=max_spans,
        )
        _make_folder(out)
        _preflight(empty, reading.passes, reading.scored, len(chosen), dtype, device, device_map, offload_cache)
        loaded = _load(model, dtype, device, revision, trust_remote_code, device_map)
        _measure(loaded, chosen, reading, data, out, as_json, chunk, offload_cache)


@app.command(context_settings=_EXTRA)
def passkey(
    context: typer.Context,
    model: Model,
    lengths: Lengths,
    method: Methods = None,
    factor: Factor = None,
    target_length: TargetLength = None,
    depths: Annotated[str, typer.Option(help="Shares of the haystack before the secret.")] = "0,0.25,0.5,0.75,1",
    trials: Annotated[int, typer.Option(min=1, help="Secrets per length and depth.")] = 10,
    distractors: Annotated[int, typer.Option(min=1, help="Numbers that the right one is ranked among.")] = 19,
    task: Annotated[
        str | None, typer.Option(help="passkey, needle or code; default: passkey, code for the bundled model.")
    ] = None,
    haystack: Annotated[
        str | None, typer.Option(help="Text to hide it in, named as in --data; default: the task's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the secrets and the text around them.")] = 0,
    chunk: Chunk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_cache: OffloadCache = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    out: Out = Path("rope-ext-results"),
    as_json: Json = False,
) -> None:
    """Find a secret in a long text: exact match and rank among distractors, over length x depth, as a heat map.

    Example: `rope-ext passkey reference --method yarn --factor 8 --lengths 256,512,1024,2048 --trials 6`
    """
    with _errors():
        from rich.console import Console

        from rope_ext_hf.eval.results import label, provenance
        from rope_ext_hf.eval.retrieval import Retrieval, heat_map, table
        from rope_ext_hf.eval.retrieval import passkey as measure
        from rope_ext_hf.patches.patching import patched

        wanted = [parse_length(length) for length in lengths.split(",")]
        try:
            shares = [float(depth) for depth in depths.split(",")]
        except ValueError as error:
            raise MethodError(f"not a list of depths: {depths!r}; write 0,0.5,1") from error
        wording = task or ("code" if model == "reference" else "passkey")
        _make_folder(out)
        empty = _without_weights(model, revision, trust_remote_code)
        chosen = _chosen(context, empty, method, factor, target_length)
        tokenizer = _tokenizer(model, revision, trust_remote_code)
        passes = [length for length in set(wanted) for _ in range(len(set(shares)) * trials)]
        _preflight(empty, passes, len(passes), len(chosen), dtype, device, device_map, offload_cache)
        loaded = _load(model, dtype, device, revision, trust_remote_code, device_map)
        results: list[Retrieval] = []
        with _progress("as loaded") as advance:
            advance.total(len(chosen) * sum(passes))
            for one in chosen:
                with patched(loaded, one) if one else nullcontext():
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
                        chunk=chunk,
                        offload_cache=offload_cache,
                        progress=partial(advance, label(one.to_dict() if one else None)),
                    )
        source = provenance(loaded, haystack or f"task {wording}")
        text = json.dumps({"provenance": source, "results": [result.to_dict() for result in results]}, indent=1)
        (out / "passkey.json").write_text(text + "\n", encoding="utf-8")
        picture: Path | None = out / "passkey.png"
        try:
            heat_map(results, out / "passkey.png", f"{Path(loaded.name_or_path).name}, task {wording}")
        except ImportError:
            picture = None
        if as_json:
            typer.echo(text)
        else:
            Console().print(table(results, _rotary(loaded).trained_length))
            typer.echo(f"results  {out / 'passkey.json'}")
            typer.echo(f"picture  {picture or _NO_PICTURE}")


def _chosen(
    context: typer.Context,
    model: PreTrainedModel,
    names: list[str] | None,
    factor: float | None,
    target_length: str | None,
) -> list[RopeMethod | None]:
    """None, for the model as loaded, then every method asked for."""
    from rope_ext_hf.methods.registry import resolve_method

    parameters = parse_parameters(context.args)
    if not names and (parameters or factor or target_length):
        raise MethodError("parameters without a method; add --method")
    length = parse_length(target_length) if target_length else None
    rotary = _rotary(model)
    return [None, *(resolve_method(n, rotary, factor=factor, target_length=length, **parameters) for n in names or [])]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the folder {str(path)!r} cannot be made: {error.strerror}") from error


@app.command()
def convert(
    source_folder: Annotated[str, typer.Argument(metavar="SRC", help="Hub id or folder; Meta's own format too.")],
    new_folder: Annotated[Path, typer.Argument(metavar="DST", help="The converted folder; must not exist yet.")],
    to: Annotated[str, typer.Option(help="half, interleaved, or meta (Meta's own format).")],
    source: Annotated[
        str | None, typer.Option(help="Pairing of the weights now; default: what the config or the family says.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Convert although they are said to be so already.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare what was written with the source.")] = False,
    model_parallel: Annotated[int, typer.Option(min=1, help="Parts, with --to meta: consolidated.00.pth, ...")] = 1,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a copy of a checkpoint in the other RoPE layout: streamed, whole or not at all, bit for bit there and back.

    Example: `rope-ext convert reference reference-interleaved --to interleaved`
    """
    with _errors():
        from rope_ext_hf.checkpoints.conversion import convert_checkpoint

        _quiet()
        with _progress(new_folder.name, unit="bytes") as advance:
            report = convert_checkpoint(
                source_folder,
                new_folder,
                to,
                source=source,
                force=force,
                resume=resume,
                verify=verify,
                model_parallel=model_parallel,
                revision=revision,
                trust_remote_code=trust_remote_code,
                progress=advance.at,
            )
        typer.echo(_json(report.to_dict()) if as_json else str(report))


@app.command()
def detect(
    model: Annotated[str, typer.Argument(metavar="PATH", help="Hub id or folder.")],
    text: Annotated[
        Path | None, typer.Option(help="A text to compare the loss of under both readings; loads the model.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say from its weights which pairing a checkpoint is in, layer by layer; or that they do not tell.

    Example: `rope-ext detect reference`
    """
    with _errors():
        from rope_ext_hf.checkpoints.detection import detect_pairing
        from rope_ext_hf.reference import path

        sample = None
        if text is not None:
            try:
                sample = text.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"the text {str(text)!r} cannot be read: {error}") from error
        _quiet()
        report = detect_pairing(path() if model == "reference" else model, text=sample)
        typer.echo(_json(report.to_dict()) if as_json else str(report))


@app.command("lm-eval", context_settings=_EXTRA)
def lm_eval(
    context: typer.Context,
    model: Model,
    tasks: Annotated[str, typer.Option(help="Names, groups or YAML files, e.g. niah_single_1,longbench_*.")],
    method: Method = None,
    factor: Factor = None,
    target_length: TargetLength = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with task definitions of your own.")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="Documents per task, or a share of them below 1.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Worked examples in each prompt.")] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or 'auto'.")] = "1",
    max_length: Annotated[str | None, typer.Option(help="Default: the extended length, e.g. 16k.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    out: Annotated[Path | None, typer.Option(help="Also write the results into this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness on the model, with a method or as loaded, up to its extended length.

    RULER's essay needles and LongBench fetch their data from the Hub; niah_single_1 makes its own.

    Example: `rope-ext lm-eval reference --method yarn --factor 8 --tasks niah_single_1 --limit 4`
    """
    with _errors():
        parameters = parse_parameters(context.args)
        if method is None and (parameters or factor or target_length):
            raise MethodError("parameters without a method; add --method")
        if batch_size != "auto" and not (batch_size.isdecimal() and int(batch_size)):
            raise MethodError(f"--batch-size must be a number of at least 1 or 'auto', got {batch_size!r}")
        length = parse_length(max_length) if max_length else None
        try:
            from lm_eval.utils import make_table

            from rope_ext_hf.eval.lm_eval_adapter import evaluate
        except ImportError as error:
            raise MethodError(f"lm-eval is needed here ({error}): pip install rope-ext-hf[eval]") from error
        loaded = _load(model, dtype, device, revision, trust_remote_code, device_map)
        tokenizer = _tokenizer(model, revision, trust_remote_code)
        if method is not None:
            _patch(loaded, method, factor, target_length, parameters)
        with redirect_stdout(sys.stderr):  # tasks print what they like
            results = evaluate(
                loaded,
                tokenizer,
                tasks=tasks.split(","),
                include_path=include_path,
                max_distance=int(limit) if limit is not None and limit >= 1 else limit,
                num_fewshot=num_fewshot,
                batch_size=batch_size if batch_size == "auto" else int(batch_size),
                max_length=length,
            )
        text = _json(results)
        if out is not None:
            _make_folder(out.parent)
            out.write_text(text + "\n", encoding="utf-8")
        if as_json:
            typer.echo(text)
            return
        typer.echo(make_table(results))
        if results.get("groups"):
            typer.echo(make_table(results, "groups"))
        typer.echo(f"read up to {results['max_length']:,} tokens" + (f"\nresults  {out}" if out is not None else ""))


@app.command()
def demo(
    out: Out = Path("rope-ext-results"),
    spans: Annotated[int, typer.Option(min=1, help="Spans per length; more is slower and steadier.")] = 32,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """See the bundled model fail beyond its trained length, and the methods repair it; offline, in a few minutes.

    Example: `rope-ext demo`
    """
    with _errors():
        from rope_ext_hf.eval.plan import prepare
        from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn
        from rope_ext_hf.methods.remapping import DualChunk, LeakyReRoPE
        from rope_ext_hf.methods.static import NTK, Linear, Yarn

        model = _load("reference", "float32", device, None, False)
        trained = _rotary(model).trained_length
        chosen: list[RopeMethod | None] = [
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
        reading = prepare(model, "stdlib", lengths=lengths, max_spans=spans)
        _make_folder(out)
        _measure(model, chosen, reading, "stdlib", out, as_json)


@app.command()
def sweep(
    model: Model,
    lengths: Lengths,
    methods: Annotated[
        str, typer.Option(help="Names, e.g. linear,ntk,yarn.")
    ] = "linear,ntk,dynamic-ntk,by-parts,yarn,dynamic-yarn,llama3",
    factors: Annotated[str | None, typer.Option(help="e.g. 2,4,8; default: what the longest length needs.")] = None,
    data: Data = "stdlib",
    protocol: Protocol = "matched",
    targets: Targets = None,
    stride: Stride = 256,
    max_spans: MaxSpans = None,
    bos: Bos = None,
    chunk: Chunk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_cache: OffloadCache = False,
    processes: Processes = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    out: Out = Path("rope-ext-results"),
    as_json: Json = False,
) -> None:
    """Methods x factors x lengths, resumable: the same command goes on where it was stopped; ends with a report.

    Example: `rope-ext sweep reference --methods ntk,yarn --factors 4,8 --lengths 256,1024,2048 --max-spans 16`
    """
    with _errors():
        from rope_ext_hf.eval.sweeps import plan_sweep, run_sweep

        try:
            scales = [float(factor) for factor in factors.split(",")] if factors else None
        except ValueError as error:
            raise MethodError(f"not a list of factors: {factors!r}; write 2,4,8") from error
        wanted = [parse_length(length) for length in lengths.split(",")]
        scored = parse_length(targets) if targets else None
        rank, world, wait = _processes(processes)
        if world > 1 and device == "auto":
            device = _own_device()
        empty = _without_weights(model, revision, trust_remote_code)
        plan = plan_sweep(
            empty,
            data,
            methods=methods.split(","),
            factors=scales,
            lengths=wanted,
            tokenizer=_tokenizer(model, revision, trust_remote_code),
            protocol=protocol,
            targets=scored,
            stride=stride,
            max_spans=max_spans,
            bos=bos,
        )
        _make_folder(out)
        reading, count = plan.plan, len(plan.methods)
        _preflight(
            empty,
            reading.passes,
            reading.scored,
            count,
            dtype,
            device,
            device_map,
            offload_cache,
            processes=world,
            show=rank == 0,
        )
        loaded = _load(model, dtype, device, revision, trust_remote_code, device_map)
        with _progress("as loaded", show=rank == 0) as advance:

            def started(folder: Path, done: int, units: int) -> None:
                if rank == 0:
                    advance.total(count * reading.tokens // world)
                    before = f" ({done} of {units} parts were done before)" if done else ""
                    typer.echo(f"run      {folder}{before}", err=True)

            run = run_sweep(
                loaded,
                plan,
                out=out,
                chunk=chunk,
                offload_cache=offload_cache,
                rank=rank,
                world=world,
                wait=wait,
                progress=advance,
                started=started,
            )
        if rank == 0:
            _show_run(run, as_json)
        _stop_if_not_finite(run.results)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder, as `sweep` names it.")], as_json: Json = False
) -> None:
    """Make the table, CSV, curves and HTML page of a run anew, finished or not.

    Example: `rope-ext report rope-ext-results/reference-0123456789`
    """
    with _errors():
        from rope_ext_hf.eval.sweeps import read_run

        run = read_run(folder)
        _show_run(run, as_json)
        _stop_if_not_finite(run.results)


def _own_device() -> str:
    """The device of this process among those of a launcher."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _show_run(run: Any, as_json: bool) -> None:
    from rich.console import Console

    from rope_ext_hf.eval.report import write_report
    from rope_ext_hf.eval.results import label, write_json
    from rope_ext_hf.eval.tables import table, throughput_text

    write_json(run.folder / "results.json", run.settings, run.results)
    rows, page = run.write_csv(), write_report(run)
    if as_json:
        typer.echo((run.folder / "results.json").read_text(encoding="utf-8"))
    else:
        if run.results:
            costs = {label(result.method): run.loss_increase(result.method) for result in run.results}
            Console().print(table(run.results, run.trained_length, costs))
            typer.echo(f"speed    {throughput_text(run.results)}")
        typer.echo(f"results  {rows}\nreport   {page}")


def _rotary(model: PreTrainedModel) -> Any:
    from rope_ext_hf.patches.geometry import geometry

    return geometry(model)


class _Advance:
    """A progress bar in tokens, with the method's name; on a terminal only."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def __call__(self, name: str, tokens: int) -> None:
        self.bar.update(self.task, advance=tokens, description=name)

    def total(self, tokens: int) -> None:
        self.bar.update(self.task, total=tokens)

    def at(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)


@contextmanager
def _progress(name: str, *, show: bool = True, unit: str = "tokens") -> Iterator[_Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    errors = Console(stderr=True)
    counts = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn("tokens"))
    )
    columns = (TextColumn("{task.description:<18}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=errors, disable=not (show and errors.is_terminal), transient=True) as bar:
        yield _Advance(bar, bar.add_task(name, total=None))


def _stop_if_not_finite(results: Sequence[Result]) -> None:
    from rope_ext_hf.eval.results import label

    bad = sorted({f"{label(r.method)} at {r.length} in {name}" for r in results for name in r.nonfinite})
    if bad:
        typer.echo(f"rope-ext: the loss is not finite: {'; '.join(bad)}", err=True)
        raise typer.Exit(1)


def _measure(
    model: PreTrainedModel,
    chosen: Sequence[RopeMethod | None],
    plan: EvalPlan,
    data: str,
    out: Path,
    as_json: bool,
    chunk: int | None = None,
    offload_cache: bool = False,
) -> None:
    """Run every method, show progress, write and print the results."""
    from rich.console import Console

    from rope_ext_hf.eval.measuring import aggregate, score_plan
    from rope_ext_hf.eval.plots import curves
    from rope_ext_hf.eval.results import label, provenance, write_json
    from rope_ext_hf.eval.scorer import TokenScorer
    from rope_ext_hf.eval.tables import table, throughput_text
    from rope_ext_hf.patches.patching import patched

    scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache)
    results: list[Result] = []
    with _progress("as loaded") as advance:
        advance.total(len(chosen) * plan.tokens)
        for method in chosen:
            saved = method.to_dict() if method else None
            with patched(model, method) if method else nullcontext():
                results += aggregate(saved, plan, score_plan(scorer, plan, partial(advance, label(saved))))

    trained = _rotary(model).trained_length
    write_json(out / "results.json", provenance(model, data), results)
    picture: Path | None = out / "perplexity.png"
    try:
        curves(results, trained, out / "perplexity.png", f"{Path(model.name_or_path).name} on {data}")
    except ImportError:
        picture = None
    if as_json:
        typer.echo((out / "results.json").read_text(encoding="utf-8"))
    else:
        Console().print(table(results, trained))
        typer.echo(f"speed    {throughput_text(results)}")
        typer.echo(f"results  {out / 'results.json'}")
        typer.echo(f"picture  {picture or _NO_PICTURE}")
    _stop_if_not_finite(results)


def main() -> None:
    """Entry point of the `rope-ext` script."""
    app()


if __name__ == "__main__":
    main()

"""The command line: `rope-ext COMMAND --help` shows an example of each.

Bad input ends with one line and exit code 2; a loss that is not finite with exit code 1. torch and transformers load
inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.scaling import Scaling

__all__ = ["main", "parse_length", "parse_parameters"]

app = typer.Typer(
    name="rope-ext",
    help="Longer context for Hugging Face models: patch RoPE methods in, and measure what they do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

# A method's further parameters keep their own names (--beta-fast 16) and are checked by the method itself.
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

Model = Annotated[str, typer.Argument(help="Hub id or local folder; 'reference' is the bundled model.")]
Method = Annotated[str | None, typer.Option("--method", "-m", help="See `rope-ext methods`.")]
Factor = Annotated[float | None, typer.Option(help="How many times the trained length.")]
TargetLength = Annotated[str | None, typer.Option(help="The same in tokens, e.g. 32k; give one of the two.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
Lengths = Annotated[str, typer.Option(help="Context lengths, e.g. 4k,8k,16k (4k = 4096).")]
Data = Annotated[str, typer.Option(help="'stdlib' (held-out modules of Python's library) or a UTF-8 text file.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
MaxWindows = Annotated[int | None, typer.Option(min=1, help="At most this many windows per length, spread evenly.")]
Targets = Annotated[str | None, typer.Option(help="Tokens scored per window; default half the shortest length.")]


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
    """Everything a user can cause ends as one line on standard error and exit code 2."""
    try:
        yield
    except RopeExtError as error:
        typer.echo(f"rope-ext: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


def _quiet() -> None:
    """transformers' own progress bars and advice would bury the table."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _load(name: str, dtype: str, device: str, revision: str | None, trust: bool) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer, in evaluation mode."""
    import torch
    from transformers import AutoTokenizer

    from rope_ext_hf.patches.saving import from_pretrained
    from rope_ext_hf.reference import path

    _quiet()
    kinds = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise MethodError(f"unknown dtype {dtype!r}; known: {', '.join(kinds)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise MethodError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    source = str(path()) if name == "reference" else name
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        model = from_pretrained(source, dtype=kinds[dtype], trust_remote_code=trust, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust, **options)
    except (OSError, ValueError) as error:
        if isinstance(error, RopeExtError):
            raise
        raise CheckpointError(f"{name!r} could not be loaded: {str(error).strip().splitlines()[0]}") from error
    return model.to(place).eval(), tokenizer


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods and their parameters.

    Example: `rope-ext methods`
    """
    import dataclasses

    from rope_ext_hf.scaling import methods as every_method

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
        from rope_ext_hf.patches.patching import describe as describe_model

        description = describe_model(empty)
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
        from rope_ext_hf.patches.patching import describe as describe_model
        from rope_ext_hf.patches.saving import save_patched_folder

        empty = _without_weights(model, revision, trust_remote_code)
        _patch(empty, method, factor, target_length, parse_parameters(context.args), native)
        save_patched_folder(empty, _folder(model, revision), out)
        description = describe_model(empty)
        typer.echo(
            _json(description.to_dict() | {"out": str(out)}) if as_json else f"{description}\n  written to        {out}"
        )


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

    from rope_ext_hf.patches.saving import load_config, restore_patch
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
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", help="One or more; none: as loaded only.")
    ] = None,
    factor: Factor = None,
    target_length: TargetLength = None,
    data: Data = "stdlib",
    protocol: Annotated[str, typer.Option(help="matched, sliding, truncate, stream, blocks or position.")] = "matched",
    targets: Targets = None,
    stride: Annotated[int, typer.Option(help="Tokens between windows under sliding and stream.")] = 256,
    max_windows: MaxWindows = None,
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="BOS before each window; default: the tokenizer's.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: Trust = False,
    out: Out = Path("rope-ext-results"),
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte by context length, as loaded and with each method, on the same target tokens.

    Example: `rope-ext ppl reference --method yarn --factor 8 --lengths 256,512,1024,2048 --max-windows 16`
    """
    with _errors():
        from rope_ext_hf.scaling import resolve_method

        parameters = parse_parameters(context.args)
        if not method and (parameters or factor or target_length):
            raise MethodError("parameters without a method; add --method")
        wanted = [parse_length(length) for length in lengths.split(",")]
        scored = parse_length(targets) if targets else None
        loaded, tokenizer = _load(model, dtype, device, revision, trust_remote_code)
        rotary = _rotary(loaded)
        length = parse_length(target_length) if target_length else None
        chosen: list[Scaling | None] = [None]
        chosen += [
            resolve_method(name, rotary, factor=factor, target_length=length, **parameters) for name in method or []
        ]
        options = {"targets": scored, "bos": bos, "protocol": protocol, "stride": stride}
        _measure(loaded, tokenizer, chosen, wanted, data, max_windows, out, as_json, **options)


@app.command()
def demo(
    out: Out = Path("rope-ext-results"),
    windows: Annotated[int, typer.Option(min=1, help="Windows per length; more is slower and steadier.")] = 32,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """See the bundled model fail beyond its trained length, and the methods repair it; offline, in a few minutes.

    Example: `rope-ext demo`
    """
    with _errors():
        from rope_ext_hf.scaling import NTK, DynamicNTK, DynamicYarn, Linear, Yarn

        model, tokenizer = _load("reference", "float32", device, None, False)
        trained = _rotary(model).trained_length
        chosen: list[Scaling | None] = [
            None,
            Linear(factor=8.0),
            NTK(factor=8.0),
            DynamicNTK(growth="hf", factor=4.0),
            DynamicYarn(),
            Yarn(factor=4.0),
            Yarn(factor=8.0),
        ]
        lengths = [trained, 2 * trained, 4 * trained, 8 * trained]
        _measure(model, tokenizer, chosen, lengths, "stdlib", windows, out, as_json)


def _rotary(model: PreTrainedModel) -> Any:
    from rope_ext_hf.patches.patching import geometry

    return geometry(model)


def _measure(
    model: PreTrainedModel,
    tokenizer: Any,
    chosen: Sequence[Scaling | None],
    lengths: Sequence[int],
    data: str,
    max_windows: int | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Run every method, show progress, write and print the results."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rope_ext_hf.eval.perplexity import finite, prepare
    from rope_ext_hf.eval.reading import Reader
    from rope_ext_hf.eval.results import DocumentLoss, Result, label, provenance, write_json
    from rope_ext_hf.eval.show import curves, table
    from rope_ext_hf.patches.patching import patched

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the folder {str(out)!r} cannot be made: {error.strerror}") from error
    reading = prepare(model, data, lengths=lengths, tokenizer=tokenizer, max_windows=max_windows, **options)
    reader = Reader(model)
    errors = Console(stderr=True)
    results: list[Result] = []
    with Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("as loaded", total=len(chosen) * reading.tokens)

        def advance(tokens: int) -> None:
            bar.advance(task, tokens)

        for method in chosen:
            bar.update(task, description=label(method.to_dict() if method else None))
            losses: dict[int, list[DocumentLoss]] = {length: [] for length in reading.lengths}
            with patched(model, method) if method else nullcontext():
                for length, loss in reading.measure(reader, advance):
                    losses[length].append(loss)
            saved = method.to_dict() if method else None
            results += [Result.of(saved, reading.setting, length, losses[length]) for length in reading.lengths]

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
        typer.echo(f"results  {out / 'results.json'}")
        typer.echo(f"picture  {picture or 'none: pip install rope-ext-hf[eval] for matplotlib'}")
    if not finite(results):
        named = sorted(
            {f"{label(result.method)} at {result.length} in {name}" for result in results for name in result.nonfinite}
        )
        typer.echo(f"rope-ext: the loss is not finite: {'; '.join(named)}", err=True)
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `rope-ext` script."""
    app()


if __name__ == "__main__":
    main()

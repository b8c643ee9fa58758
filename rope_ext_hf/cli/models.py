"""The commands about models and checkpoints: `methods`, `describe`, `patch`, `convert`, `detect`.

torch is imported inside the functions, so that --help answers at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import print_result, print_table, print_text, progress_bar
from rope_ext_hf.cli.folders import PublishOptions, described, write_patched
from rope_ext_hf.cli.options import Json, Model, SourceOptions, command
from rope_ext_hf.errors import CheckpointError, MethodError, short
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.options.arguments import argument, option_text
from rope_ext_hf.options.method_choice import LayerChoice

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod


@command("Patch a model")
def methods(as_json: Json = False) -> None:
    """List the methods and their parameters, recommended ones first.

    Each parameter is an option of every command that takes --method. A required factor may be given as --target-length.

    Example: `rope-ext methods`
    """
    from rope_ext_hf.methods.registry import list_methods
    from rope_ext_hf.plug_ins import plug_in

    recommended = plug_in("parts", "recommended_methods")  # of the tool box, which may not be installed
    by_purpose: dict[str, tuple[str, ...]] = recommended() if recommended else {}
    rows = [
        {
            "method": name,
            "group": _group(method),
            "aliases": {alias: dict(implied) for alias, implied in method.aliases.items()},
            "summary": (method.__doc__ or "").strip().splitlines()[0],
            "recommended": [purpose for purpose, names in by_purpose.items() if name in names],
            "parameters": {f.name: None if f.default is MISSING else f.default for f in fields(method)},
            "required": [f.name for f in fields(method) if f.default is MISSING],
        }
        for name, method in list_methods().items()
    ]
    if as_json:
        print_text(json_text(rows))
        return
    from rich.table import Table
    from rich.text import Text

    if by_purpose:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title="Recommended, the first choice first\n")
        table.add_column()
        table.add_column(style="bold")
        for purpose, names in by_purpose.items():
            table.add_row(purpose, ", ".join(names))
        print_table(table)
        print_text("\nFor one model and length: rope-ext extend MODEL --target-length LENGTH --dry-run\n")
    for group in _GROUPS:
        table = Table(box=None, show_header=False, padding=(0, 2, 1, 0), title=f"{group}\n")
        table.add_column(no_wrap=True, style="bold", width=max(len(str(row["method"])) for row in rows))
        table.add_column()
        for row in rows:
            if row["group"] == group:
                table.add_row(str(row["method"]), Text(_method_text(row)))  # in a string, "factors[i]" would be markup
        print_table(table)


def _method_text(row: Mapping[str, Any]) -> str:
    """Return several lines of text on a method: its summary, its other names and its parameters."""
    lines = [row["summary"]]
    aliases = []
    for alias, implied in row["aliases"].items():
        values = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in implied.items())
        aliases.append(f"{alias} (with {values})" if values else alias)
    if aliases:
        lines.append(f"Also called {', '.join(aliases)}.")
    required = [f"--{name.replace('_', '-')}" for name in row["required"]]
    if required:
        lines.append(f"Required: {', '.join(required)}")
    optional = []
    for name, default in row["parameters"].items():
        if name not in row["required"]:
            typed = _typed(default)
            optional.append(f"--{name.replace('_', '-')} {typed}".rstrip())
    if optional:
        lines.append(f"Optional: {', '.join(optional)}")
    return "\n".join(lines)


def _typed(default: Any) -> str:
    """Return a parameter's default as a user types it; empty if it has none, or the method chooses one itself."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else option_text(default)


_STATIC = "Frequency methods, the same for inputs of every length"
_BY_LENGTH = "Frequency methods that depend on the length of the input"
_REMAPPING = "Remapping methods, which change the relative positions that a query sees"
_OTHERS = "Others"
_GROUPS = (_STATIC, _BY_LENGTH, _REMAPPING, _OTHERS)


def _group(method: type[RopeMethod]) -> str:
    """Return the title under which `rope-ext methods` lists a method."""
    from rope_ext_hf.methods.base import RopeMethod as BaseMethod
    from rope_ext_hf.methods.remapping import RemappingMethod
    from rope_ext_hf.methods.static import Default

    if issubclass(method, Default) or method.trainable:
        return _OTHERS
    if issubclass(method, RemappingMethod):
        return _REMAPPING if method.moves_keys else _OTHERS
    return _STATIC if method.length_dependent is BaseMethod.length_dependent else _BY_LENGTH


@command("Patch a model")
def describe(model: Model, methods: LayerChoice, source: SourceOptions, as_json: Json = False) -> None:
    """Show which RoPE method a model has; reads no weights.

    With --method it shows the model as it would be with that method.

    Example: `rope-ext describe reference --method yarn --factor 8`
    """
    from rope_ext_hf.files.whole import foreign_errors
    from rope_ext_hf.runs.chosen_methods import apply_choice

    methods.check_single()
    empty = source.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be described"):
        apply_choice(methods, empty)
        description = described(empty, model, source)
    print_result(description, as_json)


@command("Patch a model")
def patch(
    model: Model,
    methods: LayerChoice,
    source: SourceOptions,
    publish: PublishOptions,
    folder: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The patched folder; must not exist yet. Or give --out.")
    ] = None,
    out: Path | None = argument(None, "The patched folder; must not exist yet.", metavar="FOLDER"),
    native: bool = argument(
        False, "Save in transformers' own form even where transformers then computes other results."
    ),
    as_code: bool = argument(
        False, "Add code, so that plain transformers loads the folder with trust_remote_code=True."
    ),
    keep_mistral_format: bool = argument(
        False, "Also copy params.json and consolidated*.safetensors, from which vLLM runs the model without the method."
    ),
    force: bool = argument(
        False, "Write the copy although the weights look as if they were in another pairing than the config says."
    ),
    as_json: Json = False,
) -> None:
    """Write a patched copy of a model folder.

    Weights are copied as they are; a folder whose weights contradict the pairing that its config states is refused. In
    the copy of an adapter's folder the method stands beside the adapter's settings.
    The model card of the source is kept, with its licence, and extended.

    Example: `rope-ext patch reference reference-yarn --method yarn --factor 8`
    """
    if (folder is None) == (out is None):
        raise MethodError("give the patched folder once: rope-ext patch MODEL OUT, or --out OUT")
    out = folder or out
    assert out is not None
    methods.check_single(required=True)
    publish.check()
    description = write_patched(
        model,
        out,
        methods,
        source,
        native=native,
        as_code=as_code,
        keep_mistral_format=keep_mistral_format,
        force=force,
    )
    if as_json:
        print_text(json_text(description.to_dict() | {"out": str(out)}))
    else:
        print_text(f"{description}\n  written to        {out}")
    publish.upload(out, trust_remote_code=source.trust_remote_code)


@command("Convert a checkpoint", interrupted="the same command with --resume continues", light=True)
def convert(
    source_folder: Annotated[
        str, typer.Argument(metavar="SRC", help="Hub id or folder; Meta's own format and GGUF too.")
    ],
    new_folder: Annotated[Path, typer.Argument(metavar="DST", help="The converted folder; must not exist yet.")],
    source: SourceOptions,
    to: str = argument(
        MISSING,
        "The pairing to write: half, interleaved, hf (the one of them that transformers runs for this model), or meta "
        "(Meta's own format).",
    ),
    source_pairing: str | None = argument(
        None,
        "The present pairing of the weights. Default: the pairing that the config or the model family states.",
        names=("--from",),
    ),
    force: bool = argument(False, "Convert although the config says that the weights are in that pairing already."),
    resume: bool = argument(False, "Continue after an interruption."),
    verify: bool = argument(
        False, "Compare attention scores (and logits, if memory allows) of the copy with the source."
    ),
    model_parallel: int = argument(1, "Number of files to write with --to meta: consolidated.00.pth, ...", least=1),
    context_length: str | None = argument(
        None, "The context length of weights in Meta's format. Default: by the size of the model.", metavar="TOKENS"
    ),
    dequantize: str | None = argument(
        None,
        "Unpack a GGUF file into this dtype: bfloat16, float16, or float32, which is exact. Takes the memory of the "
        "model in it.",
        metavar="DTYPE",
    ),
    as_json: Json = False,
) -> None:
    """Write a copy of a checkpoint in the other RoPE pairing.

    half pairs dimension i with i + d/2 (transformers' Llama), interleaved pairs 2i with 2i + 1 (Meta's Llama). Only the
    order of rows changes, so converting back gives the same bytes. An interrupted conversion leaves no DST; --resume
    continues it.

    Example: `rope-ext convert reference reference-interleaved --to interleaved`
    """
    from rope_ext_hf.checkpoints.conversion import convert_checkpoint

    with progress_bar(new_folder.name, unit="bytes") as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert_checkpoint(
            source_folder,
            new_folder,
            to,
            source_pairing=source_pairing,
            force=force,
            resume=resume,
            verify=verify,
            model_parallel=model_parallel,
            context_length=parse_length(context_length),
            dequantize=dequantize,
            **source.version,
            progress=bar.set,
        )
    for warning in caught:  # warnings of the conversion stand among the notes of the report already
        if str(warning.message) not in report.notes:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    print_result(report, as_json)


@command("Convert a checkpoint", light=True)
def detect(
    model: Model,
    source: SourceOptions,
    text: Path | None = argument(
        None, "A text file whose loss is compared under both pairings; this loads the model.", metavar="FILE"
    ),
    as_json: Json = False,
) -> None:
    """Detect from its weights which RoPE pairing a checkpoint is in.

    The score of each layer is printed. If the config contradicts the weights, the command that mends the folder is
    printed, and the exit code is 1. "undecided" means that the weights do not show the pairing; --text FILE then
    compares the losses on a text.

    Example: `rope-ext detect reference`
    """
    from rope_ext_hf.checkpoints.pairing.detection import detect_pairing
    from rope_ext_hf.files.model_folders import model_source
    from rope_ext_hf.files.whole import foreign_errors

    sample = None
    if text is not None:
        from rope_ext_hf.checkpoints.pairing.text_losses import TEXT_CHARACTERS
        from rope_ext_hf.reading.text.text_files import read_beginning

        with foreign_errors(f"the text {short(str(text))!r} cannot be read"):
            if not text.is_file():  # reading a device or a pipe might never end
                raise CheckpointError(f"no such text file: {short(str(text))!r}")
            sample = read_beginning(text, TEXT_CHARACTERS)
    report = detect_pairing(model_source(model), text=sample, **source.version)
    print_result(report, as_json)
    if report.contradiction is not None:
        raise typer.Exit(1)

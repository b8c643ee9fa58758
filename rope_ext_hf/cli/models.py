"""Commands about methods and models: `methods`, `describe`, `patch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import json_text, print_note, print_table, print_text, quiet_transformers
from rope_ext_hf.cli.options import Json, Model, PatchOptions, Plot, SourceOptions, parse_length
from rope_ext_hf.errors import MethodError, one_line, short

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod, Rotary

__all__ = ["describe", "methods", "patch"]


def methods(
    plot: Plot = None,
    dim: Annotated[int, typer.Option(help="For the picture: rotated dims per head.")] = 128,
    theta: Annotated[float, typer.Option(help="For the picture: the base.")] = 10000.0,
    trained_length: Annotated[str, typer.Option(help="For the picture: the trained length.")] = "4k",
    factor: Annotated[float, typer.Option(help="For the picture: the methods' factor.")] = 8.0,
    as_json: Json = False,
) -> None:
    """List the methods and their parameters, with the defaults; with --plot, draw those that need only a factor.

    Each parameter is an option of every command that takes --method. A required factor may be given as --target-length.

    Example: `rope-ext methods --plot methods.png`
    """
    import dataclasses

    from rope_ext_hf.methods.base import Rotary
    from rope_ext_hf.methods.registry import list_methods

    if plot is not None:
        from rope_ext_hf.eval.results import label
        from rope_ext_hf.eval.sweeps import DEFAULT_METHODS, expand

        rotary = Rotary(dim, theta, parse_length(trained_length))
        drawn = {label(method.to_dict()): method for method in expand(DEFAULT_METHODS, [factor], rotary)}
        title = f"{dim} dims, theta {theta:g}, trained at {rotary.context_length:,} tokens"
        _draw(plot, rotary, drawn, round(rotary.context_length * factor), title)
    rows: list[dict[str, Any]] = []
    for name, method in list_methods().items():
        fields = dataclasses.fields(method)
        rows.append(
            {
                "method": name,
                "summary": (method.__doc__ or "").strip().splitlines()[0],
                "parameters": {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields},
                "required": [f.name for f in fields if f.default is dataclasses.MISSING],
            }
        )
    if as_json:
        print_text(json_text(rows))
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(row["method"], "\n".join(filter(None, [row["summary"], _options_text(row)])))
    print_table(table)


def _options_text(row: dict[str, Any]) -> str:
    """A method's parameters as options of the command line, with their defaults."""
    options = []
    for name, default in row["parameters"].items():
        value = f" {default}" if default is not None else ""
        options.append(f"--{name.replace('_', '-')}{' (required)' if name in row['required'] else value}")
    return ", ".join(options)


def describe(
    model: Model,
    methods: PatchOptions,
    source: SourceOptions,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Say which RoPE method a model has, or would have with --method; reads no weights.

    Example: `rope-ext describe reference --method yarn --factor 8`
    """
    from rope_ext_hf.eval.results import label
    from rope_ext_hf.hub import foreign_errors
    from rope_ext_hf.patches.describing import describe as describe_model
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.patches.patching import patched_method

    methods.check_single()
    quiet_transformers()
    empty = source.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be described"):
        methods.apply(empty)
        description = describe_model(empty)
    if plot is not None:
        method = patched_method(empty)
        drawn = {label(method.to_dict()): method} if method else {}
        _draw(plot, patch_geometry(empty), drawn, description.extended_length if method else None, Path(model).name)
    print_text(json_text(description.to_dict()) if as_json else str(description))


def patch(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The patched folder; must not exist yet.")],
    methods: PatchOptions,
    source: SourceOptions,
    native: Annotated[
        bool, typer.Option("--native", help="Save in transformers' own form even where that behaves otherwise.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a copy of a model folder whose config carries a method; weights are copied as they are.

    Example: `rope-ext patch reference --method yarn --factor 8 --out reference-yarn`
    """
    from rope_ext_hf.hub import foreign_errors, model_folder
    from rope_ext_hf.patches.describing import describe as describe_model
    from rope_ext_hf.patches.saving import save_patched_folder

    methods.check_single(required=True)
    quiet_transformers()
    empty = source.empty_model(model)
    with foreign_errors(f"the model {short(model)!r} could not be patched"):
        methods.apply(empty, native=native)
        save_patched_folder(empty, model_folder(model, revision=source.revision), out)
        description = describe_model(empty)
    print_text(
        json_text(description.to_dict() | {"out": str(out)}) if as_json else f"{description}\n  written to        {out}"
    )


def _draw(path: Path, rotary: Rotary, drawn: dict[str, RopeMethod], extended: int | None, title: str) -> None:
    from rope_ext_hf.eval.rope_plots import draw

    try:
        draw(path, rotary, drawn, extended_length=extended, title=title)
    except ImportError as error:
        raise MethodError(str(error)) from error
    except (OSError, ValueError) as error:
        raise MethodError(f"the picture {str(path)!r} cannot be written: {one_line(error)}") from error
    print_note("picture", str(path))

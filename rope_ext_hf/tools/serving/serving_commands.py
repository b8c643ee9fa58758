"""The commands about serving: `serve-config`, `audit`, `gguf`, `card`."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import print_result, print_text
from rope_ext_hf.cli.folders import PublishOptions
from rope_ext_hf.cli.options import Json, Model, SourceOptions, command
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.options.arguments import argument
from rope_ext_hf.options.method_choice import PatchChoice
from rope_ext_hf.tools.engines.base import list_engines
from rope_ext_hf.tools.serving.serving_options import GPUServer

if TYPE_CHECKING:
    from rope_ext_hf.tools.engines.serving_config import ServingConfig


@command("Tool box: serve")
def serve_config(
    model: Model,
    methods: PatchChoice,
    source: SourceOptions,
    server: GPUServer,
    engine: str = argument(MISSING, f"One of {', '.join(list_engines())}.", metavar="NAME"),
    engine_version: str | None = argument(None, "The version of the engine, if you know it.", metavar="VERSION"),
    plugin: bool = argument(False, "The engine will load the plug-in of this package."),
    as_json: Json = False,
) -> None:
    """Print the command that starts a serving engine with a method.

    If the engine needs keys in config.json, they are printed as well. Without --method, command and keys are for the
    patch that the folder carries, or for the model as published. No weights are read.

    Example: `rope-ext serve-config reference --method yarn --factor 4 --engine vllm`
    """
    methods.check_single()
    config = _configure(model, methods, source, engine, engine_version, plugin=plugin, server=server)
    print_result(config, as_json)


@command("Tool box: serve")
def gguf(
    file: Annotated[Path, typer.Argument(metavar="IN.gguf", help="The GGUF file of the model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The copy; must not exist yet.")],
    methods: PatchChoice,
    source: SourceOptions,
    model: str | None = argument(
        None, "The folder or Hub id that the file was made from. Default: the file itself.", metavar="MODEL"
    ),
    as_json: Json = False,
) -> None:
    """Write a copy of a GGUF file with a method.

    The metadata and the tensors of divisors change; weights are copied as they are.

    Example: `rope-ext gguf model.gguf model-yarn.gguf --method yarn --factor 4`
    """
    from rope_ext_hf.tools.gguf.rewriting import rewrite

    methods.check_single()
    config = _configure(str(file) if model is None else model, methods, source, "gguf", None)
    rewrite(file, out, config)
    print_text(json_text(config.to_dict() | {"out": str(out)}) if as_json else f"{config}\n# written to {out}")


@command("Tool box: serve")
def audit(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder or Hub id, a config.json or a GGUF file.")],
    revision: str | None = argument(None, "Branch, tag or commit on the Hub.", metavar="NAME"),
    engine: str | None = argument(None, "Show this engine or other program alone, and what to do.", metavar="NAME"),
    as_json: Json = False,
) -> None:
    """Compare what serving engines compute from a config or GGUF.

    For each engine it prints the longest wavelength, the magnitude and the length, or how they differ from those of
    transformers. The exit code is 1 if the engines do not agree, or the file has a problem. One line names the
    converters, exporters and other programs that would silently compute something else.

    Example: `rope-ext audit reference`
    """
    from rope_ext_hf.tools.serving.auditing import audit as audit_path

    result = audit_path(path, revision=revision, engine=engine)
    print_result(result, as_json)
    if not result.agrees:
        raise typer.Exit(1)


def _configure(
    model: str, methods: PatchChoice, source: SourceOptions, engine: str, version: str | None, **options: Any
) -> ServingConfig:
    from rope_ext_hf.tools.serving.configs import serving_config

    return serving_config(
        model, engine, engine_version=version, **options, **source.version, **methods.arguments_of_patch
    )


@command("Tool box: serve")
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a model or an adapter.")],
    publish: PublishOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...", help="Folders of runs that measured it. Default: keep the results that the card has."
        ),
    ] = None,
    base_model: str | None = argument(None, "The model on the Hub that it was made from.", metavar="OWNER/NAME"),
    trust_remote_code: bool = argument(False, "Run the Python code that comes with the model."),
    as_json: Json = False,
) -> None:
    """Write the model card of a folder, with the results of runs.

    The card says how to load and serve the folder. The text of a card that exists already is kept, with its licence
    and tags. Results also go into FOLDER/.eval_results, in the form that the Hugging Face Hub reads. A run that
    measured other weights or another method is refused.

    Example: `rope-ext card longer rope-ext-results/longer-perplexity-0123456789`
    """
    from rope_ext_hf.tools.serving.model_card import RESULTS, write_card

    publish.check()
    written = write_card(folder, runs or (), base_model=base_model, trust_remote_code=trust_remote_code)
    files = [written, *sorted((folder / RESULTS).glob("*.yaml"))]
    print_text(
        json_text([str(file) for file in files]) if as_json else "\n".join(f"written to {file}" for file in files)
    )
    publish.upload(folder, trust_remote_code=trust_remote_code)

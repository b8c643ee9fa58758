"""The decorator of commands, `command`, and the options that several commands share.

A command takes groups of options as dataclasses; every field becomes an option (`rope_ext_hf.cli.dataclass_options`):

    @command("Patch a model")
    def describe(model: Model, methods: LayerChoice, colour: bool = argument(False, "In colours.")) -> None: ...

Nothing here imports torch when it is imported, so that --help answers at once: what loads a model is imported by the
methods that load it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rope_ext_hf.options.arguments import Options, argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["CONTINUES", "DryRun", "EvalOptions", "Json", "LoadOptions", "Model", "SourceOptions", "command"]

C = TypeVar("C", bound=Callable[..., Any])

Model = Annotated[
    str,
    typer.Argument(
        help="A folder or Hub id, of a model or a PEFT adapter; a GGUF file; or 'reference': the model bundled with "
        "this package."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and its time, memory and disk; read no weights.")
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The folder for results; each run gets a folder of its own in it.")
]


@dataclass(frozen=True)
class CommandSettings:
    """Settings of one command of `rope-ext`."""

    panel: str  # the title under which `rope-ext --help` lists it
    interrupted: str = ""  # advice after Ctrl-C or SIGTERM, if the command had begun to write in a folder
    repeats: bool = False  # whether its first argument decides which command takes the others, as for `run`
    light: bool = False  # whether it mostly needs no transformers, which is imported only when it is needed then


CONTINUES = "the same command continues where it stopped"
"""The text of `CommandSettings.interrupted` for a command that keeps its results as they come."""


def command(panel: str, *, interrupted: str = "", repeats: bool = False, light: bool = False) -> Callable[[C], C]:
    """Return a decorator that makes a function a command of `rope-ext`, named like the function, with hyphens.

    The function's parameters, and the fields of the dataclasses among them, become options; its docstring is the help.
    It prints its results with `rope_ext_hf.cli.console.print_text`, because `print` writes to standard error inside a
    command. transformers is imported before the command runs, unless it is `light`. Another package adds a command by
    an entry point of the group rope_ext_hf.commands.
    """

    def add_settings(function: C) -> C:
        function.command_settings = CommandSettings(panel, interrupted, repeats, light)  # type: ignore[attr-defined]
        return function

    return add_settings


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Options about the source of a model: its revision, and whether the code that comes with it may run."""

    PANEL = "Model"

    revision: str | None = argument(None, "Branch, tag or commit on the Hub.", metavar="NAME")
    trust_remote_code: bool = argument(False, "Run the Python code that comes with the model.")

    @property
    def version(self) -> dict[str, Any]:
        """The revision and the permission to run code, as keyword arguments for functions that read a model."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def empty_model(self, model: str) -> PreTrainedModel:
        """Load the model without its weights, which is enough to describe it, to patch it and to plan."""
        from rope_ext_hf.hub import load_empty

        return load_empty(model, **self.version)

    def tokenizer(self, model: str) -> PreTrainedTokenizerBase:
        from rope_ext_hf.hub import load_tokenizer

        return load_tokenizer(model, **self.version)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(SourceOptions):
    """Options for loading a model: the precision of its weights, and the device that it runs on."""

    dtype: str = argument("auto", "auto (as saved), float32, bfloat16 or float16.", metavar="DTYPE")
    device: str = argument("auto", "auto, cpu, cuda, cuda:1, mps, ...", metavar="DEVICE")
    device_map: str | None = argument(None, "auto: spread a large model over all devices.", metavar="MAP")

    def model(self, model: str, device_map: dict[str, Any] | None = None) -> PreTrainedModel:
        """Load the model with its weights; `device_map`: the place of each of its parts, else as the options say."""
        from rope_ext_hf.hub import load_model

        places = device_map or self.device_map
        return load_model(model, dtype=self.dtype, device=self.device, device_map=places, **self.version)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(LoadOptions):
    """Options for measuring a model: how it is loaded, and how many tokens go through it at a time."""

    tokens_per_pass: int | None = argument(
        None, "Tokens that go through the model at a time. Default: as many as memory allows.", least=16, metavar="N"
    )
    offload_cache: bool = argument(
        False, "Keep keys and values in main memory instead of on the GPU while prompts are answered."
    )

    @property
    def reading(self) -> dict[str, Any]:
        """The options about passes through the model, as keyword arguments of `rope_ext_hf.eval.measure`."""
        return {"chunk": self.tokens_per_pass, "offload_cache": self.offload_cache}

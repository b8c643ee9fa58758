"""The command line: `rope-ext COMMAND --help` shows an example of each command.

Bad input ends with one line on standard error and exit code 2; a loss that is not finite with exit code 1; Ctrl-C with
130. torch and transformers load inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rope_ext_hf import __version__
from rope_ext_hf.bounds import LIMITS, limits
from rope_ext_hf.cli import demo, evaluation, lm_eval, models, run_files
from rope_ext_hf.cli.console import all_results, print_error, print_text, results_to, short_warnings
from rope_ext_hf.cli.options import CommandSettings, expand_options, method_parameters
from rope_ext_hf.errors import MethodError, RopeExtError, did_you_mean, one_line, short
from rope_ext_hf.plug_ins import plug_in, plug_in_names

_LIBRARY = (
    demo.demo,
    models.methods,
    models.describe,
    models.patch,
    models.convert,
    models.detect,
    evaluation.ppl,
    evaluation.sweep,
    evaluation.passkey,
    evaluation.report,
    run_files.run,
    lm_eval.lm_eval,
)
"""The commands of the library, in the order of --help; those of plug-ins come behind them."""


def _plugged_in() -> list[Callable[..., Any]]:
    """The commands that plug-ins add; one that cannot be loaded stops no other, and is named on standard error."""
    commands = []
    for name in plug_in_names("commands"):
        try:
            commands.append(plug_in("commands", name))
        except RopeExtError as error:
            print_error(f"the command {error}")
    return commands


_ANYWHERE = frozenset({"--raise-limit", "--traceback"})
"""Options of `rope-ext` itself that are accepted behind the command too."""


class _Command(TyperCommand):
    """A command that answers a misspelt option with the nearest one, and accepts the methods' own parameters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the methods' parameters out of the arguments, into `ctx.args`, and parse the others."""
        ordinary, parameters = self._split(ctx, args)
        super().parse_args(ctx, ordinary)
        ctx.args = parameters
        return parameters

    def invoke(self, ctx: Any) -> Any:
        """Run the command; standard output holds nothing but its results, and standard error one line for an error."""
        with results_to():
            return super().invoke(ctx)

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        options: dict[str, Any] = {
            name: param
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        }
        takes_methods = "--method" in options
        ordinary: list[str] = []
        parameters: list[str] = []
        rest = list(args)
        while rest:
            arg = rest.pop(0)
            if arg == "--":
                return [*ordinary, arg, *rest], parameters
            name, equals, value = arg.partition("=")
            if name not in options and (dashed := name.replace("_", "-")) in options:  # as lm-eval has them
                name, arg = dashed, dashed + equals + value
            if name in options or not arg.startswith("--"):
                ordinary.append(arg)
                if name in options and not equals and not options[name].is_flag and rest:
                    ordinary.append(rest.pop(0))
                continue
            known = {f"--{parameter.replace('_', '-')}" for parameter in method_parameters()} if takes_methods else {}
            if name not in known and name.replace("_", "-") not in known:
                hint = did_you_mean(name, [*options, *known])
                ctx.fail(f"no such option: {short(name)}.{hint}")
            parameters.append(arg)
            if not equals and rest and not (rest[0].startswith("--") or rest[0] in options):
                parameters.append(rest.pop(0))
        return ordinary, parameters


class _Repeated(_Command):
    """A command whose first argument says which command takes the others."""

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        return (["--help"], []) if "--help" in args else (args[:1], args[1:])


_PATTERN_HINT = "; a shell turns a pattern such as texts/*.txt into several arguments: quote it, --data 'texts/*.txt'"


class _Group(TyperGroup):
    """`rope-ext` itself: every error a user can cause becomes one line, every warning too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse its own options, which may stand anywhere on the line: errors advise to add one to what was typed."""
        own: list[str] = []
        rest: list[str] = []
        waiting = list(args)
        while waiting and waiting[0] != "--":
            arg = waiting.pop(0)
            name = arg.partition("=")[0]
            (own if name in _ANYWHERE else rest).append(arg)
            if name == arg == "--raise-limit" and waiting:
                own.append(waiting.pop(0))
        return super().parse_args(ctx, [*own, *rest, *waiting])

    def invoke(self, ctx: Any) -> Any:
        try:
            with all_results():
                return super().invoke(ctx)
        except (RopeExtError, OSError) as error:
            if ctx.params["traceback"] and not isinstance(error, BrokenPipeError):
                traceback.print_exception(error)
            raise
        except (KeyboardInterrupt, typer.Abort) as error:  # the second at a question
            hint = _SETTINGS[ctx.invoked_subcommand].interrupted if ctx.invoked_subcommand in _SETTINGS else ""
            print_error("stopped" + (f"; {hint}" if hint else ""))
            raise typer.Exit(130) from error

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            with all_results(), short_warnings():
                code = super().main(*args, **kwargs | {"standalone_mode": False})
        except BrokenPipeError:  # the reader has seen enough
            code = 1
        except Exception as error:
            print_error(_message(error))
            code = 2
            if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):  # others of a launcher would wait
                from rope_ext_hf.runs.workers import tell_others

                tell_others(error)
        raise SystemExit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str:
    """What an error of a user says; of one of the disk, which a library met, the file too. Others are raised again."""
    if isinstance(error, RopeExtError):
        return str(error)
    if isinstance(error, OSError):
        where = repr(str(error.filename)) if error.filename else "a file"
        return f"{where} could not be read or written: {error.strerror or one_line(error)}"
    if not hasattr(error, "format_message"):  # the base class of usage errors moved between typer's versions
        raise error
    text: str = error.format_message()
    return text + _PATTERN_HINT if "unexpected extra argument" in text else text


app = typer.Typer(
    name="rope-ext", cls=_Group, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _print_version(requested: bool) -> None:
    if requested:
        print_text(f"rope-ext {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Before an error, also print where in the code it came from.")
    ] = False,
    raise_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help=f"Raise a limit on what a model folder may ask for: {', '.join(LIMITS)}. May be repeated.",
        ),
    ] = None,
) -> None:
    """Longer context for Hugging Face models: patch RoPE methods in, and measure what they do."""
    for value in raise_limit or ():
        name, _, number = value.partition("=")
        if not re.fullmatch("[0-9]{1,18}", number):
            raise MethodError(f"--raise-limit takes NAME=NUMBER, e.g. layers=5000; got {short(value)!r}")
        context.with_resource(limits(**{name: int(number)}))
    if context.invoked_subcommand is None:
        print_text(context.get_help())


_SETTINGS: dict[str, CommandSettings] = {}
"""The settings of every command, by the name that is typed."""

_functions: list[Any] = [*_LIBRARY, *_plugged_in()]
for _function in _functions:
    _settings: CommandSettings = _function.command_settings
    _name = _function.__name__.replace("_", "-")
    _SETTINGS[_name] = _settings
    app.command(_name, cls=_Repeated if _settings.repeats else _Command, rich_help_panel=_settings.panel)(
        expand_options(_function)
    )


def main() -> None:
    with suppress(OSError):  # either stream may be closed
        # Compiled code, that of tokenizers say, prints past sys.stdout: its file descriptor becomes standard error's.
        results = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = open(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115, PTH123
    app()

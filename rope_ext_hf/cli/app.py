"""The program `rope-ext`: its commands, its own options, and its errors.

Bad input ends with one line on standard error and exit code 2; a loss that is not finite with exit code 1; Ctrl-C with
130, and SIGTERM, which job schedulers send, with 143. `rope-ext COMMAND --help` shows an example of each command. torch
and transformers are imported inside the commands, here and in the other modules of this folder, so that --help answers
at once. `main` imports the module of the command that was typed; `app`, the program with all commands, imports all.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rope_ext_hf import __version__
from rope_ext_hf.bounds import LIMITS, limits
from rope_ext_hf.cli.console import all_results, print_error, print_text, results_to, short_warnings
from rope_ext_hf.cli.dataclass_options import expand_options
from rope_ext_hf.cli.options import CommandSettings
from rope_ext_hf.cli.parameters import split_arguments
from rope_ext_hf.errors import MethodError, RopeExtError, one_line, short
from rope_ext_hf.files.whole import LOCKED
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.stopping import end_on_shortened_files, raising, stopped

if TYPE_CHECKING:
    app: typer.Typer

_COMMANDS = {
    "demo": "rope_ext_hf.cli.demo:demo",
    "methods": "rope_ext_hf.cli.models:methods",
    "describe": "rope_ext_hf.cli.models:describe",
    "patch": "rope_ext_hf.cli.models:patch",
    "convert": "rope_ext_hf.cli.models:convert",
    "detect": "rope_ext_hf.cli.models:detect",
    "ppl": "rope_ext_hf.cli.evaluation:ppl",
    "sweep": "rope_ext_hf.cli.evaluation:sweep",
    "passkey": "rope_ext_hf.cli.evaluation:passkey",
    "report": "rope_ext_hf.cli.evaluation:report",
    "run": "rope_ext_hf.cli.run_files:run",
    "lm-eval": "rope_ext_hf.cli.lm_eval:lm_eval",
}
"""The commands of the library, in the order of --help, and their functions, as entry points name those of plug-ins."""
_REPEATING = "run"
"""The command that runs another one, so that it needs the program with all commands."""


def _plug_in_commands() -> list[Callable[..., Any]]:
    """Return the commands of plug-ins; a plug-in that cannot be loaded is named on standard error and left out."""
    commands = []
    for name in plug_in_names("commands"):
        try:
            commands.append(plug_in("commands", name))
        except RopeExtError as error:
            print_error(f"the command {error}")
    return commands


_ANYWHERE = frozenset({"--raise-limit", "--traceback"})
"""Options of `rope-ext` itself that may also stand behind the command."""


class _Command(TyperCommand):
    """A command of typer that also takes the parameters of methods as options, and corrects misspelt options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the parameters of methods from the arguments to `ctx.args`, and let typer parse the other arguments."""
        declared, parameters = self._split(ctx, args)
        super().parse_args(ctx, declared)
        ctx.args = parameters
        return parameters

    def invoke(self, ctx: Any) -> Any:
        """Run the command; only its results go to standard output, and what libraries print goes to standard error."""
        with results_to():
            return super().invoke(ctx)

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        takes_value = {
            name: not getattr(parameter, "is_flag", False)  # arguments have no flags
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")  # an option, and no argument
        }
        return split_arguments(args, takes_value, takes_methods="--method" in takes_value)


class _RepeatingCommand(_Command):
    """The command `run`: the run file in its first argument decides which options may follow."""

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        return (["--help"], []) if "--help" in args else (args[:1], args[1:])


class _Group(TyperGroup):
    """The program `rope-ext`: it prints each error that a user can cause, and each warning, as one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the options of `rope-ext` itself in front of the command.

        Users may type them anywhere on the line, because error messages advise adding one at the end.
        """
        own: list[str] = []
        rest: list[str] = []
        waiting = list(args)
        while waiting and waiting[0] != "--":
            word = waiting.pop(0)
            name, equals, _ = word.partition("=")
            if name not in _ANYWHERE:
                rest.append(word)
                continue
            own.append(word)
            if name == "--raise-limit" and not equals and waiting:
                own.append(waiting.pop(0))
        return super().parse_args(ctx, [*own, *rest, *waiting])

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line."""
        with _stop_as_exit():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        LOCKED.clear()
        try:
            with _stop_as_exit(ctx), all_results():
                return super().invoke(ctx)
        except (RopeExtError, OSError) as error:
            if ctx.params["traceback"] and not isinstance(error, BrokenPipeError):
                traceback.print_exception(error)
            raise

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the program and exit; print errors here, instead of letting typer print them."""
        code, reason = 1, "its command does not measure"
        try:
            with all_results(), short_warnings():
                code = super().main(*args, **kwargs | {"standalone_mode": False})
        except BrokenPipeError:  # the program that reads the output, such as `head`, has seen enough
            pass
        except Exception as error:
            reason = one_line(error)
            print_error(_message(error))
            code = 2
        finally:
            request, shared = stopped(), os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
            # The other processes would wait for this one. After a stop, torch may be half imported.
            if shared and (request is None or "rope_ext_hf.runs.workers" in sys.modules):
                from rope_ext_hf.runs.workers import tell_others

                tell_others(reason if request is None else str(request), failed=bool(code))
        raise SystemExit(code if isinstance(code, int) else 0)


@contextmanager
def _stop_as_exit(context: Any = None) -> Iterator[None]:
    """End the program with one line if it is asked to stop in the `with` block, by a signal or by Ctrl-C at a question.

    A signal in the middle of an import may lead to an error of any kind.

    Args:
        context: that of the command, if it is known.
    """
    try:
        yield
    except BaseException as error:
        request = stopped()
        if request is None and not isinstance(error, (KeyboardInterrupt, typer.Abort)):
            raise
        settings = _SETTINGS.get(context and context.invoked_subcommand)
        begun = settings is not None and settings.interrupted and LOCKED  # a run in a folder, and no dry run
        print_error(f"stopped; {settings.interrupted}" if settings is not None and begun else "stopped")
        raise typer.Exit(130 if request is None else request.exit_code) from error


def _message(error: Exception) -> str:
    """Return the line to print for an error that a user can cause; raise all other errors again."""
    if isinstance(error, RopeExtError):
        return str(error)
    if isinstance(error, OSError):
        file = repr(str(error.filename)) if error.filename else "a file"
        return f"{file} could not be read or written: {error.strerror or one_line(error)}"
    if not hasattr(error, "format_message"):  # a usage error: versions of typer take its class from different modules
        raise error
    text: str = error.format_message()
    if "unexpected extra argument" in text:
        return f"{text}; quote a pattern, --data 'texts/*.txt', or the shell turns it into several arguments"
    return text


def _print_version(requested: bool) -> None:
    if requested:
        print_text(f"rope-ext {__version__}")
        raise typer.Exit


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


_SETTINGS: dict[str | None, CommandSettings] = {}
"""The settings of every command, by the name that is typed."""


def _program(functions: Iterable[Any]) -> typer.Typer:
    """Return the program with these commands; --help lists them in this order."""
    program = typer.Typer(
        name="rope-ext", cls=_Group, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    program.callback(invoke_without_command=True)(_options)
    for function in functions:
        settings: CommandSettings = function.command_settings
        name = function.__name__.replace("_", "-")
        _SETTINGS[name] = settings
        cls = _RepeatingCommand if settings.repeats else _Command
        program.command(name, cls=cls, rich_help_panel=settings.panel)(expand_options(function))
    return program


@cache
def _whole_program() -> typer.Typer:
    """Return the program with the commands of the library, and those of plug-ins behind them."""
    return _program([*map(resolve_name, _COMMANDS.values()), *_plug_in_commands()])


def __getattr__(name: str) -> Any:
    """Return the program with all commands, for `app`; they are imported when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _whole_program()


def main() -> None:
    """Run `rope-ext` with the arguments of this process."""
    with suppress(OSError):  # a stream may be closed
        _keep_results_apart()
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    alone = command in _COMMANDS and command != _REPEATING  # importing all commands takes longer than many of them run
    program = typer.main.get_command(_program([resolve_name(_COMMANDS[command])]) if alone else _whole_program())
    end_on_shortened_files()
    with raising():
        program()


def _keep_results_apart() -> None:
    """Send everything that is written to file descriptor 1 to standard error, except for `sys.stdout`.

    `results_to` redirects what Python code prints. Compiled code, such as that of tokenizers, writes to the descriptor
    itself, and its messages would end up among the results, for example inside JSON.
    """
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115, PTH123

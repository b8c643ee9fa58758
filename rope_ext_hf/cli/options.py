"""The options of the command line: their names, their help, and how their text is read, without importing torch.

A command takes groups of options as dataclasses; `expand_options` turns every field into an option of the command:

    @expand_options
    def describe(model: Model, methods: LayerChoice, colour: bool = argument(False, "In colours.")) -> None: ...

The fields of a `Question` say how they are asked for, as options of a command alone do; others are annotated for typer.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from rope_ext_hf.cli.console import print_note, quiet_transformers
from rope_ext_hf.errors import MethodError, short, size_text
from rope_ext_hf.files import list_files
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_ins
from rope_ext_hf.questions import Argument, Question, argument, command_line, kind_of, option_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = Annotated[
    str,
    typer.Argument(
        help="A folder or Hub id, of a model or a PEFT adapter, or 'reference': the model bundled with this package."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and its time, memory and disk; read no weights.")
]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where results are kept, each run in a folder of its own.")]

FROM_FILE = "rope_ext_hf.from_file"  # where a context's `meta` has the options of a run file, by name
_MOST_NESTING = 100  # of brackets in a value


C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class CommandSettings:
    """Settings of one command of `rope-ext`."""

    panel: str  # the title under which `rope-ext --help` lists it
    interrupted: str = ""  # what to do after Ctrl-C
    repeats: bool = False  # whether its first argument says which command takes the others


CONTINUES = "the same command continues where it stopped"
"""The text of `CommandSettings.interrupted` for a command that keeps its results as they come."""


def command(panel: str, *, interrupted: str = "", repeats: bool = False) -> Callable[[C], C]:
    """Make a function a command of `rope-ext`, by its name with hyphens; a decorator.

    Its parameters and the fields of the dataclasses among them become options, see `expand_options`; its docstring is
    the help. An entry point of the group rope_ext_hf.commands adds one of another package. It prints its results by
    `rope_ext_hf.cli.console.print_text`: what `print` writes goes to standard error.
    """

    def settle(function: C) -> C:
        function.command_settings = CommandSettings(panel, interrupted, repeats)  # type: ignore[attr-defined]
        return function

    return settle


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Question):
    """Which version of a model is read, and whether its own code may run."""

    PANEL = "Model"

    revision: str | None = argument(None, "Branch, tag or commit on the Hub.", metavar="NAME")
    trust_remote_code: bool = argument(False, "Run the Python code that comes with the model.")

    @property
    def version(self) -> dict[str, Any]:
        """As functions that read a model take them."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def empty_model(self, model: str) -> PreTrainedModel:
        """The model without weights, which describing, patching and planning need no more than."""
        from rope_ext_hf.hub import load_empty

        return load_empty(model, **self.version)

    def tokenizer(self, model: str) -> PreTrainedTokenizerBase:
        from rope_ext_hf.hub import load_tokenizer

        return load_tokenizer(model, **self.version)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(SourceOptions):
    """How weights are loaded, and where the model runs."""

    dtype: str = argument("auto", "auto (as saved), float32, bfloat16 or float16.", metavar="DTYPE")
    device: str = argument("auto", "auto, cpu, cuda, cuda:1, mps, ...", metavar="DEVICE")
    device_map: str | None = argument(None, "auto: spread a large model over all devices.", metavar="MAP")

    def model(self, model: str) -> PreTrainedModel:
        from rope_ext_hf.hub import load_model

        return load_model(model, dtype=self.dtype, device=self.device, device_map=self.device_map, **self.version)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(LoadOptions):
    """How a model is loaded and how it reads."""

    tokens_per_pass: int | None = argument(
        None, "Tokens that go through the model at a time. Default: as many as memory allows.", least=16, metavar="N"
    )
    offload_cache: bool = argument(False, "Keep keys and values in main memory instead of on the GPU.")

    @property
    def reading(self) -> dict[str, Any]:
        """How the model reads, as `rope_ext_hf.eval.measure` takes it."""
        return {"chunk": self.tokens_per_pass, "offload_cache": self.offload_cache}


@dataclass(frozen=True, kw_only=True)
class PublishOptions(Question):
    """Whether the folder that a command writes is uploaded."""

    push_to_hub: str | None = argument(
        None, "Also upload the folder to the Hugging Face Hub, after asking; private.", metavar="OWNER/NAME"
    )
    public: bool = argument(False, "Make the uploaded repository public.")
    yes: bool = argument(False, "Do not ask.", names=("--yes", "-y"))

    def check(self) -> None:
        """Refuse, before any work, what would stop the upload."""
        from rope_ext_hf.downloads import check_upload

        if self.push_to_hub is None:
            if self.public:
                raise MethodError("--public says how --push-to-hub uploads; give that as well")
            return
        if not (self.yes or sys.stdin.isatty()):
            raise MethodError("nobody can be asked here whether to upload; give --yes")
        check_upload(self.push_to_hub, private=not self.public)

    def upload(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Upload a folder under the name asked for, which its card gets; what goes is printed, and asked about."""
        if self.push_to_hub is None:
            return
        from rope_ext_hf.downloads import upload

        write_cards(folder, name=self.push_to_hub, trust_remote_code=trust_remote_code)
        sizes = {name: (folder / name).stat().st_size for name in list_files(folder)}
        kind = "public" if self.public else "private"
        print_note("upload", f"{size_text(sum(sizes.values()))} to the {kind} repository {self.push_to_hub}:")
        for name, size in sizes.items():
            print_note("", f"{name}, {size_text(size)}{_paths_in(folder / name)}")
        if not (self.yes or typer.confirm("Upload?", default=False, err=True)):
            later = command_line("card", folder, push_to_hub=self.push_to_hub, public=self.public)
            print_note("upload", f"not done; `{later}` does it")
            return
        print_note("uploaded", upload(folder, self.push_to_hub, private=not self.public))


def write_cards(folder: Path, **given: Any) -> None:
    """Let every plug-in of the group rope_ext_hf.cards write the card of a folder; `given` are its arguments."""
    for write in plug_ins("cards").values():
        write(folder, **given)


def _paths_in(file: Path) -> str:
    """Which paths of this machine a run file, a card or a config names, in words."""
    text = file.read_text("utf-8", errors="replace") if file.name.endswith((".yaml", ".md", "config.json")) else ""
    found = dict.fromkeys(re.findall(r"(?<![\w./:-])(?:[A-Z]:)?[/\\][^\s\"'`,;:)}\]]+", text))
    named = [each for each in found if len(Path(each).parts) > 2 and Path(each).parents[-2].is_dir()]
    return f"; it names {', '.join(named)}" if named else ""


def expand_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command in which every parameter that is a dataclass stands as its fields, one option each; so do theirs.

    The options of a question with a PANEL stand together under that title in the help.
    """
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(each for each in _options_of(command) if each.name != "context")]

    instead = {each.name: how.instead_of for group in questions_of(command) for each, how in group.described_fields()}

    @wraps(command)
    def run(context: typer.Context, **values: Any) -> Any:
        of_file: dict[str, Any] = dict(context.meta.pop(FROM_FILE, {}))
        for name in values:  # what was typed counts instead of a run file, also in another way of its `instead_of`
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                for other in (name, *instead.get(name, ()), *(["parameters"] if name == "method" else [])):
                    of_file.pop(other, None)
        arguments = _arguments(command, values | of_file | {"context": context})
        for question in _questions_in([*arguments.values()]):
            question.check_early()
        quiet_transformers()  # imports transformers
        return command(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def questions_of(group: Any) -> list[type[Question]]:
    """The questions that a command takes, those inside of other dataclasses too."""
    types = get_type_hints(group)
    found: list[type[Question]] = []
    for each in (types[name] for name in inspect.signature(group).parameters):
        if dataclasses.is_dataclass(each):
            found += [each] if isinstance(each, type) and issubclass(each, Question) else questions_of(each)
    return found


def _options_of(group: Any) -> list[inspect.Parameter]:
    """The options of a command or a dataclass, in the order of its parameters."""
    if isinstance(group, type) and issubclass(group, Question):
        return [_option(group, each, how) for each, how in group.described_fields() if how.option]
    types = get_type_hints(group, include_extras=True)
    own = {each.name: each for each in _options_of(_question_alone(group))}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(group).parameters.items():
        if name in own:
            parameters.append(own[name])
            continue
        if dataclasses.is_dataclass(types[name]):
            parameters += _options_of(types[name])
            continue
        parameters.append(parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


@cache
def _question_alone(command: Callable[..., Any]) -> type[Question]:
    """The options that are parameters of a command itself, as a question: those with a default by `asked`."""
    parameters = inspect.signature(command).parameters.values()
    fields = [(each.name, each.annotation, each.default) for each in parameters if type(each.default) is Field]
    return dataclasses.make_dataclass(command.__name__, fields, bases=(Question,), frozen=True, kw_only=True)


_TYPES = {"int": int, "float": float, "bool": bool, "Path": Path}


def _option(group: type[Question], field: Field[Any], how: Argument) -> inspect.Parameter:
    """The option of one field of a question; what is parsed comes as text."""
    holders = (each for each in group.__mro__ if field.name in vars(each).get("__annotations__", ()))
    panel = getattr(next(holders), "PANEL", None)
    default = field.default if how.typed is ... else how.typed
    kind: Any = str if how.parse else _TYPES.get(kind_of(field), str)
    if how.repeated:
        kind = list[str]
    elif how.parse and default is not None and default is not dataclasses.MISSING:
        default = how.show(default) if how.show and default != how.typed else option_text(default)
    dashed = f"--{field.name.replace('_', '-')}"
    names = how.names or (
        (dashed if default is False else f"{dashed}/--no-{dashed[2:]}",) if kind is bool else (dashed,)
    )
    least = {"min": kind(how.least)} if kind in (int, float) and how.least > -math.inf else {}
    option = typer.Option(*names, metavar=how.metavar, help=how.help, rich_help_panel=panel, **least)
    empty = default is dataclasses.MISSING
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if empty else None if how.repeated else default,
        annotation=Annotated[kind | None if default is None or how.repeated else kind, option],
    )


def _questions_in(values: Iterable[Any]) -> Iterator[Question]:
    """Yield the questions among values and inside of those that are dataclasses."""
    for value in values:
        if isinstance(value, Question):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _questions_in([getattr(value, each.name) for each in dataclasses.fields(value)])


def _call(group: Any, values: dict[str, Any]) -> Any:
    """Make a question, or another dataclass, with its options from the values."""
    if isinstance(group, type) and issubclass(group, Question):
        names = [
            each.name for each, _ in group.described_fields()
        ]  # one that is no option may be another group's, as model
        given = {name: values[name] for name in names if values.get(name) is not None}
        if issubclass(group, MethodChoice):
            given["parameters"] = given.get("parameters", {}) | parse_parameters(values["context"].args)
        try:
            return group(**given)
        except MethodError as error:  # its fields stand as options
            fields = "|".join(
                sorted((each.name for each, how in group.described_fields() if how.option), key=len, reverse=True)
            )
            words = rf"^({fields})(?= (must|takes|is))|(?<=; give )({fields})(?=,)|(?<= what )({fields})(?= names)"
            raise MethodError(re.sub(words, lambda m: f"--{m[0].replace('_', '-')}", str(error))) from error
    return group(**_arguments(group, values))


def _arguments(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command or a dataclass, made of the values of its options."""
    types = get_type_hints(group)
    arguments: dict[str, Any] = _call(_question_alone(group), values).arguments
    for name in inspect.signature(group).parameters.keys() - arguments.keys():
        arguments[name] = _call(types[name], values) if dataclasses.is_dataclass(types[name]) else values[name]
    return arguments


def parse_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--beta-fast", "16", "--sticky"]` as `{"beta_fast": 16, "sticky": True}`; comma lists as tuples of floats."""
    parameters: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise MethodError(f"unexpected argument {short(option)!r}")
        name, has_value, value = option[2:].partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        if value.count("[") + value.count("{") > _MOST_NESTING:
            raise MethodError(f"a parameter is a number, a word or a comma list of numbers; got {short(value)!r}")
        parsed: Any = value
        with suppress(ValueError):  # a word
            parsed = tuple(map(float, value.strip("[]").split(","))) if "," in value else json.loads(value)
        parameters[name.replace("-", "_")] = parsed
    return parameters


def method_parameters() -> set[str]:
    from rope_ext_hf.methods.registry import list_methods

    return {name for method in list_methods().values() for name in method.parameters}

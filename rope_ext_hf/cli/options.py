"""The options of the command line: their names, their help, and how their text is read.

A command takes groups of options as dataclasses; `expand_options` turns every field into an option of the command:

    @expand_options
    def ppl(model: Model, lengths: Lengths, methods: MethodOptions, load: LoadOptions) -> None: ...

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from rope_ext_hf.bounds import MOST_TOKENS, parse_length
from rope_ext_hf.errors import MethodError, did_you_mean, short
from rope_ext_hf.reading.protocols import protocol_help

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rope_ext_hf.methods.base import RopeMethod, Rotary


Model = Annotated[
    str,
    typer.Argument(
        help="A folder or Hub id, of a model or a PEFT adapter, or 'reference': the model bundled with this package."
    ),
]
Lengths = Annotated[str, typer.Option(metavar="LENGTHS", help="Context lengths in tokens, e.g. 4k,8k,16k (4k = 4096).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where results are kept, each run in a folder of its own.")]

ARGUMENTS = "rope_ext_hf.arguments"
"""Where a context's `meta` has everything that was typed after `rope-ext`."""
_MOST_NESTING = 100  # of brackets in a value


@dataclass(frozen=True)
class SourceOptions:
    """Which version of a model is read, and whether its own code may run."""

    PANEL: ClassVar[str] = "Model"

    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
    ] = False

    @property
    def version(self) -> dict[str, Any]:
        """As functions that read a model take them."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def empty_model(self, model: str) -> PreTrainedModel:
        """The model without weights, which describing, patching and planning need no more than."""
        from rope_ext_hf.hub import load_empty

        return load_empty(model, **self.version)

    def tokenizer(self, model: str) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        from rope_ext_hf.hub import load_tokenizer

        return load_tokenizer(model, **self.version)


@dataclass(frozen=True)
class LoadOptions(SourceOptions):
    """How weights are loaded, and where the model runs."""

    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto (as saved), float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(metavar="MAP", help="auto: spread a large model over all devices.")
    ] = None

    def model(self, model: str) -> PreTrainedModel:
        """The model with its weights, ready to be measured."""
        from rope_ext_hf.hub import load_model

        return load_model(model, dtype=self.dtype, device=self.device, device_map=self.device_map, **self.version)


@dataclass(frozen=True)
class EvalOptions(LoadOptions):
    """How a model is loaded and how it reads."""

    tokens_per_pass: Annotated[
        int | None,
        typer.Option(
            min=16, metavar="N", help="Tokens that go through the model at a time. Default: as many as memory allows."
        ),
    ] = None
    offload_cache: Annotated[
        bool, typer.Option("--offload-cache", help="Keep keys and values in main memory instead of on the GPU.")
    ] = False

    @property
    def reading(self) -> dict[str, Any]:
        """How the model reads, as `rope_ext_hf.eval.perplexity` takes it."""
        return {"chunk": self.tokens_per_pass, "offload_cache": self.offload_cache}


@dataclass(frozen=True)
class SpanOptions:
    """What text is read, and which of its tokens are scored."""

    PANEL: ClassVar[str] = "Text"

    data: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="'stdlib' (modules of Python's library that the bundled model was not trained on), a text, "
            "JSON lines or parquet file, a folder, a pattern, or hf:OWNER/NAME. Settings follow a question mark: "
            "?column=..&min_bytes=..&max_documents=..&seed=..&join=true, or join=CHARACTERS per document.",
        ),
    ] = "stdlib"
    protocol: Annotated[
        str, typer.Option(metavar="NAME", help=f"Which tokens are read and scored. {protocol_help()}.")
    ] = "matched"
    targets: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens scored per span under matched. Default: half the shortest length."),
    ] = None
    stride: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens between the starts of spans, under a protocol with a stride.")
    ] = 256
    max_spans: Annotated[
        str,
        typer.Option(
            metavar="N", help="Read at most N spans per length, spread evenly over the text; all: the whole text."
        ),
    ] = "64"
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos", help="Begin each span with the BOS token. Default: as the tokenizer or the protocol does."
        ),
    ] = None

    @property
    def most_spans(self) -> int | None:
        """--max-spans as a number, None for all.

        Raises:
            MethodError: something else.
        """
        if self.max_spans == "all":
            return None
        if not re.fullmatch("[1-9][0-9]{0,8}", self.max_spans):
            raise MethodError(f"--max-spans takes a number of at least 1 or all; got {short(self.max_spans)!r}")
        return int(self.max_spans)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `rope_ext_hf.eval.perplexity` beside the corpus and the lengths."""
        return {
            "protocol": self.protocol,
            "targets": parse_length(self.targets),
            "stride": self.stride,
            "max_spans": self.most_spans,
            "bos": self.bos,
        }


@dataclass(frozen=True)
class MethodOptions:
    """The methods asked for. Their further parameters keep their own names (--beta-fast 16)."""

    PANEL: ClassVar[str] = "Methods (see rope-ext methods; their parameters are options too, e.g. --beta-fast 16)"

    context: typer.Context
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", metavar="NAMES", help="Names, separated by commas; describe, patch and lm-eval take one."
        ),
    ] = None
    factor: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBERS", help="Extended length / context length, e.g. 8; 4,8 compares two."),
    ] = None
    target_length: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="The extended length in tokens, e.g. 32k. An alternative to --factor."),
    ] = None

    over: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What is extended. own: the model as loaded, with the scaling it was trained under. original: the "
            "model without that scaling. patched: the model with its present patch, if it was trained under that.",
        ),
    ] = "own"
    context_length: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="The length that the model as loaded is for, instead of what its config states."
        ),
    ] = None

    @property
    def names(self) -> list[str]:
        """The methods by name, in the order given.

        Raises:
            MethodError: an option that names none, of a script whose variable is empty, say.
        """
        names = split_list(self.method or [])
        if self.method and not names:
            raise MethodError("--method names no method; leave it out to have the model as loaded")
        return names

    @property
    def factors(self) -> list[float]:
        """The factors in the order given."""
        return parse_numbers("--factor", ",".join(self.factor), "2,4,8") if self.factor else []

    @property
    def extended_length(self) -> int | None:
        """--target-length in tokens."""
        return parse_length(self.target_length)

    @property
    def underneath(self) -> dict[str, Any]:
        """--over and --context-length, as `rope_ext_hf.patch` takes them."""
        length = parse_length(self.context_length)
        return {"over": self.over, "context_length": length}

    @property
    def parameters(self) -> dict[str, Any]:
        """The methods' further parameters."""
        return parse_parameters(self.context.args)

    def check(self, *, factor_alone: bool = False) -> None:
        """Refuse parameters that no method was given for.

        Args:
            factor_alone: whether a factor may stand without a method, for a command that has methods of its own.

        Raises:
            MethodError: a factor, a length or another parameter without a method.
        """
        options = ["--target-length"] if self.target_length else []
        options += ["--factor"] if self.factor and not factor_alone else []
        options += [f"--{name.replace('_', '-')}" for name in self.parameters]
        if not factor_alone:
            options += ["--over"] if self.over != "own" else []
            options += ["--context-length"] if self.context_length else []
        if options and not self.names:
            raise MethodError(f"{', '.join(options)} given without a method; add --method")

    def resolve(self, model: nn.Module, longest: int, lengths: Sequence[int] = ()) -> list[RopeMethod]:
        """Every method asked for, with every factor.

        Args:
            longest: the extended length where neither a factor nor a target length is given, in tokens.
            lengths: extended lengths that a method with a factor is fitted to instead, one after the other.
        """
        from rope_ext_hf.patches.geometry import bind, patch_geometry

        self.check()
        rotary = patch_geometry(model, **self.underneath)
        longest = max(longest, rotary.context_length)
        bound = (
            bind(model, method, reach, **self.underneath)
            for method, reach in self.over_rotary(rotary, longest, lengths)
        )
        return list(dict.fromkeys(bound))

    def over_rotary(
        self, rotary: Rotary, longest: int, lengths: Sequence[int] = ()
    ) -> Iterator[tuple[RopeMethod, int]]:
        """Every method asked for, with every factor, before it is bound to a model, and its extended length."""
        from rope_ext_hf.methods.registry import accepts_factor, resolve_method
        from rope_ext_hf.patches.geometry import stated_length

        for name in self.names:
            parameters = self._parameters_for(name)
            beyond = [length for length in lengths if length > rotary.context_length and accepts_factor(name)]
            asked: list[tuple[float | None, int | None]] = [(factor, None) for factor in self.factors]
            for factor, fitted in asked or [(None, length) for length in beyond or [longest]]:
                length = self.extended_length or fitted
                method = resolve_method(name, rotary, factor=factor, target_length=length, **parameters)
                yield method, length or stated_length(method, rotary, factor) or longest

    def _parameters_for(self, name: str) -> dict[str, Any]:
        """The further parameters for one of several methods: those it takes, and those that none of them takes."""
        from rope_ext_hf.methods.registry import list_methods

        fields = {
            other: {field.name for field in dataclasses.fields(method)} for other, method in list_methods().items()
        }

        def takes(method: str, parameter: str) -> bool:  # a method without fields here is an alias, or unknown
            return method not in fields or not fields[method].isdisjoint({parameter, "frequency"})

        return {
            parameter: value
            for parameter, value in self.parameters.items()
            if takes(name, parameter) or not any(takes(other, parameter) for other in self.names)
        }


@dataclass(frozen=True)
class PatchOptions(MethodOptions):
    """One method with one factor."""

    def check_single(self, *, required: bool = False) -> None:
        """Refuse several methods or factors, and options that no method was given for.

        Raises:
            MethodError: one of these, or no method where one is required.
        """
        self.check()
        if required and not self.names:
            raise MethodError("which method? Add --method, e.g. --method yarn --factor 8; `rope-ext methods` lists all")
        if len(self.names) > 1 or len(self.factors) > 1:
            given = ", ".join([*self.names, *(f"{factor:g}" for factor in self.factors)])
            raise MethodError(
                f"this command takes one method and one factor, got {given}; ppl and sweep compare several"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The method with everything that was asked for, as `rope_ext_hf.patch` takes it; without one None."""
        return {
            "method": self.names[0] if self.names else None,
            "factor": self.factors[0] if self.factors else None,
            "target_length": self.extended_length,
            **self.underneath,
            **self.parameters,
        }

    @property
    def choice(self) -> dict[str, Any]:
        """Arguments of `rope_ext_hf.patch` for the layers to change."""
        return {}

    def apply(self, model: nn.Module, *, native: bool = False) -> None:
        """Patch a model, in place, with the method that was asked for, if there is one."""
        from rope_ext_hf.patches.patching import patch

        if self.names:
            patch(model, native=native, **self.choice, **self.arguments)


def expand_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command in which every parameter that is a dataclass stands as its fields, one option each; so do theirs.

    The options of a dataclass with a PANEL stand together under that title in the help.
    """
    parameters = _options_of(command)

    @wraps(command)
    def run(**values: Any) -> Any:
        return _call(command, values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    """The options of a command or a dataclass, in the order of its parameters."""
    types = get_type_hints(group, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(group).parameters.items():
        if dataclasses.is_dataclass(types[name]):
            parameters += _options_of(types[name])
            continue
        for option in getattr(types[name], "__metadata__", ()) if hasattr(group, "PANEL") else ():
            option.rich_help_panel = group.PANEL
        parameters.append(parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


def _call(group: Any, values: dict[str, Any]) -> Any:
    """Call a command, or make a dataclass, with its options from the values."""
    types = get_type_hints(group)
    given: dict[str, Any] = {}
    for name in inspect.signature(group).parameters:
        given[name] = _call(types[name], values) if dataclasses.is_dataclass(types[name]) else values[name]
    return group(**given)


def split_list(values: Sequence[str]) -> list[str]:
    """The parts of comma lists, blanks around them left out."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def parse_numbers(option: str, text: str, example: str) -> list[float]:
    """A comma list of finite numbers.

    Raises:
        MethodError: anything else; the message shows the option and an example.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise MethodError(f"{option} takes numbers, e.g. {example}; got {short(text)!r}") from error
    for number in numbers:
        if not abs(number) <= MOST_TOKENS:
            raise MethodError(f"{option} must be a finite number of a possible size, e.g. {example}; got {number}")
    return numbers


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
            raise MethodError(f"unexpected argument {short(option)!r}")
        name, has_value, value = option[2:].partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        parameters[name.replace("-", "_")] = _parse_value(value)
    return parameters


def _parse_value(text: str) -> Any:
    if text.count("[") + text.count("{") > _MOST_NESTING:
        raise MethodError(f"a parameter is a number, a word or a comma list of numbers; got {short(text)!r}")
    try:
        if "," in text:
            return tuple(float(number) for number in text.strip("[]").split(","))
        return json.loads(text)
    except ValueError:
        return text


def unknown_option(option: str, known: Sequence[str]) -> str:
    """The message for an option that a command does not have."""
    if option == "--plot":
        return "no such option: --plot. `rope-ext explain` draws: a model, or a geometry, under the methods of --method"
    return f"no such option: {short(option)}.{did_you_mean(option, known)}"

"""A run as a YAML file: the command with its options, package versions, and digests of the model and the text.

    run: ppl
    model: reference
    lengths: [256, 1024]
    method: [yarn]
    factor: [4]
    inputs: {perplexity: {the model: d81a7ce491846430, the text: 9d1009d1a8398c5d}}
    format: 1

Every run leaves such a file beside its results, and `rope-ext run FILE` repeats it. The keys are the options of the
command, which are the fields of the dataclasses that hold its arguments (`rope_ext_hf.options.arguments`). This module
does not depend on any kind of run. A file may hold several runs, one after the other, with a line `---` between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rope_ext_hf.errors import FileError, MethodError, RopeExtError, did_you_mean, listed, one_line, short
from rope_ext_hf.files.model_folders import model_commit
from rope_ext_hf.files.plain_yaml import PlainLoader
from rope_ext_hf.files.whole import with_tilde, write_text
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import method_from_dict
from rope_ext_hf.models.patch_records import saved_patches
from rope_ext_hf.options.arguments import Options, anything, shell_line
from rope_ext_hf.patches.loading import find_config
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.text.documents import corpus_name
from rope_ext_hf.reference import folder_of
from rope_ext_hf.runs.folder.identity import versions_now
from rope_ext_hf.runs.folder.journal import read_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Inputs", "RunFile", "check_inputs", "comparing_inputs", "inputs_of", "run_file"]

Inputs = Mapping[str, Mapping[str, str]]
"""Digests of the inputs of a run, by the kind of run and by their names in messages: "the model", "the text"."""

RUN_FILE = "run.yaml"  # the name of the file in a run's folder
IN_MEMORY = "in_memory"
"""The only key of a value that no file can hold, such as a list of texts; it says what the value was."""
_FORMAT = 1  # the format that is written
_MOST_BYTES = 100_000  # PyYAML reads some 130,000 bytes a second
_DIGITS = 16  # of a digest
_HEAD = "# To repeat this run: rope-ext run FILE. Its options override, e.g. --out again\n"


@dataclass(frozen=True)
class RunFile:
    """The content of a run file: the command, model and options of one run, as the user gave them.

    Attributes:
        command: the command of `rope-ext` that makes the run.
        model: a folder, a Hub id, or "reference" for the bundled model; a dict with the key `IN_MEMORY` where no file
            can name the model.
        options: all other options, by their names in Python.
        versions: the versions of the packages that the run was measured with.
        inputs: digests of the model and the text that were measured; empty in a file that was written by hand.
        in_memory: whether the model was given in memory, so that its weights may differ from those in its folder.
        lines: the line number of each key in the file `source`.
        source: the file that this run was read from; None: it was not read from a file.
    """

    command: str
    model: Any
    options: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    in_memory: bool = field(default=False, compare=False)
    lines: dict[str, int] = field(default_factory=dict, compare=False)
    source: Path | None = field(default=None, compare=False)

    def text(self) -> str:
        """Return the run as YAML; the model and its revision come first."""
        values = {"run": self.command, "model": self.model}
        if "revision" in self.options:
            values["revision"] = self.options["revision"]
        values |= {**self.options, "versions": self.versions}
        values |= {"inputs": self.inputs} if self.inputs else {}
        values |= {"format": _FORMAT}
        plain = _plain(values)
        return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100))

    def write(self, folder: Path, *, beside_others: bool = False) -> None:
        """Write run.yaml into the folder of a run.

        Args:
            folder: the run's folder.
            beside_others: keep the other runs in a run.yaml that exists and can be read.
        """
        others: list[RunFile] = []
        if beside_others and (folder / RUN_FILE).exists():
            try:
                others = [other for other in read_run_files(folder) if other.request != self.request]
            except FileError:
                others = []
        write_text(folder / RUN_FILE, _HEAD + "---\n".join([file.text() for file in [*others, self]]))

    @property
    def request(self) -> str:
        """The text without versions and digests; it is equal for two runs with the same command, model and options."""
        return replace(self, versions={}, inputs={}).text()

    def with_inputs(self, kind: str, digests: Mapping[str, str]) -> RunFile:
        """Return this file with digests of the inputs of a run of one kind, by their names in messages."""
        return replace(self, inputs=self.inputs | {kind: {name: value[:_DIGITS] for name, value in digests.items()}})

    def mistake(self, key: str, text: str) -> FileError:
        """Return an error with a message that names the file, and the line on which a key stands."""
        return _mistake(self.source or Path(RUN_FILE), self.lines.get(key, 1), text)


def run_file(
    options: Options,
    model: PreTrainedModel | str | Path,
    *others: Options,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **further: Any,
) -> RunFile:
    """Return the run file for a measurement: its command, model and options.

    Args:
        options: the arguments of the measurement, such as `Perplexity`.
        model: a folder or Hub id; or a model in memory, which is named by its folder or Hub id if that holds the same
            patch.
        *others: further groups of arguments: the methods, and how the model is loaded.
        tokenizer: the tokenizer, if it is not the model's own.
        **further: further options by name; None is left out.
    """
    stated: dict[str, Any] = {}
    for part in (options, *others):
        stated |= _stated(part)
    stated |= {name: _plain(value) for name, value in further.items() if value is not None}
    if isinstance(model, (str, Path)):
        name: Any = str(model)
        commit = model_commit(name, revision=stated.get("revision"))
    else:
        name, commit = _name_of(model, tokenizer), getattr(model.config, "_commit_hash", None)
        stated |= {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    stated |= {"revision": commit} if commit else {}
    stated.pop("model", None)
    return RunFile(options.command, name, stated, versions_now(), in_memory=not isinstance(model, (str, Path)))


def _stated(options: Options) -> dict[str, Any]:
    """Return the fields of some options as values for YAML.

    A field that is None is left out, unless leaving it out means something else on the command line.
    """
    stated: dict[str, Any] = {}
    for field_, argument in options.described_fields():
        name, value = field_.name, getattr(options, field_.name)
        if name == "parameters":
            stated |= {parameter: _plain(setting) for parameter, setting in value.items()}
        elif argument.parse is anything and not isinstance(value, (str, Path, type(None))):
            stated[name] = {IN_MEMORY: corpus_name(value)}
        elif value is not None:
            stated[name] = _plain(value)
        elif argument.show is not None and argument.typed is not ...:
            stated[name] = argument.show(value)
    return {name: value for name, value in stated.items() if value != []}


def _plain(value: Any) -> Any:
    """Return a value in a form for YAML: methods become dicts, tuples become lists, other objects become text."""
    if isinstance(value, RopeMethod):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, type(None))) else with_tilde(str(value))


def _name_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Return the folder or Hub id of a model in memory, if what is stored there has the same patch.

    Otherwise, return a dict with the reason why no folder can stand for the model, under the key `IN_MEMORY`.
    """
    name = model.name_or_path
    if not name:
        return {IN_MEMORY: "a model that was not loaded from a folder"}
    if hasattr(model, "peft_config"):
        return {IN_MEMORY: "a model with an adapter"}
    if tokenizer is not None and tokenizer.name_or_path != name:
        return {IN_MEMORY: f"{name} with another tokenizer"}
    try:
        _, record, _ = find_config(name, local_files_only=True, revision=getattr(model.config, "_commit_hash", None))
        same = list(active_patches(model)) == (saved_patches(record) if record else [])
    except (RopeExtError, OSError):
        same = False
    if not same:
        return {IN_MEMORY: f"{name} with a patch that no folder holds"}
    return "reference" if name == str(folder_of("reference")) else name


_EXPECTED: ContextVar[Inputs | None] = ContextVar("_EXPECTED", default=None)


def inputs_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the inputs of a run, by their names in messages, from its settings."""
    return {"the model": settings["weights"], "the text": settings["text"]}


@contextmanager
def comparing_inputs(expected: Inputs) -> Iterator[None]:
    """Inside the `with` block, let `check_inputs` compare what is measured with the digests in a run file."""
    token = _EXPECTED.set(expected)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def check_inputs(kind: str, digests: Mapping[str, str]) -> None:
    """Raise FileError if a run file is being repeated, and what it measured has changed since.

    Args:
        kind: the kind of run.
        digests: those of the inputs that it is about to read, by their names in messages, such as "the text".
    """
    expected = (_EXPECTED.get() or {}).get(kind, {})
    changed = [name for name, digest in expected.items() if digests.get(name, digest)[:_DIGITS] != digest]
    if changed:
        raise FileError(
            f"{listed(changed)} changed since this run file was written, so that its numbers would not be repeated. "
            "To measure what is there now: --accept-changes"
        )


def how_to_repeat(folder: Path) -> tuple[str, str]:
    """Return the command that repeats the runs in a folder, and the text of its run.yaml; empty if it has none."""
    path = folder / RUN_FILE
    try:
        return with_tilde(shell_line(["run", str(path)])), "---\n".join([file.text() for file in read_run_files(path)])
    except FileError:
        return "", ""


def read_run_files(path: str | Path) -> list[RunFile]:
    """Return the runs that a run file describes, or the run.yaml in a folder.

    The values of the keys are not checked here, but by the command that repeats the run.

    Raises:
        FileError: the file cannot be read, or is not a run file; the message names the line.
    """
    path = Path(path).expanduser()
    path = path / RUN_FILE if path.is_dir() else path
    text = read_plain(path, _MOST_BYTES)
    try:
        return [_read(node, path) for node in yaml.compose_all(text, Loader=PlainLoader)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _mistake(path, mark.line + 1 if mark else 1, f"this YAML cannot be read: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _mistake(path, 1, f"this YAML cannot be read: {one_line(error)}") from error


def _read(node: Any, path: Path) -> RunFile:
    """Return the run that one YAML document describes; a FileError names the line of a mistake."""
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node is not None else 1
        raise _mistake(path, line, "a run file has a key and a value in each line, e.g. 'run: ppl'")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    loader = yaml.SafeLoader("")
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value).replace("-", "_")
        if key in values:
            raise _mistake(path, line, f"{short(key)!r} is given twice, first in line {lines[key]}; remove one of them")
        lines[key] = line
        try:
            values[key] = _from_plain(loader.construct_object(value_node, deep=True))
        except MethodError as error:
            raise _mistake(path, line, str(error)) from error
    begin = node.start_mark.line + 1
    file_format = values.pop("format", _FORMAT)
    if type(file_format) is not int or file_format > _FORMAT:
        text = f"format {short(str(file_format))} is of a later version of this package; update rope-ext-hf"
        raise _mistake(path, lines["format"], text)
    for key, example in (("run", "ppl"), ("model", "reference")):
        if key not in values:
            hint = did_you_mean(key, values)
            raise _mistake(path, begin, f"there is no key {key!r}.{hint} Add one, e.g. '{key}: {example}'")
    versions = values.pop("versions", None) or {}
    if not isinstance(versions, dict):
        raise _mistake(path, lines["versions"], "'versions' must hold names and versions, e.g. {torch: 2.9.0}")
    inputs = values.pop("inputs", None) or {}
    if not isinstance(inputs, dict) or not all(isinstance(digests, dict) for digests in inputs.values()):
        raise _mistake(path, lines["inputs"], "'inputs' must hold digests by kind of run; remove it to compare nothing")
    command, model = str(values.pop("run")), values.pop("model")
    return RunFile(
        command,
        model,
        values,
        {str(name): str(version) for name, version in versions.items()},
        {str(kind): {str(name): str(digest) for name, digest in by_name.items()} for kind, by_name in inputs.items()},
        lines=lines,
        source=path,
    )


def _from_plain(value: Any) -> Any:
    """Convert what `_plain` wrote back: dicts that stand for methods, and `~` for the user's home folder."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if isinstance(value, dict) and "method" in value:
        return method_from_dict(value)
    if isinstance(value, str) and value.startswith(f"~{os.sep}"):
        return str(Path(value).expanduser())
    return value


def _mistake(path: Path, line: int, text: str) -> FileError:
    """Return an error with a message that names the file and the line of a mistake."""
    return FileError(f"{str(path)!r}, line {line}: {text}")

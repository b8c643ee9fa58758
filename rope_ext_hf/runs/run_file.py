"""A run as a file of YAML: the question, the model with its revision, the methods, and the versions that answered it.

    run: ppl
    model: reference
    lengths: [256, 1024]
    method: [yarn]
    factor: [4]
    format: 1

Every run leaves such a file beside its results, and `rope-ext run FILE` repeats it. The keys are the fields of the
questions that the command asks (`rope_ext_hf.questions`), which are its options too, so that a kind of run needs
nothing here. Several runs in one file stand one after the other, each after a line `---`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rope_ext_hf.errors import FileError, MethodError, RopeExtError, did_you_mean, one_line, short
from rope_ext_hf.files import PlainLoader, write_text
from rope_ext_hf.hub import model_commit
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import method_from_dict
from rope_ext_hf.patches.loading import find_config
from rope_ext_hf.patches.patch_records import saved_specs
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.questions import Question, anything, shell_line
from rope_ext_hf.reading.documents import corpus_name
from rope_ext_hf.reference import folder_of
from rope_ext_hf.runs.identity import versions_now
from rope_ext_hf.runs.journal import read_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RUN_FILE = "run.yaml"  # the name of the file in a run's folder
IN_MEMORY = "in_memory"  # the only key of a value that no file can hold, such as a list of texts; it says what that was
_FORMAT = 1  # what is written
_MOST_BYTES = 1_000_000
_HEAD = "# To repeat this run: rope-ext run FILE. Its options override, e.g. --out again\n"


@dataclass(frozen=True)
class RunFile:
    """One run, as it is asked for."""

    command: str
    model: Any  # a folder, a Hub id or "reference"
    options: dict[str, Any]  # everything else that was asked, by the names of the fields
    versions: dict[str, str] = field(default_factory=dict)  # of the packages that answered
    lines: dict[str, int] = field(default_factory=dict, compare=False)  # where each key stands in the file `source`
    source: Path | None = field(default=None, compare=False)

    def text(self) -> str:
        of_model = {"model": self.model} | {key: self.options[key] for key in ("revision",) if key in self.options}
        values = {"run": self.command, **of_model, **self.options, "versions": self.versions, "format": _FORMAT}
        plain = _plain(values)
        return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100))

    def write(self, folder: Path, *, beside_others: bool = False) -> None:
        """Write the file into the folder of a run; `beside_others` keeps other runs of a file that is not damaged."""
        kept: list[RunFile] = []
        if beside_others and (folder / RUN_FILE).exists():
            try:
                kept = [each for each in read_run_files(folder) if each.asked != self.asked]
            except FileError:
                kept = []
        write_text(folder / RUN_FILE, _HEAD + "---\n".join([each.text() for each in [*kept, self]]))

    @property
    def asked(self) -> str:
        """The text without the versions."""
        return replace(self, versions={}).text()

    def mistake(self, key: str, text: str) -> FileError:
        return _mistake(self.source or Path(RUN_FILE), self.lines.get(key, 1), text)


def run_file(
    question: Question,
    model: PreTrainedModel | str | Path,  # of one in memory its folder or Hub id, where that holds the same patch
    *others: Question,  # what else the command was given: methods, how the model is loaded
    tokenizer: PreTrainedTokenizerBase | None = None,  # where another one than the model's own was given
    **options: Any,  # as `others`, by names; None is left out
) -> RunFile:
    """The file of a run."""
    stated = {name: value for each in (question, *others) for name, value in _stated(each).items()}
    stated |= {name: _plain(value) for name, value in options.items() if value is not None}
    if isinstance(model, (str, Path)):
        name: Any = str(model)
        commit = model_commit(name, revision=stated.get("revision"))
    else:
        name, commit = _name_of(model, tokenizer), getattr(model.config, "_commit_hash", None)
        stated |= {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    stated |= {"revision": commit} if commit else {}
    stated.pop("model", None)
    return RunFile(question.command, name, stated, versions_now())


def _stated(question: Question) -> dict[str, Any]:
    """The fields of a question as YAML holds them; what is None is left out where that is the default."""
    stated: dict[str, Any] = {}
    for each, how in question.described_fields():
        value = getattr(question, each.name)
        if each.name == "parameters":
            stated |= {name: _plain(given) for name, given in value.items()}
        elif how.parse is anything and not isinstance(value, (str, Path, type(None))):
            stated[each.name] = {IN_MEMORY: corpus_name(value)}
        elif value is not None:
            stated[each.name] = _plain(value)
        elif how.show is not None and how.typed is not ...:
            stated[each.name] = how.show(value)
    return {name: value for name, value in stated.items() if value != []}


def _plain(value: Any) -> Any:
    if isinstance(value, RopeMethod):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _name_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """The name of a model in memory, where a folder or the Hub holds it with its patch; else why there is none."""
    name = model.name_or_path
    if not name:
        return {IN_MEMORY: "a model that was not loaded from a folder"}
    if hasattr(model, "peft_config"):
        return {IN_MEMORY: "a model with an adapter"}
    if tokenizer is not None and tokenizer.name_or_path != name:
        return {IN_MEMORY: f"{name} with another tokenizer"}
    try:
        _, record, _ = find_config(name, local_files_only=True, revision=getattr(model.config, "_commit_hash", None))
        same = list(present_specs(model)) == (saved_specs(record) if record else [])
    except (RopeExtError, OSError):
        same = False
    if not same:
        return {IN_MEMORY: f"{name} with a patch that no folder holds"}
    return "reference" if name == str(folder_of("reference")) else name


def how_to_repeat(folder: Path) -> tuple[str, str]:
    """The command that repeats what a folder holds, and the text of its run file; empty where it has no such file."""
    path = folder / RUN_FILE
    try:
        return shell_line(["run", str(path)]), "---\n".join([each.text() for each in read_run_files(path)])
    except FileError:
        return "", ""


def read_run_files(path: str | Path) -> list[RunFile]:
    """The runs of a file, or of the run.yaml in a folder; what their keys hold is checked by the command."""
    path = Path(path)
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
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node is not None else 1
        raise _mistake(path, line, "a run file holds keys and values, e.g. 'run: ppl'")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    make = yaml.SafeLoader("")
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value).replace("-", "_")
        if key in values:
            raise _mistake(path, line, f"{short(key)!r} stands there twice, first in line {lines[key]}")
        lines[key] = line
        try:
            values[key] = _methods_in(make.construct_object(value_node, deep=True))
        except MethodError as error:
            raise _mistake(path, line, str(error)) from error
    begin = node.start_mark.line + 1
    written = values.pop("format", _FORMAT)
    if type(written) is not int or written > _FORMAT:
        raise _mistake(
            path, lines["format"], f"format {short(str(written))} is of a later version of this package; update it"
        )
    for key, example in (("run", "ppl"), ("model", "reference")):
        if key not in values:
            near = did_you_mean(key, values)
            raise _mistake(path, begin, f"there is no key {key!r}.{near} Add one, e.g. '{key}: {example}'")
    versions = values.pop("versions", None) or {}
    if not isinstance(versions, dict):
        raise _mistake(path, lines["versions"], "'versions' holds names and versions")
    command, model = str(values.pop("run")), values.pop("model")
    return RunFile(command, model, values, {str(k): str(v) for k, v in versions.items()}, lines, path)


def _methods_in(value: Any) -> Any:
    """A value in which every method that `_plain` wrote is one again."""
    if isinstance(value, list):
        return [_methods_in(each) for each in value]
    return method_from_dict(value) if isinstance(value, dict) and "method" in value else value


def _mistake(path: Path, line: int, text: str) -> FileError:
    return FileError(f"{str(path)!r}, line {line}: {text}")

"""Models in one file that holds config, weights and tokenizer, such as GGUF: a plug-in reads each format.

The plug-ins are those of the group `rope_ext_hf.model_files`. The name of a plug-in is the suffix of its files: gguf
for model.gguf, and for the argument `gguf_file` of transformers. It names a class under `ModelFile`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.plug_ins import needed_plug_in, plug_in, plug_in_names

__all__ = ["ModelFile", "loaded_from", "loading_note", "model_file", "name_way_out", "resolve_file"]

_OWN = "gguf"  # the format that the tool box reads; without the tool box, an error names what to install


class ModelFile(ABC):
    """A file that holds a model; the functions of `rope_ext_hf` do with it what they do with a folder.

    Attributes:
        title: the name of the format, as in "a GGUF file".
        path: the absolute path.
    """

    title: ClassVar[str]
    path: Path

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

    @classmethod
    @abstractmethod
    def find(cls, path: str | Path, name: Any, arguments: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Return the absolute path of a file, and arguments of from_pretrained without those by which it was found.

        Args:
            path: the file, or the folder or Hub id that holds it.
            name: its name in the folder; None: `path` is the file.
            arguments: the arguments of transformers' from_pretrained.

        Raises:
            CheckpointError, FileError: there is no such file.
        """

    @property
    @abstractmethod
    def way_out(self) -> str:
        """Sentences on how the model gets into a folder."""

    @abstractmethod
    def check_exists(self) -> None:
        """Raise CheckpointError unless there is such a file."""

    @abstractmethod
    def config(self) -> Any:
        """Return the config of the model.

        Raises:
            CheckpointError: the file is damaged, or holds a model that transformers does not load.
        """

    @abstractmethod
    def loading_arguments(self) -> dict[str, Any]:
        """Return arguments with which transformers' from_pretrained loads the model, with the folder of the file."""

    @abstractmethod
    def tokenizer_arguments(self) -> dict[str, Any]:
        """Return the arguments with which it loads the tokenizer from that folder; raise the errors of `config`."""

    @abstractmethod
    def convert(
        self,
        dst: Path,
        to: str,
        *,
        dequantize: str | None,
        source_pairing: str | None,
        force: bool,
        resume: bool,
        verify: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Any:
        """Write the model into a folder; arguments, result and errors are those of `convert_checkpoint`."""

    @classmethod
    @abstractmethod
    def name_way_out(cls, model: Any) -> None:
        """Make `save_pretrained` of a model say the way out if transformers does not save a model from such a file."""

    @classmethod
    @abstractmethod
    def loading_note(cls, model: Any, files: list[Path]) -> str | None:
        """Return a sentence on what transformers may have dropped when it loaded the model from one of these files."""


def _format_of(path: str | Path) -> str | None:
    """Return the format of a model file by its suffix; None for a folder or Hub id."""
    name = next((each for each in _formats() if str(path).lower().endswith(f".{each}")), None)
    return None if name is None or os.path.isdir(path) else name  # noqa: PTH112


def _formats() -> list[str]:
    """Return the names of all formats, the one of the tool box first."""
    return list(dict.fromkeys([_OWN, *plug_in_names("model_files")]))


def _reader(name: str) -> type[ModelFile]:
    """Return the class that reads a format; raise MethodError if the tool box is not installed."""
    reader: type[ModelFile] = needed_plug_in("model_files", name, by=f"a .{name} file")
    return reader


def model_file(path: str | Path) -> ModelFile | None:
    """Return the model file that has this path, by its suffix; None for a folder or Hub id."""
    name = _format_of(path)
    return None if name is None else _reader(name)(Path(path))


def resolve_file(path: str | Path, arguments: dict[str, Any]) -> tuple[str | Path, dict[str, Any]]:
    """Return the absolute path of a model file, and the arguments of from_pretrained without those that located it.

    A folder or Hub id, and its arguments, are returned unchanged.

    Args:
        path: a model file; or a folder or Hub id, with the name of a file in it as `gguf_file` among the arguments.
        arguments: the arguments of transformers' from_pretrained.

    Raises:
        CheckpointError, FileError: there is no such file.
    """
    suffix = _format_of(path)
    name = next((each for each in _formats() if arguments.get(f"{each}_file") is not None), suffix)
    if name is None:
        return path, arguments
    inner = arguments.get(f"{name}_file")
    if suffix is not None and inner is not None:
        raise CheckpointError(
            f"{str(path)!r} is a {_reader(name).title} already; leave out {name}_file={short(str(inner))!r}"
        )
    return _reader(name).find(path, inner, {key: value for key, value in arguments.items() if key != f"{name}_file"})


def loaded_from(model: Any) -> str | Path:
    """Return the folder, Hub id or model file that a live model was loaded from, also where transformers loaded it."""
    name: str = getattr(model, "name_or_path", "") or ""
    settings = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if settings is not None:
        for each in _formats():
            file = getattr(settings, f"{each}_file", None)
            if isinstance(file, str):
                return Path(name, file)
    return name


def name_way_out(model: Any) -> None:
    """Make `save_pretrained` of a model that transformers keeps in a model file say how the model gets out of it."""
    if getattr(model, "hf_quantizer", None) is None:
        return
    name = _format_of(loaded_from(model))
    reader = None if name is None else plug_in("model_files", name)
    if reader is not None:
        reader.name_way_out(model)


def loading_note(model: Any) -> str | None:
    """Return a sentence on what transformers may have dropped when it loaded a model from a model file; else None.

    transformers does not always record the file. What is left of it is the name of the folder, which then holds model
    files and no config.json.
    """
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    folder = Path(name) if name else None
    if folder is None or not folder.is_dir() or (folder / "config.json").exists():
        return None
    for each in _formats():
        files = sorted(folder.glob(f"*.{each}"))
        reader = plug_in("model_files", each) if files else None
        if reader is not None:
            note: str | None = reader.loading_note(model, files)
            return note
    return None

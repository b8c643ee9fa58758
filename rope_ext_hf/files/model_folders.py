"""Models by name, without loading anything: a folder, a model file, a Hub id, or "reference" for the bundled model.

    folder = model_folder("Qwen/Qwen3-8B")

Nothing here imports torch or transformers. Every failure that a user can cause is a CheckpointError whose message is
one line.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.files.downloads import download
from rope_ext_hf.files.model_files import model_file
from rope_ext_hf.files.other_formats import check_model_files
from rope_ext_hf.files.whole import check_folder, foreign_errors
from rope_ext_hf.reference import folder_of

__all__ = ["folder_and_hub_id", "model_folder", "model_source"]

ADAPTER_CONFIG = "adapter_config.json"
"""The file with the settings of an adapter."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
CLASS_FILES = ("config.json", ADAPTER_CONFIG, "*.py")
"""Patterns of the files by which transformers chooses a class."""
CONFIG_FILES = (*CLASS_FILES, "generation_config.json", "params.json")
"""Patterns of the files that a model without weights needs."""
_FILE_SUFFIXES = (*WEIGHT_SUFFIXES, ".json")
"""Suffixes by which a name is taken for that of a file, and not for a Hub id."""


def model_source(name: str | Path) -> str:
    """Return the folder, GGUF file or Hub id that the model `name` is in.

    Raises:
        CheckpointError: the name is empty, names another file, or is a path at which there is nothing.
    """
    source = str(folder_of(name))
    if not source:
        raise CheckpointError("an empty name is not a model; give a folder, a Hub id or 'reference'")
    path = Path(source).expanduser()
    if is_folder(path):
        return str(path)
    file = model_file(path)
    if file is not None:
        file.check_exists()
        return str(path)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source:
        hint = "; it is a file, give the folder it is in, or a GGUF file" if _exists(path) else ""
        raise CheckpointError(f"no such model folder: {short(source)!r}{hint}")
    if _exists(path):
        raise CheckpointError(f"{short(source)!r} is a file; give the folder of the model, which holds its config")
    if "/" not in source and path.suffix in _FILE_SUFFIXES:
        raise CheckpointError(
            f"{short(source)!r} is the name of a file, and no such file is here; give the folder of the model, which "
            "holds its config"
        )
    return source


def model_folder(name: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the local folder of a model; a Hub repository is downloaded first.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.
        revision: branch, tag or commit on the Hub.
        weights: whether the weights are needed; if not, the config and files beside it are downloaded.

    Raises:
        CheckpointError: there is no such model, it cannot be downloaded, or it is a GGUF file.
    """
    source = model_source(name)
    file = model_file(source)
    if file is not None:
        raise CheckpointError(f"{source!r} is a {file.title}, and a folder is needed here. {file.way_out}")
    folder = Path(source)
    if not is_folder(folder):
        wanted: dict[str, Any] = {"weights": True} if weights else {"patterns": CONFIG_FILES}
        folder = download(source, revision, **wanted)
    check_folder(folder)
    check_model_files(folder)
    return folder


def folder_and_hub_id(name: str | Path, *, revision: str | None = None) -> tuple[Path, str | None]:
    """Return the local folder of a model with its weights, and its Hub id (None if `name` is a local folder)."""
    folder = model_folder(name, revision=revision)
    is_local = folder == Path(model_source(name))
    return folder, None if is_local else str(name)


def model_commit(name: str | Path, *, revision: str | None = None) -> str | None:
    """Return the commit on the Hub that a branch, tag or commit id names; None if `name` is a local folder or file."""
    source = model_source(name)
    if _exists(Path(source)):
        return None
    return model_folder(name, revision=revision, weights=False).name


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for a path that is too long, at which `Path.is_dir` raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for a path that is too long, at which `Path.is_file` raises."""
    return os.path.isfile(path)  # noqa: PTH113


def _exists(path: Path) -> bool:
    """Return whether a path exists; False for a path that is too long, at which `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110


def loading(subject: str) -> AbstractContextManager[None]:
    """Return a context that turns any exception inside it into a CheckpointError: `subject` could not be loaded."""
    return foreign_errors(f"{subject} could not be loaded")

"""The folder of a training run: its settings and inputs, JSON files with checksums, and the model that it writes.

A run is continued only with the settings that it was begun with, and with the same model, tokenizer and text, which may
have changed under the same names. Files that a run reads again contain a checksum of themselves.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.errors import FileError, RopeExtError, one_line, size_text
from rope_ext_hf.files.whole import atomic_file, atomic_folder, disk_errors, json_digest, read_json, write_json
from rope_ext_hf.runs.folder.folder import other_settings

_SETTINGS = "settings.json"
_LATER_FILES = ("checkpoints of *", "report.json")  # patterns of what a folder has once its run has made progress
_CHECKSUM = "checksum"


def open_run(folder: Path, settings: dict[str, Any], inputs: Mapping[str, str]) -> None:
    """Make the folder of a run, or check that it holds a run that may be continued.

    Args:
        folder: the folder.
        settings: the settings of the run, JSON-ready.
        inputs: digests of the model, the tokenizer and the text, by their names in messages.

    Raises:
        FileError: the folder holds a run with other settings or inputs, or is damaged.
    """
    file = folder / _SETTINGS
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        for pattern in _LATER_FILES:
            for path in folder.glob(pattern):
                raise FileError(
                    f"{str(folder)!r} holds {path.name!r} of a run whose {_SETTINGS} is lost; give another folder"
                )
        write_checked(file, {"settings": settings, "inputs": dict(inputs)})
        return
    try:
        saved = read_checked(file)
        earlier_settings, earlier_inputs = dict(saved["settings"]), dict(saved["inputs"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{str(file)!r} does not say what the run was begun with; give another folder, or remove this one"
        ) from error
    differing = other_settings(earlier_settings, settings)
    if differing:
        raise FileError(
            f"{str(folder)!r} holds a run with other settings: {', '.join(differing)}; give another folder, or the "
            "same settings to continue it"
        )
    changed = [name for name in inputs if earlier_inputs.get(name) != inputs[name]]
    if changed:
        raise FileError(
            f"{' and '.join(changed)} changed since the run in {str(folder)!r} was begun, so it would mix old and "
            "new; give another folder, or continue it with what it was begun with"
        )


def write_checked(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with a checksum; if the process is killed, the file is either the old or the new one."""
    with atomic_file(file) as part:
        write_json(part, value | {_CHECKSUM: json_digest(value)[:16]})


def read_checked(file: Path) -> dict[str, Any]:
    """Read the object that `write_checked` wrote.

    Raises:
        FileError: the file cannot be read, or it changed since it was written.
    """
    value = read_json(file)
    if value.pop(_CHECKSUM, None) != json_digest(value)[:16]:
        raise FileError(f"{str(file)!r} is damaged: it changed since it was written; give another folder, or remove it")
    return value


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Inside the `with` block, turn any error of torch or transformers into a FileError that names the folder.

    On a full disk, torch's own error names a position in the file, but not the disk.
    """
    try:
        yield
    except RopeExtError:
        raise
    except Exception as error:
        free = size_text(shutil.disk_usage(folder).free)
        raise FileError(
            f"a model could not be written in {str(folder)!r}, where {free} are free ({one_line(error)}); make room, "
            "and the same command continues"
        ) from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer to a folder, replacing an earlier one, completely or not at all."""
    shutil.rmtree(folder, ignore_errors=True)
    with saving(folder.parent), warnings.catch_warnings(record=True) as caught, atomic_folder(folder) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    for warning in caught:  # they name the folder as it was called while it was written
        warnings.warn(str(warning.message).replace(str(staging), str(folder)), warning.category, stacklevel=2)

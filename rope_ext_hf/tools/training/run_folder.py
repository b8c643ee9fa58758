"""The folder of a training: whose run it holds, the budget of the run, and the text kept for measuring.

A run is continued where the folder was begun with the same settings, and what these name is the same still: the model,
the tokenizer and the text may have changed in place. Files that a run reads again state a checksum of themselves.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.errors import FileError, RopeExtError, one_line, size_text
from rope_ext_hf.files import atomic_folder, disk_errors
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Tokens, corpus_name
from rope_ext_hf.reading.spans import tokenize
from rope_ext_hf.runs.folder import other_settings, read_whole, write_whole
from rope_ext_hf.tools.training.questions import Finetuning

_SETTINGS = "settings.json"
_OF_A_RUN = ("checkpoints of *", "report.json")  # files and folders that are there once a run has got on


@dataclass(frozen=True)
class Budget:
    """How long a training goes on; one of the two is given."""

    minutes: float | None = None  # without measurements and loading; those of interrupted runs count
    steps: int | None = None  # of the optimizer

    def share_used(self, seconds: float, steps: int) -> float:
        """Return the share that is used, 0 to 1."""
        if self.steps is not None:
            return min(1.0, steps / self.steps)
        return min(1.0, seconds / (60 * (self.minutes or 0.0)))

    def seconds_left(self, seconds: float, steps: int) -> float:
        """About how many more it takes, by those so far."""
        used = self.share_used(seconds, steps)
        return seconds * (1 - used) / used if used else 0.0


def open_run(
    folder: Path, settings: dict[str, Any], inputs: Mapping[str, str], *, may_differ: Collection[str] = ()
) -> None:
    """Make the folder of a run, or check that it is one of the same settings, but those that may differ, and inputs."""
    file = folder / _SETTINGS
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        if there := next((path.name for pattern in _OF_A_RUN for path in folder.glob(pattern)), None):
            raise FileError(f"{str(folder)!r} holds {there!r} of a run whose {_SETTINGS} is lost; give another folder")
        write_whole(file, {"settings": settings, "inputs": dict(inputs)})
        return
    try:
        saved = read_whole(file)
        before, read = dict(saved["settings"]), dict(saved["inputs"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{str(file)!r} does not say what the run was begun with; give another folder, or remove this one"
        ) from error
    if named := [name for name in other_settings(before, settings) if name not in may_differ]:
        raise FileError(
            f"{str(folder)!r} holds a run with other settings: {', '.join(named)}; give another folder, or the same "
            "settings to continue it"
        )
    if changed := [name for name in inputs if read.get(name) != inputs[name]]:
        raise FileError(
            f"{' and '.join(changed)} changed since the run in {str(folder)!r} was begun, so it would mix old and "
            "new; give another folder, or continue it with what it was begun with"
        )


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Inside, what torch or transformers raise where a model cannot be written in a folder becomes a FileError."""
    try:
        yield
    except RopeExtError:
        raise
    except Exception as error:  # on a full disk torch names a position in the file, and no disk
        free = size_text(shutil.disk_usage(folder).free)
        raise FileError(
            f"a model could not be written in {str(folder)!r}, where {free} are free ({one_line(error)}); make room, "
            "and the same command continues"
        ) from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the folder of a model, in place of one that an earlier call wrote; it is there whole or not at all."""
    shutil.rmtree(folder, ignore_errors=True)
    with saving(folder.parent), warnings.catch_warnings(record=True) as given, atomic_folder(folder) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    for each in given:  # they call the folder what it was called while it was written
        warnings.warn(str(each.message).replace(str(staging), str(folder)), each.category, stacklevel=2)


def settings_of(asked: Finetuning) -> dict[str, Any]:
    """The fields of a question, JSON-ready where its texts are given by names."""
    return asked.arguments | {"data": corpus_name(asked.data), "eval_data": corpus_name(asked.eval_data)}


def split_texts(
    asked: Finetuning, tokenizer: PreTrainedTokenizerBase, one_in: int
) -> tuple[list[Tokens], list[Tokens]]:
    """The texts that a run works on and measures: all data and its eval_data; without that, see `split`."""
    works_on, measured = split(tokenize(load(asked.data), tokenizer), one_in)
    if asked.eval_data is None:
        return works_on, measured
    return works_on + measured, tokenize(load(asked.eval_data), tokenizer)


def split(documents: Sequence[Tokens], one_in: int) -> tuple[list[Tokens], list[Tokens]]:
    """The texts that a run works on and measures: one document in so many by its name, else the last part of each."""
    held_out = [each for each in documents if zlib.crc32(each.name.encode()) % one_in == 0]
    if held_out and len(held_out) < len(documents):
        names = {each.name for each in held_out}
        return [each for each in documents if each.name not in names], held_out
    parts: tuple[list[Tokens], list[Tokens]] = ([], [])
    for each in documents:
        middle = len(each.ids) - len(each.ids) // one_in
        parts[0].append(cut(each, 0, middle))
        parts[1].append(cut(each, middle, len(each.ids)))
    return parts


def cut(document: Tokens, start: int, stop: int, name: str = "") -> Tokens:
    """The tokens start..stop of a document, under its name or another."""
    before = document.ends[start - 1] if start else 0
    ends = tuple(end - before for end in document.ends[start:stop])
    return Tokens(name or document.name, document.ids[start:stop], ends)

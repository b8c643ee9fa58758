"""The folder of a training or a search: whose run it holds, and the text that it keeps for measuring.

A run is continued where the folder was begun with the same settings, and what these name is the same still: the model,
the tokenizer and the text may have changed in place. Files that a run reads again state a checksum of themselves.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import FileError, RopeExtError, one_line, size_text
from rope_ext_hf.files import atomic_file, atomic_folder, disk_errors, json_digest, read_json, write_json
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.runs.model_digest import model_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SETTINGS = "settings.json"
_OF_A_RUN = ("checkpoints of *", "trials.json", "report.json")
"""What a folder holds once a run has got on."""


def digest_inputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *texts: Sequence[Tokens]
) -> dict[str, str]:
    """Digests of what a run reads, by what it is called in a sentence.

    Args:
        model: as loaded, with its weights, each of which is read once, at about 1.4 GB/s a core.
        texts: each as token ids, which change with the tokenizer.
    """
    read = hashlib.sha256()
    for documents in texts:
        read.update(b"text")
        for each in documents:
            read.update(f"{len(each.ids)} ".encode() + each.ids.numpy().tobytes())
    return {
        "the model (weights, config or adapter)": model_digest(model),
        "the tokenizer": _digest_tokenizer(tokenizer),
        "the text": read.hexdigest(),
    }


def _digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the files that a tokenizer is saved as, which do not say where it was loaded from."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def open_run(
    folder: Path, settings: dict[str, Any], inputs: Mapping[str, str], *, may_differ: Collection[str] = ()
) -> None:
    """Make the folder of a run, or check that it is one of the same settings and inputs.

    Args:
        inputs: as `digest_inputs` gives them.
        may_differ: settings with which a run may be continued in another value.

    Raises:
        FileError: the folder holds a run of other settings or inputs, or no settings at all; the message names which.
            Or the disk refuses.
    """
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
    now = json.loads(json.dumps(settings))
    unlike = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    if named := sorted(unlike - set(may_differ)):
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
    """Inside, what torch, safetensors and transformers raise where a model cannot be written becomes a FileError.

    Args:
        folder: one that exists, of the run.
    """
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


def write_whole(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object that is there as a whole or, after a kill at any moment, as it was before.

    It states a checksum of itself, for `read_whole`.
    """
    with atomic_file(file) as part:
        write_json(part, value | {"checksum": _checksum(value)})


def read_whole(file: Path) -> dict[str, Any]:
    """Read what `write_whole` wrote.

    Raises:
        FileError: the file cannot be read, or it changed since it was written.
    """
    value = read_json(file)
    if value.pop("checksum", None) != _checksum(value):
        raise FileError(
            f"{str(file)!r} is damaged: it is not as it was written; give another folder, or remove this one"
        )
    return value


def _checksum(value: dict[str, Any]) -> str:
    return json_digest(value)[:16]


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the folder of a model, in place of one that an earlier call wrote; it is there whole or not at all.

    Raises:
        FileError: the disk refuses.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with saving(folder.parent), warnings.catch_warnings(record=True) as given, atomic_folder(folder) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    for each in given:  # they call the folder what it was called while it was written
        warnings.warn(str(each.message).replace(str(staging), str(folder)), each.category, stacklevel=2)


def split(documents: Sequence[Tokens], one_in: int) -> tuple[list[Tokens], list[Tokens]]:
    """What a run works on, and what it measures: one document in so many by its name, else the last part of each."""
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

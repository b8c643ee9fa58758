"""Patched copies of model folders, written without reading the weights."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.checkpoints.files.weight_folders import check_weights
from rope_ext_hf.checkpoints.pairing.source_pairing import check_label
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.model_folders import ADAPTER_CONFIG
from rope_ext_hf.files.whole import (
    atomic_folder,
    copy_files,
    file_stamps,
    list_files,
    mistral_format_files,
    read_json,
    write_json,
)
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.models.config import EXPECTED_LINES
from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.models.families import family
from rope_ext_hf.patches.saved.adapters import find_adapter, with_record
from rope_ext_hf.patches.saved.fingerprint import fingerprint_record
from rope_ext_hf.patches.saved.generation_length import EMBEDDING_CONFIG, GENERATION_CONFIG, extend_length_files
from rope_ext_hf.patches.saved.loading_code import CODE_FILE, write_loading_code
from rope_ext_hf.patches.saved.saving import rewrite_config
from rope_ext_hf.patches.slots.patched_slot import patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOT_COPIED = frozenset({"config.json", "README.md", "__init__.py", "run.yaml", ".eval_results", CODE_FILE})
"""Files and folders that a patched copy lacks or has of its own. The source's model card, run file and results are
about another model. Files of these names in subfolders, such as the config.json of a pooling layer, are copied."""
_CHANGED_COPIES = {
    "tokenizer_config.json": "model_max_length",
    GENERATION_CONFIG: "max_length",
    EMBEDDING_CONFIG: "max_seq_length",
}
"""Files that are copied with a change, and the key that changes in them."""


def save_patched_folder(
    model: PreTrainedModel,
    source: Path,
    out: Path,
    progress: Callable[[int, int], object] = lambda done, total: None,
    as_code: bool = False,
    finish: Callable[[Path], object] = lambda folder: None,
    keep_mistral_format: bool = False,
    *,
    name: str | Path | None = None,
    force: bool = False,
) -> None:
    """Write a copy of a model's folder with the config of a patched model, whose weights need not be in memory.

    The copy of an adapter's folder gets the record of the patch instead of a config. The copy lacks the model card of
    the source and its results, which are about another model, and files in Mistral's own format, from which vLLM would
    run the model without the method.

    Args:
        model: the patched model, which may be on the meta device.
        source: the folder that it was loaded from.
        out: the copy; it must not exist yet.
        progress: called with the number of bytes that are copied, and that of all files.
        as_code: add code by which plain transformers loads the folder; see `write_loading_code`.
        finish: called with the whole copy before it gets its name, for example to write its card.
        keep_mistral_format: copy the files in Mistral's own format too.
        name: the Hub id that the source was downloaded from, for messages.
        force: write the copy even if the weights look as if they were in another pairing than the model runs.

    Raises:
        CheckpointError: the family keeps its angles in the weights, which are only copied; or `as_code` was given for
            a folder that needs no code, or for an adapter; or there are no weights, or a file of them is damaged; or
            they are in another pairing than the model runs.
        FileError: `out` exists or lies inside the source; a file of the source leads out of it, is missing, or changed
            while it was copied; or the disk cannot be written. Nothing is left of `out` then.
    """
    config = model.config.get_text_config()
    if family(config.model_type).angle_table:
        raise CheckpointError(
            f"{config.model_type!r} keeps its angles in its weights, which are only copied here; load the model, "
            "patch it with rope_ext_hf.patch, and save it with save_pretrained"
        )
    is_adapter = find_adapter(source) is not None
    if as_code and is_adapter:
        raise CheckpointError("an adapter is loaded by PEFT, which runs no code of its folder; publish a whole model")
    names = _copied_files(source, is_adapter=is_adapter)
    check_weights(source, adapter=is_adapter)
    if not (is_adapter or force):
        check_label(model, source, name or source)
    if keep_mistral_format:
        names += [file for file in mistral_format_files(source) if file not in names]
    inputs = file_stamps([source / file for file in names])
    total = sum([size for _, size, _ in inputs.values()])
    with atomic_folder(out, source=source, inputs=inputs, size=total) as staging:
        copied = 0
        progress(copied, total)
        for file in names:
            copy_files(source, [file], staging)
            copied += inputs[str(source / file)][1]
            progress(copied, total)
        if is_adapter:
            _record_in_adapter(staging, names, model)
        else:
            _write_patched_config(staging, model, out)
        if as_code:
            write_loading_code(staging)
        finish(staging)


def _write_patched_config(staging: Path, model: PreTrainedModel, out: Path) -> None:
    """Write the config of a patched model into a copy of its folder, and the extended length into other files.

    These are the files in `_CHANGED_COPIES`, where they state a shorter length. `out` is the name that the folder gets
    later.
    """
    state = patched_slots(model)[0].state
    with left_out_of_log(*EXPECTED_LINES):
        model.config.save_pretrained(staging)
    rewrite_config(staging, model, name=out, more=extend_length_files(staging, state))
    _raise_tokenizer_length(staging / "tokenizer_config.json", state.encoding.extended_length)


def _record_in_adapter(staging: Path, names: list[str], model: PreTrainedModel) -> None:
    """Write the record of a patch into every adapter_config.json among the copied files."""
    record = patched_slots(model)[0].state.record | fingerprint_record(model)
    for file in names:
        if Path(file).name == ADAPTER_CONFIG:
            write_json(staging / file, with_record(read_json(staging / file), record))


def _raise_tokenizer_length(file: Path, extended_length: int | None) -> None:
    """Raise the length beyond which a tokenizer warns to the extended length; a file without one stays as it is."""
    if extended_length is None or not file.is_file():
        return
    settings = read_json(file)
    stated = settings.get("model_max_length")
    if isinstance(stated, int) and stated < extended_length:
        write_json(file, settings | {"model_max_length": extended_length})


def _copied_files(source: Path, *, is_adapter: bool) -> list[str]:
    """Return the names of the files in a folder that belong into a patched copy of it.

    A config.json beside an adapter is that of its base model, which the patch of an adapter does not rewrite.
    """
    left_out = {*_NOT_COPIED, *mistral_format_files(source)} - ({"config.json"} if is_adapter else set())
    return [file for file in list_files(source) if Path(file).parts[0] not in left_out]


def unlike_copies(source: Path, out: Path) -> list[str]:
    """Return the names of the source's files that its patched copy `out` lacks, or holds with altered content.

    Both folders are read whole, which takes as long as copying. A file in which `save_patched_folder` changes a key is
    compared as JSON, without that key.

    Raises:
        CheckpointError, FileError: weights of the source are missing or damaged, as for `save_patched_folder`.
    """
    is_adapter = find_adapter(source) is not None
    check_weights(source, adapter=is_adapter)
    names = _copied_files(source, is_adapter=is_adapter)
    return [name for name in names if not _is_copy(source, out, name)]


def _is_copy(source: Path, out: Path, name: str) -> bool:
    """Return whether the file with this name in a patched copy has the content of the file in its source."""
    file, copied = source / name, out / name
    if not copied.is_file():
        return False
    changed = PATCH_KEY if file.name == ADAPTER_CONFIG else _CHANGED_COPIES.get(name)
    if changed is None:
        return filecmp.cmp(file, copied, shallow=False)
    return _settings_without(file, changed) == _settings_without(copied, changed)


def _settings_without(file: Path, left_out: str) -> dict[str, Any]:
    """Return the settings in a JSON file without the key `left_out`, also if more text follows it after a colon."""
    return {key: value for key, value in read_json(file).items() if key.partition(":")[0] != left_out}

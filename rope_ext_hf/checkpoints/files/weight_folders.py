"""The weight files in a folder that transformers would load: they are all there, whole, and as their index says.

Only the headers of the files are read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rope_ext_hf.checkpoints.files.weight_files import FORMATS, WeightFile
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.downloads import WEIGHT_FILES
from rope_ext_hf.files.other_formats import check_format
from rope_ext_hf.files.whole import FileStamps, file_stamps, read_json, resolve_inside

_MODEL_FILES, _ADAPTER_FILES = WEIGHT_FILES


def open_weights(folder: Path, inputs: FileStamps) -> tuple[dict[str, WeightFile], dict[str, Any] | None]:
    """Open the weight files that transformers would load, and add their stamps to `inputs`.

    Returns:
        The files by name, in the order of the index; and the index without its weight map, None for a single file.

    Raises:
        CheckpointError: there are none, one is damaged, or they contradict the index.
        FileError: one is missing.
    """
    existing = _existing(folder, chain(*WEIGHT_FILES))
    if len(set(map(is_adapter_file, existing))) > 1:
        raise CheckpointError(f"{str(folder)!r} holds a model and an adapter; give each a folder of its own")
    single = existing[0]

    def open_file(name: str) -> WeightFile:
        path = resolve_inside(folder, name)
        inputs.update(file_stamps([path]))
        return FORMATS[Path(single).suffix](path)

    if (folder / single).exists():  # transformers prefers it to an index
        return {single: open_file(single)}, None
    index_file = index_name(single)
    inputs |= file_stamps([resolve_inside(folder, index_file)])
    index = read_json(folder / index_file)
    weight_map = _weight_map(index, index_file)
    names = list(dict.fromkeys(weight_map.values()))
    if nested := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{nested[0]!r} in {index_file!r} is not a valid file name in {str(folder)!r}")
    if len({safetensors_name(name) for name in names}) < len(names):
        raise CheckpointError(f"two files in {index_file!r} would be written under one name: {', '.join(names)}")
    files = {name: open_file(name) for name in names}
    holders: dict[str, str] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            if tensor in holders:
                raise CheckpointError(f"{tensor!r} is in {holders[tensor]!r} and in {file_name!r}")
            holders[tensor] = file_name
    _check_held(files, weight_map, index_file)
    if extra := next((tensor for tensor in holders if tensor not in weight_map), None):
        raise CheckpointError(f"{extra!r} in {holders[extra]!r} is not in {index_file!r}")
    return files, index


def check_weights(folder: Path, *, adapter: bool) -> None:
    """Raise an error unless the weights that transformers would load are complete, for a copy that keeps their bytes.

    Tensors that an index does not list, and packed weights in files of torch.save, do not matter to such a copy.

    Args:
        folder: the folder.
        adapter: whether transformers would load an adapter from it, and not a model.

    Raises:
        CheckpointError: there are no weights, a file is damaged, or it lacks a tensor that the index has there.
        FileError: a file is missing.
    """
    single = _existing(folder, _ADAPTER_FILES if adapter else _MODEL_FILES)[0]
    open_file: Callable[[Path], WeightFile | None] = FORMATS[Path(single).suffix]
    if Path(single).suffix == ".bin":
        open_file = _open_if_plain
    if (folder / single).exists():
        open_file(resolve_inside(folder, single))
        return
    index_file = index_name(single)
    weight_map = _weight_map(read_json(resolve_inside(folder, index_file)), index_file)
    files = {name: open_file(resolve_inside(folder, name)) for name in dict.fromkeys(weight_map.values())}
    _check_held({name: file for name, file in files.items() if file is not None}, weight_map, index_file)


def _open_if_plain(path: Path) -> WeightFile | None:
    """Open a file of torch.save; None: it is whole, and holds more than plain tensors, such as packed weights."""
    try:
        return FORMATS[".bin"](path)
    except CheckpointError:
        if zipfile.is_zipfile(path):  # the list of a zip archive stands at its end
            return None
        raise


def _existing(folder: Path, names: Iterable[str]) -> list[str]:
    """Return those names of weight files that a folder has a file or an index for; CheckpointError if it has none."""
    names = list(names)
    existing = [name for name in names if (folder / name).exists() or (folder / index_name(name)).exists()]
    if not existing:
        check_format(folder)
        looked_for = ", ".join(candidate for name in names for candidate in (index_name(name), name))
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {looked_for}")
    return existing


def _check_held(files: Mapping[str, WeightFile], weight_map: Mapping[str, str], index_file: str) -> None:
    """Raise a CheckpointError unless each of these files holds the tensors that the index has there."""
    for tensor, name in weight_map.items():
        if name in files and tensor not in files[name].tensors:
            raise CheckpointError(f"{tensor!r} is not in {name!r}, where {index_file!r} has it")


def _weight_map(index: dict[str, Any], index_file: str) -> dict[str, str]:
    """Remove the weight map, which names the file of each tensor, from an index, and return it."""
    weight_map = index.pop("weight_map", None)
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise CheckpointError(f"{index_file!r} has no weight_map from tensors to files")
    return weight_map


def index_name(name: str) -> str:
    """Return the file name of the index that belongs to weight files of this name."""
    return f"{name}.index.json"


def is_adapter_file(name: str) -> bool:
    """Return whether a weight file belongs to an adapter, judged by its name."""
    return name.startswith("adapter_model")


def safetensors_name(name: str) -> str:
    """Return the name that a weight file gets as safetensors.

    pytorch_model-00001-of-00002.bin becomes model-00001-of-00002.safetensors.
    """
    path = Path(name)
    return name if path.suffix == ".safetensors" else f"{path.stem.replace('pytorch_model', 'model', 1)}.safetensors"

"""A checkpoint folder in Hugging Face's format: its files, its config and the tensors that rotate, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.checkpoints.head_blocks import RowLayout, ScaleBlocks
from rope_ext_hf.checkpoints.row_layouts import RotaryTensors
from rope_ext_hf.checkpoints.stated_config import stated_config
from rope_ext_hf.checkpoints.weight_files import FORMATS, TORCH_DTYPES, TensorView, WeightFile
from rope_ext_hf.downloads import WEIGHT_FILES
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import (
    FileStamps,
    file_stamps,
    list_files,
    read_json,
    resolve_inside,
)
from rope_ext_hf.hub import loading, model_folder
from rope_ext_hf.patches.adapters import ADAPTER_CONFIG, Adapter, find_adapter
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import check_sizes, check_stated, config_pairing, stated_rotary
from rope_ext_hf.patches.geometry import checkpoint_geometry, rotary_of_usual_config
from rope_ext_hf.patches.loading import load_config
from rope_ext_hf.patches.model_classes import class_of_part, empty_model
from rope_ext_hf.rotary.pairing import PAIRINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Source:
    """A checkpoint folder in Hugging Face's format, with its files checked; the weights themselves are not read yet.

    Attributes:
        folder: the folder.
        inputs: stamps of its files, taken before they were read.
        files: the weight files by name, in the order of the index.
        index: the index without its weight map; None: there is a single file.
        is_adapter: whether the weights are those of an adapter.
        adapter: the adapter; None: the weights are those of a model.
        config: the config of the model, or of the model that the adapter was trained on. Where config.json alone
            settles which rows rotate, it is one without the class of its family; `class_config` has that class.
        model: the model on the meta device; None: config.json alone settles which rows rotate.
        rotary: the parameters of its rotary embedding.
        tensors: the rows that rotate in each of its tensors.
        expected: the modules whose rows rotate, as `tensors.locate` names them; empty for an adapter.
        pairing: the pairing of the weights by the config or the family table; None: neither states one.

    Raises:
        CheckpointError: a file is missing, damaged or contradicts another one.
        UnsupportedModelError: a family that the table does not list.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self.inputs: FileStamps = {}
        self.files, self.index = _open_files(folder, self.inputs)
        # Refuses links that lead out of the folder. After the weights, because of any large folder that holds none.
        list_files(folder)
        self.is_adapter = _names_adapter(next(iter(self.files)))
        self.inputs |= file_stamps([resolve_inside(folder, ADAPTER_CONFIG if self.is_adapter else "config.json")])
        self.adapter = find_adapter(folder) if self.is_adapter else None
        self._config_folder = _config_folder(folder, self.adapter)
        self._trust_remote_code = trust_remote_code
        with loading(f"the config of {str(self._config_folder)!r}"):
            stated = _stated_config(self._config_folder)
            self.config = self.class_config if stated is None else stated
        pairing = (self.adapter and self.adapter.pairing) or getattr(self.config, PAIRING_KEY, None)
        if pairing not in (None, *PAIRINGS):
            raise CheckpointError(f"{PAIRING_KEY} in {str(folder)!r} is {pairing!r}; known: {', '.join(PAIRINGS)}")
        self.model: PreTrainedModel | None = None
        with loading(f"the model that the config of {str(folder)!r} describes"):
            expected = self._read_class() if stated is None else self._read_stated()
        self.expected = set[str]() if self.is_adapter else expected
        self.pairing = pairing or config_pairing(self.config) or self.tensors.pairing

    def _read_stated(self) -> set[str]:
        """Read from a config that states everything what rotates, and return the modules whose rows do."""
        check_sizes(self.config)
        self.rotary = stated_rotary(self.config) or rotary_of_usual_config(self.config)
        self.tensors = RotaryTensors(self.config, self.rotary.dim)
        attention = str(family(self.config.model_type).attention)
        layers = range(len(self.tensors.layers))
        return {f"{attention.format(layer)}.{module}" for layer in layers for module in self.tensors.modules}

    def _read_class(self) -> set[str]:
        """Read from the class of the model what rotates, and return the modules whose rows do."""
        from transformers import MODEL_MAPPING

        text = self.config.get_text_config()
        part = text if type(text) in MODEL_MAPPING else self.config  # some text parts have no class
        self.model = empty_model(part, trust_remote_code=self._trust_remote_code)
        self.rotary = checkpoint_geometry(self.model)
        self.tensors = RotaryTensors(self.config, self.rotary.dim, class_of_part(self.model, text))
        held = map(self.tensors.held, self.model.state_dict())
        return set[str]().union(*(modules for _, modules in filter(None, held)))

    @cached_property
    def class_config(self) -> Any:
        """The config of the model, or of the model that the adapter was trained on, in the class of its family."""
        return load_config(self._config_folder, trust_remote_code=self._trust_remote_code)[0]

    @cached_property
    def view(self) -> TensorView:
        """The tensors in all weight files, by name."""
        return TensorView.from_files(self.files.values())

    def layouts(self) -> dict[str, RowLayout | ScaleBlocks]:
        """Return the layout of every rotated tensor by its name.

        Raises:
            CheckpointError: a tensor is missing, its layout is unknown, or its rows cannot be moved.
        """
        layouts: dict[str, RowLayout | ScaleBlocks] = {}
        stacks: dict[str, set[str]] = {}  # the modules that rotate, by the prefix of their stack of layers
        for name, info in self.view.tensors.items():
            layout = self.tensors.find(name, info.shape)
            if layout is None:
                continue
            if info.dtype not in TORCH_DTYPES:
                raise CheckpointError(
                    f"the tensor {name!r} has the dtype {info.dtype}, which torch cannot read, so its rows "
                    "cannot be reordered; convert a checkpoint in another dtype"
                )
            layouts[name] = layout
            held = self.tensors.held(name)
            if held is not None:
                prefix, modules = held
                stacks.setdefault(prefix, set()).update(modules)
        if not stacks:
            raise CheckpointError(
                f"no tensor in {str(self.folder)!r} has a name of a rotated module of {self.tensors.model_type!r}"
            )
        if len(stacks) > 1:
            raise CheckpointError(
                f"there are rotated modules under {' and '.join(map(repr, stacks))} in {str(self.folder)!r}; it is "
                "unknown which of them is the language model"
            )
        [(prefix, modules)] = stacks.items()
        missing = sorted(self.expected - modules)
        if missing:
            first = f"{prefix}.{missing[0]}" if prefix else missing[0]
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{first!r} is missing in {str(self.folder)!r}{more}")
        return layouts


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights that transformers would load."""
    return any((folder / candidate).exists() for name in chain(*WEIGHT_FILES) for candidate in (name, index_name(name)))


def safetensors_name(name: str) -> str:
    """Return the name that a weight file gets as safetensors.

    pytorch_model-00001-of-00002.bin becomes model-00001-of-00002.safetensors.
    """
    path = Path(name)
    return name if path.suffix == ".safetensors" else f"{path.stem.replace('pytorch_model', 'model', 1)}.safetensors"


def _names_adapter(file: str) -> bool:
    """Return whether a weight file belongs to an adapter, judged by its name."""
    return file.startswith("adapter_model")


def _config_folder(folder: Path, adapter: Adapter | None) -> Path:
    """Return the folder with the config of the model, or of the model that an adapter was trained on."""
    if adapter is None or (folder / "config.json").is_file():
        return folder
    return model_folder(adapter.base, weights=False)


def _stated_config(folder: Path) -> Any | None:
    """Return the config of a folder, where its config.json settles it; None: its class has to be asked."""
    from transformers.configuration_utils import PreTrainedConfig

    values, _ = PreTrainedConfig.get_config_dict(folder)
    check_stated(values)
    return stated_config(values)


def _open_files(folder: Path, inputs: FileStamps) -> tuple[dict[str, WeightFile], dict[str, Any] | None]:
    """Open the weight files that transformers would load, and add their stamps to `inputs`.

    Returns:
        The files by name, in the order of the index; and the index without its weight map, None for a single file.
    """
    known = list(chain(*WEIGHT_FILES))
    existing = [name for name in known if (folder / name).exists() or (folder / index_name(name)).exists()]
    if not existing:
        looked_for = ", ".join(candidate for name in known for candidate in (index_name(name), name))
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {looked_for}")
    if len(set(map(_names_adapter, existing))) > 1:
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
    weight_map = _weight_map(index, index_file, folder)
    files = {name: open_file(name) for name in dict.fromkeys(weight_map.values())}
    _check_index(files, weight_map, index_file)
    return files, index


def _check_index(files: Mapping[str, WeightFile], weight_map: Mapping[str, str], index_file: str) -> None:
    """Raise a CheckpointError unless every tensor is in one file, and in the file that the index names."""
    holders: dict[str, str] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            if tensor in holders:
                raise CheckpointError(f"{tensor!r} is in {holders[tensor]!r} and in {file_name!r}")
            holders[tensor] = file_name
    for tensor, file_name in weight_map.items():
        if holders.get(tensor) != file_name:
            raise CheckpointError(f"{tensor!r} is not in {file_name!r}, where {index_file!r} has it")
    if extra := next((tensor for tensor in holders if tensor not in weight_map), None):
        raise CheckpointError(f"{extra!r} in {holders[extra]!r} is not in {index_file!r}")


def index_name(name: str) -> str:
    """Return the file name of the index that belongs to weight files of this name."""
    return f"{name}.index.json"


def _weight_map(index: dict[str, Any], index_file: str, folder: Path) -> dict[str, str]:
    """Remove the weight map, which names the file of each tensor, from an index, and return it."""
    weight_map = index.pop("weight_map", None)
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise CheckpointError(f"{index_file!r} has no weight_map from tensors to files")
    names = list(dict.fromkeys(weight_map.values()))
    if nested := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{nested[0]!r} in {index_file!r} is not a valid file name in {str(folder)!r}")
    if len({safetensors_name(name) for name in names}) < len(names):
        raise CheckpointError(f"two files in {index_file!r} would be written under one name: {', '.join(names)}")
    return weight_map

"""A checkpoint folder in Hugging Face's format: its files, its config and the tensors that rotate, checked once.

Where config.json alone settles which rows rotate, neither torch nor transformers is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rope_ext_hf.checkpoints.files.numbers import TORCH_NAMES
from rope_ext_hf.checkpoints.files.weight_files import TensorView
from rope_ext_hf.checkpoints.files.weight_folders import is_adapter_file, open_weights
from rope_ext_hf.checkpoints.rows.head_blocks import RowLayout, ScaleBlocks
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.errors import CheckpointError, FileError
from rope_ext_hf.files.model_folders import ADAPTER_CONFIG, loading, model_folder
from rope_ext_hf.files.other_formats import check_packed
from rope_ext_hf.files.whole import (
    FileStamps,
    file_stamps,
    list_files,
    read_json,
    resolve_inside,
)
from rope_ext_hf.models.config_keys import PAIRING_KEY, PATCH_KEY, rotated_dims
from rope_ext_hf.models.families import Family, family
from rope_ext_hf.models.family_settings import (
    check_sizes,
    check_stated,
    class_pairing,
    config_pairing,
)
from rope_ext_hf.rotary.pairing_names import PAIRINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.methods.base import Rotary
    from rope_ext_hf.patches.saved.adapters import Adapter


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
        inv_freq: the inverse frequencies of its rotary embedding in radians per token, one for each pair of dims.
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
        self.files, self.index = open_weights(folder, self.inputs)
        # Refuses links that lead out of the folder. After the weights, because of any large folder that holds none.
        list_files(folder)
        self.is_adapter = is_adapter_file(next(iter(self.files)))
        self.inputs |= file_stamps([resolve_inside(folder, ADAPTER_CONFIG if self.is_adapter else "config.json")])
        self.adapter = _find_adapter(folder) if self.is_adapter else None
        self._config_folder = _config_folder(folder, self.adapter)
        self._trust_remote_code = trust_remote_code
        self._part: Any = None  # the part of the config whose class was read
        with loading(f"the config of {str(self._config_folder)!r}"):
            stated = _stated_config(self._config_folder)
            self.config = self.class_config if stated is None else stated
        pairing = (self.adapter and self.adapter.stated_pairing) or getattr(self.config, PAIRING_KEY, None)
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
        plain = _plain_frequencies(self.config)
        self.inv_freq = self.rotary.inv_freq().numpy() if plain is None else plain
        self.tensors = RotaryTensors(self.config, 2 * len(self.inv_freq))
        attention = str(family(self.config.model_type).attention)
        layers = range(len(self.tensors.layers))
        return {f"{attention.format(layer)}.{module}" for layer in layers for module in self.tensors.modules}

    def _read_class(self) -> set[str]:
        """Read from the class of the model what rotates, and return the modules whose rows do."""
        from transformers import MODEL_MAPPING

        from rope_ext_hf.models.model_classes import class_of_part, empty_model

        text = self.config.get_text_config()
        part = text if type(text) in MODEL_MAPPING else self.config  # some text parts have no class
        self.model = empty_model(part, trust_remote_code=self._trust_remote_code)
        self._part = part
        self.inv_freq = self.rotary.inv_freq().numpy()
        self.tensors = RotaryTensors(self.config, 2 * len(self.inv_freq), class_of_part(self.model, text))
        held = map(self.tensors.held, self.model.state_dict())
        return set[str]().union(*(modules for _, modules in filter(None, held)))

    @cached_property
    def rotary(self) -> Rotary:
        """The parameters of its rotary embedding."""
        from rope_ext_hf.patches.model_rope import ModelRope

        return ModelRope.of_checkpoint(self._part or self.config, self.model).rotary

    @cached_property
    def class_config(self) -> Any:
        """The config of the model, or of the model that the adapter was trained on, in the class of its family."""
        from rope_ext_hf.patches.loading import load_config

        return load_config(self._config_folder, trust_remote_code=self._trust_remote_code)[0]

    @property
    def class_pairing(self) -> str | None:
        """The pairing that the model's class in transformers runs; None: it is unknown."""
        return class_pairing(self.config) or self.tensors.pairing

    @cached_property
    def view(self) -> TensorView:
        """The tensors in all weight files, by name."""
        return TensorView.from_files(self.files.values())

    def layouts(self) -> dict[str, RowLayout | ScaleBlocks]:
        """Return the layout of every rotated tensor by its name.

        Raises:
            CheckpointError: a tensor is missing, its layout is unknown, or its rows cannot be moved.
        """
        if not self.is_adapter:
            check_packed(read_json(self.folder / "config.json"), self.folder)
        layouts: dict[str, RowLayout | ScaleBlocks] = {}
        stacks: dict[str, set[str]] = {}  # the modules that rotate, by the prefix of their stack of layers
        for name, info in self.view.tensors.items():
            layout = self.tensors.find(name, info.shape)
            if layout is None:
                continue
            if info.dtype not in TORCH_NAMES:
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


def _find_adapter(folder: Path) -> Adapter | None:
    """Return the adapter in a folder with weights of one."""
    from rope_ext_hf.patches.saved.adapters import find_adapter

    return find_adapter(folder)


def _config_folder(folder: Path, adapter: Adapter | None) -> Path:
    """Return the folder with the config of the model, or of the model that an adapter was trained on."""
    if adapter is None or (folder / "config.json").is_file():
        return folder
    return model_folder(adapter.base, weights=False)


def _stated_config(folder: Path) -> Any | None:
    """Return the config of a folder, where its config.json settles it; None: its class has to be imported."""
    values = _usual_values(folder)
    if values is None:
        from transformers.configuration_utils import PreTrainedConfig

        values, _ = PreTrainedConfig.get_config_dict(folder)
    check_stated(values)
    return stated_config(values)


def _usual_values(folder: Path) -> dict[str, Any] | None:
    """Return the values of the config.json in a folder, where transformers reads no others; else None."""
    try:
        values = read_json(folder / "config.json")
    except FileError:  # transformers says in its own words what is wrong
        return None
    return None if "configuration_files" in values or "__float__" in str(values) else values


# --- a config.json that states everything -------------------------------------------------------------------------


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Rope types that every class reads alike; Phi-3 reads others than these in a way of its own."""


def stated_config(values: Mapping[str, Any]) -> Any | None:
    """Return the config that a config.json describes, without its class; None: the class has to be imported.

    The config has the sizes that decide which rows rotate, and its rope settings under `rope_parameters`, as
    transformers 5 writes them. What its class would add, such as defaults, is missing.

    Args:
        values: the values of the config.json.
    """
    model_type = values.get("model_type")
    known = family(model_type) if isinstance(model_type, str) else Family()
    if known.attention is None:
        return None
    if known.remote:
        return _config_of(values)
    rope = _rope_parameters(values, known)
    if rope is None or not all(_is_count(values.get(key)) for key in _SIZES):
        return None
    head_dim = values.get("head_dim")
    if not _is_count(head_dim) and (head_dim is not None or known.own_head_dim):
        return None
    if any(values.get(key) for key in (PATCH_KEY, "text_config", "auto_map")):
        return None
    return _config_of({key: values[key] for key in values if key not in _ROPE_KEYS} | {"rope_parameters": rope})


class _StatedConfig:
    """The values of a config.json as attributes, without a class of transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take over the values."""
        vars(self).update(values)

    def get_text_config(self) -> _StatedConfig:
        """Return the config itself, which is that of a text model."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the values."""
        return dict(vars(self))


_CHECKED_KEYS = (
    *("id2label", "label2id", "problem_type", "num_labels", "return_dict", "output_hidden_states", "output_attentions"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "per_layer_config", "get_text_config", "to_dict"),
)
"""Keys whose values transformers checks or converts in the config of any model."""


def _config_of(values: Mapping[str, Any]) -> Any:
    """Return a config with these values; transformers makes it where it would check or convert some of them."""
    names, dtypes = values.get("architectures"), [values.get(key) for key in ("dtype", "torch_dtype")]
    usual = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    usual = usual and all(dtype in (None, "float32", "bfloat16", "float16") for dtype in dtypes)
    if usual and not any(values.get(key) for key in _CHECKED_KEYS):
        return _StatedConfig(values)
    from transformers.configuration_utils import PreTrainedConfig

    return PreTrainedConfig(**values)


def _plain_frequencies(config: Any) -> NDArray[np.float64] | None:
    """Return the inverse frequencies of a config as `stated_config` returns it; None: a method computes them.

    They are those of a rotary embedding without a scaling: theta^(-2i/d) for pair i.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "default" or not 1 < rope["rope_theta"] < math.inf:
        return None
    dim = rotated_dims(config.to_dict(), {})
    return float(rope["rope_theta"]) ** (-np.arange(0, dim, 2) / dim)


def _rope_parameters(values: Mapping[str, Any], known: Family) -> dict[str, Any] | None:
    """Return the rope settings of a config.json, as transformers 5 writes them; None: its class is needed."""
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or any(isinstance(value, Mapping) for value in stated.values()):
        return None  # settings for each layer type
    rope = dict(stated)
    rope_type = rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.setdefault("rope_theta", values.get("rope_theta"))
    accepted = [each for each in _ROPE_TYPES if each in (known.rope_types or _ROPE_TYPES)]
    if rope_type not in accepted or not isinstance(theta, (int, float)) or isinstance(theta, bool):
        return None
    partial = [each.get("partial_rotary_factor") for each in (values, rope)]
    return rope if all(share in (None, 1) for share in partial) else None  # which some classes read, and others do not


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0

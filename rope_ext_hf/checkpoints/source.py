"""A checkpoint folder, resolved and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_ext_hf.checkpoints.row_layouts import Blocks, Layout, RotatingRows, layer_modules, rotating_rows
from rope_ext_hf.checkpoints.weight_files import TORCH_DTYPES, SafetensorsFile, TorchFile
from rope_ext_hf.errors import CheckpointError, RopeExtError
from rope_ext_hf.files import list_files, read_json, resolve_inside
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import config_pairing, stated_rotary
from rope_ext_hf.patches.geometry import checkpoint_geometry
from rope_ext_hf.rotary.pairing import PAIRINGS

__all__ = ["INDEXES", "NEVER", "WEIGHTS", "Source", "Weights", "read_source"]

INDEXES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("adapter_model.safetensors.index.json", "adapter_model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ("adapter_model.bin.index.json", "adapter_model.bin"),
)
NEVER = ["original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.nemo", "*.ckpt"]  # downloaded
# Weights in another form, which would be wrong beside converted ones.
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".nemo")

Weights = SafetensorsFile | TorchFile


@dataclass(frozen=True)
class Source:
    """A folder of weights, read as far as its headers.

    Attributes:
        folder: where it is.
        config: the Hugging Face config of the model these weights are of.
        files: its weight files by name, in the order of the index.
        index: what the index says beside its weight map, None where there is a single file.
        rows: what rotates.
        expected: the modules that rotate in the model of this config, as `rows.place` names them; none for an adapter.
        pairing: of the weights, as far as the folder says.
    """

    folder: Path
    config: Any
    files: dict[str, Weights]
    index: dict[str, Any] | None
    rows: RotatingRows
    expected: frozenset[str]
    pairing: str | None

    @property
    def adapter(self) -> bool:
        """Whether these are an adapter's weights."""
        return _is_adapter(self.files)

    def layouts(self) -> dict[str, Layout | Blocks]:
        """Every tensor that rotates.

        Raises:
            CheckpointError: one that the family table does not know, whose shape the config contradicts, or that is
                missing; two stacks of layers of which either could be the language model.
        """
        found: dict[str, Layout | Blocks] = {}
        stacks: dict[str, set[str]] = {}
        for file in self.files.values():
            for name, entry in file.tensors.items():
                layout = self.rows.find(name, entry.shape)
                if layout is None:
                    continue
                if entry.dtype not in TORCH_DTYPES:
                    raise CheckpointError(f"{name!r} is {entry.dtype}, whose rows cannot be moved here")
                found[name] = layout
                if (place := self.rows.place(name)) is not None:
                    stacks.setdefault(place[0], set()).add(place[1])
        if not stacks:
            raise CheckpointError(f"no tensor in {str(self.folder)!r} rotates by the names of {self.rows.model_type!r}")
        if len(stacks) > 1:
            raise CheckpointError(
                f"attention that rotates stands under {' and '.join(map(repr, stacks))} in {str(self.folder)!r}; which "
                "of them is the language model is not known"
            )
        stack, there = next(iter(stacks.items()))
        if missing := sorted(self.expected - there):
            raise CheckpointError(
                f"{'.'.join([*filter(None, [stack]), missing[0]])!r} is missing in {str(self.folder)!r}"
                + (f", and {len(missing) - 1} more" if missing[1:] else "")
            )
        return found


def read_source(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Read what a folder or Hub repository says of its weights, and check it; no weights are read.

    Raises:
        CheckpointError: missing, contradictory or leading out of the folder.
        UnsupportedModelError: a family that the table says nothing of.
    """
    folder = _folder(path, revision)
    list_files(folder)
    files, index = _files(folder)
    adapter = _is_adapter(files)
    config = _config(folder, adapter, trust_remote_code)
    rows, expected = _rows(config, trust_remote_code)
    said = getattr(config, PAIRING_KEY, None)
    if adapter:
        expected = frozenset()
        said = read_json(resolve_inside(folder, "adapter_config.json")).get(PAIRING_KEY, said)
    if said not in (None, *PAIRINGS):
        raise CheckpointError(f"{PAIRING_KEY} in {str(folder)!r} is {said!r}; known: half, interleaved")
    return Source(folder, config, files, index, rows, expected, said or config_pairing(config))


def _is_adapter(files: dict[str, Weights]) -> bool:
    return next(iter(files)).startswith("adapter_model")


def _folder(path: str | Path, revision: str | None) -> Path:
    name = str(path)
    if name == "reference":
        from rope_ext_hf.reference import path as reference

        return reference()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"no such folder: {name!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=NEVER))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name!r} is neither a folder nor a model on the Hub: {reason}") from error


def _config(folder: Path, adapter: bool, trust_remote_code: bool) -> Any:
    """Of the model, or of the model that an adapter is for."""
    from rope_ext_hf.patches.loading import load_config

    where: str | Path = folder
    if adapter and not (folder / "config.json").is_file():
        said = read_json(resolve_inside(folder, "adapter_config.json")).get("base_model_name_or_path")
        if not said or not isinstance(said, str):
            raise CheckpointError(f"{str(folder)!r} is an adapter that does not name the model it is for")
        where = said
    else:
        resolve_inside(folder, "config.json")
    try:
        return _own_config(where) or load_config(where, trust_remote_code=trust_remote_code)[0]
    except RopeExtError:
        raise
    except Exception as error:  # whatever the words in a config lead its class into
        raise CheckpointError(f"the config of {str(where)!r} cannot be used: {_in_a_line(error)}") from error


def _own_config(where: str | Path) -> Any | None:
    """What config.json says of a family whose code comes with its checkpoints: none of that code is run."""
    from transformers.configuration_utils import PreTrainedConfig

    said, _ = PreTrainedConfig.get_config_dict(where)
    model_type = said.get("model_type")
    if not isinstance(model_type, str) or family(model_type).own_code is None:
        return None
    return PreTrainedConfig(**said)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _rows(config: Any, trust_remote_code: bool) -> tuple[RotatingRows, frozenset[str]]:
    """What rotates, as the model of this config has it, and which of its modules do."""
    from transformers import AutoModelForCausalLM

    try:
        text = config.get_text_config()
        if family(text.model_type).own_code is not None:
            rotary = stated_rotary(config)
            assert rotary is not None  # the table has it for every such family
            rows = rotating_rows(config, rotary.dim)
            return rows, layer_modules(config, rows)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
        rows = rotating_rows(config, checkpoint_geometry(model).dim)
        places = [rows.place(name) for name in model.state_dict()]
    except RopeExtError:
        raise
    except Exception as error:  # here too
        raise CheckpointError(f"no model can be built from this config: {_in_a_line(error)}") from error
    return rows, frozenset(place[1] for place in places if place is not None)


def _files(folder: Path) -> tuple[dict[str, Weights], dict[str, Any] | None]:
    there = [(index, single) for index, single in INDEXES if (folder / index).exists() or (folder / single).exists()]
    if not there:
        known = ", ".join(name for pair in INDEXES for name in pair)
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {known}")
    if len({single.startswith("adapter_model") for _, single in there}) > 1:
        raise CheckpointError(f"{str(folder)!r} holds a model and an adapter; give each a folder of its own")
    index_name, single = there[0]
    kind = SafetensorsFile if single.endswith(".safetensors") else TorchFile
    if (folder / single).exists():  # as transformers chooses where both are there
        return {single: kind(resolve_inside(folder, single))}, None
    return _sharded(folder, index_name, kind)


def _sharded(
    folder: Path, index_name: str, kind: type[SafetensorsFile] | type[TorchFile]
) -> tuple[dict[str, Weights], dict[str, Any]]:
    index = read_json(resolve_inside(folder, index_name))
    where = index.pop("weight_map", None)
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index_name!r} has no weight_map from tensors to files")
    names = list(dict.fromkeys(where.values()))
    if deep := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{deep[0]!r} in {index_name!r} is not a valid file name in {str(folder)!r}")
    if len({_safetensors_name(name) for name in names}) < len(names):
        raise CheckpointError(f"two files in {index_name!r} would be written under one name: {', '.join(names)}")
    files = {name: kind(resolve_inside(folder, name)) for name in names}
    seen: dict[str, str] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            if tensor in seen:
                raise CheckpointError(f"{tensor!r} stands in {seen[tensor]!r} and in {file_name!r}")
            seen[tensor] = file_name
    for tensor, file_name in where.items():
        if seen.get(tensor) != file_name:
            raise CheckpointError(f"{tensor!r} should be in {file_name!r}, by {index_name!r}, and is not")
    if extra := next((tensor for tensor in seen if tensor not in where), None):
        raise CheckpointError(f"{extra!r} in {seen[extra]!r} is not in {index_name!r}")
    return files, index


def _safetensors_name(name: str) -> str:
    """pytorch_model-00001-of-00002.bin as model-00001-of-00002.safetensors."""
    if name.endswith(".safetensors"):
        return name
    return name.removesuffix(".bin").replace("pytorch_model", "model", 1) + ".safetensors"

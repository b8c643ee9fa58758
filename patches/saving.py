"""Loading a folder that was saved patched, and saving where a config class would refuse our name.

model = from_pretrained("folder")      # AutoModelForCausalLM, plus the patch saved with the folder
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.config import RECORD, SAVED_KEYS, settings_before
from rope_ext_hf.scaling import method_from_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SaveForeign", "from_pretrained", "load_config", "restore_patch", "save_patched_folder"]

M = TypeVar("M", bound=nn.Module)


class SaveForeign:
    """Stands in for `save_pretrained` on one model whose config class accepts no rope type of ours (Phi-3).

    The config is saved as the class likes it, then its rope type is replaced on disk, so that plain loading stops
    rather than runs without the method.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        if push_to_hub:
            raise CheckpointError("this method has no native form for this family; save to a folder and upload that")
        type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
        _write_rope_parameters(Path(save_directory))

    @classmethod
    def attach(cls, model: nn.Module) -> None:
        from transformers import PreTrainedModel

        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.__dict__["save_pretrained"] = cls(module)

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module.__dict__.get("save_pretrained"), cls):
                del module.__dict__["save_pretrained"]


def _write_rope_parameters(folder: Path) -> None:
    """Put the rope settings a config's record names where transformers reads them."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in [config, *config.values()]:
        if isinstance(part, dict) and RECORD in part:
            part["rope_parameters"] = part[RECORD]["rope_parameters"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
    """The config of a folder or Hub id as it was before a patch saved with it, and the record of that patch or None.

    Raises:
        CheckpointError: no such folder or Hub id, or a record that contradicts the config.
    """
    from transformers import AutoConfig
    from transformers.configuration_utils import PreTrainedConfig

    name = str(path)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise CheckpointError(f"no such model folder: {name!r}")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    except OSError as error:
        raise CheckpointError(
            f"{name!r} is neither a folder with a config.json nor a model id: {_first_line(error)}"
        ) from error
    if not raw:
        raise CheckpointError(f"{name!r} is neither a folder with a config.json nor a model id that can be reached")
    inner = next((key for key, value in raw.items() if isinstance(value, dict) and RECORD in value), None)
    record = (raw[inner] if inner else raw).get(RECORD)
    if record is None:
        return AutoConfig.from_pretrained(path, **kwargs), None
    plain = raw | {inner: _without_record(raw[inner])} if inner else _without_record(raw)
    return AutoConfig.for_model(plain.pop("model_type"), **plain), record


def _without_record(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in (RECORD, *SAVED_KEYS)}
    return kept | (settings_before(config) or {})


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def from_pretrained(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`, plus the patch saved with the folder, if there is one.

    Args:
        path: a local folder or a Hub id.
        **kwargs: handed on to transformers (dtype, device_map, revision, ...).

    Raises:
        CheckpointError: no such folder, or its record of a patch contradicts its config.
    """
    from transformers import AutoModelForCausalLM

    hub = {
        key: kwargs[key]
        for key in ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
        if key in kwargs
    }
    config, record = load_config(path, **hub)
    if record is None:
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    for key in [key for key in kwargs if hasattr(config, key)]:  # config settings among the arguments
        if key in SAVED_KEYS:
            raise CheckpointError(f"{key} of a patched folder follows from its patch; load it, then patch it anew")
        setattr(config, key, kwargs.pop(key))
    return restore_patch(AutoModelForCausalLM.from_pretrained(path, config=config, **kwargs), record)


def restore_patch(model: M, record: Mapping[str, Any]) -> M:
    """Patch a model as a record in its config says."""
    from rope_ext_hf.patches.patching import install

    method = method_from_dict(record["method"])
    install(model, lambda rotary: method, record["target_length"], record["native"])
    return model


def save_patched_folder(model: PreTrainedModel, source: Path, out: Path) -> None:
    """A copy of a model's folder with the config of a patched model (whose weights are not needed).

    Raises:
        CheckpointError: `out` exists, or the copy fails; nothing is left of it then.
    """
    if out.exists():
        raise CheckpointError(f"{str(out)!r} exists already; give a new folder")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("config.json", "__pycache__", "__init__.py"))
        model.config.save_pretrained(unfinished)
        _write_rope_parameters(unfinished)
        unfinished.rename(out)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{str(out)!r} could not be written: {error.strerror or error}") from error

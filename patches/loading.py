"""Load a folder that was saved patched.

model = from_pretrained("folder")      # AutoModelForCausalLM, plus the patch saved with the folder
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.config import RECORD, SAVED_KEYS, original_settings, saved_steps
from rope_ext_hf.patches.patching import replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["from_pretrained", "load_config", "restore_patch"]

M = TypeVar("M", bound=nn.Module)

# Arguments of transformers' from_pretrained that are also attributes of a config; "auto" is a value for the first only.
_LOADING_ARGUMENTS = frozenset({"dtype", "torch_dtype"})


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
    return kept | (original_settings(config) or {})


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
    settings = [key for key in kwargs if hasattr(config, key) and key not in _LOADING_ARGUMENTS]
    for key in settings:
        if key in SAVED_KEYS:
            raise CheckpointError(f"{key} of a patched folder follows from its patch; load it, then patch it anew")
        setattr(config, key, kwargs.pop(key))
    return restore_patch(AutoModelForCausalLM.from_pretrained(path, config=config, **kwargs), record)


def restore_patch(model: M, record: Mapping[str, Any]) -> M:
    """Patch a model as the record in its config says, stacked patches included."""
    return replay(model, tuple(saved_steps(record)))

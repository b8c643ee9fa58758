"""Load a folder that was saved patched.

model = from_pretrained("folder")      # the class its config names, plus the patch saved with the folder
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

from rope_ext_hf.errors import CheckpointError, one_line
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
            f"{name!r} is neither a folder with a config.json nor a model id: {one_line(error)}"
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


def from_pretrained(path: str | Path, *, auto_class: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load a model with transformers, plus the patch saved with the folder, if there is one.

    Args:
        path: a local folder or a Hub id.
        auto_class: the class of transformers to load with, e.g. "AutoModel"; default: the class that the config names
            in `architectures`, AutoModelForCausalLM where it names none.
        **kwargs: arguments of transformers' from_pretrained (dtype, device_map, revision, ...).

    Raises:
        CheckpointError: no such folder, its record of a patch contradicts its config, or the weights hold tensors that
            the class has no place for.
    """
    hub = {
        key: kwargs[key]
        for key in ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
        if key in kwargs
    }
    config, record = load_config(path, **hub)
    loader = _class_to_load(config, auto_class)
    if record is None:
        return _load_whole(loader, path, auto_class, kwargs)
    settings = [key for key in kwargs if hasattr(config, key) and key not in _LOADING_ARGUMENTS]
    for key in settings:
        if key in SAVED_KEYS:
            raise CheckpointError(f"{key} of a patched folder follows from its patch; load it, then patch it anew")
        setattr(config, key, kwargs.pop(key))
    return restore_patch(_load_whole(loader, path, auto_class, {"config": config, **kwargs}), record)


def _class_to_load(config: Any, auto_class: str | None) -> Any:
    import transformers

    if auto_class is not None:
        if not hasattr(getattr(transformers, auto_class, None), "from_pretrained"):
            raise CheckpointError(f"auto_class must be a model class of transformers, got {auto_class!r}")
        return getattr(transformers, auto_class)
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None:
        return transformers.AutoModelForCausalLM
    remote = getattr(config, "auto_map", None) or {}  # code that comes with the folder: the Auto class that leads to it
    auto = next((key for key, value in remote.items() if str(value).endswith(f".{name}")), None)
    return getattr(transformers, auto or name, transformers.AutoModelForCausalLM)


def _load_whole(loader: Any, path: str | Path, auto_class: str | None, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load, and refuse to drop weights unless the user has chosen the class."""
    if kwargs.pop("output_loading_info", False):
        raise CheckpointError("output_loading_info=True is not supported; load with transformers to get it")
    model, info = loader.from_pretrained(path, output_loading_info=True, **kwargs)
    if info["unexpected_keys"] and auto_class is None:
        names = sorted(info["unexpected_keys"])
        raise CheckpointError(
            f"{type(model).__name__} has no place for {len(names)} tensors of {str(path)!r}, the first of them "
            f"{names[0]!r}; give auto_class=..., e.g. 'AutoModelForSequenceClassification'"
        )
    return cast("PreTrainedModel", model)


def restore_patch(model: M, record: Mapping[str, Any]) -> M:
    """Patch a model as the record in its config says, stacked patches included."""
    return replay(model, tuple(saved_steps(record)))

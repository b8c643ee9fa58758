"""Load a folder that was saved patched, of a model or of a PEFT adapter on its base model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rope_ext_hf.bounds import Length
from rope_ext_hf.downloads import only_cached
from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError, one_line, short
from rope_ext_hf.files import check_regular
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import split_parameters
from rope_ext_hf.patches.adapters import Adapter, find_adapter, finding_base
from rope_ext_hf.patches.angle_tables import restore_table
from rope_ext_hf.patches.config_keys import own_keys
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import check_sizes, check_stated
from rope_ext_hf.patches.fingerprint import check_recorded
from rope_ext_hf.patches.generation_length import restore_generation_length
from rope_ext_hf.patches.layer_types import Layers
from rope_ext_hf.patches.loading_code import without_loading_code
from rope_ext_hf.patches.patch_records import PATCH_KEY, SAVED_KEYS, original_settings, saved_specs, written_keys
from rope_ext_hf.patches.planning import patch_as_planned, plan_patch, replay
from rope_ext_hf.reference import folder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Arguments of transformers' from_pretrained that are also attributes of a config; "auto" is a value for the first only.
_LOADING_ARGUMENTS = frozenset({"dtype", "torch_dtype"})
_HUB_ARGUMENTS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")
_ADAPTER_ARGUMENTS = ("adapter_name", "is_trainable")


def load_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
    """The config of a folder or Hub id as it was before a patch saved with it, and the record of that patch or None."""
    from transformers import AutoConfig
    from transformers.configuration_utils import PreTrainedConfig

    name = str(path)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise CheckpointError(f"no such model folder: {name!r}")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    except OSError as error:
        raise CheckpointError(f"the config of {name!r} could not be read: {one_line(error)}") from error
    if not raw:
        raise CheckpointError(f"{name!r} is neither a folder with a config.json nor a model id that can be reached")
    check_stated(raw)
    inner = next((key for key, value in raw.items() if isinstance(value, dict) and PATCH_KEY in value), None)
    record = (raw[inner] if inner else raw).get(PATCH_KEY)
    if record is None:
        return AutoConfig.from_pretrained(path, **kwargs), None
    plain = without_loading_code(raw) | {inner: _without_record(raw[inner])} if inner else _without_record(raw)
    return AutoConfig.for_model(plain.pop("model_type"), **plain), record


def _without_record(config: dict[str, Any]) -> dict[str, Any]:
    restored, written = original_settings(config) or {}, written_keys(config[PATCH_KEY])
    written |= {own for key, own in own_keys(config["model_type"]).items() if key in restored}
    return without_loading_code({key: value for key, value in config.items() if key not in written} | restored)


def find_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any] | None, Adapter | None]:
    """`load_config`, also for an adapter: the config of its base model, the patch it was trained under, and itself."""
    adapter = find_adapter(path, **kwargs)
    if adapter is None:
        return *load_config(path, **kwargs), None
    kwargs = adapter.for_base(kwargs)
    with finding_base(adapter):
        kwargs |= only_cached(adapter.base, kwargs)
        if find_adapter(adapter.base, **kwargs) is not None:
            raise CheckpointError(f"{short(adapter.base)!r} is an adapter itself; merge it into its model first")
        config, record = load_config(adapter.base, **kwargs)
    return config, dict(adapter.record) if adapter.record is not None else record, adapter


def from_pretrained(
    path: str | Path,
    method: str | RopeMethod | None = None,
    *,
    auto_class: str | None = None,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a model with transformers, plus the patch saved with the folder, if there is one; or with another method.

        model = from_pretrained("meta-llama/Llama-3.2-1B", "yarn", factor=4, dtype="bfloat16", device_map="auto")

    An adapter of PEFT is loaded onto its base model, patched first as its folder records: a peft.PeftModel.

    Args:
        path: a local folder, a Hub id, or "reference" for the bundled model.
        auto_class: the class of transformers to load with, e.g. "AutoModel"; default: the class that the config names
            in `architectures`, AutoModelForCausalLM where it names none; of an adapter, what its task asks for.
        method, factor, target_length, over, context_length, layers, native: as `rope_ext_hf.patch` takes them; what is
            loaded is patched so, in place of a patch saved with the folder, or with over="patched" over it.
        **kwargs: arguments of transformers' from_pretrained (dtype, device_map, revision, ...), of an adapter PEFT's
            `is_trainable` and `adapter_name`, and parameters of the method.

    Raises:
        MethodError, UnsupportedModelError: as `rope_ext_hf.patch` does; arguments of a patch without a method.
        CheckpointError, FileError: no such folder, a damaged one, more layers or wider heads than `limits` allows,
            tensors that the class has no place for, or an adapter whose base model is missing or another one.
        FingerprintError: the loaded model rotates otherwise than the saved one did; the message names how.
    """
    path = folder_of(path)
    of_patch: dict[str, Any] = {"factor": factor, "target_length": target_length, "over": over, "native": native}
    of_patch |= {"context_length": context_length, "layers": layers}
    params, kwargs = split_parameters(method, kwargs)
    kwargs |= only_cached(path, kwargs)
    config, record, adapter = find_config(path, **{key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs})
    if method is None:
        kwargs |= {key: params.pop(key) for key in list(params) if hasattr(config, key)}
        changed = [key for key, value in of_patch.items() if value not in (None, False, "own")]
        if given := [*changed, *params]:
            raise MethodError(f"{', '.join(given)} given without a method; add method=...")
    elif not (record or adapter or auto_class or kwargs.keys() - {*_HUB_ARGUMENTS, "dtype", "device_map"}):
        with suppress(CheckpointError):  # of a class that is built with its weights alone: loading decides
            empty = empty_model(config, trust_remote_code=kwargs.get("trust_remote_code", False))
            plan_patch(empty, method, **of_patch, **params)  # a mistake is told before weights are read
    if adapter is None:
        model = _load_patched(path, config, record, auto_class, kwargs)
    else:
        own = {key: kwargs.pop(key) for key in _ADAPTER_ARGUMENTS if key in kwargs}
        kwargs = adapter.for_base(kwargs)
        kwargs |= only_cached(adapter.base, kwargs)
        base = _load_patched(adapter.base, config, record, auto_class or adapter.auto_class, kwargs)
        model = cast("PreTrainedModel", adapter.load_onto(base, **own))
    if method is not None:
        patch_as_planned(plan_patch(model, method, **of_patch, **params))
    return model


def _load_patched(
    path: str | Path, config: Any, record: dict[str, Any] | None, auto_class: str | None, kwargs: dict[str, Any]
) -> PreTrainedModel:
    check_sizes(config)
    check_regular(Path(path))
    loader = class_to_load(config, auto_class)
    if record is None:
        return _load_whole(loader, path, auto_class, kwargs)
    usual = {own: key for key, own in own_keys(config.model_type).items()}
    settings = [key for key in kwargs if hasattr(config, key) and key not in _LOADING_ARGUMENTS]
    for key in settings:
        if {key, usual.get(key)} & {*SAVED_KEYS}:
            raise CheckpointError(f"{key} of a patched folder follows from its patch; load it, then patch it anew")
        setattr(config, key, kwargs.pop(key))
    positions = config.max_position_embeddings if family(config.model_type).angle_table else None
    if positions is not None:  # the table of the patch is among the weights
        config.max_position_embeddings = record["max_position_embeddings"]
    model = _load_whole(loader, path, auto_class, {"config": config, **kwargs})
    if positions is not None:
        restore_table(model, positions)
    return restore_patch(model, record)


def class_to_load(config: Any, auto_class: str | None = None) -> Any:
    """The class of transformers that a config is loaded with; `auto_class` names one to take instead.

    It is the one that its `architectures` name, else the Auto class for causal language models, for models of text and
    images, or for bare models that has its model type.
    """
    import transformers

    if auto_class is not None:
        if not hasattr(getattr(transformers, auto_class, None), "from_pretrained"):
            raise CheckpointError(f"auto_class must be a model class of transformers, got {auto_class!r}")
        return getattr(transformers, auto_class)
    names = getattr(config, "architectures", None) or []
    if not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
        raise CheckpointError(f"'architectures' in the config must be a list of names, got {short(repr(names))}")
    name = next(iter(names), None)
    if name is None:
        autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)
        return next((auto for auto in autos if type(config) in auto._model_mapping), autos[0])
    remote = getattr(config, "auto_map", None) or {}  # code that comes with the folder: the Auto class that leads to it
    auto = next((key for key, value in remote.items() if str(value).endswith(f".{name}")), None)
    return getattr(transformers, auto or name, transformers.AutoModelForCausalLM)


_WITHOUT_WEIGHTS = "{}, which 'architectures' in the config names, has no weights"


def empty_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a config, of the class that `from_pretrained` would load, on the meta device, without weights."""
    try:
        loader = class_to_load(config)
        check_sizes(config)
        with torch.device("meta"):
            if hasattr(loader, "_model_mapping"):
                model: PreTrainedModel = loader.from_config(config, trust_remote_code=trust_remote_code)
            # Refused before anything is built: PreTrainedModel keeps what it finds out for all models.
            elif getattr(loader, "config_class", None) is None:
                raise CheckpointError(_WITHOUT_WEIGHTS.format(loader.__name__))
            else:
                model = loader._from_config(config)
        if next(model.parameters(), None) is None:
            raise CheckpointError(_WITHOUT_WEIGHTS.format(type(model).__name__))
    except RopeExtError:
        raise
    except Exception as error:  # model classes raise anything on bad values
        raise CheckpointError(f"no language model can be built from this config: {one_line(error)}") from error
    return model


def _load_whole(loader: Any, path: str | Path, auto_class: str | None, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load, and refuse to drop weights or to make some up, unless the user has chosen the class."""
    if kwargs.pop("output_loading_info", False):
        raise CheckpointError("output_loading_info=True is not supported; load with transformers to get it")
    model, info = loader.from_pretrained(path, output_loading_info=True, **kwargs)
    if info["unexpected_keys"] and auto_class is None:
        names = sorted(info["unexpected_keys"])
        raise CheckpointError(
            f"{type(model).__name__} has no place for {len(names)} tensors of {str(path)!r}, the first of them "
            f"{names[0]!r}; give auto_class=..., e.g. 'AutoModelForSequenceClassification'"
        )
    if info["missing_keys"] and auto_class is None:  # transformers fills them with random numbers
        names = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{len(names)} tensors of {type(model).__name__} are missing in {str(path)!r}, the first of them "
            f"{names[0]!r}; its weights are incomplete, or its config describes another model"
        )
    return cast("PreTrainedModel", model)


def restore_patch(model: PreTrainedModel, record: Mapping[str, Any]) -> PreTrainedModel:
    """Patch a model as the record in its config, or with its adapter, states; stacked patches included."""
    restore_generation_length(model, record)
    replay(model, tuple(saved_specs(record)))
    check_recorded(model, record)
    return model

"""Load models, and PEFT adapters on their base models, with the patch that was saved in their folder."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import CheckpointError, MethodError, one_line, short
from rope_ext_hf.files.downloads import only_cached
from rope_ext_hf.files.model_files import model_file, name_way_out, resolve_file
from rope_ext_hf.files.other_formats import check_format, check_model_files, check_packed, without_config
from rope_ext_hf.files.whole import check_folder
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import split_parameters
from rope_ext_hf.models.config_keys import PATCH_KEY, own_keys
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import check_sizes, check_stated
from rope_ext_hf.models.layer_types import Layers
from rope_ext_hf.models.model_classes import class_to_load, empty_model
from rope_ext_hf.models.patch_records import (
    SAVED_KEYS,
    checked_patches,
    original_settings,
    replaced_note,
    saved_patches,
    still_stands,
    undo_saved_patch,
    written_keys,
)
from rope_ext_hf.patches.applying import patch_as_planned, reapply
from rope_ext_hf.patches.planning import plan_patch
from rope_ext_hf.patches.saved.adapters import Adapter, find_adapter, finding_base, keep_pairing
from rope_ext_hf.patches.saved.fingerprint import check_recorded
from rope_ext_hf.patches.saved.generation_length import restore_generation_length
from rope_ext_hf.patches.saved.loading_code import without_loading_code
from rope_ext_hf.patches.slots.roformer import restore_table
from rope_ext_hf.reference import folder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOADING_ARGUMENTS = frozenset({"dtype", "torch_dtype"})
"""Arguments of transformers' from_pretrained that are attributes of a config too, but with other values: only the
argument may be "auto"."""
_HUB_ARGUMENTS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")
_ADAPTER_ARGUMENTS = ("adapter_name", "is_trainable")


def load_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the config of a model before the patch that its folder records, and the record of that patch or None.

    Args:
        path: a local folder or a Hub id.
        **kwargs: arguments of transformers' from_pretrained for configs (revision, subfolder, ...).

    Raises:
        CheckpointError: there is no such folder or config, or a number, the record or the rope settings in it are
            impossible.
    """
    from transformers import AutoConfig
    from transformers.configuration_utils import PreTrainedConfig

    name = str(path)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).expanduser().is_dir():
        raise CheckpointError(f"no such model folder: {name!r}")
    check_folder(Path(name))
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    except OSError as error:
        raise CheckpointError(f"the config of {name!r} could not be read: {one_line(error)}") from error
    if not raw and os.path.isdir(path):  # noqa: PTH112
        if not kwargs.get("subfolder"):
            check_model_files(Path(path))
        raise CheckpointError(". ".join(filter(None, [f"{name!r} has no config.json", without_config(Path(path))])))
    if not raw:
        raise CheckpointError(f"{name!r} is neither a folder with a config.json nor a model id that can be reached")
    check_stated(raw)
    parts = {key: value for key, value in raw.items() if isinstance(value, dict)}
    inner = {key: part for key, part in parts.items() if part.get(PATCH_KEY) is not None}
    records = [part[PATCH_KEY] for part in inner.values()]
    if raw.get(PATCH_KEY) is not None:
        records.append(raw[PATCH_KEY])
    if not records:
        return AutoConfig.from_pretrained(path, **kwargs), None
    before = without_loading_code(raw) if raw.get(PATCH_KEY) is None else _before_patch(raw)
    before |= {key: _before_patch(part) for key, part in inner.items()}  # two in an encoder-decoder (T5Gemma)
    return AutoConfig.for_model(before.pop("model_type"), **before), records[0]


def before_patch(config: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return a copy of a config object of a patched folder as it was before the patch, and the record of the patch.

    The record is None where the config has none; the copy is then equal to the config. Settings that were changed since
    the config was read keep their new values.

    Raises:
        CheckpointError: the record is damaged, or a setting was changed that the patch states.
    """
    plain = copy.deepcopy(config)
    parts = [plain, *[value for value in vars(plain).values() if hasattr(value, "model_type")]]
    patched_parts = [part for part in parts if PATCH_KEY in vars(part)]
    if not patched_parts:
        return plain, None
    record = vars(patched_parts[0])[PATCH_KEY]
    checked_patches(record, "this config")
    for part in patched_parts:
        for key in ("rope_parameters", "max_position_embeddings"):
            if not still_stands(vars(part)[PATCH_KEY].get(key), getattr(part, key)):
                raise _set_by_patch(key)
        undo_saved_patch(part)
    vars(plain).update(without_loading_code({"auto_map": vars(plain).pop("auto_map", None)}))
    return plain, record


def load_patched_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the config object of a patched folder with its patch, also where its class refuses the rope type.

    Args:
        path: a local folder or a Hub id.
        **kwargs: arguments of transformers' from_pretrained for configs, and settings that replace those of the folder.

    Returns:
        The config, and those of `kwargs` that transformers has no use for in a config.

    Raises:
        CheckpointError: as `load_config` raises it.
    """
    from transformers.configuration_utils import PreTrainedConfig

    before, _ = load_config(path, **{key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs})
    raw, kwargs = PreTrainedConfig.get_config_dict(path, **kwargs)
    config, unused = type(before).from_dict(before.to_dict(), **kwargs | {"return_unused_kwargs": True})
    for part, stated in [(config, raw), *[(getattr(config, key, None), value) for key, value in raw.items()]]:
        if isinstance(stated, dict) and PATCH_KEY in stated:
            keys = written_keys(stated[PATCH_KEY]) & (stated.keys() - kwargs.keys())
            vars(part).update({key: stated[key] for key in keys})
    if "auto_map" in raw:
        config.auto_map = raw["auto_map"]
    return config, unused


def _before_patch(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config that records a patch, as they were before it."""
    restored = original_settings(config) or {}
    written = written_keys(config[PATCH_KEY])
    written |= {own for key, own in own_keys(config["model_type"]).items() if key in restored}
    return without_loading_code({key: value for key, value in config.items() if key not in written} | restored)


def find_config(path: str | Path, **kwargs: Any) -> tuple[Any, dict[str, Any] | None, Adapter | None]:
    """Return the config and the record of the patch as `load_config` does, and the adapter if `path` names one.

    `path` may also be a model file, such as a GGUF file, which holds no patch.

    For an adapter the config is that of its base model, and the record that of the patch it was trained under; if the
    adapter has none, that of the base model. The arguments and the errors are those of `load_config`.
    """
    file = model_file(path)
    if file is not None:
        return file.config(), None, None
    adapter = find_adapter(path, **kwargs)
    if adapter is None:
        return *load_config(path, **kwargs), None
    kwargs = adapter.for_base(kwargs)
    with finding_base(adapter):
        file = model_file(adapter.base)
        if file is not None:
            return file.config(), dict(adapter.record) if adapter.record is not None else None, adapter
        kwargs |= only_cached(adapter.base, kwargs)
        if find_adapter(adapter.base, **kwargs) is not None:
            raise CheckpointError(f"{short(adapter.base)!r} is an adapter itself; merge it into its model first")
        config, record = load_config(adapter.base, **kwargs)
    return config, dict(adapter.record) if adapter.record is not None else record, adapter


def from_pretrained(
    path: str | Path,
    method: str | RopeMethod | Mapping[str, Any] | None = None,
    factor: float | None = None,
    *,
    auto_class: str | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a model with transformers, with the patch that is saved in its folder, or with another method.

        model = rope.from_pretrained("saved-patched-model")
        model = rope.from_pretrained("meta-llama/Llama-3.2-1B", "yarn", factor=4, dtype="bfloat16", device_map="auto")

    Without a method, a folder that was saved patched gives a model with that patch, and any other folder gives the
    model that transformers loads. An adapter of PEFT is loaded onto its base model, as a `peft.PeftModel`; the base
    model is patched first as the adapter's folder records.

    Args:
        path: a local folder, a Hub id, a GGUF file, or "reference" for the bundled model. The weights of a GGUF file
            are unpacked, so that the model takes the memory of its dtype.
        method: a method to patch the model with, by name, as an object or as rope settings. It replaces the patch that
            is saved in the folder, which a warning says, unless `over` says "patched".
        auto_class: the class of transformers to load with, for example "AutoModel". The default is the class that the
            config names under `architectures`, and AutoModelForCausalLM if it names none; for an adapter it is the
            class that the adapter's task needs.
        factor, target_length, over, context_length, layers, native: as `rope_ext_hf.patch` takes them.
        **kwargs: arguments of transformers' `from_pretrained` (dtype, device_map, revision, gguf_file, ...), for an
            adapter also `is_trainable` and `adapter_name` of PEFT, and parameters of the method.

    Returns:
        The model, as transformers or PEFT returns it.

    Raises:
        MethodError: as `rope_ext_hf.patch` raises it; or arguments of a patch were given without a method.
        UnsupportedModelError: as `rope_ext_hf.patch` raises it.
        CheckpointError, FileError: the folder is missing or damaged; it has more layers or wider heads than
            `rope_ext_hf.limits` allows; tensors are missing, or the class has no place for them; or an adapter's base
            model is missing or not the right one.
        FingerprintError: the loaded model rotates differently from the model that was saved; the message says how.
    """
    path, kwargs = resolve_file(folder_of(path), kwargs)
    arguments: dict[str, Any] = {"factor": factor, "target_length": target_length, "over": over, "native": native}
    arguments |= {"context_length": context_length, "layers": layers}
    params, kwargs = split_parameters(method, kwargs)
    kwargs |= only_cached(path, kwargs)
    config, record, adapter = find_config(path, **{key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs})
    if method is None:
        # Some parameters of methods have the name of a config key, which transformers' from_pretrained takes too.
        kwargs |= {key: params.pop(key) for key in list(params) if hasattr(config, key)}
        stated = [key for key, value in arguments.items() if value not in (None, False, "own")]
        without_method = [*stated, *params]
        if without_method:
            raise MethodError(f"{', '.join(without_method)} given without a method; add method=...")
    elif not (record or adapter or auto_class or kwargs.keys() - {*_HUB_ARGUMENTS, "dtype", "device_map"}):
        # A mistake in the arguments is reported before weights are read. Where the class cannot be built without its
        # weights, it is reported after that.
        with suppress(CheckpointError):
            empty = empty_model(config, trust_remote_code=kwargs.get("trust_remote_code", False))
            plan_patch(empty, method, **arguments, **params)
    if adapter is None:
        model = _load_patched(path, config, record, auto_class, kwargs)
    else:
        own = {key: kwargs.pop(key) for key in _ADAPTER_ARGUMENTS if key in kwargs}
        kwargs = adapter.for_base(kwargs)
        kwargs |= only_cached(adapter.base, kwargs)
        base = _load_patched(adapter.base, config, record, auto_class or adapter.auto_class, kwargs)
        model = cast("PreTrainedModel", adapter.load_onto(base, **own))
    if method is not None:
        plan = plan_patch(model, method, **arguments, **params)
        replaced = (
            None if record is None or over == "patched" else replaced_note(saved_patches(record), plan.state.patch)
        )
        if replaced is not None:
            warnings.warn(replaced, stacklevel=2)
        patch_as_planned(plan)
    return model


def _load_patched(
    path: str | Path, config: Any, record: dict[str, Any] | None, auto_class: str | None, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Load a model that is not an adapter, and patch it as its record states.

    Args:
        path: a folder, a model file or a Hub id.
        config: its config before the patch.
        record: the record of the patch; None: there is none.
        auto_class: the class to load with; None: the one that the config names.
        kwargs: arguments of transformers' from_pretrained.
    """
    if record is not None and hasattr(kwargs.get("config"), "model_type"):
        config, _ = before_patch(kwargs.pop("config"))
    check_sizes(config)
    check_packed(vars(config), path)
    check_folder(Path(path))
    loader = class_to_load(config, auto_class)
    file = model_file(path)
    if file is not None:
        arguments = {"config": config, **file.loading_arguments(), **kwargs}
        model = _load_whole(loader, file.path.parent, auto_class, arguments)
        model.name_or_path = model.config.name_or_path = str(file.path)  # by which runs and tokenizers find it again
        name_way_out(model)  # the user may have given another quantization_config
        return model if record is None else restore_patch(model, record)  # that of an adapter
    if record is None:
        return _load_whole(loader, path, auto_class, kwargs)
    usual = {own: key for key, own in own_keys(config.model_type).items()}
    settings = [key for key in kwargs if hasattr(config, key) and key not in _LOADING_ARGUMENTS]
    for key in settings:
        if {key, usual.get(key)} & {*SAVED_KEYS}:
            raise _set_by_patch(key)
        setattr(config, key, kwargs.pop(key))
    if family(config.model_type).angle_table:
        # The saved weights hold the table of the patch, which is longer than that of the model before it.
        positions = config.max_position_embeddings
        config.max_position_embeddings = record["max_position_embeddings"]
        model = _load_whole(loader, path, auto_class, {"config": config, **kwargs})
        restore_table(model, positions)
    else:
        model = _load_whole(loader, path, auto_class, {"config": config, **kwargs})
    return restore_patch(model, record)


def _set_by_patch(key: str) -> CheckpointError:
    """Return the error for a setting that a user gave although the patch of the folder states it."""
    return CheckpointError(
        f"{key} of a patched folder is set by its patch and cannot be given: leave it out, and patch the loaded model "
        "again for another value"
    )


def _load_whole(loader: Any, path: str | Path, auto_class: str | None, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load a model; unless the user chose its class, raise CheckpointError for tensors that are missing or left over.

    transformers would fill the missing ones with random numbers and drop the others.
    """
    if kwargs.pop("output_loading_info", False):
        raise CheckpointError("output_loading_info=True is not supported here; load with transformers to get it")
    try:
        model, info = loader.from_pretrained(path, output_loading_info=True, **kwargs)
    except OSError:
        if os.path.isdir(path):  # noqa: PTH112  # an error of transformers names neither the format nor a way out
            check_format(Path(path))
        raise
    if info["unexpected_keys"] and auto_class is None:
        names = sorted(info["unexpected_keys"])
        raise CheckpointError(
            f"{type(model).__name__} has no place for {len(names)} tensors of {str(path)!r}, the first of them "
            f"{names[0]!r}; give auto_class=..., e.g. 'AutoModelForSequenceClassification'"
        )
    if info["missing_keys"] and auto_class is None:
        names = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{len(names)} tensors of {type(model).__name__} are missing in {str(path)!r}, the first of them "
            f"{names[0]!r}; its weights are incomplete, or its config describes another model"
        )
    keep_pairing(model)
    return cast("PreTrainedModel", model)


def restore_patch(model: PreTrainedModel, record: Mapping[str, Any]) -> PreTrainedModel:
    """Patch a model, in place, as a record states, with the patches underneath; return the model.

    Args:
        model: the model, as it was before any of these patches.
        record: the record of the patch in the model's config, or in its adapter's folder.

    Raises:
        CheckpointError: the record was made for another model.
        FingerprintError: the patched model rotates differently from the one that was saved.
    """
    restore_generation_length(model, record)
    reapply(model, tuple(saved_patches(record)))
    check_recorded(model, record)
    return model

"""The record of a patch in a config, under the key `rope_ext_hf`, and how a config is restored from it.

A record holds the patch, the rope settings that were written for it, and the settings before it. transformers keeps
keys that it does not know, so the record survives saving and loading.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import CheckpointError, MethodError, UnknownMethodError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import method_from_dict, rotary_from_dict
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.models.engine_keys import former_keys

__all__ = ["SAVED_KEYS", "Patch", "before_patches", "checked_patches", "recorded_patches", "saved_patches"]

SAVED_KEYS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim")
"""Every other config key that a patch may change."""


@dataclass(frozen=True)
class Patch:
    """One patch, with every parameter of its method filled in.

    Attributes:
        method: the method.
        rotary: the rotary embedding that it is applied to, scalings underneath included.
        target_length: the extended length in tokens that was given; None: the method's own.
        native: whether a rope type of transformers may be saved that computes something else.
        layers: the layers that were named; None: the layers that attend to everything before them.
        loading_code: whether the model comes from a folder with loading code, which it then is saved with again.
    """

    method: RopeMethod
    rotary: Rotary
    target_length: int | None = None
    native: bool = False
    layers: tuple[str | int, ...] | None = None
    loading_code: bool = False

    @property
    def length(self) -> int | None:
        """The extended length in tokens; None: the method follows the input."""
        return self.target_length or self.method.extended_length(self.rotary)

    def to_dict(self) -> dict[str, Any]:
        """Return the patch as plain values, as JSON holds them; `from_dict` reads them back."""
        saved: dict[str, Any] = {
            "method": self.method.to_dict(),
            "rotary": self.rotary.to_dict(),
            "target_length": self.target_length,
            "native": self.native,
        }
        if self.layers is not None:
            saved["layers"] = list(self.layers)
        if self.loading_code:
            saved["loading_code"] = True
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Patch:
        """Return the patch that `to_dict` wrote; other keys beside its own are ignored.

        Raises:
            UnknownMethodError: a method that is not registered here, or was removed.
            MethodError: a key is missing, or its value is impossible.
        """
        try:
            method = method_from_dict(saved["method"])
            rotary = rotary_from_dict(saved["rotary"])
            layers, target_length, native = saved.get("layers"), saved["target_length"], saved["native"]
            loading_code = saved.get("loading_code", False)
        except (KeyError, TypeError) as error:
            raise MethodError(f"not a saved patch: {error!r}") from error
        if target_length is not None and not (type(target_length) is int and 0 < target_length <= MOST_TOKENS):
            raise _wrong_value("target_length", "a positive whole number or null", target_length)
        if not isinstance(native, bool):
            raise _wrong_value("native", "true or false", native)
        if not isinstance(loading_code, bool):
            raise _wrong_value("loading_code", "true or false", loading_code)
        if layers is None:
            return cls(method, rotary, target_length, native, None, loading_code)
        if not isinstance(layers, list | tuple) or not all(type(layer) in (int, str) for layer in layers):
            raise _wrong_value("layers", "a list of layer numbers and layer types", layers)
        return cls(method, rotary, target_length, native, tuple(layers), loading_code)


def _wrong_value(key: str, kind: str, value: Any) -> MethodError:
    """Return the error for a key of a saved patch whose value is not of the right kind."""
    return MethodError(f"not a saved patch: {key} must be {kind}, and is {short(repr(value))}")


def saved_patches(record: Mapping[str, Any]) -> list[Patch]:
    """Return the patches of a record, bottom first; MethodError where it is damaged."""
    return [Patch.from_dict(saved) for saved in (*record.get("below", ()), record)]


def checked_patches(record: Any, owner: str) -> list[Patch]:
    """Return the patches of a record that any program may have written or changed, bottom first.

    Args:
        record: what stands under the key of the record.
        owner: the config or folder that holds it, as error messages name it.

    Raises:
        CheckpointError: the record is damaged, or names a method that is not registered here.
    """
    try:
        return saved_patches(record)
    except UnknownMethodError as error:
        raise CheckpointError(
            f"{owner} records a patch whose method cannot be used here: {error}. If a module of yours registers the "
            f"method, import it first; if rope_type is one of transformers' own, you may delete the {PATCH_KEY!r} key"
        ) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if isinstance(error, MethodError) else repr(error)
        raise CheckpointError(f"the {PATCH_KEY!r} record of {owner} is damaged ({reason}); delete that key") from error


def recorded_patches(config: Any) -> list[Patch]:
    """Return the patches that a config object records, bottom first; none where it has no record."""
    record = vars(config).get(PATCH_KEY)
    return [] if record is None else saved_patches(record)


def replaced_note(recorded: Sequence[Patch], patch: Patch, over: str = "over='patched'") -> str | None:
    """Return a sentence on the patch that a folder records and that a new one replaces; None where there is none.

    Args:
        recorded: the patches that the folder records, bottom first.
        patch: the new patch.
        over: how a user says that the recorded patch stays underneath.
    """
    if not recorded:
        return None
    top = recorded[-1]
    if (top.method, top.rotary, top.layers) == (patch.method, patch.rotary, patch.layers):
        return None
    before, after = top.length, patch.length
    name = f"{top.method.name} for {before:,} tokens" if before else top.method.name
    if top.layers is not None:
        name += f" in layers {', '.join(map(str, top.layers))}"
    lengths = f": {before:,} tokens become {after:,}" if before and after and before != after else ""
    # A remapping method changes positions, over which no other method can be put; nor can one over dropped layers.
    alone = isinstance(top.method, RemappingMethod) or (top.method.drops_rotation and top.layers is not None)
    way_out = "" if alone else f". {over} keeps it underneath"
    return f"the folder of this model records {name}, and this patch replaces it{lengths}{way_out}"


def original_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that a config had before the patch that it records; None where it has no record.

    Args:
        config: the values of a config, as `to_dict` gives them or config.json holds them.

    Raises:
        CheckpointError: the record is damaged, or the rope settings were changed after it was written.
    """
    record = config.get(PATCH_KEY)
    if record is None:
        return None
    checked_patches(record, "this config")
    try:
        written, before = record["rope_parameters"], record["before"]
        restored = {key: copy.deepcopy(before[key]) for key in SAVED_KEYS if key in before}
        former = former_keys(config["model_type"], written, record["layer_types"])
        former_agree = all(config[key] == former.get(key) for key in _former_keys_in(record) & config.keys())
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the {PATCH_KEY!r} record of this config is damaged ({error!r}); delete that key"
        ) from error
    if not former_agree or not still_stands(written, config.get("rope_parameters")):
        raise CheckpointError(
            f"this config carries a {PATCH_KEY!r} record, but its rope settings were changed since "
            f"(rope_parameters, or rope_scaling beside it); delete the {PATCH_KEY!r} key to use them as they stand"
        )
    return restored


def before_patches(config: Any) -> Any:
    """Return a copy of a text config without the patches that are recorded in it."""
    before = copy.deepcopy(config)
    undo_saved_patch(before)
    return before


def undo_saved_patch(config: Any) -> None:
    """Turn the config of a model that was loaded from a patched folder back into what it was before that patch."""
    before = original_settings(config.to_dict())
    if before is not None:
        # Keys that the patch added: a config object holds even those that its class does not define.
        for key in written_keys(getattr(config, PATCH_KEY)) - before.keys():
            vars(config).pop(key, None)
        for key, value in before.items():
            setattr(config, key, value)


def written_keys(record: Mapping[str, Any]) -> set[str]:
    """Return the top-level config keys that the patch with this record wrote, and that are removed with the patch."""
    return {PATCH_KEY, *SAVED_KEYS, *_former_keys_in(record)}


def _former_keys_in(record: Mapping[str, Any]) -> set[str]:
    """Return the top-level config keys that repeat the rope settings of a patch for transformers 4."""
    keys = record.get("former", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"former is {keys!r}")
    return {"rope_scaling", *keys} - {PATCH_KEY, *SAVED_KEYS}


def still_stands(written: Any, present: Any) -> bool:
    """Return whether all settings that a patch wrote are still present; transformers may have added defaults."""
    if isinstance(written, Mapping):
        return isinstance(present, Mapping) and all(
            still_stands(value, present.get(key)) for key, value in written.items()
        )
    return bool(present == written)

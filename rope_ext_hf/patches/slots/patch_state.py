"""The memory of a patched model: which patch it has, and which config objects were exchanged for it.

A patched model runs with copies of its config objects, because other models may share the originals. The copies hold
the method and the extended length; the originals stay as they were, so that `unpatch` can put them back.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.models.patch_records import SAVED_KEYS, Patch
from rope_ext_hf.models.patched_config import ConfigEncoding


@dataclass
class ConfigSwap:
    """A config object of a patched model, and the object that it stands in for."""

    patched: Any  # the copy that the model runs with
    original: Any  # the object that the model had before, which other models may share
    written: dict[str, Any] = field(default_factory=dict)  # the values of `patched` when the patch was done
    before: dict[str, Any] = field(default_factory=dict)  # the values of `original` at that time

    def note_written(self) -> None:
        """Remember the present values of both configs, so that later changes by the user can be recognised.

        Configs inside this config are left out: each of them has a swap of its own.
        """
        self.written, self.before = (
            copy.deepcopy({key: value for key, value in vars(config).items() if not hasattr(value, "model_type")})
            for config in (self.patched, self.original)
        )

    def sync_user_changes(self) -> None:
        """Copy to `original` every value that the user has changed in `patched`, so that unpatching keeps it."""
        _copy_changes(self.patched, self.written, self.original)

    def sync_changes_of_original(self) -> None:
        """Copy to `patched` every value that has changed in `original`, which the model around a part goes on using."""
        _copy_changes(self.original, self.before, self.patched)


def _copy_changes(config: Any, before: Mapping[str, Any], other: Any) -> None:
    """Copy to another config the values of a config that differ from those before; a patch's own keys are left out."""
    for key, value in vars(config).items():
        if key in (PATCH_KEY, *SAVED_KEYS) or hasattr(value, "model_type"):
            continue
        if key not in before or before[key] != value:
            other.__dict__[key] = value


@dataclass
class PatchState:
    """Everything that a live model keeps about its patch; all its patched rotary modules share one object."""

    patch: Patch  # the method, the rotary embedding that it extends, and the layers it is for
    encoding: ConfigEncoding  # the settings that state the method in a config
    rule: str  # the reading of the config that gave the context length of the model under the patch
    notes: tuple[str, ...]  # sentences about the model's class and config, which `describe` prints
    warning: str | None  # the note that `patch` also warns of
    configs: list[ConfigSwap]
    below: tuple[Patch, ...] = ()  # the patches that this one was put on, oldest first; `unpatch` restores the last

    @property
    def record(self) -> dict[str, Any]:
        """The record of the patch that is kept in a saved config and in the folder of an adapter."""
        for swap in self.configs:
            if PATCH_KEY in vars(swap.patched):
                record: dict[str, Any] = vars(swap.patched)[PATCH_KEY]
                return record
        raise LookupError(
            f"no config of this patched model holds {PATCH_KEY!r}; something has removed it: patch the model again"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy or a pickle; raise UnsupportedModelError for a pickle of another version."""
        if state.keys() != {each.name for each in fields(self)}:
            raise UnsupportedModelError(
                "this patched model was pickled by another version of rope_ext_hf: save it there with "
                "save_pretrained, and load the folder with rope_ext_hf.from_pretrained"
            )
        vars(self).update(state)


def copied_configs(
    model: nn.Module, unpatched: Mapping[int, Any], more: Iterable[Any] = (), memo: dict[int, Any] | None = None
) -> list[ConfigSwap]:
    """Return a copy of every config object in a model, and of the configs inside them.

    The copies refer to each other as the originals do.

    Args:
        model: the model.
        unpatched: the config before a patch, by the `id` of a patched one that the model may hold in its place.
        more: further configs to copy.
        memo: the copies that there are already, by the `id` of the original; these are left out of the result.
    """
    memo = {} if memo is None else memo
    originals: dict[int, Any] = {}
    waiting = [*more, *(module.__dict__.get("config") for module in model.modules())]
    while waiting:
        config = waiting.pop(0)
        if not hasattr(config, "model_type"):
            continue
        config = unpatched.get(id(config), config)
        if id(config) not in originals and id(config) not in memo:
            originals[id(config)] = config
            waiting += vars(config).values()
    return [ConfigSwap(copy.deepcopy(config, memo), config) for config in originals.values()]


def stating_rope(configs: Iterable[ConfigSwap], model_types: Collection[str]) -> list[ConfigSwap]:
    """Return the configs that state the rotary embedding of a decoder, of all configs in its model.

    Usually one object serves them all. But each half of T5Gemma has a config, and a decoder that was put into another
    model brings a config of its own beside the one that the whole is saved with.

    `model_types`: those of the configs of its rotary modules.
    """
    return [swap for swap in configs if swap.original.model_type in model_types]


def swap_configs(model: nn.Module, other: Mapping[int, Any]) -> None:
    """Replace configs in every module of a model that holds one of them.

    `other`: the new config by the `id` of the config that it replaces.
    """
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in other:
            module.config = other[id(config)]

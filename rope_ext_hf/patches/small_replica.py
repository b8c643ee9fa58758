"""Try patches on a small random model of the same class, where the weights of the model itself are not at hand.

`patch` refuses remapping and length-dependent methods by what a model computes: the order of its keys in a cache, a
norm after the rotation, a mask of its own. That depends on its class and on the kinds of its layers, not on its sizes,
so that a small model with random weights gives the answer for a large one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.errors import MethodError, RopeExtError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.models.layer_types import AttentionLayers
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.models.small_models import small_model
from rope_ext_hf.models.weights_at_hand import on_meta_device
from rope_ext_hf.patches.applying import apply_plan, changes_forward, reapply, remove_patch
from rope_ext_hf.patches.planning import plan_patch
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.patches.slots.slot_finding import rotary_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["refusal", "small_replica"]


@lru_cache(maxsize=4)
def small_replica(config: str) -> PreTrainedModel | None:
    """Return a small random model for a text config, of its class and kinds of layers; None if none can be built.

    `config`: the config as JSON, with all its values, so that it can be the key of a cache.
    """
    from transformers import CONFIG_MAPPING

    model_type = json.loads(config).get("model_type")
    return small_model(CONFIG_MAPPING[model_type], config) if model_type in CONFIG_MAPPING else None


def refusal(config: Any, method: str | RopeMethod, **arguments: Any) -> RopeExtError | None:
    """Return the error with which `patch` refuses a method on a model of a text config.

    None where `patch` accepts the method, or where no small model can be built to try it on. `arguments`: of `patch`.
    """
    return _refusal(config.to_json_string(use_diff=False), method, tuple(sorted(arguments.items())))


@lru_cache(maxsize=1024)
def _refusal(config: str, method: str | RopeMethod, arguments: tuple[tuple[str, Any], ...]) -> RopeExtError | None:
    model = small_replica(config)
    return None if model is None else _refused(model, lambda: apply_plan(plan_patch(model, method, **dict(arguments))))


def check_without_weights(model: nn.Module) -> None:
    """Check that a model that was patched without its weights could be patched with them as well.

    Its patch is tried on a small model of its class. A model that has its weights passes, because `patch` has checked
    it; so does a model that cannot be built small.

    Raises:
        MethodError, UnsupportedModelError: as `patch` would, if the model had its weights.
    """
    patches = active_patches(model)
    if not (patches and changes_forward(patches[-1]) and on_meta_device(model)):
        return
    config = rotary_modules(model)[0].config
    small = small_replica(config.to_json_string(use_diff=False))
    if small is None:
        return
    types = AttentionLayers(config).types  # the small model has fewer layers, of every type
    small_patches = tuple([replace(patch, layers=_by_type(patch.layers, types)) for patch in patches])
    refused = _refused(small, lambda: reapply(small, small_patches))
    if refused is None:
        return
    # The large model took the patch without its weights. If the small one does not without its own, its size is the
    # reason.
    empty = empty_model(small.config)
    if _refused(empty, lambda: reapply(empty, small_patches)) is None:
        raise refused


def _by_type(layers: tuple[str | int, ...] | None, types: Sequence[str]) -> tuple[str | int, ...] | None:
    """Return a user's choice of layers, with each layer index replaced by the type of that layer."""
    if layers is None:
        return None
    return tuple(dict.fromkeys([types[layer] if isinstance(layer, int) else layer for layer in layers]))


def _refused(model: PreTrainedModel, apply: Callable[[], object]) -> RopeExtError | None:
    """Return the error that `apply`, which patches a model, raises, or None; the model is unpatched afterwards."""
    with warnings.catch_warnings(action="ignore"):
        try:
            apply()
        except (MethodError, UnsupportedModelError) as error:
            return error
        finally:
            remove_patch(model)
    return None

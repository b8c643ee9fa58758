"""Try patches on a small random model of the same class, where the weights of the model itself are not at hand.

`patch` refuses remapping and length-dependent methods by what a model computes: the order of its keys in a cache, a
norm after the rotation, a mask of its own. That depends on its class and on the kinds of its layers, not on its sizes,
so that a small model with random weights tells what a large one would.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext_hf.errors import MethodError, RopeExtError, UnsupportedModelError
from rope_ext_hf.patches.applying import apply_plan, needs_hooks, replay, take_off
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.patches.loading import class_to_load, empty_model
from rope_ext_hf.patches.planning import on_meta_device, plan_patch
from rope_ext_hf.patches.slot_finding import rotary_modules
from rope_ext_hf.patches.slots import present_specs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VOCABULARY = 128
_WIDTH = 64
_INNER_WIDTH = 16
_HEADS = 4
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": _VOCABULARY}
_INITIALIZER_RANGE = 0.2
"""The standard deviation of random weights; with the usual 0.02, attention would weigh all keys almost alike."""
_MOST_PARAMETERS = 50_000_000
"""A model with more parameters is not built. It is larger where its class has sizes that `stand_in` does not reduce."""


@lru_cache(maxsize=4)
def stand_in(config: str) -> PreTrainedModel | None:
    """Return a small random model for a text config, of its class and kinds of layers; None if none can be built.

    `config`: the config as JSON, with all its values, so that it can be the key of a cache.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    values = json.loads(config, object_hook=_number)
    # Keys that a family names in its own way, such as n_head, get the usual names, and back at the end.
    own_names: Mapping[str, str] = {}
    if values.get("model_type") in CONFIG_MAPPING:
        own_names = CONFIG_MAPPING[values["model_type"]].attribute_map
    usual_names = {own: usual for usual, own in own_names.items()}
    values = {usual_names.get(key, key): value for key, value in values.items()}
    # Some classes want the number of heads that they have, or the number of layers, by which they count their kinds.
    for short, narrow in ((True, True), (True, False), (False, True), (False, False)):
        try:
            sizes = _small(values, narrow=narrow, short=short)
            small = AutoConfig.for_model(**{own_names.get(key, key): value for key, value in sizes.items()})
            if sum(parameter.numel() for parameter in empty_model(small).parameters()) > _MOST_PARAMETERS:
                continue
            model = _random_model(small)
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                model(input_ids=torch.arange(3, 11)[None])
        except Exception:  # classes raise anything where sizes depend on each other in a way of their own
            continue
        return model
    return None


def _random_model(config: Any) -> PreTrainedModel:
    """Return a model of a config with random weights, the same at every call, in float32 and eval mode."""
    loader = class_to_load(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        model = loader.from_config(config) if hasattr(loader, "_model_mapping") else loader._from_config(config)
    model = model.float().eval()
    # The weights of a norm begin as ones, under which a norm and a rotation could change places unnoticed.
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def _number(value: dict[str, Any]) -> Any:
    """Return the number in a JSON object that transformers writes for infinity and NaN; other objects as they are."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def refusal(config: Any, method: str, **arguments: Any) -> RopeExtError | None:
    """Return the error with which `patch` refuses a method on a model of a text config.

    None where `patch` accepts the method, or where no small model can be built to try it on. `arguments`: of `patch`.
    """
    return _refusal(config.to_json_string(use_diff=False), method, tuple(sorted(arguments.items())))


@lru_cache(maxsize=1024)
def _refusal(config: str, method: str, arguments: tuple[tuple[str, Any], ...]) -> RopeExtError | None:
    model = stand_in(config)
    return None if model is None else _refused(model, lambda: apply_plan(plan_patch(model, method, **dict(arguments))))


def check_without_weights(model: nn.Module) -> None:
    """Check that a model that was patched without its weights could be patched with them as well.

    Its patch is tried on a small model of its class. A model that has its weights passes, because `patch` has checked
    it; so does a model that cannot be built small.

    Raises:
        MethodError, UnsupportedModelError: as `patch` would, if the model had its weights.
    """
    specs = present_specs(model)
    if not (specs and needs_hooks(specs[-1]) and on_meta_device(model)):
        return
    config = rotary_modules(model)[0].config
    small = stand_in(config.to_json_string(use_diff=False))
    if small is None:
        return
    types = AttentionLayers(config).types  # the small model has fewer layers, of every type
    small_specs = tuple([replace(spec, layers=_by_type(spec.layers, types)) for spec in specs])
    refused = _refused(small, lambda: replay(small, small_specs))
    if refused is None:
        return
    # Without weights the small model must take the patch, as the large one did; else it is its size that does not fit.
    empty = empty_model(small.config)
    if _refused(empty, lambda: replay(empty, small_specs)) is None:
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
            take_off(model)
    return None


def _small(values: Mapping[str, Any], *, narrow: bool, short: bool) -> dict[str, Any]:
    """Return the values of a config for a smaller model, with fewer tokens in the vocabulary and smaller inner widths.

    Args:
        values: the values of the config, under the usual names of its keys.
        narrow: whether the model gets fewer heads, of the same size.
        short: whether the model gets fewer layers, with every kind of layer.
    """
    small = {key: copy.deepcopy(value) for key, value in values.items() if key != "transformers_version"}
    if narrow:
        small |= _fewer_heads(values)
    for key, value in values.items():
        if key.endswith("intermediate_size") and value:
            small[key] = _INNER_WIDTH
        elif key in _TOKEN_IDS:
            small[key] = _TOKEN_IDS[key]
        elif key == "initializer_range":
            small[key] = _INITIALIZER_RANGE
    if short:
        small |= _fewer_layers(values)
    return small


def _fewer_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values to change for a model with fewer heads of the same size."""
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    fewer = max(1, min(_HEADS, heads // (values.get("num_key_value_heads") or heads)))
    sizes = {
        "num_attention_heads": fewer,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "hidden_size": _WIDTH if values.get("head_dim") else fewer * head_dim,
        "index_n_heads": fewer,
    }
    if "kv_lora_rank" in values:  # latent attention has a key for every query
        sizes |= {"num_key_value_heads": fewer, "q_lora_rank": _WIDTH, "kv_lora_rank": _WIDTH}
    return {key: size for key, size in sizes.items() if values.get(key) or (key == "head_dim" and key in values)}


def _fewer_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values that keep the first layers alone: at least two, and one of every kind.

    Two layers are of the same kind if they have the same items in all lists of the config that have an item for each
    layer.
    """
    layers = values["num_hidden_layers"]
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == layers}
    kinds = [repr([value[index] for value in lists.values()]) for index in range(layers)]
    count = min(layers, max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))
    fewer: dict[str, Any] = {key: value[:count] for key, value in lists.items()}
    fewer["num_hidden_layers"] = count
    by_layer = values.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        fewer["per_layer_config"] = {key: value for key, value in by_layer.items() if int(key) < count}
    return fewer

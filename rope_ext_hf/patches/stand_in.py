"""A small model with weights in place of one whose weights are not at hand, to try what can be patched.

Remapping methods and those that follow the length are refused by what a model computes: the order of its keys in a
cache, a norm after the rotation, a mask of its own. That depends on its class and kinds of layers, not on its sizes.
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

_VOCABULARY, _WIDTH, _INNER_WIDTH, _HEADS = 128, 64, 16, 4
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": _VOCABULARY}
_SPREAD = 0.2  # of random weights: attention then prefers some keys
_MOST_PARAMETERS = 50_000_000


@lru_cache(maxsize=4)
def stand_in(config: str) -> PreTrainedModel | None:
    """Return a small random model of the class and the kinds of layers of a text config, which is given as JSON.

    None: it cannot be built.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    values = json.loads(config, object_hook=_number)
    known = values.get("model_type") in CONFIG_MAPPING
    names = CONFIG_MAPPING[values["model_type"]].attribute_map if known else {}  # a family's own, by the usual ones
    usual = {own: name for name, own in names.items()}
    values = {usual.get(key, key): value for key, value in values.items()}
    # Some classes want as many heads as they have, or as many layers, of which they count kinds of their own.
    for short, narrow in ((True, True), (True, False), (False, True), (False, False)):
        try:
            sizes = _small(values, narrow=narrow, short=short)
            small = AutoConfig.for_model(**{names.get(key, key): value for key, value in sizes.items()})
            if sum(each.numel() for each in empty_model(small).parameters()) > _MOST_PARAMETERS:
                continue
            loader = class_to_load(small)
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
                torch.manual_seed(0)
                model = loader.from_config(small) if hasattr(loader, "_model_mapping") else loader._from_config(small)
            model = _perturbed(model.float().eval())
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                model(input_ids=torch.arange(3, 11)[None])
        except Exception:  # classes raise anything where sizes depend on each other in a way of their own
            continue
        return model
    return None


def _number(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as a table into JSON, which has no infinity; other tables as is."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@torch.no_grad()
def _perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other weights in its norms than ones, under which a norm and a rotation could change places."""
    draws = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def refusal(config: Any, method: str, **arguments: Any) -> RopeExtError | None:
    """Return the error with which `patch` refuses a method on a model of a text config; None: it does not, or no small
    model can be built to try it on.
    """
    return _refusal(config.to_json_string(use_diff=False), method, tuple(sorted(arguments.items())))


@lru_cache(maxsize=1024)
def _refusal(config: str, method: str, arguments: tuple[tuple[str, Any], ...]) -> RopeExtError | None:
    model = stand_in(config)
    return None if model is None else _refused(model, lambda: apply_plan(plan_patch(model, method, **dict(arguments))))


def check_without_weights(model: nn.Module) -> None:
    """Check that a patched model without weights could be patched so with them, by a small model of its class.

    Nothing is tried on a model that has weights, or where no small model can be built.

    Raises:
        MethodError, UnsupportedModelError: as `patch` does on the model with its weights.
    """
    specs = present_specs(model)
    if not (specs and needs_hooks(specs[-1]) and on_meta_device(model)):
        return
    config = rotary_modules(model)[0][3]
    small = stand_in(config.to_json_string(use_diff=False))
    if small is None:
        return
    types = AttentionLayers(config).types  # the small model has fewer layers, and each type
    alike = tuple([replace(spec, layers=_by_type(spec.layers, types)) for spec in specs])
    refused = _refused(small, lambda: replay(small, alike))
    if refused is None:
        return
    empty = empty_model(small.config)
    if _refused(empty, lambda: replay(empty, alike)) is None:  # else it is the small size that does not fit
        raise refused


def _by_type(layers: tuple[str | int, ...] | None, types: Sequence[str]) -> tuple[str | int, ...] | None:
    if layers is None:
        return None
    return tuple(dict.fromkeys([types[each] if isinstance(each, int) else each for each in layers]))


def _refused(model: PreTrainedModel, apply: Callable[[], object]) -> RopeExtError | None:
    """Return the error with which a patch is refused, or None; the model is unpatched afterwards."""
    with warnings.catch_warnings(action="ignore"):
        try:
            apply()
        except (MethodError, UnsupportedModelError) as error:
            return error
        finally:
            take_off(model)
    return None


def _small(values: Mapping[str, Any], *, narrow: bool, short: bool) -> dict[str, Any]:
    """A config of fewer tokens and smaller inner widths; `narrow`: fewer heads of the same size; `short`: fewer layers.

    Settings have their usual names.
    """
    small = {key: copy.deepcopy(value) for key, value in values.items() if key != "transformers_version"}
    layers = values["num_hidden_layers"]
    if narrow:
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        fewer = max(1, min(_HEADS, heads // (values.get("num_key_value_heads") or heads)))
        width = _WIDTH if values.get("head_dim") else fewer * head_dim
        sizes = {"num_attention_heads": fewer, "num_key_value_heads": 1, "head_dim": head_dim, "hidden_size": width}
        if "kv_lora_rank" in values:  # latent attention has a key for every query
            sizes |= {"num_key_value_heads": fewer, "q_lora_rank": _WIDTH, "kv_lora_rank": _WIDTH}
        sizes |= {"index_n_heads": fewer}
        small |= {
            key: value for key, value in sizes.items() if values.get(key) or (key == "head_dim" and key in values)
        }
    small |= {key: _INNER_WIDTH for key, value in values.items() if key.endswith("intermediate_size") and value}
    small |= {key: value for key, value in _TOKEN_IDS.items() if key in values}
    small |= {"initializer_range": _SPREAD} if "initializer_range" in values else {}
    if not short:
        return small
    # so many layers that each kind is there; lists and tables state something of each
    by_layer = [value for value in values.values() if isinstance(value, list) and len(value) == layers]
    kinds = list(zip(*map(_hashable, by_layer), strict=True)) or [()] * layers
    count = min(layers, max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))
    small["num_hidden_layers"] = count
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            small[key] = value[:count]
    if isinstance(own := values.get("per_layer_config"), Mapping):
        small["per_layer_config"] = {key: value for key, value in own.items() if int(key) < count}
    return small


def _hashable(values: list[Any]) -> list[str]:
    return [repr(value) for value in values]

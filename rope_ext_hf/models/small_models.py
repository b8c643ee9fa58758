"""Small random models of the class that a config describes, with the same kinds of layers.

They show what a class computes where the weights of a model are not at hand, or too large to run.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.family_settings import LAYER_COUNTS
from rope_ext_hf.models.model_classes import class_to_load, empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Values = Mapping[str, Any]

_VOCABULARY = 128
_WIDTH = 64
_INNER_WIDTH = 16
_HEADS = 4
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": _VOCABULARY}
_INITIALIZER_RANGE = 0.2
"""The standard deviation of random weights; with the usual 0.02, attention would weigh all keys almost alike."""
_MOST_PARAMETERS, _MOST_WITH_ALL_HEADS = 50_000_000, 400_000_000
"""A model with more parameters is not built. It is larger where its class has sizes that are not reduced here."""


def small_model(
    config_class: type[Any],
    config: str,
    model_class: type[Any] | None = None,
    *,
    heads: bool = False,
    layers: bool = False,
) -> PreTrainedModel | None:
    """Return a small random model for a config, of its class and kinds of layers; None if none can be built.

    Args:
        config_class: the class of the config.
        config: the config as JSON, with all its values.
        model_class: the class of the model; None: the one that transformers loads for the config.
        heads: whether the model keeps the number of heads and the width of compressed keys and values, so that its
            projections have as many rows as those of the config, and one layer of each kind. Else it has few heads, of
            the same size, and its first layers, as many as hold every kind.
        layers: whether it keeps all layers.

    Returns:
        The model, float32 in eval mode on the CPU. It is a new one at every call, with the same weights.
    """
    # Keys that a family names in its own way, such as n_head, get the usual names, and back at the end.
    values = usual_values(config_class, config)
    own_names: Mapping[str, str] = getattr(config_class, "attribute_map", {})
    most = _MOST_WITH_ALL_HEADS if heads else _MOST_PARAMETERS
    for changes in _sizes(values, heads=heads, layers=layers):
        try:
            sizes = _small(values) | changes()
            small = config_class(**{own_names.get(key, key): value for key, value in sizes.items()})
            with torch.device("meta"):
                empty = empty_model(small) if model_class is None else model_class._from_config(small)
            if sum(parameter.numel() for parameter in empty.parameters()) > most:
                continue
            model = _random_model(small, model_class)
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                model(input_ids=torch.arange(3, 11)[None])
        except Exception:  # classes raise anything where sizes depend on each other in a way of their own
            continue
        return model
    return None


def usual_values(config_class: type[Any], config: str) -> dict[str, Any]:
    """Return the values of a config, given as JSON, under the names that most families have for their keys."""
    usual_names = {own: usual for usual, own in getattr(config_class, "attribute_map", {}).items()}
    values = json.loads(config, object_hook=_number)
    return {usual_names.get(key, key): value for key, value in values.items()}


def _sizes(values: _Values, *, heads: bool, layers: bool) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield the changes of sizes to try, those of the smallest model first.

    Some classes want the number of heads that they have, the width, or the number of layers, by which they count their
    kinds.
    """
    narrow, short = (_narrower, _one_layer_of_each_kind) if heads else (_fewer_heads, _fewer_layers)
    if not layers:
        yield lambda: narrow(values) | short(values)
    yield lambda: narrow(values)
    if not layers:
        yield lambda: short(values)
    yield dict


def _random_model(config: Any, model_class: type[Any] | None) -> PreTrainedModel:
    """Return a model of a config with random weights, the same at every call, in float32 and eval mode."""
    loader: Any = model_class or class_to_load(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        model = loader.from_config(config) if hasattr(loader, "_model_mapping") else loader._from_config(config)
    _fill_meta(model)
    model = model.float().eval()
    # The weights of a norm begin as ones, under which a norm and a rotation could change places unnoticed.
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # a table of angles (RoFormer), which is not trained
                continue
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def _fill_meta(model: nn.Module) -> None:
    """Give random values to the parameters of a model that have none.

    Inside accelerate's `init_empty_weights` every module of the process loses the values of its parameters when they
    are registered, so that they are put into their places directly.
    """
    draws = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                values = _INITIALIZER_RANGE * torch.randn(parameter.shape, generator=draws, device="cpu")
                module._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)


def _number(value: dict[str, Any]) -> Any:
    """Return the number in a JSON object that transformers writes for infinity and NaN; other objects as they are."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _small(values: _Values) -> dict[str, Any]:
    """Return the values of a config for a model with fewer tokens in the vocabulary and smaller inner widths.

    `values`: those of the config, under the usual names of its keys.
    """
    small = {key: copy.deepcopy(value) for key, value in values.items() if key != "transformers_version"}
    for key, value in values.items():
        if key.endswith("intermediate_size") and value:
            small[key] = _INNER_WIDTH
        elif key in _TOKEN_IDS:
            small[key] = _TOKEN_IDS[key]
        elif "vocab_size" in key and value:  # of a second table of embeddings (Gemma 3n), or of n-grams
            small[key] = _VOCABULARY
        elif key == "initializer_range":
            small[key] = _INITIALIZER_RANGE
    return small


def _fewer_heads(values: _Values) -> dict[str, Any]:
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


def _narrower(values: _Values) -> dict[str, Any]:
    """Return the config values to change for a model with as many heads and a smaller width."""
    heads = values["num_attention_heads"]
    sizes = {"q_lora_rank": _WIDTH}
    if values.get("head_dim") or values.get("kv_lora_rank"):
        sizes["hidden_size"] = heads * -(-_WIDTH // heads)  # some classes want a multiple of the heads
    return {key: size for key, size in sizes.items() if values.get(key)}


def _fewer_layers(values: _Values) -> dict[str, Any]:
    """Return the config values that keep the first layers alone: at least two, and one of every kind."""
    count = min(_layers(values), max(2, 1 + max(kinds_of_layers(values))))
    fewer: dict[str, Any] = {key: value[:count] for key, value in _lists_by_layer(values).items()}
    fewer |= {key: count for key in LAYER_COUNTS if key in values}
    by_layer = values.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        fewer["per_layer_config"] = {key: value for key, value in by_layer.items() if int(key) < count}
    return fewer


def _one_layer_of_each_kind(values: _Values) -> dict[str, Any]:
    """Return the config values that keep the first layer of each kind, in their order."""
    kept = sorted(set(kinds_of_layers(values)))
    chosen: dict[str, Any] = {
        key: items[: len(kept)] if _are_numbers_of_layers(items) else [items[layer] for layer in kept]
        for key, items in _lists_by_layer(values).items()
    }
    chosen |= {key: len(kept) for key in LAYER_COUNTS if key in values}
    by_layer = values.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        own = {int(layer): value for layer, value in by_layer.items()}
        chosen["per_layer_config"] = {place: own[layer] for place, layer in enumerate(kept) if layer in own}
    return chosen


def kinds_of_layers(values: _Values) -> tuple[int, ...]:
    """Return for each layer of a config the first layer of its kind.

    Two layers are of the same kind if they have the same items in all lists of the config that have an item for each
    layer, and the same values of their own.
    """
    lists = [items for items in _lists_by_layer(values).values() if not _are_numbers_of_layers(items)]
    own = values.get("per_layer_config")
    own = own if isinstance(own, Mapping) else {}
    first: dict[str, int] = {}
    return tuple(
        first.setdefault(repr(([items[layer] for items in lists], own.get(str(layer), own.get(layer)))), layer)
        for layer in range(_layers(values))
    )


def _lists_by_layer(values: _Values) -> dict[str, list[Any]]:
    """Return the values of a config that are lists with an item for each layer."""
    layers = _layers(values)
    return {key: value for key, value in values.items() if isinstance(value, list) and len(value) == layers}


def _are_numbers_of_layers(items: list[Any]) -> bool:
    """Return whether a list only counts the layers; in Mistral Large 4, the layers whose keys each layer uses."""
    return items == list(range(len(items)))


def _layers(values: _Values) -> int:
    """Return the number of layers that a config states.

    Raises:
        UnsupportedModelError: it states none under a name that is known.
    """
    for key in LAYER_COUNTS:
        if key in values:
            return int(values[key])
    raise UnsupportedModelError("its config states no number of layers")

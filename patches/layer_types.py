"""Which layers of a model attend to everything before them, which rotate, and which rotary embedding each uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rope_ext_hf.errors import MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.patches.config import PATCH_KEY, saved_specs
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_hooks import rope_key
from rope_ext_hf.patches.family_settings import values_of

SLIDING = frozenset({"sliding_attention", "chunked_attention", "window_attention", "hybrid_sliding"})
"""Layer types that never attend past their window, whatever their rotary embedding does."""
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mamba", "recurrent"})
"""Layer types without keys that could be rotated."""

LayerType = str | None
"""The name of one of several rotary embeddings, a layer type in most families; None: there is one for all layers."""
Layers = str | int | Sequence[str | int]
"""A choice of layers: layer types, keys of `rope_parameters`, or indices from 0 on."""


def _layer_types(config: Any) -> list[str]:
    """The type of every layer.

    Where the config has none, "sliding_attention" under a window shorter than the length that the config states, as in
    Mistral 7B v0.1, else "full_attention": no input of that length reaches beyond a longer window.
    """
    count, window = config.num_hidden_layers, _window(config)
    only = "sliding_attention" if window and window < _stated_length(config) else "full_attention"
    return list(getattr(config, "layer_types", None) or [only] * count)[:count]


def _stated_length(config: Any) -> int:
    """The length in tokens that a config states, without the patches recorded in it; 0: none."""
    if (record := vars(config).get(PATCH_KEY)) is not None:
        with suppress(MethodError):  # a damaged record is refused by whoever reads the patch
            return saved_specs(record)[0].rotary.context_length
    stated = getattr(config, "max_position_embeddings", None)
    return stated if isinstance(stated, int) else 0


def _window(config: Any) -> int | None:
    """The window in tokens of the sliding-window layers; None: there is none."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    stated = [*values_of(config, "sliding_window"), *values_of(config, "attention_chunk_size")]
    return max((each for each in stated if isinstance(each, int) and each > 0), default=None)


def nothing_to_extend(config: Any) -> UnsupportedModelError:
    """The error for a model whose every layer sees a window, whatever the RoPE method."""
    window = _window(config)
    return UnsupportedModelError(
        f"every layer of this model has a sliding window{f' of {window:,} tokens' if window else ''} and sees no "
        "further, whatever the RoPE method; there is nothing to extend. layers='sliding_attention' "
        "(--layers sliding_attention) changes these layers all the same"
    )


def sliding_layers(config: Any) -> tuple[int | None, int]:
    """The window in tokens of the sliding-window layers, and how many layers those are."""
    window, layers = _window(config), getattr(config, "layer_types", None)
    if not window:
        return None, 0
    return window, sum(kind in SLIDING for kind in layers) if layers else config.num_hidden_layers


def rotating_layers(config: Any) -> tuple[int, int]:
    """How many full-attention layers rotate their queries and keys, and how many full-attention layers there are."""
    full = [index for index, kind in enumerate(_layer_types(config)) if _attends_to_all(kind)]
    return sum(_rotates(config, index) for index in full), len(full)


def _attends_to_all(layer_type: str) -> bool:
    return layer_type not in SLIDING | _WITHOUT_ATTENTION


def _rotates(config: Any, index: int) -> bool:
    uses_rope = getattr(config, "no_rope_layers", None)  # despite its name 1 where a layer rotates (Llama 4, SmolLM3)
    thetas = getattr(config, "layer_rope_theta", None)  # 0 where a layer does not rotate
    if family(config.model_type).sliding_rope_only and any(values_of(config, "sliding_window")):
        return False
    settings: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    key = rope_key(config.model_type, _layer_types(config)[index])
    if key in settings and settings[key] is None:
        return False
    return all(not each or bool(each[index]) for each in (uses_rope, thetas))


_Served = Mapping[LayerType, tuple[int, ...]]
"""The indices of the layers that use each of a rotary module's embeddings."""


def layers_of_types(config: Any, keys: Sequence[LayerType], theta: float | None = None) -> _Served:
    """The indices of the layers that use each of a rotary module's embeddings.

    Args:
        keys: the names of the embeddings; [None]: one for all layers.
        theta: of a module that serves those layers only whose `layer_rope_theta` is this number; None: of others.
    """
    types = _layer_types(config)
    if list(keys) == [None]:
        thetas = getattr(config, "layer_rope_theta", None) if theta is not None else None
        return {None: tuple(i for i in range(len(types)) if thetas is None or thetas[i] == theta)}
    used = [rope_key(config.model_type, kind) for kind in types]
    return {key: tuple(i for i, each in enumerate(used) if each == key) for key in keys}


def choose_layer_types(config: Any, served: _Served, layers: Layers | None = None) -> tuple[LayerType, ...]:
    """The rotary embeddings that a method is applied to.

    Args:
        served: the layers of each, from `layers_of_types`.
        layers: the layers that were asked for; None: those that attend to everything before them.

    Raises:
        MethodError: layers that do not exist.
        UnsupportedModelError: layers that share their rotary embedding with others.
    """
    types = _layer_types(config)
    if layers is None:
        if list(served) == [None]:
            attend = any(_attends_to_all(types[i]) for i in served[None])
            apart = len(served[None]) < len(types)  # a module of its own theta, maybe for windows alone
            windows = getattr(config, "layer_types", None) is None and all(kind in SLIDING for kind in types)
            return (None,) if served[None] and (attend or not (apart or windows)) else ()
        full = tuple(key for key, indices in served.items() if any(_attends_to_all(types[i]) for i in indices))
        return full or tuple(key for key, indices in served.items() if not indices and key not in SLIDING)
    wanted = _indices(config, types, served, layers)
    for indices in served.values():
        if (some := wanted & set(indices)) and (rest := set(indices) - wanted):
            raise UnsupportedModelError(
                f"layers {_listed(some)} of this {config.model_type!r} model share one rotary embedding with layers "
                f"{_listed(rest)}; a method applies to all of them or to none"
            )
    return tuple(key for key, indices in served.items() if wanted & set(indices))


def _indices(config: Any, types: Sequence[str], served: _Served, layers: Layers) -> set[int]:
    chosen: set[int] = set()
    for each in [layers] if isinstance(layers, (str, int)) else layers:
        if isinstance(each, str):
            known = {*types, *(key for key in served if key is not None)}
            if each not in known:
                raise MethodError(
                    f"this {config.model_type!r} model has no {each!r} layers, only {', '.join(sorted(known))}."
                    + did_you_mean(each, known)
                )
            chosen |= {i for i, kind in enumerate(types) if each in (kind, rope_key(config.model_type, kind))}
        elif isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < len(types):
            raise MethodError(f"layers must be layer types, or numbers from 0 to {len(types) - 1}; got {each!r}")
        else:
            chosen.add(each)
    if not chosen:
        raise MethodError("layers names no layer of this model; leave it away for those that attend to everything")
    return chosen


def _listed(indices: set[int]) -> str:
    first = ", ".join(map(str, sorted(indices)[:6]))
    return f"{first}, ..." if len(indices) > 6 else first

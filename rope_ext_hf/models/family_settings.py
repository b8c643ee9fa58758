"""Sizes, the pairing and the rotary embedding that a config states, under the keys of its family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import advice, limit
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError, short
from rope_ext_hf.models.families import Family, check_architecture, choose, family, look_up

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import Rotary

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
"""Config keys of the number of layers, in models of text, vision and audio."""


def check_sizes(config: Any) -> None:
    """Raise CheckpointError if a model of this config could take unreasonable time or memory to build without weights.

    The limits are those of `rope_ext_hf.limits`.
    """
    for part in _parts(config):
        _check_size(part, "layers", "layers", _largest(part, *LAYER_COUNTS))
        width = _largest(part, "head_dim")
        heads = _largest(part, "num_attention_heads")
        if not width and heads:
            width = _largest(part, "hidden_size") / heads
        _check_size(part, "head_dim", "dims per head", width)


def _check_size(config: Any, limit_name: str, words: str, size: float) -> None:
    """Raise CheckpointError if a size of a config is above its limit; `words` name the size in the message."""
    most = limit(limit_name)
    if size > most:
        raise CheckpointError(
            f"the config of this {config.model_type!r} has {size:,.0f} {words}; at most {most:,} are supported. "
            f"Correct the config; {advice(limit_name)}"
        )


_MOST_STATED: dict[str, float] = {
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rope_theta": 1e30,  # beyond 1e38 the slowest frequencies are 0 in float32
    "rotary_emb_base": 1e30,
    **dict.fromkeys(("num_labels", *LAYER_COUNTS), 1_000_000),
}
"""The largest number that a config may state under a key. When transformers reads a config, it makes lists as long as
some of these counts say."""


def check_stated(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for impossibly large numbers in the values of a config and of the configs inside it.

    Call this before a config class of transformers reads them.
    """
    for key, value in values.items():
        most = _MOST_STATED.get(key, math.inf)
        if isinstance(value, Mapping):
            check_stated(value)
        elif isinstance(value, (int, float)) and value > most:
            raise CheckpointError(
                f"the config states {short(str(value))} as its {key}; at most {most:,} is supported. Correct the config"
            )


def _parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs inside it, such as those of the text and vision parts of a model."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _parts(value)


def _largest(config: Any, *keys: str) -> float:
    """Return the largest number that a config states under some keys, 0 where it states none.

    A missing or wrong number does not raise here; it is reported where the number is needed.
    """
    own_keys = family(config.model_type).config_keys
    values: list[Any] = []
    for key in keys:
        if key in own_keys:
            with suppress(CheckpointError):
                values.append(config_number(config, key))
        else:
            values += values_of(config, key)
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return max(numbers, default=0)


def values_of(config: Any, key: str) -> list[Any]:
    """Return the value of a config key in a list; one value for each layer where they differ (Gemma 4's head_dim)."""
    if key in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, key, None) for layer in config.per_layer_config]
    return [getattr(config, key, None)]


def stated_rotary(config: Any) -> Rotary | None:
    """Return the rotary embedding of a family whose table states `rotary_dim`; None for other families.

    Raises:
        UnsupportedModelError: the family table does not describe this model.
        CheckpointError: a number is missing or impossible.
    """
    text = config.get_text_config()
    if "rotary_dim" not in supported_family(text).config_keys:
        return None
    dim = int(config_number(text, "rotary_dim"))
    theta = config_number(text, "rope_theta")
    length = int(config_number(text, "max_position_embeddings"))
    width = head_dim(text)
    if not 2 <= dim <= width or dim % 2:
        raise CheckpointError(
            f"by the config, {dim} of the {width} dims of a head rotate; the number must be even, at least 2 "
            f"and at most {width}"
        )
    from rope_ext_hf.methods.base import Rotary  # imports torch

    return Rotary(dim, theta, length)


class LayerConfig:
    """A text config with the values that apply to one layer.

    An attribute is the value for the layer where layers differ: by `per_layer_config`, by a list with an entry for each
    layer, or by settings for each layer type in `rope_parameters`.
    """

    def __init__(self, text: Any, layer: int) -> None:
        """Read the config `text` as the layer with the index `layer`, counted from 0, reads it."""
        self._text = text
        self._layer = layer
        types = getattr(text, "layer_types", None)
        self._type = types[layer] if types else None

    def __getattr__(self, key: str) -> Any:
        if key == "per_layer_attributes":
            return ()
        if key in (getattr(self._text, "per_layer_attributes", None) or ()):
            return getattr(self._text.per_layer_config[self._layer], key)
        value = getattr(self._text, key)
        if isinstance(value, list) and len(value) == self._text.num_hidden_layers:
            return value[self._layer]
        if key == "rope_parameters" and isinstance(value, dict) and isinstance(value.get(self._type), dict):
            return value[self._type]
        return value

    def rotary_dim(self, dim: int) -> int:
        """Return how many dims of each head rotate in this layer.

        That is `dim`, unless `rope_parameters` has settings for its layer type alone.
        """
        if getattr(self, "kv_lora_rank", None):
            return int(self.qk_rope_head_dim)
        rope = self.rope_parameters if hasattr(self._text, "rope_parameters") else None
        if rope is None or rope is self._text.rope_parameters:
            return dim
        # A proportional embedding counts all dims as rotated: some of its pairs have frequency 0.
        partial = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
        return 2 * math.ceil(int(head_dim(self) * partial) / 2)  # the last dim of an odd number is a pair of its own


def supported_family(text: Any) -> Family:
    """Return the family of a text config.

    Raises:
        UnsupportedModelError: the family table describes another architecture, or other weights, under this model type.
    """
    known = family(text.model_type)
    check_architecture(text)
    if known.rotates_values and look_up(text, known.rotates_values):
        raise UnsupportedModelError(
            f"this {text.model_type!r} takes its values from the projection of the keys ({known.rotates_values!r} in "
            "its config). If the rows of that projection are reordered, columns of the output projection must be "
            "reordered as well, and which ones is not known for this family, so this model cannot be converted"
        )
    return known


def head_dim(text: Any) -> int:
    """Return the number of dims of each head by a text config.

    Raises:
        CheckpointError: the config states neither that nor possible sizes from which it follows.
    """
    stated = config_number(text, "head_dim", 0)
    return int(stated or config_number(text, "hidden_size") // config_number(text, "num_attention_heads"))


def config_number(text: Any, key: str, default: float | None = None) -> float:
    """Return a number of a text config, under the keys that its family has for it.

    Args:
        text: the text config.
        key: the usual key of the number.
        default: the number where the config has none, in families without a key of their own for it.

    Raises:
        CheckpointError: the number is missing, or is not above 0 and finite.
    """
    alternatives = family(text.model_type).config_keys.get(key)
    if alternatives is None and default is not None:
        return look_up(text, key) or default
    number = 1.0
    for factor in [key] if alternatives is None else choose(alternatives, text).product:
        value = look_up(text, factor) if isinstance(factor, str) else factor
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{factor!r} in the config of this {text.model_type!r} must be a number above zero, and is {value!r}"
            )
        number *= value
    return number


def set_pairing_switch(config: Any, to: str) -> None:
    """Make a config state which dims its class rotates together ("half", "interleaved"), if its family can switch."""
    text = config.get_text_config()
    switch = family(text.model_type).pairing_switch
    if switch is not None:
        setattr(text, switch, to == "interleaved")


def config_pairing(config: Any, after: str | None = None) -> str | None:
    """Return which dims rotate together in the weights, "half" or "interleaved", by family and config; None: unknown.

    `after`: the pairing to which the config's switch is about to be set, instead of the one that the config states.
    """
    text = config.get_text_config()
    known = family(text.model_type)
    if known.pairing_switch is None:
        return known.pairing
    return after or ("interleaved" if getattr(text, known.pairing_switch, True) else "half")


def class_pairing(config: Any, after: str | None = None) -> str | None:
    """Return which dims the transformers class rotates together, "half" or "interleaved"; None if that is unknown.

    For a family whose code comes with its checkpoints, it is the pairing that this code runs. Not every version of such
    code reads the switch, so it is unknown where the switch differs from the family's own pairing. `after`: as in
    `config_pairing`.
    """
    stated = config_pairing(config, after)
    known = family(config.get_text_config().model_type)
    if known.remote and stated != known.pairing:
        return None
    return stated

"""What a config states about its rotary embedding, its pairing and its sizes, under the keys of its family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rope_ext_hf.bounds import advice, limit
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError, short
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.families import Family, check_architecture, choose, family, look_up

_LAYERS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")  # of text, vision, audio


def check_sizes(config: Any) -> None:
    """Check that a model of this config can be built in reasonable time and memory, even without weights."""
    for part in _parts(config):
        layers, heads = _largest(part, *_LAYERS), _largest(part, "num_attention_heads")
        width = _largest(part, "head_dim") or (heads and _largest(part, "hidden_size") / heads)
        for name, words, value in (("layers", "layers", layers), ("head_dim", "dims per head", width)):
            if value > (most := limit(name)):
                raise CheckpointError(
                    f"the config of this {part.model_type!r} has {value:,.0f} {words}; at most {most:,} are supported. "
                    f"Correct the config; {advice(name)}"
                )


_MOST_STATED: dict[str, float] = {
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rope_theta": 1e30,  # beyond 1e38 the slowest frequencies are 0 in float32
    "rotary_emb_base": 1e30,
    **dict.fromkeys(("num_labels", *_LAYERS), 1_000_000),
}
"""What a config may state at most. Of the counts transformers makes lists, of any length, when it reads a config."""


def check_stated(values: Mapping[str, Any]) -> None:
    """Check numbers of a config, and of the configs inside it, before a class of transformers reads it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_stated(value)
        elif isinstance(value, (int, float)) and value > (most := _MOST_STATED.get(key, math.inf)):
            raise CheckpointError(
                f"the config states {short(str(value))} as its {key}; at most {most:,} is supported. Correct the config"
            )


def _parts(config: Any) -> Iterator[Any]:
    """A config and those inside it: of text, of vision."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _parts(value)


def _largest(config: Any, *keys: str) -> float:
    """The largest number of a config under these keys, 0 where it has none: whoever needs the number reports that."""
    own, values = family(config.model_type).config_keys, list[Any]()
    for key in keys:
        with suppress(CheckpointError):
            values += [config_number(config, key)] if key in own else values_of(config, key)
    return max([each for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)], default=0)


def values_of(config: Any, key: str) -> list[Any]:
    """The value of a config key, or those of all layers where layers have their own (Gemma 4's head_dim)."""
    if key in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, key, None) for layer in config.per_layer_config]
    return [getattr(config, key, None)]


def stated_rotary(config: Any) -> Rotary | None:
    """Return the rotary embedding of a family whose table gives rotary_dim; None for other families."""
    text = config.get_text_config()
    if "rotary_dim" not in supported_family(text).config_keys:
        return None
    dim, theta, length = (config_number(text, key) for key in ("rotary_dim", "rope_theta", "max_position_embeddings"))
    width = head_dim(text)
    if not 2 <= int(dim) <= width or int(dim) % 2:
        raise CheckpointError(
            f"by the config, {int(dim)} of the {width} dims of a head rotate; the number must be even, at least 2 "
            f"and at most {width}"
        )
    return Rotary(int(dim), theta, int(length))


class LayerConfig:
    """A text config as one layer reads it.

    Each key has the layer's own value where layers differ: by `per_layer_config`, by a list with an entry for each
    layer, or by settings for each layer type in rope_parameters. `layer_types` is a dict {layer type: True}, which a
    condition in the family table can ask.
    """

    def __init__(self, text: Any, layer: int) -> None:
        self._text = text
        self._layer = layer
        types = getattr(text, "layer_types", None)
        self._type = types[layer] if types else None

    def __getattr__(self, key: str) -> Any:
        if key == "per_layer_attributes":
            return ()
        if key == "layer_types":
            return {self._type: True}
        if key in (getattr(self._text, "per_layer_attributes", None) or ()):
            return getattr(self._text.per_layer_config[self._layer], key)
        value = getattr(self._text, key)
        if isinstance(value, list) and len(value) == self._text.num_hidden_layers:
            return value[self._layer]
        if key == "rope_parameters" and isinstance(value, dict) and isinstance(value.get(self._type), dict):
            return value[self._type]
        return value

    def rotary_dim(self, dim: int) -> int:
        """Rotated dims per head of this layer, `dim` unless its settings in rope_parameters are its own."""
        if getattr(self, "kv_lora_rank", None):
            return int(self.qk_rope_head_dim)
        rope = self.rope_parameters if hasattr(self._text, "rope_parameters") else None
        if rope is None or rope is self._text.rope_parameters:
            return dim
        partial = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
        return 2 * math.ceil(int(head_dim(self) * partial) / 2)  # an odd number has a last pair of its own


def supported_family(text: Any) -> Family:
    """Return the family of a text config; UnsupportedModelError for one that the family table does not describe."""
    known = family(text.model_type)
    check_architecture(text)
    if known.rotates_values and look_up(text, known.rotates_values):
        raise UnsupportedModelError(
            f"by {known.rotates_values!r} in its config the values of this {text.model_type!r} come from rows that "
            "rotate; which columns of the weights after them move with them is not in the family table"
        )
    return known


def head_dim(text: Any) -> int:
    stated = config_number(text, "head_dim", 0)
    return int(stated or config_number(text, "hidden_size") // config_number(text, "num_attention_heads"))


def config_number(text: Any, key: str, default: float | None = None) -> float:
    """Return a number of a text config, maybe under keys of its family; CheckpointError: missing or wrong."""
    own = family(text.model_type).config_keys.get(key)
    if own is None and default is not None:
        return look_up(text, key) or default
    number = 1.0
    for factor in (key,) if own is None else choose(own, text).product:
        value = look_up(text, factor) if isinstance(factor, str) else factor
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{factor!r} in the config of this {text.model_type!r} must be a number above zero, and is {value!r}"
            )
        number *= value
    return number


def set_pairing_switch(config: Any, to: str) -> None:
    """Have the class of this config run a pairing, in families whose config has a switch for it."""
    text = config.get_text_config()
    switch = family(text.model_type).pairing_switch
    if switch is not None:
        setattr(text, switch, to == "interleaved")


def config_pairing(config: Any, after: str | None = None) -> str | None:
    """Return the pairing of the weights by family and switch, taken as set to `after`; None: it is unknown."""
    text = config.get_text_config()
    known = family(text.model_type)
    if known.pairing_switch is None:
        return known.pairing
    return after or ("interleaved" if getattr(text, known.pairing_switch, True) else "half")


def class_pairing(config: Any, after: str | None = None) -> str | None:
    """Return the pairing that the transformers class of this config runs; None where that is unknown.

    For families with remote code this is what that code runs. Not every version of it reads the switch, so the answer
    is None where the switch differs from the family's own pairing. `after`: as in `config_pairing`.
    """
    stated = config_pairing(config, after)
    known = family(config.get_text_config().model_type)
    return None if known.remote_attention is not None and stated != known.pairing else stated

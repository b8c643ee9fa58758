"""What a config says in the words of its family: rotary dims, theta, pairing."""

from __future__ import annotations

import math
from typing import Any

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.families import Family, choose, family, look_up

__all__ = ["class_pairing", "config_pairing", "set_pairing_switch", "stated_rotary"]


def stated_rotary(config: Any) -> Rotary | None:
    """The rotary embedding of a family of which the table says how its config has it; None for others.

    Raises:
        CheckpointError: a config that does not say it, or says what cannot be.
    """
    text = config.get_text_config()
    if "rotary_dim" not in _family(text).words:
        return None
    words = ("rotary_dim", "rope_theta", "max_position_embeddings")
    dim, theta, length = (_number(text, word) for word in words)
    if not 2 <= int(dim) <= _head_dim(text) or int(dim) % 2:
        raise CheckpointError(
            f"by the config {int(dim)} of the {_head_dim(text)} dims of a head rotate; that cannot be"
        )
    return Rotary(int(dim), theta, int(length))


def _family(text: Any) -> Family:
    """Of a config, unless one of its keys is a sign of another family by the same model_type."""
    known = family(text.model_type)
    for key, other in known.unlike.items():
        if look_up(text, key) is not None:
            raise UnsupportedModelError(
                f"by {key!r} in its config this {text.model_type!r} is {other}; that is not in the family table"
            )
    return known


def _head_dim(text: Any) -> int:
    return int(_number(text, "head_dim", 0) or _number(text, "hidden_size") // _number(text, "num_attention_heads"))


def _number(text: Any, word: str, default: float | None = None) -> float:
    """What a config says by one of the words of the family table, by its family's own keys where there are such.

    Raises:
        CheckpointError: nothing where there is no default, or what is no number above zero.
    """
    own = family(text.model_type).words.get(word)
    if own is None and default is not None:
        return getattr(text, word, None) or default
    number = 1.0
    for factor in choose(own or [word], text).split(" * "):
        said = float(factor) if factor[0].isdigit() else look_up(text, factor)
        if not isinstance(said, (int, float)) or isinstance(said, bool) or not 0 < said < math.inf:
            raise CheckpointError(
                f"{factor!r} in the config of this {text.model_type!r} should be a number above zero, and is {said!r}"
            )
        number *= said
    return number


def set_pairing_switch(config: Any, to: str) -> None:
    """Have the class of this config run that pairing, where a key of the config can."""
    text = config.get_text_config()
    switch = family(text.model_type).pairing_switch
    if switch is not None:
        setattr(text, switch, to == "interleaved")


def config_pairing(config: Any) -> str | None:
    """The pairing that a config says its weights are in, by its family; None where the table does not say."""
    text = config.get_text_config()
    known: Family = family(text.model_type)
    if known.pairing_switch is not None:
        return "interleaved" if getattr(text, known.pairing_switch, True) else "half"
    return known.pairing


def class_pairing(config: Any) -> str | None:
    """The pairing that the transformers class of this config runs; None where the table does not say.

    Or that the code beside a checkpoint runs, where transformers has no class of its family: not all of that heeds a
    switch, so what one that is set otherwise does is not known.
    """
    stated = config_pairing(config)
    known = family(config.get_text_config().model_type)
    return None if known.own_code is not None and stated != known.pairing else stated

"""Sentences about what a patch does not reach, for `describe` and warnings."""

from __future__ import annotations

from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import ConfigRope
from rope_ext_hf.patches.layer_types import SLIDING, AttentionLayers
from rope_ext_hf.patches.slots import Slot


def sliding_notes(slot: Slot, extended_length: int) -> tuple[str | None, bool]:
    """What a patch does to sliding-window layers, as a sentence, and whether every layer is one."""
    chosen = [name for name in slot.scaled_layers if name in SLIDING]
    apart = next((rope for name, rope in slot.as_loaded.items() if name in SLIDING), None)
    note, every_layer = sliding_note(slot.layers, apart, extended_length)
    if note is None or every_layer or not chosen:
        return note, every_layer
    return (
        f"Its {chosen[0]} layers alone are changed. They attend to the last {slot.layers.window} tokens only, and a "
        "longer RoPE does not make them look further back.",
        False,
    )


def sliding_note(layers: AttentionLayers, apart: ConfigRope | None, extended_length: int) -> tuple[str | None, bool]:
    """`sliding_notes` where there are no modules.

    Args:
        apart: the rotary embedding of the sliding-window layers, where it is one of their own.
    """
    window, sliding, count = layers.window, layers.sliding, layers.config.num_hidden_layers
    if not window or not sliding or window >= extended_length:
        return None, False
    if sliding == count:
        reach = f"Every layer attends to the last {window} tokens only"
        return f"{reach}: a longer RoPE does not make the model look further back.", True
    share = f"{sliding} of {count} layers attend to the last {window} tokens only"
    if apart is not None:
        own = f"{apart.method.name}, theta {apart.plain.theta:g}"
        return f"{share} and keep their own rotary embedding ({own}).", False
    return f"{share}; they share one rotary embedding with the others, so the method changes them too.", False


def unrotated_note(layers: AttentionLayers, method: RopeMethod) -> str | None:
    """What a method does to full-attention layers without RoPE, as a sentence; None where it reaches every layer."""
    rotating, full = layers.rotating
    if rotating == full:
        return None
    unrotated = f"{full - rotating} of the {full} full-attention layers do not rotate their queries and keys (no RoPE)"
    if isinstance(method, RemappingMethod):
        if not method.moves_keys:  # it adds a bias to scores, which every layer gets
            return None
        if method.temperature != "none":
            return f"{unrotated}: the temperature ({method.temperature}) is all that the method changes there."
    return f"{unrotated}: the method does not reach them."

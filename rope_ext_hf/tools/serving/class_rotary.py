"""The rotary embedding that the class of a model in transformers computes for a config, run instead of read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_ext_hf.errors import ServingError, UnsupportedModelError, short
from rope_ext_hf.methods.static import Default
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import check_stated
from rope_ext_hf.models.layer_types import LayerType
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.class_angles import ClassAngles, softmax_multiple
from rope_ext_hf.patches.slots.slot_finding import keeps_frequencies_in_weights, rotary_modules


def check_described(config: Mapping[str, Any]) -> None:
    """Check that the values of a config.json describe a rotary embedding, before any class reads them.

    Raises:
        CheckpointError: a number is impossibly large.
        ServingError: the model has its angles as a table in its weights.
    """
    check_stated(config)
    model_type = str(config.get("model_type"))
    if family(model_type).angle_table:
        raise ServingError(
            f"the angles of {short(model_type)!r} are a table in its weights, which its config does not describe"
        )


class ClassRotary:
    """The rotary embedding of the layers that a method applies to, as the model's own class computes it.

    Attributes:
        config: the config that the class built its rotary module from.
        softmax_scale: the number that attention multiplies its softmax scale by.
        context_length: the length in tokens that the model is for; None: the class could not be patched, and it is not
            known.
        note: a sentence on layers that the scaling of the model does not reach; None: it reaches all.
    """

    def __init__(self, config: Any) -> None:
        """Build the model that a config describes, without weights.

        Raises:
            CheckpointError: the class is not installed, or refuses the config.
            UnsupportedModelError: the model has no rotary module.
        """
        model = empty_model(config)
        self.softmax_scale = softmax_multiple(model)
        self.context_length: int | None = None
        self.note: str | None = None
        self._layer_type: LayerType = None
        try:
            rope = ModelRope.of_model(model)
        except UnsupportedModelError:  # the class can be run, but not patched
            [(_, _, module, self.config)] = rotary_modules(model)
            self._angles = ClassAngles(model, module, None)
            if keeps_frequencies_in_weights(module):
                self.note = "The weights hold the frequencies (inv_freq), and win over those of the config shown here."
            return
        slot = rope.slot
        self._layer_type = (*slot.scaled_layers, *slot.as_loaded)[0]
        self._angles, self.config = ClassAngles(model, slot.module, slot.layout), slot.config
        described = slot.as_loaded[self._layer_type]
        self.context_length = described.context_length
        if not isinstance(described.method, Default):
            self.note = slot.layers.unrotated_note(described.method)

    def at(self, length: int) -> tuple[tuple[float, ...], float]:
        """Return the frequencies in radians per position, and the factor of cos and sin, for inputs of a length."""
        return self._angles.at(self._layer_type, length)

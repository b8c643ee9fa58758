"""Convert a loaded model between RoPE layouts, in memory.

    convert(model, to="half", source_pairing="interleaved")    # its config says half, its weights are interleaved

The pairing of the weights is recorded as `rope_pairing` in the config, and saved with it.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.checkpoints.pairing.detection import detect_in_weights
from rope_ext_hf.checkpoints.pairing.model_weights import weights_from_model
from rope_ext_hf.checkpoints.pairing.right_calls import model_call
from rope_ext_hf.checkpoints.pairing.source_pairing import settle_pairing
from rope_ext_hf.checkpoints.rows.loaded_rows import reorder
from rope_ext_hf.errors import CheckpointError, MethodError
from rope_ext_hf.models.config_keys import PAIRING_KEY
from rope_ext_hf.models.family_settings import class_pairing, set_pairing_switch
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.patches.saved.adapters import keep_pairing, modules_with_adapters
from rope_ext_hf.rotary.pairing_names import PAIRINGS, other_pairing

M = TypeVar("M", bound=nn.Module)


def convert(model: M, to: str, *, source_pairing: str | None = None) -> M:
    """Change the pairing of a model in memory, in place, by reordering the rows of its weights.

    These are the weights, biases, norms and adapters whose outputs are rotated; one tensor is converted at a time. If
    the weights themselves do not show their pairing (see `detect_pairing`), the config is believed.

    Args:
        model: a transformers model, which may be under PEFT.
        to: "half" or "interleaved".
        source_pairing: the pairing of the weights now; default: the config's `rope_pairing`, else the one that the
            model's class runs.

    Returns:
        The same model. A warning is given if its class does not run the new pairing: then it is for saving only.

    Raises:
        CheckpointError: the weights are in that pairing already, contradict the config, or cannot be reordered exactly.
        MethodError: an unknown pairing, or a patched model.
        UnsupportedModelError: a family that the table does not list.
    """
    config: Any = model.config
    for name, value, allowed in (("to", to, PAIRINGS), ("source_pairing", source_pairing, (None, *PAIRINGS))):
        if value not in allowed:
            raise MethodError(f"{name} must be one of {', '.join(PAIRINGS)}, got {value!r}")
    if patched_method(model) is not None:
        raise MethodError("this model is patched: unpatch it, convert it, and patch it again")
    weights = weights_from_model(model)
    settled = settle_pairing(
        detect_in_weights(weights), to, stated=source_pairing, configured=weights.stated, command=model_call
    )
    if settled.pairing == to:
        raise CheckpointError(settled.already("the weights", model_call(to, other_pairing(to))))
    if settled.is_contradicted:
        warnings.warn(settled.warning, stacklevel=2)
    reorder(model, weights.tensors, to)
    set_pairing_switch(config, to)
    setattr(config, PAIRING_KEY, to)
    for module in {model, *modules_with_adapters(model)}:
        keep_pairing(module)
    runs = class_pairing(config) or weights.tensors.pairing
    if runs is not None and runs != to:
        warnings.warn(
            f"these weights are in the {to} pairing now, and {type(model).__name__} rotates in the {runs} pairing: "
            f"save them for code that rotates in the {to} pairing, or convert them back (to={runs!r}) to use this "
            "model",
            stacklevel=2,
        )
    return model

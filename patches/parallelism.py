"""What cannot be run with the tokens of a row spread over several processes."""

from __future__ import annotations

from typing import Any

from torch import nn

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import patched_slots


def check_context_parallel(model: nn.Module) -> None:
    """Check that a model rotates right where each process has a part of every row: context or sequence parallelism.

    Call it inside `fixed_length`, where that is used. `RopeCallback` calls it in a Trainer with such parallelism.

    Args:
        model: patched or not.

    Raises:
        MethodError: a method whose frequencies follow the length of the input, which each process would take from its
            own part, so that they rotate by different ones; or a remapping method, whose attention needs all keys.
        UnsupportedModelError: a model without rotary embeddings that could be replaced.
    """
    rule = "under context parallelism each process has a part of every row only"
    slots = patched_slots(model)
    for table in (table for slot in slots for table in slot.tables.values()):
        method: Any = table.method
        if isinstance(method, RemappingMethod):
            raise MethodError(
                f"{rule}, and {method.name} needs all keys at their places; choose a frequency method, such as yarn"
            )
        if table.length_dependent:
            raise MethodError(
                f"{rule}, and the frequencies of {method.name} follow the longest position of each part; hold one "
                "length: with rope_ext_hf.fixed_length(model, LENGTH): trainer.train()"
            )
    for own in () if slots else (own for slot in find_slots(model) for own in slot.as_loaded.values()):
        if own.method.depends_on_length(own.plain):
            raise MethodError(
                f"{rule}, and the model's own {own.method.name} takes the length of the input from it; patch the model "
                "with a static method, or patch it and hold one length with rope_ext_hf.fixed_length"
            )

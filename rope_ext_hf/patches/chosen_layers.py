"""Plan the one method that is put into layers one by one: `nope`, which drops their rotation.

Every other method changes a rotary module, and with it all layers that the module serves.
"""

from __future__ import annotations

from torch import nn

from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.patches.forward.decoders import decoder_of
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.unrotated_layers import DroppedRotation, taking_angles


def drop_layer_by_layer(rope: ModelRope, patch: Patch) -> tuple[tuple[nn.Module, DroppedRotation], ...]:
    """Return the modules of the named layers with the hooks that drop their rotation.

    There are none where these layers have one rotary embedding, and no others use it: it takes the method itself then.

    Raises:
        UnsupportedModelError: the method is not one that can be applied so; or the rotation of a layer cannot be
            dropped so.
        MethodError: the patch is over the model without its own scaling, which other layers keep.
    """
    model, slots, layers = rope.model, rope.slots, rope.slots[0].layers
    assert model is not None
    not_named = [index for slot in slots for index in slot.not_named]
    chosen = {index for slot in slots if slot.named for index in slot.changed_layers if slot.rotates(index)}
    if not_named and not patch.method.drops_rotation:
        raise layers.sharing(chosen, not_named)
    several = len({slot.as_loaded[key].rotary for slot in slots for key in slot.named}) > 1
    if not patch.method.drops_rotation or not (not_named or several):
        return ()
    if not chosen:
        raise does_not_rotate(rope, patch.layers)
    if rope.over == "original":
        raise MethodError(
            f"over='original' replaces the scaling of all layers, and {patch.method.name} in chosen layers leaves the "
            "others as they are: leave over out, or choose no layers"
        )
    layers.check_keys_are_own(chosen)
    decoder, *others = {decoder_of(model, slot.parent) for slot in slots if slot.named}
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several stacks of layers with the same numbers (an encoder and a decoder), so "
            f"{patch.method.name} cannot be put into chosen layers; leave out layers (--layers)"
        )
    factor = patch.method.frequencies(patch.rotary).attention_factor
    rotary_modules = [slot.module for slot in slots]
    hooks = {
        module: DroppedRotation(index, factor)
        for index in sorted(chosen)
        for module in taking_angles(decoder, index, len(layers.types), rotary_modules)
    }
    return tuple(hooks.items())


def check_attention_factors(rope: ModelRope, method: RopeMethod) -> None:
    """Raise UnsupportedModelError if a method gives the rotary embeddings of the named layers unlike factors."""
    rotaries = {slot.as_loaded[key].rotary for slot in rope.slots for key in slot.named}
    factors = {method.frequencies(rotary).attention_factor for rotary in rotaries} if len(rotaries) > 1 else ()
    if len(factors) > 1:
        several = ", ".join([f"{factor:g}" for factor in sorted(factors)])
        raise UnsupportedModelError(
            f"the layers that were named have attention factors of {several}; choose layers that have the same one: "
            "layers=... (--layers)"
        )


def does_not_rotate(rope: ModelRope, layers: tuple[str | int, ...] | None) -> UnsupportedModelError:
    """Return the error for named layers that have no rotation which a method could change."""
    named = ", ".join(map(str, layers or ()))
    return UnsupportedModelError(
        f"the layers that were named ({named}) do not rotate their queries and keys in this "
        f"{rope.config.model_type!r} model, so there is nothing to change in them"
    )

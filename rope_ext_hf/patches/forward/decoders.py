"""The decoders of a model, and the forwards that a patch puts on them and on the modules around them.

A decoder is the nearest module around a rotary slot whose forward takes token ids or embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.decoder_arguments import is_of_transformers, takes_tokens
from rope_ext_hf.patches.forward.patched_forward import DecoderForward, OuterForward, PatchedForward
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding


def install_forwards(model: nn.Module, kind: type[DecoderForward]) -> None:
    """Put a forward of this kind on every decoder with patched rotary modules, and one on the modules around it.

    The first of the decoder's rotary modules keeps the forwards, to remove them with the patch.
    """
    modules = dict(model.named_modules())
    slots_of: dict[str, list[PatchedRotaryEmbedding]] = {}
    for path, slot in modules.items():
        if isinstance(slot, PatchedRotaryEmbedding):
            slots_of.setdefault(_decoder_path(modules, path.rpartition(".")[0]), []).append(slot)
    decoders = {path: kind(modules[path], slots) for path, slots in slots_of.items()}
    for decoder in decoders.values():
        decoder.prepare(model)
    forwards: dict[str, PatchedForward] = {**decoders}
    for path, decoder in decoders.items():
        around = path
        while around:  # from the decoder outwards, up to the model itself, whose path is empty
            around = around.rpartition(".")[0]
            takes_mask = "attention_mask" in inspect.signature(type(modules[around]).forward).parameters
            if takes_mask and around not in forwards:
                forwards[around] = OuterForward(modules[around])
                decoder.slots[0].hooks.append(forwards[around])
        decoder.slots[0].hooks.append(decoder)
    for forward in forwards.values():
        forward.install()


def _takes_no_tokens(model: Any) -> UnsupportedModelError:
    """Return the error for a model that takes neither token ids nor embeddings: a part, or one that reads no text.

    Every model of transformers takes what its class names as its main input.
    """
    arguments = list(inspect.signature(type(model).forward).parameters)[1:]
    main = getattr(model, "main_input_name", None)
    which = f"{type(model).__name__} takes {main if main in arguments else arguments[0]}"
    if "hidden_states" in arguments:
        way_out = "It is a part of a model: patch the whole model"
    elif not is_of_transformers(model):
        way_out = "Give its forward input_ids (docs/own-models.md), or use a static method (yarn, ntk, linear, ...)"
    else:
        way_out = "Use a static method (yarn, ntk, linear, ...)"
    return UnsupportedModelError(
        f"{which}, and neither input_ids nor inputs_embeds, by which length-dependent and remapping methods count "
        f"tokens. {way_out}"
    )


def decoder_of(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return the decoder that a module of a model belongs to: itself, or the next module around it that takes tokens.

    Raises:
        UnsupportedModelError: no module around it does.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    start = next(path for path, candidate in modules.items() if candidate is module)
    return modules[_decoder_path(modules, start)]


def _decoder_path(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the path of the decoder that the module at a path belongs to; `modules` are those of a model by path."""
    while not takes_tokens(modules[path]):
        if not path:
            raise _takes_no_tokens(modules[""])
        path = path.rpartition(".")[0]
    return path

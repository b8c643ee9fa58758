"""Find out how each layer of a decoder keeps its keys in a cache, by running one token under three rotations.

Keys that are to be rotated again in a cache must be known dim by dim: which dims rotate, how they are paired, whether
they carry the attention factor. Some models keep them among the values, or normalise them after the rotation. This
depends on the class of a model and on the kinds of its layers, so that a small random model of the class shows it where
the weights of the model itself are missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, MethodError, UnsupportedModelError, one_line
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.models.decoder_arguments import cache_of_output, cache_parameter
from rope_ext_hf.models.patch_records import before_patches
from rope_ext_hf.models.small_models import small_model
from rope_ext_hf.models.temporary import trying
from rope_ext_hf.models.weights_at_hand import is_offloaded, missing_weights
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, tables_of
from rope_ext_hf.patches.slots.slot_finding import find_slots
from rope_ext_hf.rotary.embedding import RotaryEmbedding, override_angles
from rope_ext_hf.rotary.key_rotation import KeyLayout, infer_key_layout

_ATTENTION_FACTOR = 1.25
"""A factor whose effect no rounding hides, exact in every dtype."""
_TOKEN_ID = 3
_DOES_NOT_RUN = (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError, AssertionError)
"""The errors of a decoder that is called without something that it needs, or in a form that it does not take."""


class CacheCannotFollowError(LengthError):
    """The error for decoders whose cached keys cannot be rotated again; inside `fixed_length` they still work."""


def find_key_layouts(
    model: nn.Module, decoder: nn.Module, slots: Sequence[PatchedRotaryEmbedding]
) -> list[KeyLayout | None]:
    """Return how each layer of a decoder's cache keeps its keys; None for a layer that keeps no rotated keys.

    Args:
        model: the patched model.
        decoder: its decoder.
        slots: the modules that stand in the slots of this decoder, under a length-dependent method.

    Raises:
        CacheCannotFollowError: the decoder does not run on one token, or what it keeps is not simply rotated; or its
            weights are not here, and no small model of its class can be built.
    """
    tables = [table for table in tables_of(slots) if table.length_dependent]
    if not tables:  # none of the frequencies of this decoder will change
        return []
    reason = missing_weights(model)
    if reason is not None:
        layouts = _layouts_of_small_model(decoder, slots)
        if layouts is not None:
            return layouts
        if not is_offloaded(model):
            raise CacheCannotFollowError(
                f"how {type(decoder).__name__} keeps its keys could not be found out when it was patched, because "
                f"{reason}. Patch it again where its weights are whole. {HOLD_ONE_LENGTH}"
            )
    with trying(model):
        return _probe(decoder, tables)


def _layouts_of_small_model(
    decoder: nn.Module, slots: Sequence[PatchedRotaryEmbedding]
) -> list[KeyLayout | None] | None:
    """Return the layouts of a small random model of a decoder's class; None if none can be built."""
    state, patch = slots[0].state, slots[0].state.patch
    config: Any = decoder.config
    config = next((swap.original for swap in state.configs if swap.patched is config), config)
    classes: tuple[Any, Any] = type(decoder), type(config)
    as_json = before_patches(config).to_json_string(use_diff=False)
    return _small_layouts(*classes, as_json, patch.method, patch.rotary, patch.layers)


@lru_cache(maxsize=32)
def _small_layouts(
    decoder_class: type[Any],
    config_class: type[Any],
    config: str,
    method: RopeMethod,
    rotary: Rotary,
    layers: tuple[str | int, ...] | None,
) -> list[KeyLayout | None] | None:
    """Return the layouts of a small random decoder with all layers of a config, given as JSON; see `Patch`."""
    with torch.device("cpu"):  # a model without weights may be patched where the default device is meta
        small = small_model(config_class, config, decoder_class, layers=True)
        if small is None:
            return None
        slots = []
        try:
            for slot in find_slots(small, layers):
                slots.append(PatchedRotaryEmbedding(slot, method, rotary, None))
                setattr(slot.parent, slot.attribute, slots[-1])
        except (UnsupportedModelError, MethodError):
            return None
        return _probe(small, [table for table in tables_of(slots) if table.length_dependent])


def _probe(decoder: nn.Module, tables: Sequence[RotaryEmbedding]) -> list[KeyLayout | None]:
    """Return how each layer of a decoder's cache keeps its keys, by running one token through it.

    A token that attends to itself alone is rotated together with its key, so that all hidden states are the same
    whatever the angle, and nothing but the rotation differs in the cache. The angles are quarters of a cycle, which are
    exact in every dtype.

    Args:
        decoder: the decoder, before a patch gives it another forward.
        tables: the length-dependent rotary modules of the decoder.

    Raises:
        CacheCannotFollowError: as `find_key_layouts` raises it.
    """
    radians = (1 + torch.arange(tables[0].rotary.dim // 2, device="cpu") % 3) * (math.pi / 2)
    unrotated, rotated, rotated_scaled = (cache.layers for cache in _three_caches(decoder, tables, radians))
    try:
        return [infer_key_layout(*layers, radians) for layers in zip(unrotated, rotated, rotated_scaled, strict=True)]
    except ValueError as error:
        raise CacheCannotFollowError(
            f"the {error} that {type(decoder).__name__} keeps in its cache are not simply rotated (a norm after the "
            f"rotation, or an index with keys of its own), so they cannot follow other frequencies. {HOLD_ONE_LENGTH}"
        ) from error


def _one_token(decoder: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the arguments of a call with one token, in the two forms that a decoder may take: an id, an embedding."""
    weight = next(weight for weight in decoder.parameters() if weight.is_floating_point())
    device = torch.device("cpu") if weight.device.type == "meta" else weight.device  # of offloaded weights
    position = {"position_ids": torch.ones(1, 1, dtype=torch.int64, device=device)}
    yield position | {"input_ids": torch.full((1, 1), _TOKEN_ID, device=device)}
    width = getattr(decoder.config, "hidden_size", None)
    if width is not None:
        embedding = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0), device="cpu")
        yield position | {"inputs_embeds": embedding.to(device, weight.dtype)}


def _three_caches(decoder: nn.Module, tables: Sequence[RotaryEmbedding], radians: Tensor) -> list[Any]:
    """Return the caches that a decoder fills with one token: not rotated, rotated, and rotated and scaled."""
    rotations = ((torch.zeros_like(radians), 1.0), (radians, 1.0), (radians, _ATTENTION_FACTOR))
    reasons = []
    for token in _one_token(decoder):
        caches = []
        try:
            for angles, attention_factor in rotations:
                with override_angles(tables, angles, attention_factor), torch.no_grad():
                    caches.append(_cache_of_one_token(decoder, token))
        except (*_DOES_NOT_RUN, UnsupportedModelError) as error:  # a decoder that needs an encoder; one without a cache
            reasons.append(one_line(error))
        else:
            return caches
    raise CacheCannotFollowError(
        f"{type(decoder).__name__} does not run on one token alone, so how it keeps its keys cannot be found out "
        f"({reasons[0]}). {HOLD_ONE_LENGTH}"
    )


def _cache_of_one_token(decoder: nn.Module, token: dict[str, Tensor]) -> Any:
    """Return the cache that a decoder fills with one token: its own, or one that it is given where it returns none."""
    from transformers.cache_utils import DynamicCache

    cache = cache_of_output(decoder(**token, use_cache=True, return_dict=True))
    if cache is None:
        cache = DynamicCache(config=decoder.config)
        arguments: dict[str, Any] = token | {cache_parameter(decoder): cache}
        decoder(**arguments, use_cache=True, return_dict=True)
    return cache

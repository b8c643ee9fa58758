"""Find out how each layer of a decoder keeps its keys in a cache, by running one token under three rotations.

Keys that are to be rotated again in a cache must be known dim by dim: which dims rotate, how they are paired, whether
they carry the attention factor. Some models keep them among the values, or normalise them after the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, one_line
from rope_ext_hf.patches.decoder_arguments import cache_of_output, cache_parameter
from rope_ext_hf.patches.forward_context import HOLD_ONE_LENGTH
from rope_ext_hf.patches.hooked_forward import forward_without_hooks
from rope_ext_hf.rotary.embedding import RotaryEmbedding, override_angles
from rope_ext_hf.rotary.key_rotation import KeyLayout, infer_key_layout

_ATTENTION_FACTOR = 1.25
"""A factor whose effect no rounding hides, exact in every dtype."""


class CacheCannotFollowError(LengthError):
    """The error for decoders whose cached keys cannot be rotated again; inside `fixed_length` they still work."""


def probe_key_layouts(
    decoder: nn.Module, new_tokens: Tensor, tables: Sequence[RotaryEmbedding]
) -> list[KeyLayout | None]:
    """Return how each layer of a decoder's cache keeps its keys; None for a layer that keeps no rotated keys.

    A token that attends to itself alone is rotated together with its key, so that all hidden states are the same
    whatever the angle, and nothing but the rotation differs in the cache. The angles are quarters of a cycle, which are
    exact in every dtype.

    Args:
        decoder: the decoder; its hooks are not run here.
        new_tokens: ids (rows, tokens) or embeddings (rows, tokens, hidden size); one of these tokens is run.
        tables: the length-dependent rotary modules of the decoder.

    Raises:
        CacheCannotFollowError: the decoder does not run on one token, or what it keeps is not simply rotated.
    """
    name = "inputs_embeds" if new_tokens.is_floating_point() else "input_ids"
    token = {name: new_tokens[:1, -1:], "position_ids": torch.ones(1, 1, dtype=torch.int64, device=new_tokens.device)}
    radians = (1 + torch.arange(tables[0].rotary.dim // 2) % 3) * (math.pi / 2)
    rotations = ((torch.zeros_like(radians), 1.0), (radians, 1.0), (radians, _ATTENTION_FACTOR))
    caches = []
    for angles, attention_factor in rotations:
        with override_angles(tables, angles, attention_factor), torch.no_grad():
            try:
                caches.append(_cache_of_one_token(decoder, token))
            except (TypeError, ValueError) as error:  # the decoder beside an encoder needs what the encoder gives
                raise CacheCannotFollowError(
                    f"{type(decoder).__name__} does not run on one token alone, so how it keeps its keys cannot be "
                    f"found out ({one_line(error)}). {HOLD_ONE_LENGTH}"
                ) from error
    try:
        unrotated, rotated, rotated_scaled = (cache.layers for cache in caches)
        return [infer_key_layout(*layers, radians) for layers in zip(unrotated, rotated, rotated_scaled, strict=True)]
    except ValueError as error:
        raise CacheCannotFollowError(
            f"the {error} that {type(decoder).__name__} keeps in its cache are not simply rotated (a norm after the "
            f"rotation, or an index with keys of its own), so they cannot follow other frequencies. {HOLD_ONE_LENGTH}"
        ) from error


def _cache_of_one_token(decoder: nn.Module, token: dict[str, Tensor]) -> Any:
    """Return the cache that a decoder fills with one token: its own, or one that it is given where it returns none."""
    from transformers.cache_utils import DynamicCache

    cache = cache_of_output(forward_without_hooks(decoder, **token, use_cache=True, return_dict=True))
    if cache is None:
        cache = DynamicCache(config=decoder.config)
        arguments: dict[str, Any] = token | {cache_parameter(decoder): cache}
        forward_without_hooks(decoder, **arguments, use_cache=True, return_dict=True)
    return cache

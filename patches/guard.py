"""Stops a length-dependent method where it would be silently wrong.

The rotary module sees positions only. Whether a row is padded, or its keys were cached under other frequencies, is
known one level up, so a hook on the decoder looks there before each forward.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from rope_ext_hf.errors import LengthError

__all__ = ["LengthGuard"]

_REMEDY = (
    "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ... "
    "or use a static method."
)


class LengthGuard:
    """A forward pre-hook for the decoder whose rotary module hangs at `attribute`.

    Raises:
        LengthError: a padded batch, or a forward onto keys already in the cache, unless the length is fixed.
    """

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tables = getattr(decoder, self.attribute).tables.values()
        changing = [table.method.name for table in tables if table.length_dependent]
        if not changing:
            return
        call = inspect.signature(type(decoder).forward).bind_partial(decoder, *args, **kwargs).arguments
        call |= call.get("kwargs", {})
        cache = call.get("past_key_values")
        if cache is not None and int(cache.get_seq_length()) > 0:
            raise LengthError(
                f"{changing[0]} changes its frequencies with the length, and the keys in the cache were turned with "
                f"those of a shorter input. {_REMEDY}"
            )
        mask = call.get("attention_mask")
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise LengthError(
                f"{changing[0]} cannot read each row's number of tokens off a prepared attention mask. {_REMEDY}"
            )
        if not bool(mask.all()):
            raise LengthError(f"{changing[0]} does not know the length of each row of a padded batch yet. {_REMEDY}")

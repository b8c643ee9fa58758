"""The positions and the padding of all tokens of a forward, for the attention of remapping methods."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import TokenPositions
from rope_ext_hf.attention.static_step import StaticStep
from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.forward.forward_call import ForwardCall
from rope_ext_hf.rotary.cache_memory import is_counted
from rope_ext_hf.rotary.row_lengths import several_inputs

_NOT_CONTINUED = (
    "position_ids do not continue the positions of the keys in the cache: pass those of the new tokens, each one more "
    "than the one before"
)
_NOT_AT_THE_BEGINNING = "compiled steps of a remapping method take padding at the beginning of a row alone"


def place_tokens(call: ForwardCall) -> TokenPositions:
    """Return positions and padding of all tokens of a forward.

    Positions are usually counted from the mask: [0 0 1 1 1] gives two tokens of padding, then the positions 0, 1, 2.
    position_ids that differ from this count are used as they were given. The host looks at values on the device three
    times at most, and not at all while text is generated without padding on CUDA.

    Raises:
        LengthError: position_ids are not one number per token, or do not continue those in the cache.
    """
    tokens, past_length = call.new_tokens.shape[1], call.past_length
    positions, key_mask = _checked_positions(call), _key_mask(call)
    continues = key_mask is None and call.memory is not None and call.memory.in_order
    keys = _count_keys(call, positions, key_mask, continues=continues)
    if keys.agree or positions is None:
        return TokenPositions(
            query_positions=keys.positions[:, past_length:],
            key_positions=keys.positions,
            left_padding=keys.left_padding,
            key_mask=keys.key_mask,
            counted=keys.counted,
        )
    if past_length == 0:  # several inputs in a row, or positions that do not begin at 0
        call.packed = bool(several_inputs(positions, call.padding_mask))
        return TokenPositions(positions, positions, None, keys.key_mask)
    # The keys in the cache stand before the new tokens, one position apart, wherever those are.
    shifted = keys.positions + positions[:, -1:] - keys.positions[:, -1:]
    if continues or not bool(_agree(positions, shifted[:, -tokens:], keys.key_mask)):
        raise LengthError(_NOT_CONTINUED)
    if keys.key_mask is None and not bool((shifted[:, 0] > 0).any()):  # left padding, known from the positions alone
        padding = (-shifted[:, 0]).expand(len(call.new_tokens))
        padded = shifted >= 0 if bool(padding.any()) else None
        return TokenPositions(positions, shifted.clamp(min=0), tuple(padding.tolist()), padded)
    return TokenPositions(positions, shifted, None, keys.key_mask)


def has_static_places(call: ForwardCall) -> bool:
    """Return whether a call reads one token per row onto a static cache whose layers hold all keys at fixed places.

    The cache holds earlier tokens, whose positions are known to count them. The padding mask of such a call has a value
    for each place; there may be none where the rows have no padding.
    """
    from transformers.cache_utils import StaticLayer

    layers, mask = call.cache.layers if call.cache is not None else [], call.kwargs.get("attention_mask")
    if call.new_tokens.shape[1] != 1 or not layers or not all(type(layer) is StaticLayer for layer in layers):
        return False
    if not isinstance(getattr(layers[0], "cumulative_length", None), Tensor):  # in 5.0
        return False
    if not is_counted(call.cache):
        return False
    positions = call.kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.is_floating_point():
        return False
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == layers[0].max_cache_len)


def place_step(call: ForwardCall) -> StaticStep:
    """Return the positions of a call for which `has_static_places` is true, without a look at values.

    Keys stand before the new tokens, one position apart, after the padding that a row begins with. The device checks
    that there is no other padding, and that the positions count the tokens.
    """
    layer, mask, device = call.cache.layers[0], call.kwargs.get("attention_mask"), call.new_tokens.device
    place, positions = layer.cumulative_length.to(device).clone(), call.kwargs["position_ids"].to(device)
    places = torch.arange(layer.max_cache_len, device=device)[None]
    padding = torch.zeros((), dtype=torch.int64, device=device)
    if mask is not None:
        padded = (mask.to(device) == 0) & (places < place)
        padding = padded.sum(-1, keepdim=True)
        torch._assert_async((padded == (places < padding)).all(), _NOT_AT_THE_BEGINNING)
    torch._assert_async((positions == place - padding).all(), _NOT_CONTINUED)
    return StaticStep(place, positions, places - padding)


def _checked_positions(call: ForwardCall) -> Tensor | None:
    """Return the position_ids of a call on the device of its tokens; None where the call has none."""
    positions = call.position_ids
    if positions is None:
        return None
    if positions.ndim != 2:
        raise LengthError(
            f"remapping methods need one position per token, a tensor of shape (rows, tokens); got position_ids "
            f"of shape {tuple(positions.shape)}"
        )
    return positions.to(call.new_tokens.device)


def _key_mask(call: ForwardCall) -> Tensor | None:
    """Return the padding mask of all keys, (rows, past + tokens) bool; tokens beyond the given mask are no padding."""
    if call.padding_mask is None:
        return None
    total = call.past_length + call.new_tokens.shape[1]
    mask = call.padding_mask.to(call.new_tokens.device)
    return nn.functional.pad(mask, (0, max(0, total - mask.shape[1])), value=True)[:, :total]


def _agree(positions: Tensor | None, counted: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return whether the positions of the new tokens equal the counted ones, padding aside; a bool scalar.

    `key_mask`: of all keys, of which the new tokens are the last.
    """
    if positions is None:
        return torch.ones((), dtype=torch.bool, device=counted.device)
    differ = counted != positions
    if key_mask is not None:
        differ = differ & key_mask[:, -counted.shape[1] :]
    return ~differ.any()


class _CountedKeys(NamedTuple):
    """Positions and padding of all keys in a forward, by a count of the tokens; see `TokenPositions`.

    They hold if each row is one input, so that its positions count its tokens.
    """

    positions: Tensor  # (rows or 1, past + tokens)
    key_mask: Tensor | None
    left_padding: tuple[int, ...] | None
    counted: tuple[int, ...]
    agree: bool  # the position_ids of the call, if it has any, are these positions


def _count_keys(
    call: ForwardCall, positions: Tensor | None, key_mask: Tensor | None, *, continues: bool
) -> _CountedKeys:
    """Return the keys of a forward by a count of its tokens, and whether its positions agree with that.

    `continues`: the keys in the cache are known to be in order and without padding, so that positions should agree.
    """
    new_tokens, past_length = call.new_tokens, call.past_length
    rows, tokens = new_tokens.shape[:2]
    total = past_length + tokens
    in_order = torch.arange(total, device=new_tokens.device)[None]
    no_padding = (0,) * rows
    if key_mask is None:
        agree = positions is None or _is_true(
            _agree(positions, in_order[:, past_length:], None), continues, _NOT_CONTINUED
        )
        return _CountedKeys(in_order, None, no_padding, (total,), agree)
    by_mask = (key_mask.cumsum(-1) - 1).clamp(min=0)
    first_real = key_mask.int().argmax(-1)
    one_run = key_mask.int().diff(dim=-1).clamp(min=0).sum(-1) + key_mask[:, 0] == 1
    # Padding on the right is behind every query of a first forward, and between queries and keys of later ones.
    to_the_end = (first_real + key_mask.sum(-1) == total) | (past_length == 0)
    flags = [
        _agree(positions, in_order[:, past_length:], None),
        _agree(positions, by_mask[:, past_length:], key_mask),
        key_mask.all(),
        (one_run & to_the_end).all(),
    ]
    values = torch.cat([torch.stack(flags), first_real, key_mask.sum(-1)]).tolist()  # one wait for the device
    agree_in_order, agree_by_mask, all_real, is_ordered = values[:4]
    left_padding, counted = tuple(values[4 : 4 + rows]), tuple(values[4 + rows :])
    if all_real:
        return _CountedKeys(in_order, None, no_padding, counted, bool(agree_in_order))
    # A module around the decoder that counts tokens, padding among them, leaves the positions to the mask.
    agree = bool(agree_by_mask) or (call.positions_filled_in and bool(agree_in_order))
    return _CountedKeys(by_mask, key_mask, left_padding if is_ordered else None, counted, agree)


def _is_true(flag: Tensor, expected: bool, message: str) -> bool:
    """Return whether a bool scalar is True.

    Where that is `expected`, a CUDA device checks it by itself, later, so that the host need not wait for the value.
    """
    if expected and flag.device.type == "cuda" and torch.version.hip is None:  # ROCm leaves such checks out
        torch._assert_async(flag, message)
        return True
    return bool(flag)

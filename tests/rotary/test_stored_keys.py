"""Keys that are rotated as they are read: the same numbers as keys that were rotated before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.key_rotation import KeyLayout
from rope_ext_hf.rotary.reading_rotation import ReadingRotation
from rope_ext_hf.rotary.stored_keys import StoredKeys
from rope_ext_hf.rotary.tiled_rotation import _MAX_AT_ONCE, TILE_TOKENS

COUNT = 2500  # more than one tile, the last one not full
ROWS, KV_HEADS, HEADS, DIM = 2, 2, 6, 24
LAYOUTS = [
    KeyLayout("half", 0, DIM),
    KeyLayout("interleaved", 0, DIM),
    KeyLayout("half", 8, 16),
    KeyLayout("interleaved", 0, 16, negative_angle=True),
]


def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes) + sizes[-1])).to(dtype)


def rotated_by_hand(keys: Tensor, stored: float, present: float, method: Any, layout: KeyLayout) -> Tensor:
    """Keys at positions 0 to n, from the frequencies of one length to those of another, in float64."""
    rotary = Rotary(layout.dim, 10_000.0, 64)
    before, after = (method.frequencies(rotary, length) for length in (stored, present))
    angle = torch.arange(keys.shape[-2], dtype=torch.float64)[:, None] * (after.inv_freq - before.inv_freq)
    angle = -angle if layout.negative_angle else angle
    ratio = after.attention_factor / before.attention_factor if layout.scaled else 1.0
    out = keys.double().clone()
    part = out[..., layout.start : layout.start + layout.dim]
    half = slice(None, layout.dim // 2), slice(layout.dim // 2, None)
    first, second = half if layout.pairing == "half" else (slice(0, None, 2), slice(1, None, 2))
    pairs = torch.complex(part[..., first], part[..., second]) * torch.polar(torch.full_like(angle, ratio), angle)
    part[..., first], part[..., second] = pairs.real, pairs.imag
    return out


def stored_keys(
    keys: Tensor, layout: KeyLayout, method: Any, lengths: tuple[int, int] = (70, COUNT)
) -> tuple[StoredKeys, Tensor]:
    """Keys as they are stored, and a copy rotated in float64."""
    table = RotaryEmbedding(method, Rotary(layout.dim, 10_000.0, 64))
    stored, present = (torch.tensor([length]) for length in lengths)
    rotation = ReadingRotation(table, stored, present, torch.arange(COUNT)[None], layout.scaled)
    return StoredKeys(keys, rotation, layout), rotated_by_hand(keys, *lengths, method, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", [DynamicYarn(), DynamicNTK()], ids=lambda method: method.name)
def test_attention_of_one_token(method: Any, layout: KeyLayout) -> None:
    keys, expected_keys = stored_keys(draw(ROWS, KV_HEADS, COUNT, DIM), layout, method)
    values, query = draw(ROWS, KV_HEADS, COUNT, 8), draw(ROWS, HEADS, 1, DIM)
    actual = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), expected_keys, values.double(), enable_gqa=True
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
    assert "rotated" not in vars(keys)  # no copy was made


def test_rows_of_different_lengths_with_heads_too_wide_for_one_part() -> None:
    dim, layout, method = 256, KeyLayout("half", 0, 256), DynamicNTK()
    lengths, stored = (70, 900), draw(ROWS, KV_HEADS, COUNT, dim)
    assert KV_HEADS * TILE_TOKENS * dim > _MAX_AT_ONCE
    rotation = ReadingRotation(
        RotaryEmbedding(method, Rotary(dim, 10_000.0, 64)),
        torch.tensor(lengths),
        torch.tensor([COUNT]),
        torch.arange(COUNT)[None],
    )
    query = draw(ROWS, KV_HEADS, 3, dim)
    scores = rotation.in_tiles(torch.device("cpu"), COUNT).scores(query, stored, layout, dim**-0.5)
    for row, length in enumerate(lengths):
        keys = rotated_by_hand(stored[row], length, COUNT, method, layout)
        exact = query[row].double() @ keys.mT * dim**-0.5
        torch.testing.assert_close(scores[row].double(), exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["all heads", "heads that share a key as queries"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_masks(kind: torch.dtype, packed: bool) -> None:
    keys, expected_keys = stored_keys(draw(ROWS, KV_HEADS, COUNT, DIM), LAYOUTS[0], DynamicYarn())
    values, query = draw(ROWS, KV_HEADS, COUNT, 8), draw(ROWS, HEADS, 1, DIM)
    seen = torch.rand(ROWS, 1, 1, COUNT, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = seen if kind == torch.bool else torch.zeros(()).where(seen, torch.finfo(torch.float32).min)
    options: dict[str, Any] = {"scale": 0.3}
    if packed:  # as transformers does it for one token and a mask
        query = query.reshape(ROWS, KV_HEADS, HEADS // KV_HEADS, DIM)
    else:
        options["enable_gqa"] = True
    actual = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
    wide = mask if kind == torch.bool else mask.double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), expected_keys, values.double(), attn_mask=wide, **options
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
    assert "rotated" not in vars(keys)


def test_scores_are_not_rounded_to_bfloat16() -> None:
    """Rotated keys stay in float32, so that scores are nearer to the exact ones than those of a rotated copy."""
    stored = draw(1, KV_HEADS, COUNT, DIM, dtype=torch.bfloat16)
    keys, expected_keys = stored_keys(stored, LAYOUTS[0], DynamicYarn())
    values, query = draw(1, KV_HEADS, COUNT, 8, dtype=torch.bfloat16), 3 * draw(1, HEADS, 1, DIM)
    query = query.bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query.double(), expected_keys, values.double(), enable_gqa=True)
    error = (attend(query, keys, values, enable_gqa=True).double() - expected).abs().max()
    of_copy = (attend(query, expected_keys.bfloat16(), values, enable_gqa=True).double() - expected).abs().max()
    assert error < 1.2 * of_copy


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a product": lambda keys: keys @ torch.ones(DIM, 3),
    "a view": lambda keys: keys.transpose(-1, -2),
    "an index": lambda keys: keys[:, :, None, -7:],
    "a cast": lambda keys: keys.double(),
    "a list": lambda keys: torch.cat([keys, keys], dim=-2),
    "a copy": lambda keys: keys.clone(),
    "a sum": lambda keys: keys.sum(-1),
    "an operator": lambda keys: torch.ops.aten.mul(keys, 2.0),
    "attention of two tokens": lambda keys: torch.nn.functional.scaled_dot_product_attention(
        draw(ROWS, KV_HEADS, 2, DIM), keys, draw(ROWS, KV_HEADS, COUNT, 8), is_causal=True
    ),
    "numbers": lambda keys: torch.from_numpy(keys.numpy().copy()),
    "a list of numbers": lambda keys: torch.tensor(keys.tolist()),
    "a deep copy": lambda keys: copy.deepcopy(keys),
    "shared memory": lambda keys: keys.share_memory_(),
    "attention of rows without heads": lambda keys: torch.nn.functional.scaled_dot_product_attention(
        draw(KV_HEADS, 1, DIM), keys[0], draw(KV_HEADS, COUNT, 8)
    ),
    "attention after a change": lambda keys: torch.nn.functional.scaled_dot_product_attention(
        draw(ROWS, KV_HEADS, 1, DIM), keys.mul_(2.0), draw(ROWS, KV_HEADS, COUNT, 8)
    ),
    "attention with dropout": lambda keys: torch.nn.functional.scaled_dot_product_attention(
        draw(ROWS, KV_HEADS, 1, DIM), keys, draw(ROWS, KV_HEADS, COUNT, 8), dropout_p=1e-9
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_everything_else_gets_rotated_keys(operation: Callable[[Any], Any]) -> None:
    keys, expected = stored_keys(draw(ROWS, KV_HEADS, COUNT, DIM), LAYOUTS[0], DynamicYarn())
    out = operation(keys)
    torch.testing.assert_close(out, operation(expected.float()), atol=2e-5, rtol=1e-5)


def test_autocast_does_not_round_scores() -> None:
    keys, expected_keys = stored_keys(draw(1, KV_HEADS, COUNT, DIM), LAYOUTS[0], DynamicYarn())
    query = 3 * draw(1, KV_HEADS, 3, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        tiled = keys.rotation.in_tiles(torch.device("cpu"), COUNT)
        scores = tiled.scores(query, keys.stored, keys.key_layout, 1.0)
    exact = query.double() @ expected_keys.transpose(-1, -2)
    torch.testing.assert_close(scores.double(), exact, atol=1e-4, rtol=0)


def test_its_form_is_that_of_the_stored_keys() -> None:
    stored = draw(ROWS, KV_HEADS, COUNT, DIM, dtype=torch.bfloat16)
    keys, _ = stored_keys(stored, LAYOUTS[0], DynamicYarn())
    for read in (
        lambda x: x.shape,
        lambda x: (x.dtype, x.device, x.ndim),
        lambda x: x.size(-2),
        lambda x: x.stride(),
        lambda x: x.requires_grad,
        len,
    ):
        assert read(keys) == read(stored)
    assert "rotated" not in vars(keys)

"""Contracts: what every method must keep, for the registered ones and for those that a test file defines.

A remapping method is compared with its definition: an entry in `STORED_POSITIONS` of oracles.py, and one in its
`FAR_DISTANCES` or `DISTANCES`.
"""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable, ScoreModifiers, TokenPositions
from rope_ext_hf.attention.static_step import StaticStep, attend_step
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.clipping import Cope
from rope_ext_hf.methods.dropping import Nope
from rope_ext_hf.methods.registry import frequencies, method_from_dict
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.method_checks import EXACT, GEOMETRY, assert_native, assert_same
from tests.support.oracles import naive_attention, plain, rotate_to, stored_position

THETA = 10_000.0


class MethodContract:
    """What holds for every method; a test class derives from it and gives `method`."""

    def test_shape_and_dtype(self, method: RopeMethod) -> None:
        for length in (None, 1, 512, 513, 5000):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, length)
            assert inv_freq.shape == (32,)
            assert inv_freq.dtype == torch.float64
            assert type(attention_factor) is float

    def test_positive_and_non_increasing(self, method: RopeMethod) -> None:
        for length in (1, 512, 513, 5000):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, length)
            assert torch.isfinite(inv_freq).all()
            assert ((inv_freq > 0) | isinstance(method, (Cope, Nope))).all()
            assert (inv_freq.diff() <= 0).all()
            assert math.isfinite(attention_factor)
            assert attention_factor > 0

    def test_never_faster_than_the_model_itself(self, method: RopeMethod) -> None:
        """Extension slows pairs down; a turn beyond the trained ones is what it avoids."""
        inv_freq = method.frequencies(GEOMETRY, 5000).inv_freq
        assert (inv_freq <= torch.tensor(plain(GEOMETRY), dtype=torch.float64) * (1 + EXACT)).all()

    def test_json_round_trip(self, method: RopeMethod) -> None:
        again = method_from_dict(json.loads(json.dumps(method.to_dict())))
        assert again == method
        assert type(again) is type(method)
        assert again.to_dict() == method.to_dict()

    def test_pickle_round_trip(self, method: RopeMethod) -> None:
        assert pickle.loads(pickle.dumps(method)) == method

    def test_hashable(self, method: RopeMethod) -> None:
        assert len({method, pickle.loads(pickle.dumps(method))}) == 1

    def test_frozen(self, method: RopeMethod) -> None:
        with pytest.raises((FrozenInstanceError, TypeError)):
            method.factor = 2.0  # type: ignore[attr-defined]

    def test_native_form_of_a_static_method(self, method: RopeMethod) -> None:
        if isinstance(method, RemappingMethod):  # no frequencies say what it does
            assert method.rope_parameters(GEOMETRY) is None
            return
        if method.length_dependent:
            parameters = method.rope_parameters(GEOMETRY)
            assert parameters is None or parameters["rope_type"] == "longrope"
            return
        for rotary in (GEOMETRY, Rotary(dim=64, theta=5e5, trained_length=8192)):
            parameters = method.rope_parameters(rotary)
            assert parameters is not None
            for length in (None, 4 * rotary.trained_length):
                assert_native(rotary, method.frequencies(rotary), parameters, length)

    def test_longrope_writes_any_static_frequencies(self, method: RopeMethod) -> None:
        if not method.length_dependent:
            assert_native(GEOMETRY, method.frequencies(GEOMETRY), method.longrope_parameters(GEOMETRY), 9999)

    def test_static_means_the_length_does_not_matter(self, method: RopeMethod) -> None:
        short, long = (method.frequencies(GEOMETRY, length) for length in (10, 50_000))
        same = torch.equal(short.inv_freq, long.inv_freq) and short.attention_factor == long.attention_factor
        assert same is not method.length_dependent

    def test_no_length_is_the_trained_length(self, method: RopeMethod) -> None:
        without, trained = method.frequencies(GEOMETRY), method.frequencies(GEOMETRY, 512)
        assert torch.equal(without.inv_freq, trained.inv_freq)
        assert without.attention_factor == trained.attention_factor

    def test_each_length_of_many(self, method: RopeMethod) -> None:
        """at_lengths over a tensor is `frequencies` of each entry."""
        lengths = [1, 256, 511, 512, 513, 1024, 1025, 2048, 2049, 4096, 4097, 100_000, 1 << 24]
        inv_freq, attention_factor = method.at_lengths(GEOMETRY, torch.tensor(lengths, dtype=torch.float64))
        inv_freq = inv_freq.expand(len(lengths), -1)
        warmth = torch.as_tensor(attention_factor, dtype=torch.float64).expand(len(lengths), 1)
        for row, length in enumerate(lengths):
            alone = method.frequencies(GEOMETRY, length)
            assert_same(inv_freq[row], alone.inv_freq)
            assert float(warmth[row, 0]) == pytest.approx(alone.attention_factor, rel=EXACT)

    def test_a_batch_of_lengths_may_have_any_shape(self, method: RopeMethod) -> None:
        lengths = torch.tensor([[100.0, 600.0, 1000.0], [2000.0, 512.0, 513.0]], dtype=torch.float64)
        flat, _ = method.at_lengths(GEOMETRY, lengths.flatten())
        square, _ = method.at_lengths(GEOMETRY, lengths)
        assert_same(square.expand(2, 3, 32).reshape(6, 32), flat.expand(6, 32))

    def test_the_ambient_default_device_does_not_matter(self, method: RopeMethod) -> None:
        expected = method.frequencies(GEOMETRY, 1000)
        with torch.device("meta"):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, 1000)
        assert torch.equal(inv_freq, expected.inv_freq)
        assert attention_factor == expected.attention_factor

    def test_a_length_below_one_is_refused(self, method: RopeMethod) -> None:
        with pytest.raises(MethodError, match="got 0"):
            method.frequencies(GEOMETRY, 0)

    def test_an_object_is_as_good_as_a_name(self, method: RopeMethod) -> None:
        values = method.to_dict()
        by_name = frequencies(values.pop("method"), GEOMETRY, length=700, **values)
        by_object = frequencies(method, GEOMETRY, length=700)
        assert torch.equal(by_name.inv_freq, by_object.inv_freq)
        assert by_name.attention_factor == by_object.attention_factor


def attend_and_definition(
    method: RemappingMethod,
    tokens: int,
    count: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int = 16,
    dim: int = 16,
    pads: tuple[int, ...] = (0,),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sliding: int | None = None,
    gone: int = 0,
    needs_grad: bool = False,
    places: int | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Results of `attend` and of the definition, padding left out; pads: padding before the first token of each row.

    places: those of a static cache, for `attend_step` in place of `attend`; what stands after the keys is large.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(pads)

    def random(n_heads: int, length: int, width: int) -> Tensor:
        return torch.randn(rows, n_heads, length, width, generator=generator, dtype=torch.float64)

    q, k, v = random(heads, tokens, head_dim), random(kv_heads, count, head_dim), random(kv_heads, count, value_dim)
    keys = torch.stack([torch.arange(count) - pad for pad in pads]).clamp(min=0)
    stored = torch.tensor([[stored_position(method, int(n)) for n in row] for row in keys], dtype=torch.float64)[
        :, None
    ]
    call = TokenPositions(
        query_positions=keys[:, count - tokens :],
        key_positions=keys,
        left_padding=pads if more.pop("ordered", True) else None,
        key_mask=torch.stack([torch.arange(count) >= pad for pad in pads]) if any(pads) else None,
    )
    rule: Any = method if sliding is None else LocalAttention(sliding, method)
    inv_freq = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    mask = more.get("mask")
    extras = ScoreModifiers(
        softcap=more.get("cap"), sinks=more.get("sinks"), mask=None if mask is None else mask[None, None]
    )
    rotation = Rotation(RotationTable(inv_freq), KeyLayout("half", 0, dim))
    qkv = (
        rotate_to(q, stored[..., count - tokens :], dim, THETA).to(dtype).requires_grad_(needs_grad),
        rotate_to(k, stored, dim, THETA).to(dtype)[:, :, gone:],
        v.to(dtype)[:, :, gone:],
    )
    if places is None:
        actual = attend(rule, rotation, call, *qkv, head_dim**-0.5, extras)
    else:
        positions = torch.arange(places) - torch.tensor(pads)[:, None]
        step = StaticStep(torch.tensor(count - 1), keys[:, count - tokens :], positions)
        key, value = (nn.functional.pad(x, (0, 0, 0, places - count), value=50.0) for x in qkv[1:])
        if extras.mask is not None:
            extras = extras._replace(mask=nn.functional.pad(extras.mask, (0, places - count)))
        actual = attend_step(rule, rotation, step, qkv[0], key, value, head_dim**-0.5, extras)
    parts, expected = [], []
    for r, pad in enumerate(pads):
        real = min(tokens, count - pad)
        definition = None if sliding is not None else method
        out = naive_attention(
            definition, q[r, :, tokens - real :], k[r, :, pad:], v[r, :, pad:], dim, THETA, window=sliding, **more
        )
        parts.append(actual[r, :, tokens - real :].double().reshape(-1))
        expected.append(out.reshape(-1))
    return torch.cat(parts), torch.cat(expected)


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)

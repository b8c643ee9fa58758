"""Steps of one token onto a static cache against the definitions in the papers, written out pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rope_ext_hf.attention.rules import Rotation, RotationTable, ScoreModifiers
from rope_ext_hf.attention.static_step import StaticStep, attend_step, can_step
from rope_ext_hf.methods.dual_chunk import DualChunk
from rope_ext_hf.methods.grouped import JetLong, SelfExtend
from rope_ext_hf.methods.remapping import LeakyReRoPE, RemappingMethod, ReRoPE
from rope_ext_hf.methods.stairs import Stairs
from rope_ext_hf.methods.temperature import Temperature
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.contracts import assert_close, attend_and_definition
from tests.support.simulated_cuda import SimulatedCuda, why_unavailable

LIMIT: dict[str, Any] = {"max_distance": 64, "temperature": "log-n"}
EACH = [
    ReRoPE(window=40, **LIMIT),
    LeakyReRoPE(window=40, k=8.0, **LIMIT),
    SelfExtend(window=40, group=4, **LIMIT),
    SelfExtend(window=40, group=3, floor_window=False, **LIMIT),
    JetLong(window=39, group=4, **LIMIT),
    DualChunk(chunk=48, window=16, **LIMIT),
]


@pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)
@pytest.mark.parametrize("count", [1, 7, 40, 41, 97, 150])
@pytest.mark.parametrize("more", [0, 1, 90], ids=lambda more: f"{more} empty places")
def test_is_the_definition_at_every_length(method: RemappingMethod, count: int, more: int) -> None:
    assert can_step(method, count + more)
    assert_close(*attend_and_definition(method, 1, count, places=count + more))


@pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)
@pytest.mark.parametrize(
    "more",
    [{}, {"cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"dim": 8}, {"value_dim": 8, "kv_heads": 4}],
    ids=["padded", "soft cap", "sinks", "rotated in part", "a key for each head"],
)
def test_what_families_and_padding_do(method: RemappingMethod, more: dict[str, Any]) -> None:
    assert_close(*attend_and_definition(method, 1, 150, pads=(0, 7, 90), places=200, **more))


@pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_the_model_itself(method: RemappingMethod, kind: torch.dtype) -> None:
    draws = torch.rand(1, 150, generator=torch.Generator().manual_seed(0))
    mask = draws < 0.6 if kind == torch.bool else -4 * draws
    assert_close(*attend_and_definition(method, 1, 150, places=170, mask=mask))


@pytest.mark.parametrize(
    "method",
    [
        JetLong(window=39, group=4, beyond_only=True, **LIMIT),
        Temperature(temperature="log-n", max_distance=64),
        Stairs(window=4, start=4, chunk=8, **LIMIT),
    ],
    ids=["follows the length", "scales queries", "many zones"],
)
def test_other_rules_are_left_to_tiles(method: RemappingMethod) -> None:
    assert not can_step(method, 4096)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)
def test_a_step_does_not_wait_for_the_device(method: RemappingMethod) -> None:
    inv_freq = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    rotation = Rotation(RotationTable(inv_freq), KeyLayout("half", 0, 16))
    with SimulatedCuda() as device, torch.no_grad():
        query, keys = torch.randn(2, 4, 1, 16).cuda(), torch.randn(2, 2, 128, 16).cuda()
        step = StaticStep(torch.tensor(99).cuda(), torch.tensor([[99]]).cuda(), torch.arange(128)[None].cuda())
        for _ in range(2):  # numbers of the table are copied to the device once
            device.reset()
            attend_step(method, rotation, step, query, keys, keys, 0.25, ScoreModifiers())
        assert device.launches
        assert (device.waits, device.to_host, device.to_device) == (0, 0, 0)

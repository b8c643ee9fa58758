"""cos and sin in graphs that other runtimes execute: without 64-bit numbers, and in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext_hf import NTKAwareRoPE, Rotary, RotaryEmbedding
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from tests.support.dispatch import NarrowRuntime
from tests.support.oracles import plain
from tests.support.rotary_examples import (
    AT,
    BOUND,
    DEPENDENT,
    REACH,
    SMALL,
    at_length,
    cos_sin,
    positions_to_check,
    static,
    worst,
)

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
EXAMPLE = AT[:1]
Graph = Callable[[Tensor, Tensor], Any]


def traced(module: nn.Module, positions: Tensor = EXAMPLE) -> Graph:
    graph: Graph = torch.jit.trace(module, (torch.zeros(1), positions))  # type: ignore[no-untyped-call]
    return graph


def exported(module: nn.Module, positions: Tensor = EXAMPLE, *, strict: bool = False) -> Graph:
    length = torch.export.Dim("length", min=2, max=REACH)
    shapes = (None, {positions.ndim - 1: length})
    graph: Graph = torch.export.export(
        module, (torch.zeros(1), positions), dynamic_shapes=shapes, strict=strict
    ).module()
    return graph


WAYS = {"trace": traced, "export": exported}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def run(graph: Graph, positions: Tensor, floating: torch.dtype = torch.float32) -> Any:
    """Return what a graph computes in a runtime without 64-bit numbers."""
    optimized: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
    with torch.no_grad(), optimized(False):
        graph(torch.zeros(1), positions)  # a traced graph is compiled in its first run, which compares constants
        with NarrowRuntime(floating):
            return graph(torch.zeros(1), positions)


@static
@each_way
def test_at_every_position_below_2_to_the_24(
    way: Callable[[nn.Module], Graph], method: str, params: dict[str, Any], formula: Callable[[Rotary], list[float]],
    warmth: float,
) -> None:  # fmt: skip
    rotary, positions = Rotary(128, 5e5, 4096), positions_to_check()
    module = RotaryEmbedding(method, rotary, layout="bare", **params)
    cos, sin = run(way(module), positions)
    assert worst((cos / warmth, sin / warmth), cos_sin(positions, formula(rotary))) <= BOUND
    with NarrowRuntime():  # where the fixed point of the module itself overflows
        cos, sin = module(torch.zeros(1), positions)
    assert worst((cos / warmth, sin / warmth), cos_sin(positions, formula(rotary))) > 1


@each_way
def test_half_precision_rounds_cos_and_sin_alone(way: Callable[[nn.Module], Graph]) -> None:
    """A product of a position and a frequency would be off by whole cycles."""
    positions = positions_to_check()
    actual = run(way(RotaryEmbedding("default", SMALL, layout="bare")), positions, torch.bfloat16)
    assert worst(actual, cos_sin(positions, plain(SMALL))) <= 4 * torch.finfo(torch.bfloat16).eps


@each_way
def test_positions_before_the_first(way: Callable[[nn.Module], Graph]) -> None:
    positions = -positions_to_check()
    actual = run(way(RotaryEmbedding("default", SMALL, layout="bare")), positions)
    assert worst(actual, cos_sin(positions, plain(SMALL))) <= BOUND


@each_way
def test_positions_of_several_axes(way: Callable[..., Graph]) -> None:
    axis_of_pair = [index % 3 for index in range(32)]
    module = RotaryEmbedding("default", SMALL, layout="bare", axis_of_pair=axis_of_pair)
    flat = positions_to_check()[0]
    positions = torch.stack((flat, flat.flip(0), flat.roll(3)))[:, None]  # (axes, rows, tokens)
    actual = run(way(module, EXAMPLE.expand(3, 1, -1)), positions)
    by_axis = [cos_sin(axis, plain(SMALL)) for axis in positions]
    expected = [
        torch.stack([by_axis[axis][part][..., pair] for pair, axis in enumerate(axis_of_pair)], -1) for part in (0, 1)
    ]
    assert worst(actual, (expected[0], expected[1])) <= BOUND


@each_way
@pytest.mark.parametrize(("method", "params"), DEPENDENT)
def test_a_length_dependent_method_needs_a_fixed_length(
    way: Callable[[nn.Module], Graph], method: str, params: dict[str, Any]
) -> None:
    module, positions = RotaryEmbedding(method, SMALL, layout="bare", **params), positions_to_check()
    with pytest.raises(LengthError, match=r"with rope_ext_hf\.fixed_length\(model, length\):"):
        way(module)
    with module.at_length(1024):
        graph = way(module)
    inv_freq, warmth = at_length(method, params, 1024)
    cos, sin = run(graph, positions)
    assert worst((cos / warmth, sin / warmth), cos_sin(positions, inv_freq)) <= BOUND


def test_trained_frequencies() -> None:
    """A trace keeps their values; torch.export does not show them."""
    module, positions = RotaryEmbedding("learnable", SMALL, layout="bare"), positions_to_check()
    scales = torch.linspace(-0.5, 0.3, 32)
    with torch.no_grad():
        module.trained.copy_(scales)
    actual = run(traced(module), positions)
    inv_freq = torch.tensor(plain(SMALL), dtype=torch.float64) * scales.double().exp()
    assert worst(actual, cos_sin(positions, inv_freq)) <= BOUND
    with pytest.raises(UnsupportedModelError, match=r"load the folder with transformers alone"):
        exported(module)


def test_a_strict_export() -> None:
    positions = positions_to_check()
    module = RotaryEmbedding("default", SMALL, layout="bare")
    assert worst(run(exported(module, strict=True), positions), cos_sin(positions, plain(SMALL))) <= BOUND


@each_way
def test_tables_that_cannot_grow(way: Callable[..., Graph]) -> None:
    class Grown(nn.Module):
        def __init__(self, k: float) -> None:
            super().__init__()
            self.rope = NTKAwareRoPE(16, 10, k=k, dynamic=True)

        def forward(self, _: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.rope(x)
            return out

    x = torch.ones(1, 40, 1, 16)
    with pytest.raises(LengthError, match=r"10 positions, and this input ends at 40: make the module with a k of .* 4"):
        torch.export.export(Grown(1), (torch.zeros(1), x))
    with pytest.raises(LengthError, match=r"10 positions, and this input ends at 40: make the module with a k of .* 4"):
        traced(Grown(1), x)
    assert torch.equal(run(traced(Grown(4), x), x), Grown(4)(x, x))


@static
@each_way
def test_positions_between_tokens(
    way: Callable[..., Graph], method: str, params: dict[str, Any], formula: Callable[[Rotary], list[float]],
    warmth: float,
) -> None:  # fmt: skip
    """Qwen3-Omni places the frames of a video between tokens."""
    rotary = Rotary(128, 5e5, 4096)
    positions = torch.tensor([[0.0, 0.5, 7.25, 100.0, 4095.75, 131071.5, 1048575.875]], dtype=torch.float64)
    graph = way(RotaryEmbedding(method, rotary, layout="bare", **params), positions[:, :4])
    with torch.no_grad():
        cos, sin = graph(torch.zeros(1), positions)
    assert worst((cos / warmth, sin / warmth), cos_sin(positions, formula(rotary))) <= BOUND

"""Remapping methods: the parameters that they fill in, and the distances that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.methods.grouped import SelfExtend
from rope_ext_hf.methods.remapping import RemappingMethod
from tests.support.method_examples import example_method
from tests.support.models import TRAINED, build

REMAPPING = [name for name, cls in rope.list_methods().items() if issubclass(cls, RemappingMethod)]


@pytest.mark.parametrize("name", REMAPPING)
@pytest.mark.parametrize(("first", "last"), [(0, 150), (0, 1), (149, 150), (37, 113), (128, 131)])
def test_tiles_hold_every_pair_once_and_in_its_zone(name: str, first: int, last: int) -> None:
    """Attention reads keys by `tiles`, and `zone` decides the zone of a pair and so its distance: both must agree."""
    rotary = rope.Rotary(dim=16, theta=10_000.0, trained_length=TRAINED)
    method: Any = example_method(rope.list_methods()[name], rotary)
    method = method.bind(rotary, None)
    m, n = torch.arange(first, last)[:, None], torch.arange(last)
    held, zones = torch.zeros(last - first, last, dtype=torch.long), torch.zeros(last - first, last, dtype=torch.long)
    for tile in method.tiles(first, last):
        for (q0, q1), (k0, k1), mask in tile.rectangles(0):
            whole = torch.ones(q1 - q0, k1 - k0, dtype=torch.long)
            part = {"full": whole, "causal": whole.tril(), "anticausal": whole.triu()}[mask]
            held[q0 - first : q1 - first, k0:k1] += part
            zones[q0 - first : q1 - first, k0:k1] += part * tile.zone

    def pairs(mask: torch.Tensor) -> list[tuple[int, int]]:
        return [(first + int(query), int(key)) for query, key in mask.nonzero()[:5]]

    wrong = pairs(held != (n <= m).long())
    assert not wrong, f"{name}: tiles({first}, {last}) must hold each pair (m, n <= m) once, and no other; see {wrong}"
    stated = method.zone(m, n).expand_as(zones)
    wrong = pairs((zones != stated) & (n <= m))
    assert not wrong, f"{name}: tiles({first}, {last}) must give each pair (m, n) the zone of zone(m, n); see {wrong}"
    bounds = torch.tensor(method.zone_distances(last))[stated]
    wrong = pairs(((m - n < bounds[..., 0]) | (m - n >= bounds[..., 1])) & (n <= m))
    assert not wrong, f"{name}: zone_distances({last}) must hold the distances m - n of all pairs; see {wrong}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rerope", {"window": 32}),
        ("leaky-rerope", {"window": 32, "k": 16.0}),
        ("self-extend", {"window": 16, "group": 16}),
        ("dca", {"chunk": 48, "window": 16}),
    ],
)
def test_defaults_for_a_trained_length_of_64(name: str, expected: dict[str, Any]) -> None:
    params = rope.describe(rope.patch(build("llama"), name)).params
    assert params["max_distance"] == TRAINED == 64
    assert {key: params[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"chunk": 40}, {"chunk": 40, "window": 24}),
        ({"chunk": 63}, {"chunk": 63, "window": 1}),
        ({"window": 10}, {"chunk": 48, "window": 10}),
    ],
    ids=str,
)
def test_the_window_of_dca_is_the_rest_of_the_longest_distance(
    parameters: dict[str, Any], expected: dict[str, int]
) -> None:
    params = rope.describe(rope.patch(build("llama"), "dca", **parameters)).params
    assert {key: params[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # distances from the query at 12 to the keys 0, 1, ..., 12
        ("rerope", {"window": 4}, [4] * 9 + [3, 2, 1, 0]),
        ("leaky-rerope", {"window": 4, "k": 2.0}, [8, 7.5, 7, 6.5, 6, 5.5, 5, 4.5, 4, 3, 2, 1, 0]),
        ("self-extend", {"window": 4, "group": 2}, [8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 2, 1, 0]),
        (
            "self-extend",
            {"window": 5, "group": 2, "floor_window": False},
            [8.5, 8.5, 7.5, 7.5, 6.5, 6.5, 5.5, 5.5, 4, 3, 2, 1, 0],
        ),
        # chunks of 5: the key n stands at n mod 5; the query at 2, at min(2 + 5, 7) for the chunk before, and at 7
        ("dca", {"chunk": 5, "window": 3}, [7, 6, 5, 4, 3, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_distances_by_hand(name: str, params: dict[str, Any], expected: list[float]) -> None:
    cls: Any = rope.list_methods()[name]
    method = cls(**params, max_distance=64)
    assert method.distance(torch.tensor(12), torch.arange(13)).tolist() == expected


@pytest.mark.parametrize("floored", [True, False])
@pytest.mark.parametrize(("window", "group"), [(6, 3), (7, 3), (2, 5)])
def test_self_extend_leaves_inputs_as_they_are_up_to_its_exact_length(window: int, group: int, floored: bool) -> None:
    method = SelfExtend(window=window, group=group, floor_window=floored, max_distance=64, temperature="none")
    at = torch.arange(method.exact_length + 1)
    moved = (method.distance(at[:, None], at) != at[:, None] - at).tril().any(-1)
    assert moved.tolist() == [False] * method.exact_length + [True]

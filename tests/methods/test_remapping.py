"""Remapping methods: the parameters that they fill in, and the distances that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from tests.support.models import TRAINED, build


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
    ("given", "expected"),
    [
        ({"chunk": 40}, {"chunk": 40, "window": 24}),
        ({"chunk": 63}, {"chunk": 63, "window": 1}),
        ({"window": 10}, {"chunk": 48, "window": 10}),
    ],
    ids=str,
)
def test_the_window_of_dca_is_the_rest_of_the_longest_distance(given: dict[str, Any], expected: dict[str, int]) -> None:
    params = rope.describe(rope.patch(build("llama"), "dca", **given)).params
    assert {key: params[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # distances from the query at 12 to the keys 0, 1, ..., 12
        ("rerope", {"window": 4}, [4] * 9 + [3, 2, 1, 0]),
        ("leaky-rerope", {"window": 4, "k": 2.0}, [8, 7.5, 7, 6.5, 6, 5.5, 5, 4.5, 4, 3, 2, 1, 0]),
        ("self-extend", {"window": 4, "group": 2}, [8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 2, 1, 0]),
        # chunks of 5: the key n stands at n mod 5; the query at 2, at min(2 + 5, 7) for the chunk before, and at 7
        ("dca", {"chunk": 5, "window": 3}, [7, 6, 5, 4, 3, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_distances_by_hand(name: str, params: dict[str, Any], expected: list[float]) -> None:
    cls: Any = rope.list_methods()[name]
    method = cls(**params, max_distance=64)
    assert method.distance(torch.tensor(12), torch.arange(13)).tolist() == expected

"""Declared ranges: they belong to parameters, and every number in them is one that the method takes."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest

from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.search_ranges import SearchRange
from tests.support.method_checks import LLAMA2

SEARCHED = {name: cls.search_ranges for name, cls in list_methods().items() if cls.search_ranges}


def test_static_methods_declare_ranges() -> None:
    assert {"linear", "ntk", "by-parts", "yarn", "llama3", "dynamic-yarn"} <= set(SEARCHED)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("factor", [1.5, 8.0, 64.0])
def test_a_method_takes_all_corners_of_its_ranges(name: str, factor: float) -> None:
    ranges = SEARCHED[name]
    assert set(ranges) <= {item.name for item in fields(list_methods()[name])}
    ends: list[tuple[Any, ...]] = [
        among.ends(factor) if isinstance(among, SearchRange) else among for among in ranges.values()
    ]
    for values in itertools.product(*ends):
        method = resolve_method(name, LLAMA2, **dict(zip(ranges, values, strict=True)))
        assert bool((method.frequencies(LLAMA2, 4 * LLAMA2.trained_length).inv_freq > 0).all())


def test_a_factor_is_counted_in_the_one_that_is_needed() -> None:
    assert SearchRange(0.5, 3.0, times_factor=True).ends(8.0) == (4.0, 24.0)
    assert SearchRange(0.5, 3.0, times_factor=True).ends(1.5) == (1.0, 4.5)  # no factor is below 1
    assert SearchRange(0.5, 3.0).ends(8.0) == (0.5, 3.0)

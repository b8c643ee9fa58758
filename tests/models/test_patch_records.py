"""A patch as it is saved, and what is refused of a damaged one."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.static import Linear
from rope_ext_hf.models.patch_records import Patch


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        *(
            ("target_length", value, "a positive whole number or null")
            for value in ("many", 0, -5, 2.5, True, [1], 10**30)
        ),
        *(("native", value, "true or false") for value in ("yes", 1, None)),
        *(
            ("layers", value, "a list of layer numbers and layer types")
            for value in ("full", 3, [None], [[1]], {"a": 1})
        ),
    ],
)
def test_a_saved_patch_with_a_value_of_another_type_is_refused(key: str, value: Any, kind: str) -> None:
    saved = Patch(Linear(factor=2.0), Rotary(64, 1e4, 512), 1024).to_dict()
    assert Patch.from_dict(saved).to_dict() == saved
    with pytest.raises(MethodError, match=f"not a saved patch: {key} must be {kind}, and is"):
        Patch.from_dict(saved | {key: value})


@pytest.mark.parametrize("key", ["dim", "trained_length", "rotated_pairs"])
@pytest.mark.parametrize("value", ["64", 64.5, True, 10**30, float("inf"), [64]])
def test_a_saved_rotary_embedding_with_an_impossible_size_is_refused(key: str, value: Any) -> None:
    saved = Patch(Linear(factor=2.0), Rotary(64, 1e4, 512)).to_dict()
    with pytest.raises(MethodError, match=f"not a saved rotary embedding: {key} must be a whole number from 0 to"):
        Patch.from_dict(saved | {"rotary": saved["rotary"] | {key: value}})


@pytest.mark.parametrize("factor", [1e13, 1e308, 2**41])
def test_a_factor_that_no_length_has_is_refused(factor: float) -> None:
    with pytest.raises(MethodError, match="factor must be at most 1,099,511,627,776, got"):
        Linear(factor=factor)
    for name in ("yarn", "dynamic-ntk", "rerope"):
        with pytest.raises(MethodError, match="at most 1,099,511,627,776, got"):
            resolve_method(name, Rotary(64, 1e4, 512), factor=factor)

"""Both pairings: the permutation by its definition, the rotation by its laws and as transformers computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.rotary.pairing import rotate, to_pairing
from rope_ext_hf.rotary.pairing_names import PAIRINGS, other_pairing
from tests.support.oracles import Pairing, rotation_matrix

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]


def moved_by_hand(rows: list[int], heads: int, rotary: int, start: int, to: str) -> list[int]:
    """Permute row by row, from the definition."""
    head_dim = len(rows) // heads
    out = list(rows)
    for head in range(heads):
        base = head * head_dim + start
        for i in range(rotary // 2):
            for j in (0, 1):
                interleaved, half = base + 2 * i + j, base + i + j * (rotary // 2)
                source, target = (interleaved, half) if to == "half" else (half, interleaved)
                out[target] = rows[source]
    return out


def test_the_order_of_eight() -> None:
    assert to_pairing(torch.arange(8), "half", heads=1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert to_pairing(torch.arange(8), "interleaved", heads=1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert to_pairing(torch.arange(8), "half", heads=2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert to_pairing(torch.arange(8), "half", heads=1, rotary_dim=4, start=2).tolist() == [0, 1, 2, 4, 3, 5, 6, 7]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_shape_any_slice_any_dimension(data: st.DataObject) -> None:
    heads, pairs = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    start, after = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    head_dim = start + 2 * pairs + after
    if head_dim == 0:
        return
    before, behind = (tuple(data.draw(st.lists(st.integers(1, 3), max_size=2))) for _ in range(2))
    to, dtype = data.draw(st.sampled_from(PAIRINGS)), data.draw(st.sampled_from(DTYPES))
    shape = (*before, heads * head_dim, *behind)
    raw = torch.randint(0, 256, (*shape, torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8)
    tensor = raw.view(dtype)[..., 0]
    options: dict[str, Any] = {"heads": heads, "rotary_dim": 2 * pairs, "start": start, "dim": len(before)}
    moved = to_pairing(tensor, to, **options)
    assert (moved.shape, moved.dtype) == (tensor.shape, tensor.dtype)
    order = moved_by_hand(list(range(heads * head_dim)), heads, 2 * pairs, start, to)
    by_rows = raw.movedim(len(before), 0)[order].movedim(0, len(before))
    assert torch.equal(moved.contiguous().view(torch.uint8).reshape(raw.shape), by_rows)
    back = to_pairing(moved, other_pairing(to), **options)
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "8 rows cannot be divided into 3 heads"),
        ({"heads": 0}, "8 rows cannot be divided into 0 heads"),
        ({"heads": 1, "rotary_dim": 3}, "3 rotated dims"),
        ({"heads": 2, "rotary_dim": 6}, "must be an even number, and fit into a head of 4"),
        ({"heads": 1, "rotary_dim": 4, "start": 6}, "from dim 6 on"),
        ({"heads": 1, "start": -2}, "rotated dims from dim -2"),
        ({"heads": 1, "dim": 1}, "dim 1 does not exist in"),
        ({"heads": 8}, "1 rotated dims"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_pairing(torch.arange(8), "half", **options)


def test_unknown_pairings_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of half, interleaved, got 'neox'"):
        to_pairing(torch.arange(8), "neox", heads=1)
    with pytest.raises(ValueError, match="must be one of half, interleaved, got 'neox'"):
        other_pairing("neox")
    with pytest.raises(ValueError, match="must be one of half, interleaved, got 'neox'"):
        rotate(torch.ones(8), torch.ones(4), "neox")


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate as Meta's Llama does: adjacent dims are a complex number, which is multiplied by e^(i angle)."""
    count = angles.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, angles.dtype), torch.float32)
    pairs = torch.view_as_complex(x[..., : 2 * count].to(wide).reshape(*x.shape[:-1], count, 2).contiguous())
    out = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles, dtype=wide), angles.to(wide))).flatten(-2)
    return torch.cat([out.to(x.dtype), x[..., 2 * count :].expand(*out.shape[:-1], -1)], -1)


# The laws of the rotation, for both pairings and for Meta's form.
FORMS = {
    "half": lambda x, angles: rotate(x, angles, "half"),
    "interleaved": lambda x, angles: rotate(x, angles, "interleaved"),
    "complex": rotate_complex,
}
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "yarn": {"factor": 4},
    "llama3": {"factor": 4},
}


@pytest.mark.slow
@given(
    data=st.data(),
    pairs=st.integers(2, 8),
    after=st.integers(0, 4),
    position=st.integers(0, 2000),
    method=st.sampled_from(sorted(METHODS)),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@settings(max_examples=60)
def test_pairs_matrix_and_complex_numbers_are_one_rotation(
    data: st.DataObject, pairs: int, after: int, position: int, method: str, dtype: torch.dtype
) -> None:
    """The order of rows leads from one pairing to the other in the weights, not in the vectors."""
    dim, heads, hidden = 2 * pairs + after, data.draw(st.integers(1, 3)), 6
    angles = position * rope.frequencies(method, rope.Rotary(2 * pairs, 1e4, 256), **METHODS[method]).inv_freq
    x, weight = torch.randn(hidden, dtype=dtype), torch.randn(heads * dim, hidden, dtype=dtype)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-10 if dtype == torch.float64 else 1e-5}
    rotated = {}
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    for pairing in pairings:
        vectors = (weight @ x).view(heads, dim)
        by_matrix = vectors.double() @ rotation_matrix(angles, dim, pairing).T
        rotated[pairing] = rotate(vectors, angles, pairing)
        torch.testing.assert_close(rotated[pairing], by_matrix.to(dtype), **close)
    torch.testing.assert_close(rotate_complex(vectors, angles), rotated["interleaved"], **close)

    reordered = to_pairing(weight, "half", heads=heads, rotary_dim=2 * pairs)
    halved = rotate((reordered @ x).view(heads, dim), angles, "half")
    expected = to_pairing(rotated["interleaved"], "half", heads=1, rotary_dim=2 * pairs, dim=1)
    torch.testing.assert_close(halved, expected, **close)
    scores = [each @ each.T for each in (halved, rotated["interleaved"])]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-3)


vectors = st.integers(0, 2**31).map(
    lambda seed: torch.randn(2, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
)
positions = st.integers(-1000, 1000)
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05, 0.0], dtype=torch.float64)  # 8 rotated dims of 10


def at(position: int) -> Tensor:
    return position * FREQUENCIES


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(x=vectors, m=positions, n=positions)
@settings(max_examples=50, deadline=None)
def test_laws_of_the_rotation(form: str, x: Tensor, m: int, n: int) -> None:
    rotated = FORMS[form]
    q, k = x
    torch.testing.assert_close(rotated(q, at(m)).norm(), q.norm())
    torch.testing.assert_close(rotated(rotated(q, at(m)), at(n)), rotated(q, at(m + n)))
    torch.testing.assert_close(rotated(q, at(0)), q)
    shifted = rotated(q, at(m + 7)) @ rotated(k, at(n + 7))
    torch.testing.assert_close(rotated(q, at(m)) @ rotated(k, at(n)), shifted)
    torch.testing.assert_close(rotated(q, at(m))[8:], q[8:])


@given(x=vectors, m=positions)
@settings(max_examples=50, deadline=None)
def test_the_forms_are_one_rotation(x: Tensor, m: int) -> None:
    interleaved = rotate(x, at(m), "interleaved")
    torch.testing.assert_close(rotate_complex(x, at(m)), interleaved)
    halved = to_pairing(x, "half", heads=1, rotary_dim=8, dim=-1)
    expected = to_pairing(interleaved, "half", heads=1, rotary_dim=8, dim=-1)
    torch.testing.assert_close(rotate(halved, at(m), "half"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_and_broadcasting(form: str) -> None:
    x = torch.randn(2, 3, 5, 10, dtype=torch.bfloat16)  # (batch, heads, length, head_dim)
    angles = torch.arange(5)[:, None] * FREQUENCIES.float()
    actual = FORMS[form](x, angles)
    assert (actual.shape, actual.dtype) == (x.shape, x.dtype)
    exact = FORMS[form](x.double(), angles.double())
    torch.testing.assert_close(actual.double(), exact, atol=2e-2, rtol=1e-2)


def test_as_transformers_rotates() -> None:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    x = torch.randn(1, 2, 6, 8)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    half = torch.cat([angles, angles], -1)[None]
    torch.testing.assert_close(rotate(x, angles, "half"), llama(x, x, half.cos(), half.sin())[0])
    adjacent = angles.repeat_interleave(2, -1)[None]
    torch.testing.assert_close(rotate(x, angles, "interleaved"), cohere(x, x, adjacent.cos(), adjacent.sin())[0])

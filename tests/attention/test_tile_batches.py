"""Tiles as batches of one kernel call, function by function."""

from __future__ import annotations

import math

import pytest
import torch

from rope_ext_hf.attention.kernels import join_rows, run_kernel
from rope_ext_hf.attention.tile_batches import (
    KernelCall,
    MergedSoftmax,
    Spans,
    add_to_spans,
    batch_rows,
    kernel_calls,
    strided_spans,
)
from rope_ext_hf.methods.dual_chunk import DualChunk
from rope_ext_hf.methods.remapping import ReRoPE
from rope_ext_hf.methods.stairs import Stairs
from rope_ext_hf.methods.tiles import Tile


def test_three_chunks_are_three_calls() -> None:
    assert kernel_calls(DualChunk(chunk=4, window=2).tiles(0, 12), 0, 100) == [
        KernelCall((0,), "causal", Spans(0, 4, 4, 3), Spans(0, 4, 4, 3)),
        KernelCall((1,), "full", Spans(4, 4, 4, 2), Spans(0, 4, 4, 2)),
        KernelCall((2,), "full", Spans(8, 4), Spans(0, 4)),
    ]


def test_a_window_shares_its_square_with_the_next_zone() -> None:
    tiles = list(ReRoPE(window=4).tiles(0, 12))
    visible: dict[tuple[int, int], int] = {}
    for tile in tiles:
        for (q0, q1), (k0, k1), mask in tile.rectangles(0):
            for m in range(q0, q1):
                for n in range(k0, k1):
                    i, j = m - q0, n - k0
                    if mask == "full" or (mask == "causal" and j <= i) or (mask == "anticausal" and j >= i):
                        assert (m, n) not in visible
                        visible[m, n] = tile.zone
    assert visible == {(m, n): int(m - n >= 4) for m in range(12) for n in range(m + 1)}


@pytest.mark.parametrize("low", [0, 1, 3, 6])
def test_keys_that_are_not_there_are_left_out(low: int) -> None:
    pairs = set()
    for (q0, q1), (k0, k1), mask in Tile(0, (2, 9), (0, 9), 2).rectangles(low):
        pairs |= {(m, n) for m in range(q0, q1) for n in range(k0, k1) if mask == "full" or n - k0 <= m - q0}
    assert pairs == {(m, n) for m in range(2, 9) for n in range(low, 9) if n <= m - 2}


def test_tiles_of_other_sizes_masks_diagonals_or_distances_are_calls_of_their_own() -> None:
    first = Tile(0, (0, 4), (0, 4))
    others = {
        Tile(0, (4, 7), (4, 7)): KernelCall((0,), "causal", Spans(4, 3), Spans(4, 3)),  # smaller
        Tile(0, (4, 8), (4, 8), -4, width=4): KernelCall((0,), "anticausal", Spans(4, 3), Spans(5, 3)),
        Tile(0, (4, 8), (3, 7), 1): KernelCall((0,), "causal", Spans(4, 4), Spans(3, 4)),  # on another diagonal
        Tile(1, (4, 8), (4, 8)): KernelCall((1,), "causal", Spans(4, 4), Spans(4, 4)),
    }
    alone = KernelCall((0,), "causal", Spans(0, 4), Spans(0, 4))
    for other, call in others.items():
        assert kernel_calls([first, other], 0, 100) == [alone, call]
    spaced = [Tile(0, (start, start + 4), (start, start + 4)) for start in (0, 4, 10)]
    assert [call.queries for call in kernel_calls(spaced, 0, 100)] == [Spans(0, 4, 4, 2), Spans(10, 4)]
    overlapping = [Tile(0, (start, start + 4), (start, start + 4)) for start in (0, 2)]
    assert [call.queries for call in kernel_calls(overlapping, 0, 100)] == [Spans(0, 4), Spans(2, 4)]


def test_tiles_of_the_same_queries_share_a_call() -> None:
    """In a decoding step with bands of 4 keys, zones 1 to 3 share a call; the nearest and a piece of a band do not."""
    tiles = list(Stairs(window=6, start=2, chunk=4).tiles(20, 21))
    assert [(tile.zone, tile.keys) for tile in tiles] == [
        (0, (15, 21)),
        (1, (11, 15)),
        (2, (7, 11)),
        (3, (3, 7)),
        (4, (0, 3)),
    ]
    near, far, last = kernel_calls(tiles, 0, 100, 100)
    assert near == KernelCall((0,), "full", Spans(20, 1), Spans(15, 6))
    assert far == KernelCall((3, 2, 1), "full", Spans(20, 1), Spans(3, 4, 4, 3), joint=True)
    assert last == KernelCall((4,), "full", Spans(20, 1), Spans(0, 3))
    assert [call.joint for call in (near, far, last)] == [False, True, False]
    assert len(kernel_calls(tiles, 0, 100)) == 5
    assert [call.keys.times for call in kernel_calls(tiles, 0, 100, 2)] == [1] * 5


def test_calls_over_the_same_queries_are_bounded() -> None:
    tiles = [Tile(1, (100, 110), (start, start + 10)) for start in range(0, 80, 10)]
    assert [call.keys.times for call in kernel_calls(tiles, 0, 100, 40)] == [4, 4]


def test_anticausal_calls_are_bounded() -> None:
    tiles = [Tile(0, (q, q + 4), (q - 5, q - 1), 1, width=4) for q in (8, 12, 16, 20, 24)]
    calls = [call for call in kernel_calls(tiles, 0, 8) if call.mask == "anticausal"]
    assert [call.queries.times for call in calls] == [2, 2, 1]


def test_spans_are_views() -> None:
    x = torch.arange(2 * 3 * 20 * 5.0).view(2, 3, 20, 5)
    spans = strided_spans(x, Spans(2, 4, 6, 3))
    assert spans.shape == (2, 3, 3, 4, 5)
    for i, start in enumerate((2, 8, 14)):
        assert torch.equal(spans[:, i], x[:, :, start : start + 4])
    assert torch.equal(strided_spans(x, Spans(7, 4, 1, 1)), x[:, :, 7:11])
    spans.zero_()
    assert x[:, :, 8:12].abs().max() == 0
    assert x[:, :, 6:8].abs().max() > 0


def test_spans_are_rows_of_a_batch_without_a_copy_for_one_row() -> None:
    x = torch.randn(1, 3, 20, 5)
    folded = batch_rows(x, Spans(0, 4, 6, 3))
    assert folded.shape == (3, 3, 4, 5)
    assert folded.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert batch_rows(x, Spans(0, 4)).shape == (1, 3, 4, 5)
    several = batch_rows(torch.randn(2, 3, 20, 5), Spans(0, 4, 6, 3))
    assert several.shape == (6, 3, 4, 5)


def test_sums_over_spans_that_overlap() -> None:
    x, part = torch.zeros(1, 1, 8, 1), torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]]).view(2, 1, 4, 1)
    add_to_spans(x, Spans(1, 4, 2, 2), part)
    assert x.flatten().tolist() == [0, 1, 2, 13, 24, 30, 40, 0]


@pytest.mark.parametrize("masks", [("full", "full"), ("causal", "anticausal")])
def test_partial_softmaxes_merge_to_the_whole(masks: tuple[str, str]) -> None:
    """There are two spans of 4 queries, 6 apart, and their keys come in two parts."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 10, 8, generator=generator)
    keys, values = (torch.randn(2, 1, 2, 4, 8, generator=generator) for _ in range(2))
    merged = MergedSoftmax(query, None)
    hidden = torch.zeros(4, 8, dtype=torch.bool)
    for i, mask in enumerate(masks):
        parts = run_kernel(
            batch_rows(query, Spans(0, 4, 6, 2)), keys[i].expand(2, -1, -1, -1),
            values[i].expand(2, -1, -1, -1), 0.3, mask,
        )  # fmt: skip
        merged.add(Spans(0, 4, 6, 2), *parts)
        ones = torch.ones(4, 4, dtype=torch.bool)
        hidden[:, 4 * i : 4 * i + 4] = {"full": ~ones, "causal": ones.triu(1), "anticausal": ones.tril(-1)}[mask]
    out, lse = merged.out, merged.log_sum_exp()
    assert out is not None
    key, value = torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2)
    for start in (0, 6):
        scores = (query[:, :, start : start + 4] @ key.transpose(-1, -2) * 0.3).masked_fill(hidden, -math.inf)
        torch.testing.assert_close(out[:, :, start : start + 4], scores.softmax(-1) @ value)
        torch.testing.assert_close(lse[:, :, start : start + 4, 0], scores.logsumexp(-1))
    assert out[:, :, 4:6].abs().max() == 0


def test_parts_of_all_queries_merge_without_a_copy() -> None:
    """It is as in a decoding step; the memory of the result is not empty before."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 3, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    expected = (query @ key.transpose(-1, -2) * 0.3).softmax(-1) @ value
    for out in (None, torch.full((1, 2, 3, 8), math.nan)):
        merged = MergedSoftmax(query, out)
        for part in (slice(0, 2), slice(2, 3), slice(3, 9)):
            merged.add(Spans(0, 3), *run_kernel(query, key[:, :, part], value[:, :, part], 0.3, "full"))
        assert merged.out is not None
        assert out is None or merged.out is out
        torch.testing.assert_close(merged.out, expected)
        torch.testing.assert_close(merged.log_sum_exp()[..., 0], (query @ key.transpose(-1, -2) * 0.3).logsumexp(-1))


@pytest.mark.parametrize("mask", ["full", "causal", "anticausal"])
@pytest.mark.parametrize("queries", [1, 3], ids=["one row of queries", "each row turned"])
@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
def test_rows_of_the_same_queries_have_one_softmax(queries: int, layout: str, mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(queries, 4, 6, 8, generator=generator)
    if layout == "tokens first":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = (torch.randn(3, 2, 6, 8, generator=generator) for _ in range(2))
    out, lse = run_kernel(query, key, value, 0.3, mask, joint=True)
    if mask != "anticausal":
        out, lse = join_rows(out, lse)
    wide_key, wide_value = (x.repeat_interleave(2, 1) for x in (key, value))
    ones = torch.ones(6, 6, dtype=torch.bool)
    hidden = {"full": ~ones, "causal": ones.triu(1), "anticausal": ones.tril(-1)}[mask]
    scores = (query @ wide_key.transpose(-1, -2) * 0.3).masked_fill(hidden, -math.inf)
    whole = torch.cat(list(scores), dim=-1)
    torch.testing.assert_close(out[0], whole.softmax(-1) @ torch.cat(list(wide_value), dim=-2))
    torch.testing.assert_close(lse[0], whole.logsumexp(-1))

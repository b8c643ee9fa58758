from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rope_ext_hf.eval.windows import Window, check_lengths, matched


def test_matched_golden() -> None:
    assert list(matched(17, [4, 8], 2)) == [
        Window(4, 4, 8, 6),
        Window(8, 0, 8, 6),
        Window(4, 12, 16, 14),
        Window(8, 8, 16, 14),
    ]


def test_matched_leaves_out_short_documents() -> None:
    assert list(matched(7, [4, 8], 2)) == []


@given(
    st.integers(0, 300),
    st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True),
    st.data(),
)
def test_matched_scores_the_same_targets_at_every_length(tokens: int, lengths: list[int], data: st.DataObject) -> None:
    lengths.sort()
    targets = data.draw(st.integers(1, lengths[0] - 1))
    windows = list(matched(tokens, lengths, targets))
    scored = {length: [range(w.score_from, w.stop) for w in windows if w.length == length] for length in lengths}
    assert all(spans == scored[lengths[0]] for spans in scored.values())
    for window in windows:
        assert 0 <= window.start < window.score_from < window.stop <= tokens  # a token before the first target
        assert window.stop - window.start == window.length
        assert window.stop - window.score_from == targets
    assert len(scored[lengths[0]]) == tokens // lengths[-1]


def test_lengths_are_sorted_and_targets_default_to_half_the_shortest() -> None:
    assert check_lengths([1024, 256, 256], None) == ([256, 1024], 128)


@pytest.mark.parametrize(("lengths", "targets"), [([], None), ([1], None), ([4, 8], 4), ([4], 0), ([-4], None)])
def test_impossible_lengths_are_refused(lengths: list[int], targets: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        check_lengths(lengths, targets)

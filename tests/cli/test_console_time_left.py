from __future__ import annotations

import pytest

from rope_ext_hf.cli.console import TimeLeft


def lines(work: list[int], seconds: list[float], total: float) -> list[str]:
    """What is said of passes of so much work, each taking so long."""
    said: list[str] = []
    now = [100.0]
    left = TimeLeft(total, said.append, lambda: now[0])
    left.begin()
    for tokens, each in zip(work, seconds, strict=True):
        now[0] += each
        left.passed(tokens)
    return said


@pytest.mark.parametrize(
    ("work", "seconds", "total", "said"),
    [
        ([10], [20.0], 100, ["about 3 minutes more, by the first pass"]),
        ([10, 10, 10], [20.0, 21.0, 22.0], 100, ["about 3 minutes more, by the first pass"]),  # as it was said
        (  # corrected
            [10, 10],
            [20.0, 900.0],
            100,
            ["about 3 minutes more, by the first pass", "about 61 minutes more, by the 2 passes so far"],
        ),
        # the first pass took its time for something else: 10 in a second from then on
        ([10, 10, 10], [4.0, 1.0, 1.0], 1030, ["about 2 minutes more, by the first 3 passes"]),
        ([10, 40], [4.0, 2.0], 1050, ["about 50 s more, by the first 2 passes"]),  # unequal passes
        ([10, 10], [0.1, 0.1], 1000, []),  # too short to tell
        ([10], [20.0], 10, []),  # nothing is left
    ],
)
def test_time_goes_by_work_done(work: list[int], seconds: list[float], total: float, said: list[str]) -> None:
    assert lines(work, seconds, total) == said

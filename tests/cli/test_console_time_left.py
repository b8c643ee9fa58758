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
        ([10], [20.0], 100, ["about 3 minutes left (1 pass timed)"]),
        ([10, 10, 10], [20.0, 21.0, 22.0], 100, ["about 3 minutes left (1 pass timed)"]),  # as it was said
        (  # corrected
            [10, 10],
            [20.0, 900.0],
            100,
            ["about 3 minutes left (1 pass timed)", "about 2 hours left (2 passes timed)"],
        ),
        # the first pass took its time for something else: 10 in a second from then on
        ([10, 10, 10], [4.0, 1.0, 1.0], 1030, ["about 2 minutes left (3 passes timed)"]),
        ([10, 40], [4.0, 2.0], 1050, ["about 50 s left (2 passes timed)"]),  # unequal passes
        ([10, 10], [0.1, 0.1], 1000, []),  # too short to tell
        ([10], [20.0], 10, []),  # nothing is left
    ],
)
def test_time_goes_by_work_done(work: list[int], seconds: list[float], total: float, said: list[str]) -> None:
    assert lines(work, seconds, total) == said


def test_short_passes_are_no_forecast_of_long_ones() -> None:
    """Passes of 10 take 1.1 s, of 100 take 2 s: 1 s each, and 0.01 s per unit; 20 of each are 62 s."""
    said: list[str] = []
    now = [100.0]
    left = TimeLeft(20 * 110, said.append, lambda: now[0])
    left.largest, left.count = 100, 40
    left.begin()
    for index in range(20):
        for work, seconds in ((10, 1.1 if index else 9.0), (100, 2.0)):  # the first pass of all is a warm-up
            now[0] += seconds
            left.passed(work)
            assert index or work == 100 or not said
    assert said == ["about 42 s left (2 passes timed)"]  # 59 s were left


def test_a_time_of_each_pass_and_one_of_its_work_are_told_apart() -> None:
    """Of 1 s a pass and 0.01 s a unit, what is left is exact once two sizes were read."""
    left = TimeLeft(1000.0, lambda line: None, lambda: now)
    left.count, now = 22, 0.0
    left.begin()
    for work in (10, 10, 100):
        now += 1 + work / 100
        left.passed(work)
    assert left._left() == pytest.approx(19 + 8.8)

"""The commands that make a longer model: what `search` refuses on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_app import run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "10"], "--budget takes a time, e.g. 90s, 10m or 2h; got '10'"),
        (["--budget", "0m"], "--budget takes a time"),
        ([], "Give minutes (--budget) or trials"),
        (["--trials", "1", "--device-map", "auto"], "leave out --device-map"),
    ],
)
def test_search_refuses(options: list[str], said: str, tmp_path: Path) -> None:
    arguments = ["search", "reference", "--target-length", "2k", "--data", "stdlib", "--out", str(tmp_path / "run")]
    code, out, err = run(*arguments, *options)
    assert (code, out) == (2, "")
    assert said in err

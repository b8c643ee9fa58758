"""Calls of Python functions of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of_this_package(function: Callable[[], object]) -> int:
    """How many Python functions of the package a call runs, comprehensions and generators' steps among them."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "rope_ext_hf" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count

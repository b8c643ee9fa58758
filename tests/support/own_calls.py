"""Calls of Python functions of this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import rope_ext_hf


def calls_of_this_package(function: Callable[[], object]) -> int:
    """How many Python functions of the package a call runs, comprehensions and generators' steps among them."""
    count, folder = 0, f"{Path(rope_ext_hf.__file__).parent}{os.sep}"  # the hook of an editable install is not counted

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count

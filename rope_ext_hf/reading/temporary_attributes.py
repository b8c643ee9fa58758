"""Set attributes of another package's module or object for a while, and set them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def set_to(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or an object inside the with block, and give them back their old values after it."""
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)

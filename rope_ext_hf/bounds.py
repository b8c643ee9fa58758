"""Limits on what a model folder may ask for, checked before time or memory is spent; each can be raised.

    with limits(layers=5_000):                  # on the command line: --raise-limit layers=5000
        model = from_pretrained("deep-model")

And lengths in tokens, as users write them: 4096, "4k", "1M".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, overload

from rope_ext_hf.errors import MethodError, RopeExtError, did_you_mean, short

Length = int | str  # a number of tokens, or its text: "4096", "4k", "1M"

MOST_TOKENS = 2**40  # a longer context has no meaning; keeps numbers of 400 digits out of every computation

LIMITS = {
    "layers": 2_000,  # of each part of a model; the deepest published ones have a few hundred
    "head_dim": 65_536,  # the widest published heads have 512 dims
    "json_bytes": 100_000_000,  # of a config or an index
    "pickle_bytes": 100_000_000,  # of the pickles in a .bin or .pth file
    "pickle_opcodes": 4_000_000,  # of one pickle; a tensor takes about 60, and the largest models have 50,000 tensors
}
_raised: ContextVar[dict[str, int]] = ContextVar("raised limits", default={})  # noqa: B039 - never changed in place


def limit(name: str) -> int:
    return _raised.get().get(name, LIMITS[name])


def advice(name: str) -> str:
    """How to raise a limit, for the end of an error message."""
    return f"if that is right, raise the limit: --raise-limit {name}=NUMBER, or with rope.limits({name}=NUMBER)"


@contextmanager
def limits(**values: int) -> Iterator[None]:
    """Inside the block, other limits hold for what is read from model folders, in this thread.

    Args:
        **values: `layers` (2,000; of each part of a model), `head_dim` (65,536), `json_bytes` (100 million; of a
            config or an index), `pickle_bytes` (100 million) and `pickle_opcodes` (4 million; both of a .bin or .pth
            file).

    Raises:
        MethodError: an unknown limit, or one that is not a whole number of at least 1.
    """
    for name, value in values.items():
        if name not in LIMITS:
            raise MethodError(f"unknown limit {name!r}.{did_you_mean(name, LIMITS)} Known: {', '.join(LIMITS)}")
        whole(f"the limit {name}", value)
    token = _raised.set(_raised.get() | values)
    try:
        yield
    finally:
        _raised.reset(token)


def whole(
    name: str, value: object, least: float = 1, most: float = math.inf, error: type[RopeExtError] = MethodError
) -> int:
    """Return a value that must be a whole number within limits, by the name in the error; True and False are none."""
    if type(value) is int and least <= value <= most:
        return value
    raise error(f"{name} must be a whole number{range_text(least, most)}, got {short(repr(value))}")


def range_text(least: float, most: float) -> str:
    """` from 1 to 1,000`, ` of at least 1`, or nothing where there is no least number."""
    if least == -math.inf:
        return ""
    return f" of at least {least:,}" if most == math.inf else f" from {least:,} to {most:,}"


@overload
def parse_length(given: None) -> None: ...
@overload
def parse_length(given: Length) -> int: ...
def parse_length(given: Length | None) -> int | None:
    """'256', '4k' (4096) or '1M' (1048576) as a number of tokens; what is no text stays as it is."""
    if not isinstance(given, str):
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", given.strip())
    tokens = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if not 1 <= tokens <= MOST_TOKENS or tokens != int(tokens):
        raise MethodError(f"not a length in tokens: {short(given)!r}; write 4096, 4k or 1M")
    return int(tokens)


def parse_bytes(given: int | str) -> int:
    """'80GB' (80 * 10**9) or '80GiB' (80 * 2**30) as a number of bytes; what is no text stays as it is."""
    if not isinstance(given, str):
        return given
    if (match := re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?G(i?)B", given.strip())) is None:
        raise MethodError(f"not an amount of memory: {short(given)!r}; write 80GB or 80GiB")
    return int(float(match[1]) * (2**30 if match[2] else 10**9))


def parse_lengths(given: Length | Iterable[Length], least: int = 1) -> list[int]:
    """One length, several, or a comma list of them, each at least `least`."""
    lengths = [parse_length(part) for part in (given.split(",") if isinstance(given, str) else listed(given))]
    if not lengths:
        raise MethodError("lengths must be one or more whole numbers, got none")
    return [whole("lengths", length, least, MOST_TOKENS) for length in lengths]


def listed(given: Any) -> list[Any]:
    """Several values as a list, and one value, a text among them, as a list of one."""
    return [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)

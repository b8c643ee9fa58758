"""Limits on the numbers in a model folder, checked before time or memory is spent; each can be raised.

    with limits(layers=5_000):                  # on the command line: --raise-limit layers=5000
        model = from_pretrained("deep-model")

The module also reads lengths in tokens as users write them (4096, "4k", "1M"), and checks whole numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, overload

from rope_ext_hf.errors import MethodError, RopeExtError, did_you_mean, short

__all__ = [
    "MOST_TOKENS",
    "NO_ROTATION",
    "Length",
    "check_int",
    "limit",
    "limits",
    "parse_bytes",
    "parse_length",
    "parse_lengths",
]

Length = int | str  # a number of tokens, or its text: "4096", "4k", "1M"

MOST_TOKENS = 2**40  # a longer context has no meaning; the limit keeps numbers of 400 digits out of every computation
NO_ROTATION = 2.0**127
"""The divisor of a frequency that stands for a frequency of 0, because JSON has no infinity.

It leaves at most 6e-39 radians per position, which do not show in cos and sin of any dtype. Every dtype with the range
of float32 holds it exactly.
"""

LIMITS = {
    "layers": 2_000,  # in each part of a model; the deepest published models have a few hundred
    "head_dim": 65_536,  # the widest published heads have 512 dims
    "json_bytes": 100_000_000,  # in a config or an index
    "config_values": 20_000,  # transformers copies them dozens of times; a setting of every layer has some hundreds
    "tokenizer_values": 400_000,  # in the settings of a tokenizer; 28,000 added tokens have some 230,000
    "pickle_bytes": 100_000_000,  # in all pickles of a .bin or .pth file
    "pickle_opcodes": 4_000_000,  # in one pickle; a tensor takes about 60, and the largest models have 50,000 tensors
}
"""The limits by name, unless they are raised."""
_raised: ContextVar[dict[str, int]] = ContextVar("raised limits", default={})  # noqa: B039 - never changed in place


def limit(name: str) -> int:
    """Return the present value of the limit with this name, which `limits` may have raised in this thread."""
    return _raised.get().get(name, LIMITS[name])


def advice(name: str) -> str:
    """Return the last part of an error message, which says how to raise the limit with this name."""
    return f"if that is right, raise the limit: --raise-limit {name}=NUMBER, or with rope.limits({name}=NUMBER)"


@contextmanager
def limits(**values: int) -> Iterator[None]:
    """Change limits inside the `with` block, for everything that this thread reads from model folders.

    Args:
        **values: the new limits; `layers` in each part of a model (default 2,000), `head_dim` (65,536), `json_bytes`
            in a config or an index (100 million), `config_values` in a config (20,000), `tokenizer_values` in the
            settings of a tokenizer (400,000), and `pickle_bytes` (100 million) and `pickle_opcodes` (4 million) in
            a .bin or .pth file.

    Raises:
        MethodError: an unknown limit, or one that is not a whole number of at least 1.
    """
    for name, value in values.items():
        if name not in LIMITS:
            raise MethodError(f"unknown limit {name!r}.{did_you_mean(name, LIMITS)} Known: {', '.join(LIMITS)}")
        check_int(f"the limit {name}", value)
    token = _raised.set(_raised.get() | values)
    try:
        yield
    finally:
        _raised.reset(token)


def check_int(
    name: str, value: object, least: float = 1, most: float = math.inf, error: type[RopeExtError] = MethodError
) -> int:
    """Return a value if it is a whole number within limits, else raise `error` with its name.

    True and False are not whole numbers.
    """
    if type(value) is int and least <= value <= most:
        return value
    raise error(f"{name} must be a whole number{range_text(least, most)}, got {short(repr(value))}")


def range_text(least: float, most: float) -> str:
    """Return a range of allowed numbers in words: " from 1 to 1,000", " of at least 1"; empty without a lower end."""
    if least == -math.inf:
        return ""
    return f" of at least {least:,}" if most == math.inf else f" from {least:,} to {most:,}"


@overload
def parse_length(length: None) -> None: ...
@overload
def parse_length(length: Length) -> int: ...
def parse_length(length: Length | None) -> int | None:
    """Return "256", "4k" (4096) or "1M" (1048576) as a number of tokens; a value that is not a text is returned as is.

    Raises:
        MethodError: another text, or a number of tokens that is not whole, below 1 or above `MOST_TOKENS`.
    """
    if not isinstance(length, str):
        return length
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", length.strip())
    tokens = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if not 1 <= tokens <= MOST_TOKENS or tokens != int(tokens):
        raise MethodError(f"not a length in tokens: {short(length)!r}; write 4096, 4k or 1M")
    return int(tokens)


def parse_bytes(size: int | str) -> int:
    """Return "80GB" (80 * 10**9) or "80GiB" (80 * 2**30) as a number of bytes; a number is returned as it is."""
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?G(i?)B", size.strip())
    if match is None:
        raise MethodError(f"not an amount of memory: {short(size)!r}; write 80GB or 80GiB")
    return int(float(match[1]) * (2**30 if match[2] else 10**9))


def parse_lengths(lengths: Length | Iterable[Length], least: int = 1) -> list[int]:
    """Return numbers of tokens, each at least `least`, from one length, several lengths, or a text such as "1k,4k"."""
    parts = lengths.split(",") if isinstance(lengths, str) else as_list(lengths)
    if not parts:
        raise MethodError("lengths must be one or more whole numbers, got none")
    return [check_int("lengths", length, least, MOST_TOKENS) for length in map(parse_length, parts)]


def as_list(values: Any) -> list[Any]:
    """Return a list of the given values; a single value, which may be a text, becomes a list of one."""
    return [values] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)

"""The two pairings of rotated dims by name, and the order of the rows of one head in each; no torch is needed.

Rows are moved as numbers of rows here, so that files can be converted without knowing what their numbers mean.
`pairing` has the same for tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PAIRINGS = ("half", "interleaved")


def other_pairing(pairing: str) -> str:
    """Return "interleaved" for "half", and the reverse."""
    check_pairing(pairing)
    return "interleaved" if pairing == "half" else "half"


def check_pairing(pairing: str) -> None:
    """Raise ValueError unless this is the name of a pairing."""
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {', '.join(PAIRINGS)}, got {pairing!r}")


def row_order(to: str, size: int, rotary_dim: int, start: int = 0) -> NDArray[np.int64]:
    """Return for each row of a head in the pairing `to` the number that it has in the other pairing, (size,).

    Args:
        to: "half", where rows (i, i + rotary_dim / 2) are a pair, or "interleaved", where (2i, 2i + 1) are.
        size: rows per head.
        rotary_dim: rotated rows per head; the others keep their place.
        start: the first rotated row of a head.

    Raises:
        ValueError: an unknown pairing, or sizes that do not fit each other.
    """
    check_pairing(to)
    if rotary_dim < 0 or rotary_dim % 2 or start < 0 or start + rotary_dim > size:
        raise ValueError(
            f"{rotary_dim} rotated dims from dim {start} on must be an even number, and fit into a head of {size} dims"
        )
    order = np.arange(size)
    # The rotated rows of a head are a flattened (pairs, 2) or (2, pairs) array: the other pairing is its transpose.
    sizes = (rotary_dim // 2, 2) if to == "half" else (2, rotary_dim // 2)
    rotated = slice(start, start + rotary_dim)
    order[rotated] = order[rotated].reshape(sizes).T.reshape(-1)
    return order

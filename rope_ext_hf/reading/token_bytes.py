"""Where each token of a text ends, in UTF-8 bytes, also where a character is spread over several tokens.

    >>> byte_ends("é!", ["Ã", "©", "!"], [(0, 1), (0, 1), (1, 2)])
    (1, 2, 3)

The tokens of byte-level BPE and of byte fallback name their bytes: these are counted where they spell the text. A
normalised text goes by offsets. These count characters, and every token of a character ends where the character does:
its bytes are divided evenly among its tokens, if their names do not spell it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate


def byte_ends(text: str, tokens: Sequence[str], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return where each token ends in the text, in UTF-8 bytes; a token begins where the one before it ends.

    Tokens, (T,), are as the vocabulary writes them; offsets, (T,), have the first character and the one after the last.
    """
    data = text.encode("utf-8")
    if (spelled := _spelled(data, tokens)) is not None:
        return tuple(spelled)
    before = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(c.encode("utf-8")) for c in text)]
    ends = list(accumulate((before[stop] for _, stop in offsets), max))
    for first, last in _overlapping(offsets):
        begin, end = ends[first - 1] if first else 0, ends[last - 1]
        spelled = _spelled(data[begin:end], tokens[first:last])
        if spelled is None:
            ends[first:last] = _divided(before, offsets[first:last])
        else:
            ends[first:last] = [begin + place for place in spelled]
    return tuple(ends)


def _overlapping(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs of tokens, first and one after the last, in which each begins before those to its left have ended."""
    first, reach = 0, 0
    for i, (start, stop) in enumerate(offsets):
        if start >= reach:
            if i - first > 1:
                yield first, i
            first = i
        reach = max(reach, stop)
    if len(offsets) - first > 1:
        yield first, len(offsets)


def _spelled(piece: bytes, tokens: Sequence[str]) -> list[int] | None:
    """Where each token ends in a piece of text, by the tokens' own bytes; None where those do not spell it."""
    for parts in (_byte_level(tokens), _byte_fallback(tokens)):
        if parts is not None:
            whole = b"".join(parts)  # the tokenizer may add a space before the piece, or leave out spaces there
            if whole in (piece, b" " + piece) or (piece.endswith(whole) and piece[: len(piece) - len(whole)].isspace()):
                surplus = len(whole) - len(piece)
                return [max(0, place - surplus) for place in accumulate(map(len, parts))]
    return None


def _byte_level(tokens: Sequence[str]) -> list[bytes] | None:
    """The bytes of tokens of byte-level BPE, which writes every byte as one character; None for others."""
    bytes_of = _alphabet()
    try:
        known = {token: token.translate(bytes_of).encode("latin-1") for token in set(tokens)}
    except UnicodeEncodeError:
        return None
    return [known[token] for token in tokens]


@cache
def _alphabet() -> dict[int, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {ord(character): byte for byte, character in bytes_to_unicode().items()}


def _byte_fallback(tokens: Sequence[str]) -> list[bytes]:
    """The bytes of tokens of SentencePiece, which writes a byte as <0xE9> and a space as ▁."""
    byte = re.compile("<0x([0-9A-F]{2})>")  # a token of a single byte
    known = {
        token: bytes.fromhex(match[1]) if (match := byte.fullmatch(token)) else token.replace("▁", " ").encode("utf-8")
        for token in set(tokens)
    }
    return [known[token] for token in tokens]


def _divided(before: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Where each token ends if a character's bytes are divided evenly among the tokens that it belongs to.

    `before` holds the bytes before each character of the text, `offsets` are those of tokens that overlap.
    """
    first, last = min(start for start, _ in offsets), max(stop for _, stop in offsets)
    changes = [0] * (last - first + 1)  # in the number of tokens, from one character to the next
    for start, stop in offsets:
        changes[start - first] += 1
        changes[stop - first] -= 1
    owners = accumulate(changes)
    shares = ((before[c + 1] - before[c]) / max(1, count) for c, count in zip(range(first, last), owners, strict=False))
    sums = [0.0, *accumulate(shares)]
    ends = accumulate(sums[stop - first] - sums[start - first] for start, stop in offsets)
    return [min(before[first] + round(end), before[last]) for end in ends]

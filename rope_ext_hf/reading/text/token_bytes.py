"""The end of each token of a text in UTF-8 bytes, even if several tokens share a character.

    >>> byte_ends("é!", ["Ã", "©", "!"], [(0, 1), (0, 1), (1, 2)])
    (1, 2, 3)

The names of tokens in byte-level BPE and in byte fallback are their bytes, which are counted if they spell the text.
Otherwise, for example after a normalisation, the tokenizer's offsets are used. They count characters, and for them
every token that shares a character ends where the character does: then its bytes are those that the names spell, or
else an even share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = "\ufffd"
"""The character that decoders write in place of bytes that form no character."""


def spelled_ends(text: str, tokens: Sequence[str], *, cut: bool = False) -> tuple[int, ...] | None:
    """Return the position in a text, in UTF-8 bytes, where each token ends, by the bytes that their names stand for.

    None: these bytes do not spell the text, and `byte_ends` is needed.

    Args:
        text: the text.
        tokens: the tokens, as the vocabulary writes them.
        cut: whether the text was decoded from the tokens, so that it has U+FFFD in place of the bytes of a character
            that they do not spell as a whole; the ends count the bytes of the tokens.
    """
    spelled = _spelled_ends(text.encode("utf-8"), tokens)
    if spelled is None and cut and _CUT in text:
        spelled = _ends_of_cut_text(text, tokens)
    return None if spelled is None else tuple(spelled)


def _ends_of_cut_text(text: str, tokens: Sequence[str]) -> list[int] | None:
    """Return the ends as `spelled_ends` does for a text with U+FFFD in place of incomplete characters."""
    for parts in (_byte_level(tokens), _byte_fallback(tokens)):
        if parts is None:
            continue
        spelled = b"".join(parts).decode("utf-8", errors="replace")
        # of several bytes in a row, some decoders write each as U+FFFD if only the last of them are no character
        shown = re.sub(f"{_CUT}+", lambda run: f".{{1,{len(run[0])}}}", re.escape(text))
        if (match := re.fullmatch(f"( ?){shown}", spelled, re.DOTALL)) is not None:  # tokenizers add a space
            surplus = len(match[1])
            return [max(0, end - surplus) for end in accumulate(map(len, parts))]
    return None


def byte_ends(text: str, tokens: Sequence[str], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the position in a text, in UTF-8 bytes, where each token ends; the next token begins there.

    Args:
        text: the text.
        tokens: the tokens, as the vocabulary writes them.
        offsets: for each token the first of its characters and the one after its last.
    """
    data = text.encode("utf-8")
    spelled = _spelled_ends(data, tokens)
    if spelled is not None:
        return tuple(spelled)
    before: Sequence[int]  # the bytes before each character
    before = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(c.encode("utf-8")) for c in text)]
    ends = list(accumulate((before[stop] for _, stop in offsets), max))
    for first, last in _overlapping(offsets):
        begin, end = ends[first - 1] if first else 0, ends[last - 1]
        spelled = _spelled_ends(data[begin:end], tokens[first:last])
        if spelled is None:
            ends[first:last] = _divided(before, offsets[first:last])
        else:
            ends[first:last] = [begin + place for place in spelled]
    return tuple(ends)


def _overlapping(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the runs of tokens that overlap: the index of the first token, and the one after the last."""
    first, reach = 0, 0
    for i, (start, stop) in enumerate(offsets):
        if start >= reach:
            if i - first > 1:
                yield first, i
            first = i
        reach = max(reach, stop)
    if len(offsets) - first > 1:
        yield first, len(offsets)


def _spelled_ends(piece: bytes, tokens: Sequence[str]) -> list[int] | None:
    """Return the position in a piece of text, in bytes, where each token ends, counted by the tokens' own bytes.

    None: these bytes do not spell the piece.
    """
    for read in (_byte_level, _byte_fallback):
        parts = read(tokens)
        if parts is None:
            continue
        spelled = b"".join(parts)
        adds_a_space = spelled == b" " + piece
        lacks_spaces = piece.endswith(spelled) and piece[: len(piece) - len(spelled)].isspace()
        if spelled == piece or adds_a_space or lacks_spaces:  # tokenizers add or drop spaces before a piece
            surplus, ends = len(spelled) - len(piece), list(accumulate(map(len, parts)))
            return [max(0, end - surplus) for end in ends] if surplus else ends
    return None


def _byte_level(tokens: Sequence[str]) -> list[bytes] | None:
    """Return the bytes of each token, if the tokens are from byte-level BPE, which writes every byte as a character.

    None: they are not.
    """
    bytes_of = _alphabet()
    try:
        known = {token: token.translate(bytes_of).encode("latin-1") for token in set(tokens)}
    except UnicodeEncodeError:
        return None
    return list(map(known.__getitem__, tokens))


@cache
def _alphabet() -> dict[int, int]:
    """Return the byte that each character stands for in byte-level BPE, by the code point of the character."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {ord(character): byte for byte, character in bytes_to_unicode().items()}


def _byte_fallback(tokens: Sequence[str]) -> list[bytes]:
    """Return the bytes of each token from SentencePiece, which writes a single byte as <0xE9> and a space as ▁."""
    known = {}
    for token in set(tokens):
        single_byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        known[token] = bytes.fromhex(single_byte[1]) if single_byte else token.replace("▁", " ").encode("utf-8")
    return list(map(known.__getitem__, tokens))


def _divided(before: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return where each token ends, in bytes, if tokens that share a character share its bytes evenly.

    Args:
        before: the number of bytes before each character of the text.
        offsets: for each of these overlapping tokens, the first of its characters and the one after its last.
    """
    first, last = min(start for start, _ in offsets), max(stop for _, stop in offsets)
    changes = [0] * (last - first + 1)  # of the number of tokens that share a character, from one to the next
    for start, stop in offsets:
        changes[start - first] += 1
        changes[stop - first] -= 1
    owners = accumulate(changes)
    shares = ((before[c + 1] - before[c]) / max(1, count) for c, count in zip(range(first, last), owners, strict=False))
    sums = [0.0, *accumulate(shares)]
    ends = accumulate(sums[stop - first] - sums[start - first] for start, stop in offsets)
    return [min(before[first] + round(end), before[last]) for end in ends]


# --- tokenizing ---------------------------------------------------------------------------------------------------


PLAIN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
"""Arguments of a tokenizer for the tokens of a text alone, without warnings of its length."""
_ENCODERS = (
    *("__call__", "_call_one", "_encode_plus", "_batch_encode_plus"),
    *("prepare_for_tokenization", "tokenize", "convert_tokens_to_ids", "prepare_for_model"),
)
"""The methods between the call of a tokenizer and the cutting of a text; each release of transformers has some."""


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return the token ids of each text, without special tokens.

    Where the class of a tokenizer encodes as every tokenizer of transformers does, there are two faster ways than its
    call. The compiled part of a fast tokenizer is called directly: with several texts at a time it uses all cores, and
    without offsets, which nobody reads for a text that is only counted, it takes half the time. A tokenizer in Python
    looks up the id of each different token once, and looks for special tokens where there are any.
    """
    from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

    if not texts:
        return []
    if _encodes_as(tokenizer, PreTrainedTokenizerFast):
        tokenizer("", **PLAIN)  # switches truncation and padding off in the compiled part
        compiled: Any = tokenizer
        encoded = compiled.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]
    if _encodes_as(tokenizer, PreTrainedTokenizer):
        return [_python_ids(tokenizer, text) for text in texts]
    return [list(tokenizer(text, **PLAIN)["input_ids"]) for text in texts]


def _encodes_as(tokenizer: PreTrainedTokenizerBase, plain: type) -> bool:
    """Return whether a tokenizer is of a class of transformers, and encodes as that class does.

    A few subclasses treat some texts on their own first, as CodeLlama's does.
    """
    actual = type(tokenizer)
    return isinstance(tokenizer, plain) and all(
        getattr(actual, name, None) is getattr(plain, name, None) for name in _ENCODERS
    )


def _python_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text by a tokenizer in Python, without special tokens around it."""
    lower = text.lower()
    has_special = any(token in text or token.lower() in lower for token in tokenizer.added_tokens_encoder)
    tokens = tokenizer.tokenize(text, split_special_tokens=tokenizer.split_special_tokens or not has_special)
    different = list(set(tokens))
    id_of = dict(zip(different, tokenizer.convert_tokens_to_ids(different), strict=True))
    return list(map(id_of.__getitem__, tokens))

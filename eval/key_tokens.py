"""Key tokens: those that a model predicts well with a long context and badly with a short one.

LongPPL (Fang et al. 2024, arXiv 2410.23771, sec. 3) is the perplexity of key tokens alone. One evaluator model finds
them for every model and method that is compared. They are kept as ranges of characters, which any tokenizer can use.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, FileError, MethodError, one_line, printable, short
from rope_ext_hf.files import atomic_file, read_json, write_json
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.scorer import TokenScorer

_WINDOW, _OF_LENGTH = 4096, 8  # tokens of a short context in the paper, and which part that is of its texts
Range = tuple[int, int]  # the first character and the one after the last
Pass = tuple[int, int, int]  # tokens of a document: first, one after the last, first that may be a key token


@dataclass(frozen=True)
class KeySetting:
    """The thresholds and windows by which a token is a key token."""

    window: int  # tokens of a short context, which is up to `stride` - 1 longer
    stride: int  # tokens that share a short context
    # by how many nats its log-probability with the long context is above that with the short one, at least
    gain: float = 2.0
    likely: float = -2.0  # the least log-probability with the long context, in nats

    def __str__(self) -> str:
        return (
            f"gain above {self.gain:g}, log-probability above {self.likely:g}, "
            f"windows of {self.window:,} tokens every {self.stride:,}"
        )


def key_setting(longest: int, window: int | None = None) -> KeySetting:
    """The paper's thresholds, with a window of 4,096 tokens or an eighth of the longest length, or the given one."""
    chosen = min(_WINDOW, max(1, longest // _OF_LENGTH)) if window is None else window
    if not 1 <= chosen < longest:
        raise MethodError(
            f"the short context of key tokens must have between 1 and {longest - 1:,} tokens, fewer than the longest "
            f"length; got {chosen:,}"
        )
    return KeySetting(chosen, max(1, chosen // 4))


def find_key_tokens(
    scorer: TokenScorer, ids: Tensor, first: int, setting: KeySetting, *, prefix: int | None = None, length: int
) -> Tensor:
    """Find the key tokens from `first` on, (N - first,) bool; a token with no more than a window before it is none.

    Windows begin every `stride` tokens from the first token on, as in the paper's code. `prefix` is the first of the
    ids, (N,) int64, if there is one, and stands in place of the first one of a window. Length-dependent methods are
    held at `length` for the long context, in a window at its own; `first` is at least 1.
    """
    found = torch.zeros(len(ids) - first, dtype=torch.bool)
    begin = max(first, setting.window)
    if begin >= len(ids):
        return found
    long = scorer.losses(ids, begin, length=length)  # (N - begin,)
    for start in range((begin - setting.window) // setting.stride * setting.stride, len(ids), setting.stride):
        window = ids[start : start + setting.window + setting.stride].clone()
        if len(window) <= setting.window:
            break
        if prefix is not None:
            window[0] = prefix
        low, high = max(begin, start + setting.window), start + len(window)  # the tokens that it scores
        of_long = long[low - begin : high - begin]
        of_short = scorer.losses(window, low - start)
        found[low - first : high - first] = (of_short - of_long > setting.gain) & (of_long < -setting.likely)
    return found


def keys_of_document(
    scorer: TokenScorer, document: Tensor, passes: Iterable[Pass], prefix: int | None, setting: KeySetting, length: int
) -> tuple[set[int], set[int]]:
    """The tokens of a document (tokens,) that are compared, and the key tokens among them; see `find_key_tokens`."""
    compared, found = set[int](), set[int]()
    for start, stop, first in passes:
        ids, shift = document[start:stop].clone(), start
        if prefix is not None and start:  # a pass from the middle of a document has it for its first token
            ids[0] = prefix
        elif prefix is not None:
            ids, shift = torch.cat([ids.new_tensor([prefix]), ids]), -1
        scored = max(first - shift, 1)
        keys = find_key_tokens(scorer, ids, scored, setting, prefix=prefix, length=length)
        compared |= set(range(shift + max(scored, setting.window), stop))
        found |= {shift + scored + place for place in keys.nonzero()[:, 0].tolist()}
    return compared, found


@dataclass(frozen=True)
class KeyRanges:
    """Places of the key tokens of documents."""

    evaluator: str  # the model that found them, and its method
    setting: KeySetting
    # by the digest of a document's text: its name, and ranges of characters, ascending and apart
    documents: Mapping[str, tuple[str, tuple[Range, ...]]]

    @property
    def described(self) -> str:
        """The evaluator and the thresholds, for tables."""
        return f"{short(printable(self.evaluator))}: {self.setting}"

    def mask(self, document: Tokens) -> Tensor:
        """Mark the tokens that lie in a range, (tokens,) bool; none of a document that was not searched for them."""
        digest = text_digest(document)
        if digest not in self.documents and document.name in {name for name, _ in self.documents.values()}:
            raise CorpusError(
                f"{document.name}: its text is not the one that key tokens were found in; find them anew with "
                "--keys-by MODEL"
            )
        _, ranges = self.documents.get(digest, ("", ()))
        if ranges and ranges[-1][1] > len(document.text):
            raise CorpusError(f"{document.name}: a range of key tokens ends after the text's last character")
        starts = [start for start, _ in ranges]
        inside = []
        for start, stop in character_spans(document) if ranges else [(0, 0)] * len(document.ids):
            index = bisect_right(starts, start) - 1
            inside.append(start < stop and index >= 0 and stop <= ranges[index][1])
        return torch.tensor(inside, dtype=torch.bool)

    def write(self, file: Path) -> None:
        documents = [{"name": n, "sha256": d, "ranges": r} for d, (n, r) in self.documents.items()]
        with atomic_file(file) as part:
            write_json(part, {"evaluator": self.evaluator, "setting": asdict(self.setting), "documents": documents})


def read_keys(file: str | Path, window: int | None = None) -> KeyRanges:
    """Read key tokens that another run found, with `window` if one was asked for; the file may be somebody else's."""
    saved = read_json(Path(file))
    try:
        setting = KeySetting(**saved["setting"])
        whole = all(type(n) is int and 1 <= n < 2**40 for n in (setting.window, setting.stride))
        if not whole or not all(type(n) in (int, float) and math.isfinite(n) for n in (setting.gain, setting.likely)):
            raise ValueError(f"its setting is {short(repr(saved['setting']))}")
        documents = {}
        for each in saved["documents"]:
            if not (isinstance(each["name"], str) and isinstance(each["sha256"], str)):
                raise ValueError("a document needs a name and the sha256 of its text")
            documents[each["sha256"]] = (each["name"], check_ranges(each["ranges"]))
        if not isinstance(saved["evaluator"], str):
            raise ValueError("the evaluator must be named by a string")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{one_line(error)} is missing" if isinstance(error, KeyError) else one_line(error)
        raise FileError(f"{str(file)!r} does not hold key tokens, as keys.json of a run does: {reason}") from error
    if window not in (None, setting.window):
        raise MethodError(
            f"the key tokens in {str(file)!r} were found with windows of {setting.window:,} tokens, not {window:,}: "
            "leave out the window, or give the model that finds them"
        )
    return KeyRanges(saved["evaluator"], setting, documents)


def check_ranges(value: Any) -> tuple[Range, ...]:
    """Ranges of characters from JSON; ValueError for anything but a list of pairs, ascending and apart."""
    last, ranges = -1, []
    for pair in value if isinstance(value, list) else [value]:
        match pair:
            case [int(start), int(stop)] if last < start < stop < 2**40 and not isinstance(start, bool):
                ranges.append((start, stop))
                last = stop
            case _:
                raise ValueError(f"expected ranges [start, stop] of characters, ascending; got {short(repr(pair))}")
    return tuple(ranges)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same characters by ranges that are ascending and apart; empty ones are left out."""
    joined: list[Range] = []
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def character_spans(document: Tokens) -> Sequence[Range]:
    """The characters that each token has a part of; CorpusError where the document came as token ids."""
    places = list(zip((0, *document.ends), document.ends, strict=False))  # in bytes
    if _text(document).isascii():
        return places
    before = [0, *accumulate(len(character.encode()) for character in document.text)]
    return [(bisect_right(before, start) - 1, bisect_left(before, stop)) for start, stop in places]


def text_digest(document: Tokens) -> str:
    """SHA-256 of a document's text; CorpusError where it came as token ids."""
    return hashlib.sha256(_text(document).encode()).hexdigest()


def _text(document: Tokens) -> str:
    if not document.text and len(document.ids):
        raise CorpusError(
            f"{document.name}: key tokens are ranges of characters, and this document came as token ids; give text"
        )
    return document.text

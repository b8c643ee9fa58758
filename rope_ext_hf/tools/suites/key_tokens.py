"""Key tokens: the tokens that a model predicts well with a long context and badly with a short one.

LongPPL (Fang et al. 2024, arXiv 2410.23771, sec. 3) is the perplexity of key tokens alone. One evaluator model finds
them, and every compared model and method is scored on the same ones. They are kept as ranges of characters, since the
compared models may have other tokenizers than the evaluator.
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

from rope_ext_hf.errors import CorpusError, FileError, MethodError, one_line, short
from rope_ext_hf.files.whole import atomic_file, read_json, write_json
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import with_prefix
from rope_ext_hf.reading.text.documents import Tokens

Range = tuple[int, int]  # of characters: the first one, and the one after the last

_PAPER_WINDOW = 4096  # tokens of a short context in the paper, whose texts have 32k
_WINDOWS_PER_LENGTH = 8


@dataclass(frozen=True)
class KeySetting:
    """The thresholds and window lengths by which key tokens are chosen for LongPPL."""

    window: int  # tokens of a short context, which may be up to `stride` - 1 tokens longer
    stride: int  # tokens that share a short context
    gain: float = 2.0  # nats by which the long context must raise the log-probability of the token
    likely: float = -2.0  # the log-probability, in nats, that the token must exceed with the long context

    def __str__(self) -> str:
        return (
            f"gain above {self.gain:g}, log-probability above {self.likely:g}, "
            f"windows of {self.window:,} tokens every {self.stride:,}"
        )


def key_setting(longest: int, window: int | None = None) -> KeySetting:
    """Return the paper's thresholds, with windows for texts of `longest` tokens.

    Args:
        longest: the longest context length.
        window: tokens of a short context; None: 4,096 as in the paper, or an eighth of `longest` where that is less.

    Raises:
        MethodError: the window is not shorter than the longest length.
    """
    chosen = min(_PAPER_WINDOW, max(1, longest // _WINDOWS_PER_LENGTH)) if window is None else window
    if not 1 <= chosen < longest:
        raise MethodError(
            f"the short context of key tokens must have between 1 and {longest - 1:,} tokens, fewer than the longest "
            f"length; got {chosen:,}"
        )
    return KeySetting(chosen, max(1, chosen // 4))


def find_key_tokens(
    scorer: TokenScorer, ids: Tensor, first: int, setting: KeySetting, *, prefix: tuple[int, ...] = (), length: int
) -> Tensor:
    """Find the key tokens of a text: those that the model predicts well with a long context and badly with a short one.

    Tokens before `first` and the first `setting.window` tokens of a text are never key tokens. Short contexts begin
    every `stride` tokens from the first token on, as in the paper's code.

    Args:
        scorer: computes losses with the evaluator model.
        ids: the text's token ids, (N,) int64, which begin with `prefix`.
        first: the first token to judge; at least 1.
        setting: windows and thresholds.
        prefix: token ids that take the place of the first tokens of each short context, too.
        length: the length at which a length-dependent method reads the long context. It reads a short context at the
            short context's own length.

    Returns:
        True for each key token among those from `first` on, (N - first,) bool.
    """
    is_key = torch.zeros(len(ids) - first, dtype=torch.bool)
    begin = max(first, setting.window)
    if begin >= len(ids):
        return is_key
    long_losses = scorer.losses(ids, begin, length=length)  # (N - begin,)
    for start in range((begin - setting.window) // setting.stride * setting.stride, len(ids), setting.stride):
        window = with_prefix(ids, start, start + setting.window + setting.stride, prefix)
        if len(window) <= setting.window:
            break
        low, high = max(begin, start + setting.window), start + len(window)  # the tokens that this window scores
        with_long = long_losses[low - begin : high - begin]
        with_short = scorer.losses(window, low - start)
        is_key[low - first : high - first] = (with_short - with_long > setting.gain) & (with_long < -setting.likely)
    return is_key


@dataclass(frozen=True)
class KeyRanges:
    """The places of key tokens in documents, as ranges of characters."""

    evaluator: str  # the name of the model that found them, with its method
    setting: KeySetting
    # By the SHA-256 of a document's text: its name, and ranges of characters that are ascending and do not touch.
    documents: Mapping[str, tuple[str, tuple[Range, ...]]]

    def mask(self, document: Tokens) -> Tensor:
        """Return True for each of a document's tokens that lies wholly within a range of key tokens, (tokens,) bool.

        In a document that was never searched for key tokens, no token is marked.

        Raises:
            CorpusError: a document of this name was searched but had another text, or the document came as token ids.
        """
        digest = text_digest(document)
        if digest not in self.documents and document.name in {name for name, _ in self.documents.values()}:
            raise CorpusError(
                f"{document.name}: its text is not the one in which key tokens were found; find them anew with "
                "--keys-by MODEL"
            )
        _, ranges = self.documents.get(digest, ("", ()))
        if ranges and ranges[-1][1] > len(document.text):
            raise CorpusError(f"{document.name}: a range of key tokens ends after the text's last character")
        if not ranges:
            return torch.zeros(len(document.ids), dtype=torch.bool)
        range_starts = [start for start, _ in ranges]
        inside = []
        for start, stop in character_spans(document):
            index = bisect_right(range_starts, start) - 1
            inside.append(start < stop and index >= 0 and stop <= ranges[index][1])
        return torch.tensor(inside, dtype=torch.bool)

    def write(self, file: Path) -> None:
        """Write the ranges to a JSON file, which `read_keys` reads."""
        documents = [
            {"name": name, "sha256": digest, "ranges": ranges} for digest, (name, ranges) in self.documents.items()
        ]
        with atomic_file(file) as part:
            write_json(part, {"evaluator": self.evaluator, "setting": asdict(self.setting), "documents": documents})


def read_keys(file: str | Path, window: int | None = None) -> KeyRanges:
    """Read the places of key tokens from a file that `KeyRanges.write` wrote; everything in the file is checked.

    Raises:
        FileError: the file holds something else.
        MethodError: `window` is given, and the key tokens were found with windows of another length.
    """
    content = read_json(Path(file))
    try:
        keys = _parse_keys(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{one_line(error)} is missing" if isinstance(error, KeyError) else one_line(error)
        raise FileError(f"{str(file)!r} does not hold key tokens, as keys.json of a run does: {reason}") from error
    if window not in (None, keys.setting.window):
        raise MethodError(
            f"the key tokens in {str(file)!r} were found with windows of {keys.setting.window:,} tokens, not "
            f"{window:,}: leave out the window, or give the model that finds them"
        )
    return keys


def _parse_keys(content: Any) -> KeyRanges:
    """Return the places of key tokens from a file's content.

    Malformed content is a ValueError, TypeError or KeyError.
    """
    setting = KeySetting(**content["setting"])
    whole_windows = all(type(n) is int and 1 <= n < 2**40 for n in (setting.window, setting.stride))
    finite_limits = all(type(n) in (int, float) and math.isfinite(n) for n in (setting.gain, setting.likely))
    if not (whole_windows and finite_limits):
        raise ValueError(
            "its setting must have whole numbers from 1 to 2**40 - 1 as window and stride, and finite numbers as "
            f"gain and likely; got {short(repr(content['setting']))}"
        )
    documents = {}
    for document in content["documents"]:
        if not (isinstance(document["name"], str) and isinstance(document["sha256"], str)):
            raise ValueError("a document needs a name and the sha256 of its text")
        documents[document["sha256"]] = (document["name"], parse_ranges(document["ranges"]))
    if not isinstance(content["evaluator"], str):
        raise ValueError("the evaluator must be named by a string")
    return KeyRanges(content["evaluator"], setting, documents)


def parse_ranges(value: Any) -> tuple[Range, ...]:
    """Return the ranges of characters that a JSON value lists.

    Raises:
        ValueError: the value is not a list of pairs [start, stop], ascending and without overlap.
    """
    last_stop, ranges = -1, []
    for pair in value if isinstance(value, list) else [value]:
        match pair:
            case [int(start), int(stop)] if last_stop < start < stop < 2**40 and not isinstance(start, bool):
                ranges.append((start, stop))
                last_stop = stop
            case _:
                raise ValueError(f"expected ranges [start, stop] of characters, ascending; got {short(repr(pair))}")
    return tuple(ranges)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Merge ranges of characters that overlap or touch, and return them in ascending order; empty ones are left out."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def character_spans(document: Tokens) -> Sequence[Range]:
    """Return, for each token of a document, the range of characters that the token covers at least in part.

    Raises:
        CorpusError: the document came as token ids, without a text.
    """
    byte_spans = list(zip((0, *document.ends), document.ends, strict=False))
    if _text(document).isascii():
        return byte_spans
    bytes_before = [0, *accumulate(len(character.encode()) for character in document.text)]  # of each character
    return [(bisect_right(bytes_before, start) - 1, bisect_left(bytes_before, stop)) for start, stop in byte_spans]


def text_digest(document: Tokens) -> str:
    """Return the SHA-256 of a document's text.

    Raises:
        CorpusError: the document came as token ids, without a text.
    """
    return hashlib.sha256(_text(document).encode()).hexdigest()


def _text(document: Tokens) -> str:
    if not document.text and len(document.ids):
        raise CorpusError(
            f"{document.name}: key tokens are ranges of characters, and this document came as token ids; give text"
        )
    return document.text

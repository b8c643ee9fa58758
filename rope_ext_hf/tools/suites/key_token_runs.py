"""Runs that find key tokens: those that a model predicts well with a long context and badly with a short one.

LongPPL (Fang et al. 2024, arXiv 2410.23771, sec. 3) is the perplexity of key tokens alone. One evaluator model finds
them for every model and method that is compared. They are kept as ranges of characters, which any tokenizer can use.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, FileError, MethodError, one_line, printable, short, warn_caller
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.eval.questions import MeasureWith, Perplexity
from rope_ext_hf.files import atomic_file, read_json, write_json
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.reading.documents import Document, Tokens
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import check_vocabulary, prefix_tokens, tokenize, with_prefix
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.labels import Method, MethodResult, label
from rope_ext_hf.runs.measurement import Measurement, Passed, RunPlan, Scored
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import length_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_KEYS_FILE = "keys.json"
_WINDOW, _OF_LENGTH = 4096, 8  # tokens of a short context in the paper, and which part that is of its texts
_Range = tuple[int, int]  # the first character and the one after the last
_Pass = tuple[int, int, int]  # tokens of a document: first, one after the last, first that may be a key token


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
    scorer: TokenScorer, ids: Tensor, first: int, setting: KeySetting, *, prefix: tuple[int, ...] = (), length: int
) -> Tensor:
    """Find the key tokens from `first` on, (N - first,) bool; a token with no more than a window before it is none.

    Windows begin every `stride` tokens from the first token on, as in the paper's code. `prefix` are the first of the
    ids, (N,) int64, and stand in place of the first ones of a window. Length-dependent methods are
    held at `length` for the long context, in a window at its own; `first` is at least 1.
    """
    found = torch.zeros(len(ids) - first, dtype=torch.bool)
    begin = max(first, setting.window)
    if begin >= len(ids):
        return found
    long = scorer.losses(ids, begin, length=length)  # (N - begin,)
    for start in range((begin - setting.window) // setting.stride * setting.stride, len(ids), setting.stride):
        window = with_prefix(ids, start, start + setting.window + setting.stride, prefix)
        if len(window) <= setting.window:
            break
        low, high = max(begin, start + setting.window), start + len(window)  # the tokens that it scores
        of_long = long[low - begin : high - begin]
        of_short = scorer.losses(window, low - start)
        found[low - first : high - first] = (of_short - of_long > setting.gain) & (of_long < -setting.likely)
    return found


def _keys_of_pass(
    scorer: TokenScorer, document: Tensor, read: _Pass, prefix: tuple[int, ...], setting: KeySetting, length: int
) -> tuple[set[int], set[int]]:
    """The tokens of a document (tokens,) that a pass compares, and the key tokens among them; see `find_key_tokens`."""
    start, stop, first = read
    shift = start or -len(prefix)  # a pass from the middle of a document has the prefix for its first tokens
    ids = with_prefix(document, shift, stop, prefix)
    scored = max(first - shift, len(prefix), 1)
    keys = find_key_tokens(scorer, ids, scored, setting, prefix=prefix, length=length)
    compared = set(range(shift + max(scored, setting.window), stop))
    return compared, {shift + scored + place for place in keys.nonzero()[:, 0].tolist()}


@dataclass(frozen=True)
class KeyRanges:
    """Places of the key tokens of documents."""

    evaluator: str  # the model that found them, and its method
    setting: KeySetting
    # by the digest of a document's text: its name, and ranges of characters, ascending and apart
    documents: Mapping[str, tuple[str, tuple[_Range, ...]]]

    def mask(self, document: Tokens) -> Tensor:
        """Mark the tokens that lie in a range, (tokens,) bool; none of a document that was not searched for them."""
        digest = _text_digest(document)
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
        for start, stop in _character_spans(document) if ranges else [(0, 0)] * len(document.ids):
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
            documents[each["sha256"]] = (each["name"], _check_ranges(each["ranges"]))
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


def _check_ranges(value: Any) -> tuple[_Range, ...]:
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


def merged(ranges: Iterable[_Range]) -> tuple[_Range, ...]:
    """The same characters by ranges that are ascending and apart; empty ones are left out."""
    joined: list[_Range] = []
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _character_spans(document: Tokens) -> Sequence[_Range]:
    """The characters that each token has a part of; CorpusError where the document came as token ids."""
    places = list(zip((0, *document.ends), document.ends, strict=False))  # in bytes
    if _text(document).isascii():
        return places
    before = [0, *accumulate(len(character.encode()) for character in document.text)]
    return [(bisect_right(before, start) - 1, bisect_left(before, stop)) for start, stop in places]


def _text_digest(document: Tokens) -> str:
    """SHA-256 of a document's text; CorpusError where it came as token ids."""
    return hashlib.sha256(_text(document).encode()).hexdigest()


def _text(document: Tokens) -> str:
    if not document.text and len(document.ids):
        raise CorpusError(
            f"{document.name}: key tokens are ranges of characters, and this document came as token ids; give text"
        )
    return document.text


class _DocumentKeys(NamedTuple):
    """One document's key tokens: how many tokens were compared, how many of them are key tokens, and where."""

    name: str
    compared: int
    keys: int
    ranges: tuple[_Range, ...]

    def to_record(self) -> list[Any]:
        return list(self[1:])


@dataclass(frozen=True)
class _KeyTokens(MethodResult):
    """The finds of an evaluator; `compared` tokens were read with a long and with a short context."""

    setting: KeySetting
    compared: int
    keys: int
    documents: tuple[_DocumentKeys, ...]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"documents": [document._asdict() for document in self.documents]}


@register_run_kind
class KeyTokenRuns(RunKind):
    """Key tokens of documents; the only cell is the longest context length."""

    name = "keys"
    setting = KeySetting
    items = "documents"
    columns = ("length", "compared_tokens", "key_tokens")

    def parse(self, item: str, value: Any) -> _DocumentKeys:
        match value:
            case [int(compared), int(keys), list(ranges)] if 0 <= keys <= compared < 2**63:
                return _DocumentKeys(item, compared, keys, _check_ranges(ranges))
        raise ValueError(f"expected [compared, keys, ranges], got {short(repr(value))}")

    def result(
        self, method: Method, setting: KeySetting, cell: Cell, values: Sequence[_DocumentKeys], costs: Sequence[Cost]
    ) -> _KeyTokens:
        compared, keys = sum(value.compared for value in values), sum(value.keys for value in values)
        return _KeyTokens(method, int(cell[0]), setting, compared, keys, tuple(values))

    def rows(self, run: Run[_KeyTokens]) -> Iterable[Sequence[Any]]:
        return ([result.length, result.compared, result.keys] for result in run.results)

    def outcome(self, run: Run[_KeyTokens]) -> str:
        (result,) = run.results
        count = f"{result.keys:,} of {result.compared:,} tokens are key tokens: {result.setting}"
        return f"{count}. They are in {run.folder / _KEYS_FILE}"

    def table(self, run: Run[_KeyTokens], *, detailed: bool = False) -> Table:
        view = length_table(run, "Key tokens by context length", str(run.results[0].setting), "evaluator")
        for result in run.results:
            view.add_row(Text(label(result.method)), Text(f"{result.keys:,} of {result.compared:,}"))
        return view


class _KeyTokenMeasurement(Measurement):
    """The key tokens among those that a perplexity run scores, of which `length` is the longest length.

    The documents, as the evaluator's tokenizer cuts them, have passes (start, stop, first): tokens start to stop are
    read, after `prefix`, and those from `first` on may be key tokens.
    """

    kind = "keys"

    def __init__(
        self,
        documents: Sequence[tuple[Tokens, Sequence[_Pass]]],
        prefix: tuple[int, ...],
        setting: KeySetting,
        length: int,
    ) -> None:
        self.documents, self.prefix, self.setting, self.length = documents, prefix, setting, length
        self.items, self.all_cells = [document.name for document, _ in documents], [(length,)]
        self.passes = [size for _, passes in documents for each in passes for size in self._sizes(*each)]
        self.scored = 2 * sum(stop - first for _, passes in documents for _, stop, first in passes)

    def _sizes(self, start: int, stop: int, first: int) -> list[int]:
        """Tokens of the long context, and of the windows."""
        window, stride = self.setting.window, self.setting.stride
        windows = max(0, -(-(stop - max(first, start + window)) // stride))
        return [stop - start, *[min(window + stride, stop - start)] * windows]

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr((self.prefix, self.setting)).encode()
        for document, passes in self.documents:
            yield document.ids.numpy().tobytes() + _text_digest(document).encode() + repr(passes).encode()

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[_DocumentKeys]:
        document, passes = self.documents[item]
        compared, found = set[int](), set[int]()
        for each in passes:
            of_pass = _keys_of_pass(scorer, document.ids, each, self.prefix, self.setting, self.length)
            compared |= of_pass[0]
            found |= of_pass[1]
            progress(sum(self._sizes(*each)))
        characters = _character_spans(document)
        ranges = merged(characters[token] for token in found)
        yield cells[0], _DocumentKeys(document.name, len(compared), len(found), ranges), scorer.take_cost()


def _plan_keys(
    evaluator: PreTrainedModel,  # may be on the meta device
    tokenizer: PreTrainedTokenizerBase,  # of the evaluator
    plan: RunPlan[PerplexityMeasurement],
    window: int | None,  # see `key_setting`
) -> RunPlan[_KeyTokenMeasurement]:
    """Plan to find the key tokens among those that a plan scores at its longest length, before weights are read."""
    read = plan.measurement.plan
    longest = read.lengths[-1]
    setting = key_setting(longest, window)
    prefix = prefix_tokens(tokenizer, None)
    documents: list[tuple[Tokens, list[_Pass]]] = []
    for document, spans in read.documents:
        places = _character_spans(document)
        (again,) = tokenize([Document(document.name, document.text)], tokenizer)
        characters = _character_spans(again)
        starts, stops = ([place[end] for place in characters] for end in (0, 1))
        passes = set[_Pass]()
        for start, stop, first in _passes(spans, longest):
            start = bisect_left(starts, places[start][0])
            stop = bisect_right(stops, places[stop - 1][1])
            first = max(start, bisect_left(starts, places[first][0]))
            if stop - max(first, start + setting.window) > 0:
                passes.add((start, stop, first))
        documents.append((again, sorted(passes)))  # without a pass it has no key tokens, which its entry says
    if not any(passes for _, passes in documents):
        raise CorpusError(
            f"no scored token has more than {setting.window:,} tokens before it, so that no short context is shorter "
            "than the long one; give longer lengths or a smaller --key-window"
        )
    check_vocabulary(evaluator, [document for document, _ in documents])
    measurement = _KeyTokenMeasurement(documents, prefix, setting, longest)
    described, longest_pass = describe(evaluator), max(measurement.passes)
    if (reach := described.extended_length or described.context_length) < longest_pass:
        warn_caller(
            f"the evaluator {short(evaluator.name_or_path)!r} is for {reach:,} tokens and reads {longest_pass:,}; what "
            "it finds may be wrong: save it with a method (`rope-ext patch`) and give that folder"
        )
    return RunPlan(measurement, plan.data, chunk=plan.chunk, offload_cache=plan.offload_cache)


def _passes(spans: Iterable[Span], longest: int) -> list[_Pass]:
    """The passes of the longest length, up to the last token that each scores."""
    return [(max(span.start, 0), span.score_to, span.score_from) for span in spans if span.context == longest]


def _keys_of_run(run: Run[_KeyTokens], plan: RunPlan[_KeyTokenMeasurement]) -> KeyRanges:
    """Return the key tokens that a complete run of a plan found; a run in a folder keeps them there."""
    (result,) = run.results
    name = Path(run.settings["model"]).name or "model"
    digests = {document.name: _text_digest(document) for document, _ in plan.measurement.documents}
    keys = KeyRanges(
        name if result.method is None else f"{name} ({label(result.method)})",
        result.setting,
        {digests[each.name]: (each.name, each.ranges) for each in result.documents},
    )
    if run.path is not None:
        keys.write(run.path / _KEYS_FILE)
    return keys


def score_key_tokens(
    plan: RunPlan[PerplexityMeasurement], question: Perplexity, measure_with: MeasureWith
) -> RunPlan[PerplexityMeasurement]:
    """Return the plan with LongPPL measured over the key tokens that `question.keys_by` names: a file, or a model.

    `measure_with` measures a plan with the model of this name; where it returns None, the plan comes back as it is.
    Warns of documents in which no key tokens were looked for.
    """
    source = question.keys_by
    assert source is not None
    if os.path.isfile(source):  # noqa: PTH113 - Path.is_file raises where a name is too long for a path
        keys = read_keys(source, question.key_window)
    else:
        plans: list[RunPlan[_KeyTokenMeasurement]] = []

        def make(evaluator: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RunPlan[_KeyTokenMeasurement]:
            plans.append(_plan_keys(evaluator, tokenizer, plan, question.key_window))
            return plans[0]

        run = measure_with(source, make)
        if run is None:
            return plan
        keys = _keys_of_run(run, plans[0])
    read = plan.measurement.plan
    masks = [keys.mask(document) for document, _ in read.documents]
    unknown = [document.name for document, _ in read.documents if _text_digest(document) not in keys.documents]
    if 0 < len(unknown) < len(masks):  # of no document at all is an error of the measurement
        warn_caller(
            f"{len(unknown):,} of {len(masks):,} documents were not searched for key tokens, {unknown[0]!r} for one: "
            "LongPPL is that of the others; find keys in all of them with --keys-by MODEL"
        )
    found_by = f"{short(printable(keys.evaluator))}: {keys.setting}"
    return replace(plan, measurement=PerplexityMeasurement(read, masks, found_by))

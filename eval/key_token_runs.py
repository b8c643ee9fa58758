"""Runs that find the key tokens of documents with an evaluator model, see `key_tokens.py`."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, short, warn_caller
from rope_ext_hf.eval.key_tokens import (
    KeyRanges,
    KeySetting,
    Pass,
    Range,
    character_spans,
    check_ranges,
    key_setting,
    keys_of_document,
    merged,
    text_digest,
)
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.reading.documents import Document, Tokens
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, check_vocabulary, prefix_token, tokenize
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import Measurement, Run, RunKind, RunPlan, register_run_kind
from rope_ext_hf.runs.labels import Method, label
from rope_ext_hf.runs.tables import length_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEYS_FILE = "keys.json"


class _DocumentKeys(NamedTuple):
    """One document's key tokens: how many tokens were compared, how many of them are key tokens, and where."""

    name: str
    compared: int
    keys: int
    ranges: tuple[Range, ...]

    def to_record(self) -> list[Any]:
        return list(self[1:])


@dataclass(frozen=True)
class _KeyTokens:
    """The finds of an evaluator; `compared` tokens were read with a long and with a short context."""

    method: Method
    setting: KeySetting
    length: int
    compared: int
    keys: int
    documents: tuple[_DocumentKeys, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"documents": [document._asdict() for document in self.documents]}


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
                return _DocumentKeys(item, compared, keys, check_ranges(ranges))
        raise ValueError(f"expected [compared, keys, ranges], got {short(repr(value))}")

    def result(
        self, method: Method, setting: KeySetting, cell: Cell, values: Sequence[_DocumentKeys], costs: Sequence[Cost]
    ) -> _KeyTokens:
        compared, keys = sum(value.compared for value in values), sum(value.keys for value in values)
        return _KeyTokens(method, setting, int(cell[0]), compared, keys, tuple(values))

    def rows(self, run: Run[_KeyTokens]) -> Iterable[Sequence[Any]]:
        return ([result.length, result.compared, result.keys] for result in run.results)

    def table(self, run: Run[_KeyTokens], *, detailed: bool = False) -> Table:
        view = length_table(run, "Key tokens by context length", str(run.results[0].setting), "evaluator")
        for result in run.results:
            view.add_row(Text(label(result.method)), Text(f"{result.keys:,} of {result.compared:,}"))
        return view


class _KeyTokenMeasurement(Measurement):
    """The key tokens among those that a perplexity run scores, of which `length` is the longest length.

    The documents, as the evaluator's tokenizer cuts them, have passes (start, stop, first): tokens start to stop are
    read, after `prefix` if there is one, and those from `first` on may be key tokens.
    """

    kind = "keys"

    def __init__(
        self, documents: Sequence[tuple[Tokens, Sequence[Pass]]], prefix: int | None, setting: KeySetting, length: int
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

    def cell_fingerprints(self) -> Mapping[Cell, str]:
        digest = hashlib.sha256(repr((self.prefix, self.setting)).encode())
        for document, passes in self.documents:
            digest.update(document.ids.numpy().tobytes() + text_digest(document).encode() + repr(passes).encode())
        return {(self.length,): digest.hexdigest()}

    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None]
    ) -> Iterator[tuple[Cell, _DocumentKeys, Cost]]:
        document, passes = self.documents[item]
        compared, found = set[int](), set[int]()
        for each in passes:
            of_pass = keys_of_document(scorer, document.ids, [each], self.prefix, self.setting, self.length)
            compared |= of_pass[0]
            found |= of_pass[1]
            progress(sum(self._sizes(*each)))
        characters = character_spans(document)
        ranges = merged(characters[token] for token in found)
        yield cells[0], _DocumentKeys(document.name, len(compared), len(found), ranges), scorer.take_cost()


def plan_keys(
    evaluator: PreTrainedModel,  # may be on the meta device
    plan: EvalPlan,
    *,
    tokenizer: PreTrainedTokenizerBase,  # of the evaluator
    data: str,
    window: int | None = None,  # see `key_setting`
    **reading: Any,
) -> RunPlan[_KeyTokenMeasurement]:
    """Plan to find the key tokens among those that a plan scores at its longest length, before weights are read."""
    longest = plan.lengths[-1]
    setting = key_setting(longest, window)
    prefix = prefix_token(tokenizer, None)
    documents: list[tuple[Tokens, list[Pass]]] = []
    for document, spans in plan.documents:
        places = character_spans(document)
        (read,) = tokenize([Document(document.name, document.text)], tokenizer)
        characters = character_spans(read)
        starts, stops = ([place[end] for place in characters] for end in (0, 1))
        passes = set[Pass]()
        for start, stop, first in _passes(spans, longest):
            start = bisect_left(starts, places[start][0])
            stop = bisect_right(stops, places[stop - 1][1])
            first = max(start, bisect_left(starts, places[first][0]))
            if stop - max(first, start + setting.window) > 0:
                passes.add((start, stop, first))
        documents.append((read, sorted(passes)))  # without a pass it has no key tokens, which its entry says
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
    return RunPlan(measurement, data, **reading)


def _passes(spans: Iterable[Span], longest: int) -> list[Pass]:
    """The passes of the longest length, up to the last token that each scores."""
    return [(max(span.start, 0), span.score_to, span.score_from) for span in spans if span.context == longest]


def find_keys(scorer: TokenScorer, plan: EvalPlan) -> tuple[list[Tensor], KeySetting]:
    """The key tokens that a plan scores at its longest length, (tokens,) bool of each document, and their setting."""
    longest = plan.lengths[-1]
    setting, masks = key_setting(longest), []
    for document, spans in plan.documents:
        _, found = keys_of_document(scorer, document.ids, _passes(spans, longest), plan.prefix, setting, longest)
        masks.append(torch.zeros(len(document.ids), dtype=torch.bool))
        masks[-1][sorted(found)] = True
    return masks, setting


def keys_of_run(run: Run[_KeyTokens], plan: RunPlan[_KeyTokenMeasurement], *, write: bool = True) -> KeyRanges:
    """The key tokens that a complete run of a plan found; `write` puts them into the run's folder, if it has one."""
    (result,) = run.results
    name = Path(run.settings["model"]).name or "model"
    digests = {document.name: text_digest(document) for document, _ in plan.measurement.documents}
    found = KeyRanges(
        name if result.method is None else f"{name} ({label(result.method)})",
        result.setting,
        {digests[each.name]: (each.name, each.ranges) for each in result.documents},
    )
    if write and run.path is not None:
        found.write(run.path / KEYS_FILE)
    return found


def mark_keys(plan: RunPlan[PerplexityMeasurement], keys: KeyRanges) -> RunPlan[PerplexityMeasurement]:
    """The same plan, with LongPPL measured over these key tokens; warns of documents that were not searched for any."""
    read = plan.measurement.plan
    masks = [keys.mask(document) for document, _ in read.documents]
    unknown = [document.name for document, _ in read.documents if text_digest(document) not in keys.documents]
    if 0 < len(unknown) < len(masks):  # of no document at all is an error of the measurement
        warn_caller(
            f"{len(unknown):,} of {len(masks):,} documents were not searched for key tokens, {unknown[0]!r} for one: "
            "LongPPL is that of the others; find keys in all of them with --keys-by MODEL"
        )
    return replace(plan, measurement=PerplexityMeasurement(read, masks, keys.described))

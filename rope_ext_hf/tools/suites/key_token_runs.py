"""Runs in which an evaluator model finds key tokens, and the scoring of LongPPL: perplexity of key tokens.

Key tokens are those that a model predicts well only with a long context; see `key_tokens`.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import CorpusError, printable, short, warn_caller
from rope_ext_hf.eval.measurement_options import MeasureWith, Perplexity
from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import with_prefix
from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.reading.text.tokenizing import check_vocabulary, prefix_tokens, tokenize, warn_of_unknown
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, label
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import length_table
from rope_ext_hf.tools.suites.key_tokens import (
    KeyRanges,
    KeySetting,
    Range,
    character_spans,
    find_key_tokens,
    key_setting,
    merged,
    parse_ranges,
    read_keys,
    text_digest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_KEYS_FILE = "keys.json"


class _DocumentKeys(NamedTuple):
    """The key tokens that were found in one document: the tokens that a long context helps to predict."""

    name: str
    compared: int  # tokens that were read with a long and with a short context
    keys: int  # key tokens among them
    ranges: tuple[Range, ...]  # characters of the key tokens

    def to_record(self) -> list[Any]:
        return list(self[1:])


@dataclass(frozen=True)
class _KeyTokens(MethodResult):
    """Result of a search: the key tokens that an evaluator model found in all documents."""

    setting: KeySetting
    compared: int  # tokens that were read with a long and with a short context
    keys: int  # key tokens among them
    documents: tuple[_DocumentKeys, ...]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"documents": [document._asdict() for document in self.documents]}


@register_run_kind
class KeyTokenRuns(RunKind):
    """Runs that search documents for key tokens: the tokens that a long context helps to predict.

    There is a single context length, the longest.
    """

    name = "keys"
    setting = KeySetting
    item = "document"
    columns = ("length", "compared_tokens", "key_tokens")

    def parse(self, item: str, value: Any) -> _DocumentKeys:
        match value:
            case [int(compared), int(keys), list(ranges)] if 0 <= keys <= compared < 2**63:
                return _DocumentKeys(item, compared, keys, parse_ranges(ranges))
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


class _Pass(NamedTuple):
    """A long context that the evaluator model reads at once: the tokens `start` to `stop` - 1 of a document.

    Tokens are counted by the evaluator's tokenizer.
    """

    start: int
    stop: int
    first: int  # the first token that may be a key token


class _KeyTokenMeasurement(Measurement):
    """The search for key tokens, those that a long context helps to predict, for LongPPL.

    It searches among the tokens that a perplexity run scores at its longest length.
    """

    kind = "keys"
    by_layer = True

    def __init__(
        self,
        documents: Sequence[tuple[Tokens, Sequence[_Pass]]],
        prefix: tuple[int, ...],  # token ids that are read before a pass, such as BOS
        setting: KeySetting,
        length: int,  # the longest context length
    ) -> None:
        self.documents, self.prefix, self.setting, self.length = documents, prefix, setting, length
        self.items, self.all_cells = [document.name for document, _ in documents], [(length,)]
        self.passes, self.scored = [], 0
        for _, passes in documents:
            for long_pass in passes:
                self.passes += self._sizes(long_pass)
                self.scored += 2 * (long_pass.stop - long_pass.first)

    def _sizes(self, long_pass: _Pass) -> list[int]:
        """Return the number of tokens in a long context, followed by those in each short context cut from it."""
        start, stop, first = long_pass
        window, stride = self.setting.window, self.setting.stride
        windows = max(0, -(-(stop - max(first, start + window)) // stride))
        return [stop - start, *[min(window + stride, stop - start)] * windows]

    @property
    def computed_by(self) -> tuple[str, ...]:
        return (*super().computed_by, KeySetting.__module__)

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr((self.prefix, self.setting)).encode()
        for document, passes in self.documents:
            yield document.ids.numpy().tobytes() + text_digest(document).encode() + repr(passes).encode()

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> Iterator[Reading]:
        """Yield the long contexts of a document; the last one gives the value of the document, for all of them."""
        passes = self.documents[item][1]
        if cells and not passes:
            yield Reading(item, tuple(cells), 0)
        for number, long_pass in enumerate(passes if cells else ()):
            is_last = number == len(passes) - 1
            yield Reading(item, tuple(cells) if is_last else (), sum(self._sizes(long_pass)), long_pass)

    def score(self, scorer: TokenScorer, reading: Reading) -> list[_DocumentKeys]:
        document, passes = self.documents[reading.item]
        long_pass = reading.what
        if not passes or long_pass == passes[0]:
            self._compared, self._keys = set[int](), set[int]()  # of tokens; passes may overlap
        if long_pass is not None:
            compared, keys = self._search(scorer, document.ids, long_pass)
            self._compared |= compared
            self._keys |= keys
        if not reading.cells:
            return []
        spans = character_spans(document)
        ranges = merged(spans[token] for token in self._keys)
        return [_DocumentKeys(document.name, len(self._compared), len(self._keys), ranges)]

    def _search(self, scorer: TokenScorer, ids: Any, long_pass: _Pass) -> tuple[set[int], set[int]]:
        """Return the tokens of one long context that were examined, and the key tokens among them.

        Tokens are examined if they have both a loss with long context and one with short context. Both sets hold places
        of tokens in the document.
        """
        start, stop, first = long_pass
        # At the start of a document the prefix is read before it; further on it replaces the first tokens of the pass.
        shift = start or -len(self.prefix)
        read = with_prefix(ids, shift, stop, self.prefix)
        scored = max(first - shift, len(self.prefix), 1)
        is_key = find_key_tokens(scorer, read, scored, self.setting, prefix=self.prefix, length=self.length)
        compared = set(range(shift + max(scored, self.setting.window), stop))
        return compared, {shift + scored + place for place in is_key.nonzero()[:, 0].tolist()}


def _plan_keys(
    evaluator: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: RunPlan[PerplexityMeasurement],
    window: int | None,
) -> RunPlan[_KeyTokenMeasurement]:
    """Plan a run that searches for key tokens among the tokens that a perplexity run scores at its longest length.

    Args:
        evaluator: the model that finds them; it may be on the meta device.
        tokenizer: the evaluator's.
        plan: the plan of the perplexity run.
        window: see `key_setting`.

    Raises:
        CorpusError: no token has more tokens before it than a short context has.
    """
    text = plan.measurement.plan
    longest = text.lengths[-1]
    setting = key_setting(longest, window)
    documents = []
    for document, spans in text.documents:
        (retokenized,) = tokenize([Document(document.name, document.text)], tokenizer)
        # A document without a pass has no key tokens. It stays, so that the file of keys says that it was searched.
        documents.append((retokenized, _passes(document, retokenized, spans, longest, setting.window)))
    if not any(passes for _, passes in documents):
        raise CorpusError(
            f"no scored token has more than {setting.window:,} tokens before it, so that no short context is shorter "
            "than the long one; give longer lengths or a smaller --key-window"
        )
    check_vocabulary(evaluator, [document for document, _ in documents])
    warn_of_unknown([document for document, _ in documents], tokenizer)
    measurement = _KeyTokenMeasurement(documents, prefix_tokens(tokenizer, None), setting, longest)
    _warn_of_reach(evaluator, max(measurement.passes))
    return RunPlan(measurement, plan.data, chunk=plan.chunk, offload_cache=plan.offload_cache)


def _passes(document: Tokens, retokenized: Tokens, spans: Iterable[Span], longest: int, window: int) -> list[_Pass]:
    """Return the long contexts that the evaluator must read to cover the text of the longest spans.

    A span is a text that the measured model reads at once. `document` and `retokenized` are the same document in tokens
    of the measured model and of the evaluator. A span is covered up to the last token that it scores. A context in
    which no token has a whole `window` before it is left out.
    """
    characters = character_spans(document)
    starts, stops = zip(*character_spans(retokenized), strict=True) if len(retokenized.ids) else ((), ())
    passes = set[_Pass]()
    for span in spans:
        if span.context != longest:
            continue
        start = bisect_left(starts, characters[max(span.start, 0)][0])
        stop = bisect_right(stops, characters[span.score_to - 1][1])
        first = max(start, bisect_left(starts, characters[span.score_from][0]))
        if stop - max(first, start + window) > 0:
            passes.add(_Pass(start, stop, first))
    return sorted(passes)


def _warn_of_reach(evaluator: PreTrainedModel, longest_pass: int) -> None:
    """Warn if the evaluator model is to read longer inputs than it is made for."""
    described = describe(evaluator)
    reach = described.extended_length or described.context_length
    if reach < longest_pass:
        warn_caller(
            f"the evaluator {short(evaluator.name_or_path)!r} is made for {reach:,} tokens and reads {longest_pass:,}, "
            "so the key tokens may be wrong: save it with a method (`rope-ext patch`) and give that folder"
        )


def _keys_of_run(run: Run[_KeyTokens], plan: RunPlan[_KeyTokenMeasurement]) -> KeyRanges:
    """Return the key tokens that a complete run found; if the run has a folder, write them there, too."""
    (result,) = run.results
    name = Path(run.settings["model"]).name or "model"
    digests = {document.name: text_digest(document) for document, _ in plan.measurement.documents}
    keys = KeyRanges(
        name if result.method is None else f"{name} ({label(result.method)})",
        result.setting,
        {digests[document.name]: (document.name, document.ranges) for document in result.documents},
    )
    if run.path is not None:
        keys.write(run.path / _KEYS_FILE)
    return keys


def score_key_tokens(
    plan: RunPlan[PerplexityMeasurement], options: Perplexity, measure_with: MeasureWith
) -> RunPlan[PerplexityMeasurement]:
    """Return the plan of a perplexity run extended so that LongPPL, perplexity over key tokens alone, is measured, too.

    `options.keys_by` is a file of key tokens, or a model that finds them: `measure_with` measures a plan with the
    model of this name. Where that returns None, as in a dry run, the plan is returned unchanged. Warns where key tokens
    were not searched for in some documents.
    """
    source = options.keys_by
    assert source is not None
    if os.path.isfile(source):  # noqa: PTH113 - Path.is_file raises where a name is too long for a path
        keys = read_keys(source, options.key_window)
    else:
        plans: list[RunPlan[_KeyTokenMeasurement]] = []

        def make(evaluator: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RunPlan[_KeyTokenMeasurement]:
            plans.append(_plan_keys(evaluator, tokenizer, plan, options.key_window))
            return plans[0]

        run = measure_with(source, make)
        if run is None:
            return plan
        keys = _keys_of_run(run, plans[0])
    text = plan.measurement.plan
    masks = [keys.mask(document) for document, _ in text.documents]
    unknown = [document.name for document, _ in text.documents if text_digest(document) not in keys.documents]
    if 0 < len(unknown) < len(masks):  # where all are unknown, the measurement raises an error
        warn_caller(
            f"key tokens were not searched for in {len(unknown):,} of {len(masks):,} documents, such as "
            f"{unknown[0]!r}: LongPPL is that of the others. Find the keys of all documents with --keys-by MODEL"
        )
    origin = f"{short(printable(keys.evaluator))}: {keys.setting}"
    return replace(plan, measurement=plan.measurement.with_keys(masks, origin))

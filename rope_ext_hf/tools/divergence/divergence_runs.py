"""Runs that compare the distributions of a model with those of an earlier run, whose last hidden states are stored.

Both models read the same tokens. At each scored token, the distribution Q of the model is compared with P of the run:
by the KL divergence from P to Q, and by whether both have the same likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, FileError, MethodError, listed, printable, short
from rope_ext_hf.eval.spans.span_measurement import SpanMeasurement, SpanRuns, scored_parts
from rope_ext_hf.files.whole import json_digest
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.protocols import PROTOCOLS, Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import check_prompts
from rope_ext_hf.reading.text.tokenizing import check_vocabulary
from rope_ext_hf.reading.through.head_losses import HeadLosses
from rope_ext_hf.runs.conclusions.conclusions import Conclusion
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, label
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure, exponential, perplexity_text
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.kinds import register_run_kind
from rope_ext_hf.runs.measurement import Cell, Listener, Reading, Record, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import BEST_NOTE, beyond_mark, length_table
from rope_ext_hf.tools.divergence.divergence_options import Divergence
from rope_ext_hf.tools.divergence.divergences import divergences
from rope_ext_hf.tools.divergence.states_files import token_names
from rope_ext_hf.tools.divergence.stored_states import StoredStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RECORDED = 0.1
"""The nats per token by which the loss of the stored states may differ from the one that their run recorded.

Rounding to float16 and another device change it by some thousandths; other states, or another head, by whole nats.
"""


@dataclass(frozen=True)
class DivergenceSetting:
    """The settings with which distributions were compared.

    Attributes:
        reference: the model whose run is compared with, and its method, in words.
        reference_run: a digest of everything that the numbers of that run depend on.
        states: the dtype in which its last hidden states are stored, as the run states it.
        protocol: the name of the protocol by which the run read its text.
        targets, stride: see `rope_ext_hf.reading.protocols.ProtocolOptions`.
        bos: whether a prefix, such as BOS, was read.
        left_out: the number of documents that were too short.
    """

    reference: str
    reference_run: str
    states: str
    protocol: str
    targets: int
    stride: int
    bos: bool
    left_out: int


class DocumentDivergence(NamedTuple):
    """The divergence of the distributions over one document at one context length.

    Attributes:
        name: the name of the document.
        kl: KL(P || Q) in nats, summed over the scored tokens; P is the distribution of the stored run.
        same: number of scored tokens for which P and Q have the same likeliest token.
        nats: the loss of the model, summed over the scored tokens.
        reference_nats: the loss of the stored run, computed from its states.
        tokens: number of scored tokens.
        spans: number of spans (pieces of text of one context length) that were read.
    """

    name: str
    kl: float
    same: int
    nats: float
    reference_nats: float
    tokens: int
    spans: int

    def plus(self, other: DocumentDivergence) -> DocumentDivergence:
        """Return the divergence over this part of a document and another part of it, together."""
        return DocumentDivergence(
            self.name,
            kl=self.kl + other.kl,
            same=self.same + other.same,
            nats=self.nats + other.nats,
            reference_nats=self.reference_nats + other.reference_nats,
            tokens=self.tokens + other.tokens,
            spans=self.spans + other.spans,
        )

    def to_record(self) -> list[float]:
        """Return all fields but the name as a list for JSON."""
        return list(self[1:])


@dataclass(frozen=True)
class DivergenceResult(MethodResult):
    """The divergence of a model's distributions from those of a stored run at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the model's method, or None for the model as loaded.
        length: context length in tokens.
        setting: the stored run, and how its text was read.
        kl: KL(P || Q) in nats, as a mean over tokens; P is the distribution of the stored run, Q that of the model.
        kl_low, kl_high: its 95% confidence interval over documents; None with fewer than three.
        same_likeliest: share of tokens for which both have the same likeliest token, as greedy decoding would take.
        same_likeliest_low, same_likeliest_high: its 95% confidence interval over documents.
        perplexity: that of the model.
        reference_perplexity: that of the stored run, computed from its states.
        tokens: number of scored tokens.
        spans: number of spans (pieces of text of this length) that were read.
        nonfinite: names of the documents whose divergence is not finite.
        documents: the divergence over each document.
        tokens_per_second: speed of reading spans of this length; None where it was not timed. This field and the next
            one are left out of comparisons by ==.
        gpu_bytes: peak memory on the GPU in bytes; None without a GPU.
    """

    setting: DivergenceSetting
    kl: float
    kl_low: float | None
    kl_high: float | None
    same_likeliest: float
    same_likeliest_low: float | None
    same_likeliest_high: float | None
    perplexity: float
    reference_perplexity: float
    tokens: int
    spans: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentDivergence, ...]
    tokens_per_second: float | None = field(default=None, compare=False)
    gpu_bytes: int | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, with a dict for each document."""
        return super().to_dict() | {"documents": [document._asdict() for document in self.documents]}


@register_run_kind
class DivergenceRuns(SpanRuns):
    """The kind of run that compares distributions with those of a stored run.

    Each document gets a value per cell; in these runs a cell is a context length in tokens.
    """

    name = "divergence"
    asks = "How close is {model} to the stored run at {inputs}?"
    setting = DivergenceSetting
    columns = (
        "length",
        "kl",
        "kl_low",
        "kl_high",
        "same_likeliest",
        "same_likeliest_low",
        "same_likeliest_high",
        "perplexity",
        "reference_perplexity",
        "tokens",
        "spans",
        "tokens_per_second",
        "gpu_bytes",
    )

    def fit(self, options: Divergence, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        """Return the options and the methods, fitted to the longest length of the stored run."""
        lengths = options.lengths or [int(length) for length, *_ in read_run(options.against).settings["cells"]]
        _, resolved = super().fit(replace(options, lengths=lengths), model, methods)
        return options, resolved

    def plan(
        self, options: Divergence, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return the plan: the tokens that the stored run has read, see `RunKind.plan`."""
        states = StoredStates.open(Path(options.against), options.against_method)
        lengths = set(states.plan.lengths if options.lengths is None else options.lengths)
        if unknown := sorted(lengths - set(states.plan.lengths)):
            raise MethodError(
                f"the run in {options.against!r} has no length {unknown[0]:,}; it has "
                f"{listed(f'{length:,}' for length in states.plan.lengths)}"
            )
        _check_model(states, model, tokenizer)
        measurement = _DivergenceMeasurement(states, lengths)
        check_prompts(model, (), max(measurement.passes))
        return RunPlan(measurement, states.run.settings["data"], **settings)

    def parse(self, item: str, value: Any) -> DocumentDivergence:
        """Return the divergence over a document from the JSON value in a journal's line; ValueError if it is not one.

        `item` is the name of the document.
        """
        match value:
            case [
                int() | float() as kl,
                int(same),
                int() | float() as nats,
                int() | float() as reference_nats,
                int(tokens),
                int(spans),
            ] if 0 <= same <= tokens < 2**63 and 1 <= spans <= tokens and not isinstance(kl, bool):
                return DocumentDivergence(item, float(kl), same, float(nats), float(reference_nats), tokens, spans)
        raise ValueError(
            "expected a divergence [KL in nats, tokens with the same likeliest token, nats, nats of the stored run, "
            f"tokens, spans], got {short(repr(value))}"
        )

    def result(
        self,
        method: Method,
        setting: DivergenceSetting,
        cell: Cell,
        values: Sequence[DocumentDivergence],
        costs: Sequence[Cost],
    ) -> DivergenceResult:
        """Return the result for one length from the divergences over its documents."""
        names, kls, same, nats, reference_nats, tokens, spans = zip(*values, strict=True)
        kl, share = estimate(kls, tokens, ends=(0.0, math.inf)), estimate(same, tokens, ends=(0.0, 1.0))
        cost = reduce(Cost.plus, costs, Cost())
        return DivergenceResult(
            method=method,
            length=int(cell[0]),
            setting=setting,
            kl=kl.value,
            kl_low=kl.low,
            kl_high=kl.high,
            same_likeliest=share.value,
            same_likeliest_low=share.low,
            same_likeliest_high=share.high,
            perplexity=exponential(math.fsum(nats) / sum(tokens)),
            reference_perplexity=exponential(math.fsum(reference_nats) / sum(tokens)),
            tokens=sum(tokens),
            spans=sum(spans),
            nonfinite=tuple(name for name, kl in zip(names, kls, strict=True) if not math.isfinite(kl)),
            documents=tuple(values),
            tokens_per_second=cost.tokens / cost.seconds if cost.seconds else None,
            gpu_bytes=cost.peak or None,
        )

    def table(self, run: Run[DivergenceResult], *, detailed: bool = False) -> Table:
        """Return a table with four rows per method (divergence, agreement, two perplexities) and a column per length.

        Args:
            run: has at least one result.
            detailed: add a second line with the 95% confidence interval over documents, where there is one.
        """
        [measure] = self.measures(run)
        stars = {length: {*run.findings.starred(measure, length)} for length in run.lengths}
        setting = run.results[0].setting
        notes = [_scored_text(run.results[0])]
        if any(stars.values()):
            notes.append(BEST_NOTE)
        if detailed and any(result.kl_low is not None for result in run.results):
            notes.append("in parentheses: 95% confidence interval over documents")
        title = (
            f"Divergence from {short(printable(setting.reference))} by context length; the model is for {run.meant_for}"
        )
        view = length_table(run, title, "\n".join(notes), "method", "")
        view.columns[1].justify = "left"
        for name, row in run.by_label.items():
            by_length = {result.length: result for result in row}
            rows: dict[str, Callable[[DivergenceResult], Text]] = {
                "KL, nats per token": lambda r: _kl_cell(run, r, stars[r.length], detailed),
                "same likeliest token": lambda r: _share_cell(r, detailed),
                "perplexity": lambda r: Text(perplexity_text(r.perplexity)),
                "perplexity of the stored run": lambda r: Text(perplexity_text(r.reference_perplexity)),
            }
            for number, (what, cell) in enumerate(rows.items()):
                cells = [cell(by_length[length]) if length in by_length else Text("") for length in run.lengths]
                view.add_row(Text("" if number else name), what, *cells, end_section=number == len(rows) - 1)
        return view

    def measures(self, run: Run[DivergenceResult]) -> Sequence[Measure]:
        """Return the KL divergence as a measure, by which methods are compared: the lower, the closer to the run."""

        def kls(results: Sequence[DivergenceResult]) -> list[tuple[float, float]]:
            return [(d.kl, float(d.tokens)) for result in results for d in result.documents]

        protocol = PROTOCOLS.get(run.results[0].setting.protocol)
        of_positions = protocol is not None and protocol.one_pass
        unit, items = "nats per token", run.items(kls)
        return [
            Measure("KL divergence", unit, Evidence.DIVERGENCE, False, items, of_positions=of_positions, digits=".3g")
        ]

    def conclude(self, run: Run[DivergenceResult]) -> Conclusion:
        """Return the conclusion: how close the first method is to the stored run, and which method is the closest."""
        first = next(iter(run.by_label.values()))
        result = max(first, key=lambda result: result.length)
        conclusion = super().conclude(run)
        name = "the unpatched model" if result.key == run.findings.loaded else label(result.method)
        reference = short(printable(result.setting.reference))
        kl = Estimate(result.kl, result.kl_low, result.kl_high, len(result.documents)).text(_number)
        sentence = (
            f"At {result.length:,} tokens, the KL divergence of {name} from {reference} is {kl} nats per token, and "
            f"both have the same likeliest token for {result.same_likeliest:.1%} of {result.tokens:,} tokens."
        )
        several = len(run.by_label) > 1
        return replace(conclusion, sentences=(sentence, *conclusion.sentences) if several else (sentence,))


class _Checking(Listener):
    """A listener that compares the losses of the stored run with those that it recorded, before a value is kept."""

    def __init__(self, measurement: _DivergenceMeasurement) -> None:
        self._measurement = measurement

    def measured(self, record: Record) -> None:
        self._measurement.check_recorded(record)


class _DivergenceMeasurement(SpanMeasurement[DocumentDivergence]):
    """The measurement of the divergence from the distributions of a stored run; an item is a document.

    Args:
        states: the stored states of one method of the run.
        lengths: the lengths of the run at which distributions are compared.
    """

    kind = "divergence"
    takes_outputs = True

    def __init__(self, states: StoredStates, lengths: Iterable[int]) -> None:
        wanted = set(lengths)
        spans_of_items = [tuple(span for span in spans if span.length in wanted) for _, spans in states.plan.documents]
        # the numbers that the documents have in the run, of those that are read at these lengths
        self._numbers = [number for number, spans in enumerate(spans_of_items) if spans]
        documents = tuple((states.plan.documents[number][0], spans_of_items[number]) for number in self._numbers)
        super().__init__(replace(states.plan, lengths=tuple(sorted(wanted)), documents=documents))
        self.weight_bytes = states.head_size
        self.scored *= 2  # each goes through two heads
        self.states = states
        setting, options = states.run.settings, self.plan.options
        model = Path(setting["model"]).name or "model"
        self.setting = DivergenceSetting(
            reference=f"{model} in {setting['dtype']} ({states.label})",
            reference_run=json_digest([setting | {"model": ""}, states.method]),
            states=setting["setting"]["states"],
            protocol=self.plan.protocol.name,
            targets=options.targets,
            stride=options.stride,
            bos=bool(self.plan.prefix),
            left_out=self.plan.left_out,
        )
        self._head: HeadLosses | None = None
        self.listeners = [_Checking(self)]

    @property
    def computed_by(self) -> tuple[str, ...]:
        return (*super().computed_by, divergences.__module__, StoredStates.__module__, token_names.__module__)

    def digested(self, cell: Cell) -> Iterable[bytes]:
        """Return the bytes that identify what is read at one context length, and the stored run, for a digest."""
        yield f"{self.setting.reference_run} {self.plan.prefix}".encode()
        for document, spans in self.plan.documents:
            yield document.ids.numpy().tobytes()
            yield repr([span for span in spans if span.length == cell[0]]).encode()

    def score_together(self, scorer: TokenScorer, readings: Sequence[Reading]) -> list[Sequence[DocumentDivergence]]:
        """Read some passes together, and return the divergences over their spans, see `SpanMeasurement.score_together`.

        Raises:
            UnsupportedModelError: the model has no last hidden states, because it is read whole.
        """

        def use(number: int, begin: int, outputs: Tensor, targets: Tensor) -> list[tuple[Span, Tensor]]:
            item, one_pass = readings[number].item, readings[number].what
            head = scorer.head
            reference = self._reference_head(outputs.device, head.head_bytes)
            sums = []
            for span, part, first in scored_parts(one_pass, begin, len(outputs)):
                count = part.stop - part.start
                rows = self.states.rows(self._numbers[item], span, first, first + count)
                rows = rows.to(outputs.device).to(reference.dtype)
                columns = divergences(reference, rows, head, outputs[part], targets[part])
                sums.append((span, columns.cpu().double().sum(0)))
            return sums

        results = scorer.outputs_together(self.texts(readings), use, length=readings[0].what.context)
        values: list[Sequence[DocumentDivergence]] = []
        for reading, parts in zip(readings, results, strict=True):
            item, one_pass = reading.item, reading.what
            sums = {span: torch.zeros(4, dtype=torch.float64) for span in one_pass.spans}
            for span, columns in (pair for pairs in parts for pair in pairs):
                sums[span] += columns
            values.append([self._value(item, span, sums[span]) for span in one_pass.spans])
        return values

    def check_recorded(self, record: Record) -> None:
        """Raise FileError if the stored states do not give the loss that the stored run recorded: they are damaged."""
        value, length = cast("DocumentDivergence", record.value), int(record.cell[0])
        recorded = self.states.nats[self._numbers[record.item], length]
        if abs(value.reference_nats - recorded) > _RECORDED * value.tokens:
            losses = f"{value.reference_nats / value.tokens:.3f} against {recorded / value.tokens:.3f} nats per token"
            raise FileError(
                f"the states stored in {str(self.states.run.path)!r} do not give the loss that the run recorded "
                f"for {short(printable(value.name))!r} at {length:,} tokens ({losses}): they are of another model "
                "or text; measure the run again with another --out"
            )

    def _value(self, item: int, span: Span, sums: Tensor) -> DocumentDivergence:
        """Return the divergence over one span; `sums` are the columns of `divergences`, summed over its targets."""
        kl, same, reference_nats, nats = sums.tolist()
        kl = 0.0 if kl < 0 else kl  # a divergence is never negative, but the rounding of a tiny one may be
        tokens = span.score_to - span.score_from
        return DocumentDivergence(
            self.items[item], kl=kl, same=round(same), nats=nats, reference_nats=reference_nats, tokens=tokens, spans=1
        )

    def _reference_head(self, device: torch.device, head_bytes: int) -> HeadLosses:
        """Return the head of the stored run on a device; it is read from the disk the first time."""
        if self._head is None or self._head.head.weight.device != device:
            self._head = self.states.head(device, head_bytes)
        self._head.head_bytes = head_bytes
        return self._head


def _check_model(states: StoredStates, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise an error if a model cannot be compared with a stored run, because its tokens are others."""
    documents = [document for document, _ in states.plan.documents]
    head: Any = model.get_output_embeddings()
    folder = str(states.run.path)
    vocabulary = states.vocabulary if head is None else getattr(head, "out_features", head.weight.shape[0])
    if vocabulary != states.vocabulary:
        raise CorpusError(
            f"the model has a vocabulary of {vocabulary:,} entries, and the run in {folder!r} one of "
            f"{states.vocabulary:,}: their distributions cannot be compared"
        )
    check_vocabulary(model, documents)
    names = token_names(model, tokenizer, states.plan)
    if names and states.names and names != states.names:
        raise CorpusError(
            f"the tokens of this model are others than those of the run in {folder!r}: the same numbers stand for "
            "other text. Compare models with one tokenizer"
        )


def _scored_text(result: DivergenceResult) -> str:
    """Return a line about the tokens that were scored."""
    name = short(printable(result.setting.protocol))
    return f"protocol {name}: {result.tokens:,} tokens in {result.spans} spans at {result.length:,}"


def _kl_cell(run: Run[DivergenceResult], result: DivergenceResult, best: set[str], detailed: bool) -> Text:
    """Return the table cell with the KL divergence of a result, with a star if `best` has its method."""
    if not math.isfinite(result.kl):
        names = f"\n{', '.join(map(printable, result.nonfinite))}" if detailed else ""
        return Text(f"not finite{names}", style="red")
    kl = Estimate(result.kl, result.kl_low, result.kl_high, len(result.documents))
    star = "*" if result.key in best else ""
    interval = kl.line_below(_number) if detailed else ""
    return Text(
        f"{_number(kl.value)}{star}{beyond_mark(run, result)}{interval}",
        style="bold green" if result.key in best else "",
    )


def _share_cell(result: DivergenceResult, detailed: bool) -> Text:
    """Return the table cell with the share of tokens with the same likeliest token."""
    share = Estimate(
        result.same_likeliest, result.same_likeliest_low, result.same_likeliest_high, len(result.documents)
    )
    text = "{:.1%}".format
    return Text(text(share.value) + (share.line_below(text) if detailed else ""))


def _number(nats: float) -> str:
    """Return a divergence with three significant digits."""
    return f"{nats:.3g}" if math.isfinite(nats) else "not finite"

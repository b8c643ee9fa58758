"""Runs that measure perplexity: their results, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import MethodError, capital, printable, short
from rope_ext_hf.eval.measurement_options import DEFAULT_METHODS, LOSS_UNITS, Perplexity, Sweep
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss, PerplexityMeasurement
from rope_ext_hf.eval.spans.span_measurement import SpanRuns
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.pictures.charts import Chart
from rope_ext_hf.plug_ins import needed_plug_in
from rope_ext_hf.reading.protocols import PROTOCOLS, check_lengths, resolve_protocol
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.reading.spans import Setting, prepare
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.runs.chosen_methods import resolve_choice
from rope_ext_hf.runs.conclusions.charts import line_chart
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, method_key
from rope_ext_hf.runs.conclusions.measures import RECENT, Evidence, Measure, exponential, perplexity_text
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate
from rope_ext_hf.runs.kinds import register_run_kind
from rope_ext_hf.runs.measurement import Cell, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import BEST_NOTE, beyond_mark, length_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["PerplexityRuns", "Result", "difference"]

_TOLERANCE = 0.05
"""The share by which a perplexity may be above that of short inputs and still count as reading well."""


@dataclass(frozen=True)
class Result(MethodResult):
    """The loss of a model at one context length, as a mean over tokens.

    Attributes:
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        length: context length in tokens.
        setting: how the text was read.
        loss: nats per token. NaN or infinite if the loss of any span was; `nonfinite` names the documents.
        low, high: the 95% confidence interval of `loss` over documents; None with fewer than three.
        perplexity: exp(loss).
        bits_per_token: the loss in bits per token.
        bits_per_byte: the loss in bits per byte of text; None where token ids were read without a tokenizer, so that
            their text is not known.
        tokens: number of scored tokens.
        spans: number of spans (pieces of text of this length) that were read.
        nonfinite: names of the documents whose loss is not finite.
        documents: the loss of each document.
        longppl: LongPPL, the perplexity of the key tokens alone, whose prediction needs the long context; None if there
            are none.
        longppl_low, longppl_high: its 95% confidence interval over the documents that have key tokens; None with fewer
            than three.
        key_tokens: number of key tokens; None where none were looked for.
        recent_loss: the loss of the same tokens when the model as loaded reads only the last tokens before them, as
            many as its context length has room for; None except for the model as loaded, beyond its context length,
            under a protocol that measures it.
        tokens_per_second: speed of reading spans of this length; None where it was not timed.
        gpu_bytes: peak memory on the GPU in bytes; None without a GPU.
        seconds: time that reading each document took; empty where it was not timed. This field and the two before it
            are left out of comparisons by ==.
    """

    setting: Setting
    # the loss, in several units
    loss: float
    low: float | None
    high: float | None
    perplexity: float
    bits_per_token: float
    bits_per_byte: float | None
    # what it was measured on
    tokens: int
    spans: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentLoss, ...]
    # key tokens
    longppl: float | None = None
    longppl_low: float | None = None
    longppl_high: float | None = None
    key_tokens: int | None = None
    # the same tokens with a short context
    recent_loss: float | None = None
    # speed and memory
    tokens_per_second: float | None = field(default=None, compare=False)
    gpu_bytes: int | None = field(default=None, compare=False)
    seconds: tuple[float, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, with a dict for each document."""
        return super().to_dict() | {"documents": [document._asdict() for document in self.documents]}


def difference(one: Result, other: Result, *, keys: bool = False) -> Estimate:
    """Estimate by how much the loss of one result is higher than that of another, in nats per token.

    Documents are compared one by one.

    Args:
        one, other: results over the same scored tokens; ValueError where they are not.
        keys: compare only the loss of key tokens, whose prediction needs the long context.
    """

    def losses(result: Result) -> dict[str, tuple[float, int]]:
        """Return the loss in nats and the number of tokens of each document, by its name."""
        if keys:
            return {d.name: (d.key_nats, d.key_tokens) for d in result.documents if d.key_tokens}
        return {d.name: (d.nats, d.tokens) for d in result.documents}

    losses_of_one, losses_of_other = losses(one), losses(other)
    counts = {name: count for name, (_, count) in losses_of_one.items()}
    if not counts or counts != {name: count for name, (_, count) in losses_of_other.items()}:
        raise ValueError("only results over the same scored tokens can be compared by document")
    differences = [nats - losses_of_other[name][0] for name, (nats, _) in losses_of_one.items()]
    return estimate(differences, list(counts.values()))


class _Unit(NamedTuple):
    """A unit in which losses are shown.

    Attributes:
        measure: the name of the number, such as "perplexity".
        unit: the unit; empty for a perplexity.
        exponential: true if the number is the exponential of the mean.
        item: a function that returns a document's sum of losses, and the weight that it is divided by.
    """

    measure: str
    unit: str
    exponential: bool
    item: Callable[[DocumentLoss], tuple[float, float]]


_UNITS = {
    "perplexity": _Unit("perplexity", "", True, lambda d: (d.nats, float(d.tokens))),
    "nats": _Unit("loss", "nats per token", False, lambda d: (d.nats, float(d.tokens))),
    "bits": _Unit("loss", "bits per byte", False, lambda d: (d.nats / math.log(2), float(d.bytes))),
}


@register_run_kind
class PerplexityRuns(SpanRuns):
    """The kind of run that measures the perplexity of documents.

    Each document gets a value per cell; in these runs a cell is a context length in tokens.
    """

    name = "perplexity"
    setting = Setting
    units = LOSS_UNITS
    columns = (
        "length",
        "perplexity",
        "perplexity_low",
        "perplexity_high",
        "loss_nats",
        "low_nats",
        "high_nats",
        "bits_per_token",
        "bits_per_byte",
        "tokens",
        "spans",
        "documents",
        "loss_increase_at_context_length_nats",
        "tokens_per_second",
        "gpu_bytes",
        "longppl",
        "longppl_low",
        "longppl_high",
        "key_tokens",
        "recent_loss_nats",
    )

    def fit(self, options: Perplexity, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        """Return the options and the methods; those of a `Sweep` are fitted to each of its lengths."""
        if isinstance(options, Sweep):
            return _fit_sweep(options, model, methods)
        return super().fit(options, model, methods)

    def plan(
        self, options: Perplexity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return the plan: the documents to read, and the spans of text to score, see `RunKind.plan`."""
        return _plan(options, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> DocumentLoss:
        """Return the loss of a document from the JSON value in a journal's line; ValueError if it is not a loss.

        `item` is the name of the document.
        """
        match value:
            case [int() | float() as nats, int(tokens), int(size), int(spans), *rest] if (
                1 <= tokens < 2**63 and 0 <= size < 2**63 and 1 <= spans <= tokens and not isinstance(nats, bool)
            ):
                loss = DocumentLoss(item, float(nats), tokens, size, spans)
                match rest:
                    case []:
                        return loss
                    case [int() | float() as recent]:
                        return loss._replace(recent_nats=float(recent))
                    case [int() | float() as key_nats, int(keys)] if 1 <= keys <= tokens:
                        return loss._replace(key_nats=float(key_nats), key_tokens=keys)
                    case [int() | float() as key_nats, int(keys), int() | float() as recent] if 1 <= keys <= tokens:
                        return loss._replace(key_nats=float(key_nats), key_tokens=keys, recent_nats=float(recent))
        raise ValueError(
            "expected a loss [nats, tokens, bytes, spans], then with key tokens [key nats, key tokens], then where it "
            f"was measured [nats with only the last tokens read]; got {short(repr(value))}"
        )

    def result(
        self, method: Method, setting: Setting, cell: Cell, values: Sequence[DocumentLoss], costs: Sequence[Cost] = ()
    ) -> Result:
        """Return the result for one length from the losses of its documents, in any order.

        `costs` has the time and memory for each; without it, the result has no speed.
        """
        order = sorted(range(len(values)), key=values.__getitem__)
        documents = [values[index] for index in order]
        costs = [costs[index] for index in order] if costs else []
        cost = reduce(Cost.plus, costs, Cost())
        names, nats, tokens, sizes, spans, key_nats, key_tokens, recent_nats = zip(*documents, strict=True)
        loss, low, high, _ = estimate(nats, tokens)
        recent_loss = None
        if all(nats is not None for nats in recent_nats):
            recent_loss = math.fsum(recent_nats) / sum(tokens)
        longppl: list[float | None] = [None, None, None]  # value, and ends of its interval
        if any(key_tokens):
            key_loss = estimate(key_nats, key_tokens)
            ends = (key_loss.value, key_loss.low, key_loss.high)
            longppl = [None if end is None else exponential(end) for end in ends]
        return Result(
            method=method,
            setting=setting,
            length=int(cell[0]),
            loss=loss,
            low=low,
            high=high,
            perplexity=exponential(loss),
            bits_per_token=loss / math.log(2),
            bits_per_byte=math.fsum(nats) / math.log(2) / sum(sizes) if any(sizes) else None,
            tokens=sum(tokens),
            spans=sum(spans),
            nonfinite=tuple(name for name, loss in zip(names, nats, strict=True) if not math.isfinite(loss)),
            documents=tuple(documents),
            longppl=longppl[0],
            longppl_low=longppl[1],
            longppl_high=longppl[2],
            key_tokens=sum(key_tokens) if setting.keys else None,
            recent_loss=recent_loss,
            tokens_per_second=cost.tokens / cost.seconds if cost.seconds else None,
            gpu_bytes=cost.peak or None,
            seconds=tuple(document_cost.seconds for document_cost in costs) if cost.seconds else (),
        )

    def rows(self, run: Run[Result]) -> Iterable[Sequence[Any]]:
        """Return a row of results.csv for each result: its values for the columns that `columns` names."""
        increases: dict[str, float | str] = {}
        for key in run.names:
            increase = loss_increase(run, key)
            increases[key] = "" if increase is None else increase.value
        for result in run.results:
            yield [
                result.length,
                result.perplexity,
                *(None if end is None else exponential(end) for end in (result.low, result.high)),
                result.loss,
                result.low,
                result.high,
                result.bits_per_token,
                result.bits_per_byte,
                result.tokens,
                result.spans,
                len(result.documents),
                increases[result.key],
                result.tokens_per_second,
                result.gpu_bytes,
                result.longppl,
                result.longppl_low,
                result.longppl_high,
                result.key_tokens,
                result.recent_loss,
            ]

    def table(self, run: Run[Result], *, detailed: bool = False) -> Table:
        """Return a table with a row per method and a column per length, in which the best of each column is marked.

        Where there are key tokens, a further column has LongPPL at the longest length.

        Args:
            run: has at least one result.
            detailed: add a second line to each cell, with the interval or the documents whose loss is not finite, and
                have a column of LongPPL for each length.
        """
        measures = self.measures(run)
        loss = next(measure for measure in measures if measure.evidence is Evidence.LOSS)
        stars = {length: {*run.findings.starred(loss, length)} for length in run.lengths}
        longppl_lengths = sorted({result.length for result in run.results if result.key_tokens})
        if not detailed:
            longppl_lengths = longppl_lengths[-1:]
        unit = f" in {loss.unit}" if loss.unit else ""
        title = f"{capital(loss.name)}{unit} by context length; the model is for {run.meant_for}"
        notes = [_scored_text(run.results[0])]
        if note := run.results[0].setting.note:
            notes.append(printable(note))
        if any(stars.values()):
            notes.append(BEST_NOTE)
        if detailed:
            notes.append("in parentheses: 95% confidence interval over documents")
        if longppl_lengths:
            notes.append(f"LongPPL: perplexity of key tokens ({run.results[0].setting.keys})")
        view = length_table(run, title, "\n".join(notes), "method")
        for length in longppl_lengths:
            tokens = next(r.key_tokens for r in run.results if r.length == length and r.key_tokens)
            view.add_column(f"LongPPL\nat {length:,}\n{tokens:,} tokens", justify="right", overflow="fold")
        for name, row in run.by_label.items():
            by_length = {result.length: result for result in row}
            cells = [_loss_cell(run, loss, by_length.get(length), stars[length], detailed) for length in run.lengths]
            cells += [_longppl_cell(by_length.get(length), detailed) for length in longppl_lengths]
            view.add_row(Text(name), *cells)
            if loss.recent and row[0].key == run.findings.loaded:
                view.add_row(*_recent_cells(run, loss, detailed))
        return view

    def chart(self, run: Run[Result]) -> Chart:
        """Return the chart of the loss (not of LongPPL) by context length."""
        loss = next(measure for measure in run.findings.ordered if measure.evidence is Evidence.LOSS)
        return line_chart(run.findings, loss)

    def measures(self, run: Run[Result]) -> Sequence[Measure]:
        """Return the measures: LongPPL if there are key tokens, then perplexity, or the loss in the run's unit."""
        unit = _UNITS[run.unit]
        if run.unit == "bits" and not all(d.bytes for r in run.results for d in r.documents):
            raise _no_bytes()

        def losses(results: Sequence[Result]) -> list[tuple[float, float]]:
            return [unit.item(document) for result in results for document in result.documents]

        def key_losses(results: Sequence[Result]) -> list[tuple[float, float]]:
            documents = [document for result in results for document in result.documents if document.key_tokens]
            return [(document.key_nats, float(document.key_tokens)) for document in documents]

        recent = {
            result.length: [
                unit.item(document._replace(nats=document.recent_nats))
                for document in result.documents
                if document.recent_nats is not None
            ]
            for result in run.results
            if result.recent_loss is not None
        }
        protocol = PROTOCOLS.get(run.results[0].setting.protocol)
        of_positions = protocol is not None and protocol.one_pass
        loss = Measure(
            unit.measure,
            unit.unit,
            Evidence.LOSS,
            False,
            run.items(losses),
            exponential=unit.exponential,
            # other tokens are scored at every length where there is a reference, so that lengths do not compare
            tolerance=_TOLERANCE if unit.exponential and not recent else None,
            of_positions=of_positions,
            recent=recent,
        )
        key_items = run.items(key_losses)
        if not key_items:
            return [loss]
        longppl = Measure(
            "LongPPL", "", Evidence.KEY_TOKENS, False, key_items, exponential=True, of_positions=of_positions
        )
        return [longppl, loss]


def loss_increase(run: Run[Result], key: str) -> Estimate | None:
    """Return how much a method raises the loss on short inputs, in nats per token.

    Short inputs are those of the context length. The result is None for the model as loaded, which is the baseline, or
    where one of the two was not measured at the context length.
    """
    loaded_key = method_key(run.settings["loaded"])
    if key == loaded_key:
        return None
    [patched] = run.by_length.get(key, {}).get(run.context_length, [None])
    [loaded] = run.by_length.get(loaded_key, {}).get(run.context_length, [None])
    return difference(patched, loaded) if patched and loaded else None


def _scored_text(result: Result) -> str:
    """Return a line about the protocol, and about which tokens were scored."""
    setting = result.setting
    left_out = f"; documents too short: {setting.left_out}" if setting.left_out else ""
    protocol = PROTOCOLS.get(setting.protocol)  # None for a protocol of a plug-in that is not installed here
    name = short(printable(setting.protocol))
    if protocol is not None and protocol.same_targets:
        return (
            f"protocol {name}: the same {result.tokens:,} tokens scored at every length, "
            f"the last {setting.targets} of {result.spans} span{'s' * (result.spans != 1)}{left_out}"
        )
    if protocol is not None and protocol.recent:
        return (
            f"protocol {name}: the last {setting.targets} tokens of each length, all lengths from the same beginning; "
            f"{result.spans} beginning{'s' * (result.spans != 1)}{left_out}"
        )
    tokens = f"{result.tokens:,} tokens in {result.spans} spans at {result.length:,}"
    return f"protocol {name}: {tokens}{left_out}"


def _recent_cells(run: Run[Result], loss: Measure, detailed: bool) -> list[Text]:
    """Return the table row of the model as loaded when it reads only the last tokens of each input."""
    cells = [Text(f"unpatched, last {run.context_length:,} tokens")]
    for length in run.lengths:
        if length not in loss.recent:
            cells.append(Text(""))
            continue
        value = loss.estimate(RECENT, length)
        cells.append(Text(f"{loss.text(value.value)} {value.line_below(loss.text) if detailed else ''}"))
    return cells


def _longppl_cell(result: Result | None, detailed: bool) -> Text:
    """Return the table cell with the LongPPL of a result; empty if there is none."""
    if result is None or result.longppl is None:
        return Text("")
    if not math.isfinite(result.longppl):
        return Text("not finite", style="red")
    value = Estimate(result.longppl, result.longppl_low, result.longppl_high, len(result.documents))
    return Text(perplexity_text(value.value) + (value.line_below(perplexity_text) if detailed else ""))


def _loss_cell(run: Run[Result], loss: Measure, result: Result | None, best: set[str], detailed: bool) -> Text:
    """Return the table cell with the loss of a result, with a star if `best` has its method; empty without result."""
    if result is None:
        return Text("")
    if not math.isfinite(result.loss):
        names = f"\n{', '.join(map(printable, result.nonfinite))}" if detailed else ""
        return Text(f"not finite{names}", style="red")
    value = loss.estimate(result.key, result.length)
    star = "*" if result.key in best else " "
    interval = value.line_below(loss.text) if detailed else ""
    text = f"{loss.text(value.value)}{star}{beyond_mark(run, result)}{interval}"
    return Text(text, style="bold green" if result.key in best else "")


def _plan(
    options: Perplexity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[PerplexityMeasurement]:
    """Load and tokenise the text, check it, and plan which spans are read."""
    documents = load(options.data)
    fields = ("lengths", "protocol", "targets", "stride", "bos", "max_spans")
    of_spans = {name: getattr(options, name) for name in fields}
    base_arguments = {name: settings[name] for name in ("over", "context_length") if name in settings}
    length = (
        ModelRope.of_model(model).extending(**base_arguments).rotary.context_length
        if resolve_protocol(options.protocol).recent
        else None
    )
    plan = prepare(model, documents, tokenizer=tokenizer, context_length=length, **of_spans)
    if options.unit == "bits" and not all(document.ends for document, _ in plan.documents):
        raise _no_bytes()
    name = options.data_name or documents.source
    run_plan = RunPlan(PerplexityMeasurement(plan), name, unit=options.unit, **settings)
    if options.store_states is None:
        return run_plan
    storing: RunPlan[PerplexityMeasurement] = needed_plug_in("parts", "store_states")(
        run_plan, options, model, tokenizer
    )
    return storing


def _no_bytes() -> MethodError:
    """Return the error for a run in which bits per byte are not known."""
    return MethodError(
        "bits per byte need the text of the token ids, and there is no tokenizer; give tokenizer=..., or choose "
        "another unit: perplexity or nats"
    )


def _fit_sweep(options: Sweep, model: PreTrainedModel, methods: MethodChoice) -> tuple[Sweep, list[RopeMethod]]:
    """Add the context length to the lengths of a sweep, and fit the methods to each length; see `Sweep`."""
    length = ModelRope.of_model(model).extending(**methods.base_arguments).rotary.context_length
    ordered, _ = check_lengths(options.lengths, None)
    methods.check(factor_alone=True)
    chosen = replace(methods, method=methods.method or DEFAULT_METHODS)
    resolved = resolve_choice(chosen, model, ordered[-1], ordered)
    lengths = sorted({*ordered, length}) if length < ordered[-1] else ordered
    return replace(options, lengths=lengths), resolved

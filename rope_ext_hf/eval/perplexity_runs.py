"""Runs that measure perplexity: the losses of documents by context length, and how they are shown."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, printable, short
from rope_ext_hf.eval.questions import DEFAULT_METHODS, LOSS_UNITS, Perplexity, Sweep
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.pictures.charts import Chart
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.protocols import PROTOCOLS, check_lengths
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Setting, prepare
from rope_ext_hf.runs.charts import line_chart
from rope_ext_hf.runs.chosen_methods import resolve_choice
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.labels import Method, MethodResult, label, method_key
from rope_ext_hf.runs.measurement import Measurement, Passed, RunPlan, Scored
from rope_ext_hf.runs.measures import Evidence, Measure, exponential, perplexity_text
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.statistics import Estimate, estimate
from rope_ext_hf.runs.tables import BEST_NOTE, beyond_mark, length_table
from rope_ext_hf.runs.wording import capital

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOLERANCE = 0.05  # the share by which a perplexity may be above that of short inputs and still count as reading well


class DocumentLoss(NamedTuple):
    """One document's share of a result: nats summed over the scored tokens, and over the key tokens among them."""

    name: str
    nats: float
    tokens: int
    bytes: int
    spans: int
    key_nats: float = 0.0
    key_tokens: int = 0

    def to_record(self) -> list[float]:
        """Everything but the name; without key tokens the last two numbers are left out."""
        return list(self[1:] if self.key_tokens else self[1:5])


@dataclass(frozen=True)
class Result(MethodResult):
    """A model's loss at one context length; every token weighs the same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        setting: how the text was read.
        length: context length in tokens.
        loss: nats per token. NaN or infinite if the loss of any span was; `nonfinite` names the documents.
        low, high: its 95% interval over documents (`rope_ext_hf.runs.statistics`); None with fewer than three.
        perplexity, bits_per_token, bits_per_byte: the same loss in other units; bits_per_byte is None where token ids
            were read without a tokenizer, so that their text is not known.
        documents: the sums it was made of.
        longppl: the perplexity of the key tokens alone; None where there are none.
        longppl_low, longppl_high: its 95% interval over the documents that have key tokens; None as above.
        key_tokens: how many there are; None where none were looked for.
        tokens_per_second: how fast spans of this length went through the model; None where nothing was timed.
        gpu_bytes: the most memory held on a GPU meanwhile; None without one.
        seconds: that reading each document took; empty where nothing was timed. These three do not count when results
            are compared.
    """

    setting: Setting
    loss: float
    low: float | None
    high: float | None
    perplexity: float
    bits_per_token: float
    bits_per_byte: float | None
    tokens: int
    spans: int
    nonfinite: tuple[str, ...]
    documents: tuple[DocumentLoss, ...]
    longppl: float | None = None
    longppl_low: float | None = None
    longppl_high: float | None = None
    key_tokens: int | None = None
    tokens_per_second: float | None = field(default=None, compare=False)
    gpu_bytes: int | None = field(default=None, compare=False)
    seconds: tuple[float, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; documents as objects."""
        return super().to_dict() | {"documents": [document._asdict() for document in self.documents]}


def difference(one: Result, other: Result, *, keys: bool = False) -> Estimate:
    """How much higher the loss of `one` is, nats per token, by document; with `keys` over the key tokens alone."""

    def shares(result: Result) -> dict[str, tuple[float, int]]:
        of_keys = {d.name: (d.key_nats, d.key_tokens) for d in result.documents if d.key_tokens}
        return of_keys if keys else {d.name: (d.nats, d.tokens) for d in result.documents}

    mine, theirs = shares(one), shares(other)
    counts = {name: count for name, (_, count) in mine.items()}
    if not counts or counts != {name: count for name, (_, count) in theirs.items()}:
        raise ValueError("only results over the same scored tokens can be compared by document")
    return estimate([nats - theirs[name][0] for name, (nats, _) in mine.items()], list(counts.values()))


class _Unit(NamedTuple):
    """A unit in which people read losses."""

    measure: str  # name of the number
    unit: str  # its unit; a perplexity has none
    exponential: bool  # whether the number is the exponential of the mean
    item: Callable[[DocumentLoss], tuple[float, float]]  # a document's sum, and what it is divided by


_UNITS = {
    "perplexity": _Unit("perplexity", "", True, lambda d: (d.nats, float(d.tokens))),
    "nats": _Unit("loss", "nats per token", False, lambda d: (d.nats, float(d.tokens))),
    "bits": _Unit("loss", "bits per byte", False, lambda d: (d.nats / math.log(2), float(d.bytes))),
}


@register_run_kind
class PerplexityRuns(RunKind):
    """Perplexity of documents; a cell is a context length."""

    name = "perplexity"
    setting = Setting
    items = "documents"
    units = LOSS_UNITS
    columns = (
        *("length", "perplexity", "loss_nats", "low_nats", "high_nats", "bits_per_token", "bits_per_byte", "tokens"),
        *("spans", "documents", "loss_increase_at_context_length_nats", "tokens_per_second", "gpu_bytes"),
        *("longppl", "longppl_low", "longppl_high", "key_tokens"),
    )

    def fit(self, question: Perplexity, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        if isinstance(question, Sweep):
            return _fit_sweep(question, model, methods)
        return super().fit(question, model, methods)

    def plan(
        self, question: Perplexity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(question, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> DocumentLoss:
        match value:
            case [int() | float() as nats, int(tokens), int(size), int(spans), *rest] if (
                1 <= tokens < 2**63 and 0 <= size < 2**63 and 1 <= spans <= tokens and not isinstance(nats, bool)
            ):
                match rest:
                    case []:
                        return DocumentLoss(item, float(nats), tokens, size, spans)
                    case [int() | float() as key_nats, int(keys)] if 1 <= keys <= tokens:
                        return DocumentLoss(item, float(nats), tokens, size, spans, float(key_nats), keys)
        raise ValueError(f"expected a loss [nats, tokens, bytes, spans] and of key tokens, got {short(repr(value))}")

    def result(
        self, method: Method, setting: Setting, cell: Cell, values: Sequence[DocumentLoss], costs: Sequence[Cost] = ()
    ) -> Result:
        """The result of one length, whatever order the documents come in; without costs, nothing was timed."""
        order = sorted(range(len(values)), key=values.__getitem__)
        documents, costs = [values[at] for at in order], [costs[at] for at in order] if costs else []
        cost = reduce(Cost.plus, costs, Cost())
        names, nats, tokens, sizes, spans, key_nats, key_tokens = zip(*documents, strict=True)
        loss, low, high, _ = estimate(nats, tokens)
        ends = estimate(key_nats, key_tokens)[:3] if any(key_tokens) else (None, None, None)
        keys = [None if end is None else exponential(end) for end in ends]
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
            nonfinite=tuple([name for name, loss in zip(names, nats, strict=True) if not math.isfinite(loss)]),
            documents=tuple(documents),
            longppl=keys[0],
            longppl_low=keys[1],
            longppl_high=keys[2],
            key_tokens=sum(key_tokens) if setting.keys else None,
            tokens_per_second=cost.tokens / cost.seconds if cost.seconds else None,
            gpu_bytes=cost.peak or None,
            seconds=tuple([each.seconds for each in costs]) if cost.seconds else (),
        )

    def rows(self, run: Run[Result]) -> Iterable[Sequence[Any]]:
        increases = {key: increase.value if (increase := loss_increase(run, key)) else "" for key in run.names}
        for r in run.results:
            yield [
                *(r.length, r.perplexity, r.loss, r.low, r.high, r.bits_per_token, r.bits_per_byte, r.tokens, r.spans),
                *(len(r.documents), increases[r.key], r.tokens_per_second, r.gpu_bytes),
                *(r.longppl, r.longppl_low, r.longppl_high, r.key_tokens),
            ]

    def table(self, run: Run[Result], *, detailed: bool = False) -> Table:
        """One row per method, one column per length, the best of each column marked.

        Where there are key tokens, a column has LongPPL at the longest length, or one for each length if `detailed`.
        `detailed` adds a second line to each cell: the interval, or the documents whose loss is not finite.
        """
        measures = self.measures(run)
        loss = next(measure for measure in measures if measure.evidence is Evidence.LOSS)
        stars = {length: {*run.findings.starred(loss, length)} for length in run.lengths}
        keyed = sorted({result.length for result in run.results if result.key_tokens})
        keyed = keyed if detailed else keyed[-1:]
        unit = f" in {loss.unit}" if loss.unit else ""
        title = f"{capital(loss.name)}{unit} by context length; the model is for {run.meant_for}"
        notes = {
            BEST_NOTE: any(stars.values()),
            "in parentheses: 95% confidence interval over documents": detailed,
            f"LongPPL: perplexity of key tokens ({run.results[0].setting.keys})": keyed,
        }
        caption = "\n".join([_scored_text(run.results[0]), *(note for note, shown in notes.items() if shown)])
        view = length_table(run, title, caption, "method")
        for length in keyed:
            tokens = next(r.key_tokens for r in run.results if r.length == length and r.key_tokens)
            view.add_column(f"LongPPL\nat {length:,}\n{tokens:,} tokens", justify="right", overflow="fold")
        for name, row in run.by_label.items():
            at = {result.length: result for result in row}
            cells = [_loss_cell(run, loss, at.get(length), stars[length], detailed) for length in stars]
            cells += [_longppl_cell(at.get(length), detailed) for length in keyed]
            view.add_row(Text(name), *cells)
        return view

    def chart(self, run: Run[Result]) -> Chart:
        return line_chart(run.findings, next(m for m in run.findings.ordered if m.evidence is Evidence.LOSS))

    def measures(self, run: Run[Result]) -> Sequence[Measure]:
        """The perplexity, or the loss in the run's unit, and LongPPL first where key tokens were looked for."""
        unit = _UNITS[run.unit]
        if run.unit == "bits" and not all(d.bytes for r in run.results for d in r.documents):
            raise _no_bytes()
        every = run.items(lambda results: [unit.item(d) for r in results for d in r.documents])
        keys = run.items(
            lambda results: [(d.key_nats, float(d.key_tokens)) for r in results for d in r.documents if d.key_tokens]
        )
        protocol = PROTOCOLS.get(run.results[0].setting.protocol)
        of_positions = protocol is not None and protocol.one_pass
        shown = Measure(
            unit.measure,
            unit.unit,
            Evidence.LOSS,
            False,
            every,
            exponential=unit.exponential,
            tolerance=_TOLERANCE if unit.exponential else None,
            of_positions=of_positions,
        )
        of_keys = Measure("LongPPL", "", Evidence.KEY_TOKENS, False, keys, exponential=True, of_positions=of_positions)
        return [of_keys, shown] if keys else [shown]

    def speed(self, run: Run[Result]) -> str:
        """The speed of reading, from the slowest to the fastest, and the GPU memory that took."""
        rates = sorted([result.tokens_per_second for result in run.results if result.tokens_per_second])
        if not rates:
            return "not timed"
        slowest, fastest = f"{rates[0]:,.0f}", f"{rates[-1]:,.0f}"
        text = f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} tokens per second"
        peak = max([result.gpu_bytes or 0 for result in run.results])
        return f"{text}, at most {peak / 1e9:.1f} GB of GPU memory" if peak else text

    def not_finite(self, run: Run[Result]) -> list[str]:
        return sorted(f"{label(r.method)} at {r.length} in {name}" for r in run.results for name in r.nonfinite)


class PerplexityMeasurement(Measurement):
    """The losses of a plan's documents, and of the key tokens in them; CorpusError: no scored token is one.

    Args:
        keys: which tokens are key tokens, (tokens,) bool for each document; None: none are looked for.
        keys_from: the model that found them, and how, in words.
    """

    kind = "perplexity"

    def __init__(self, plan: EvalPlan, keys: Sequence[Tensor] | None = None, keys_from: str = "") -> None:
        self.plan, self.keys, self.keys_from = plan, keys, keys_from
        self.items = [document.name for document, _ in plan.documents]
        targets, stride, bos = plan.options.targets, plan.options.stride, bool(plan.prefix)
        self.setting = Setting(plan.protocol.name, targets, stride, bos, plan.left_out, keys_from)
        self.passes = plan.passes
        # a token that counts for two lengths counts twice
        self.scored = sum(span.score_to - span.score_from for _, spans in plan.documents for span in spans)
        if keys is not None and not any(
            mask[span.score_from : span.score_to].any()
            for mask, (_, spans) in zip(keys, plan.documents, strict=True)
            for span in spans
        ):
            raise CorpusError(
                f"none of the scored tokens is a key token ({keys_from}), so LongPPL has no value; give longer text or "
                "longer lengths, or another evaluator, one that reads the longest length well"
            )

    def cells(self, item: int) -> Sequence[Cell]:
        return [(length,) for length in sorted({span.length for span in self.plan.documents[item][1]})]

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr(self.plan.prefix).encode()
        for document, _ in self.plan.documents:
            yield document.ids.numpy().tobytes()
            yield array("q", document.ends).tobytes()  # 64-bit integers; for bits per byte
        for mask in self.keys or ():
            yield mask.numpy().tobytes()
        for _, spans in self.plan.documents:
            yield repr([span for span in spans if span.length == cell[0]]).encode()

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[DocumentLoss]:
        """Score one document; lengths that share passes share their cost."""
        document, spans = self.plan.documents[item]
        wanted = [span for span in spans if (span.length,) in cells]
        for context, same_context in groupby(wanted, key=attrgetter("context")):
            losses: dict[int, DocumentLoss] = {}
            for (start, stop), same_pass in groupby(same_context, key=attrgetter("start", "stop")):
                scored = list(same_pass)
                first = min([span.score_from for span in scored])
                ids, shift = self.plan.input_ids(document, start, stop)
                nats = scorer.losses(ids, first - shift, length=context).to(torch.float64)  # (stop - first,)
                for span in scored:
                    before = losses.get(span.length, DocumentLoss(document.name, 0.0, 0, 0, 0))
                    of_span, of_keys = nats[span.score_from - first : span.score_to - first], nats[:0]
                    if self.keys is not None:
                        of_keys = of_span[self.keys[item][span.score_from : span.score_to]]
                    size = document.bytes_between(span.score_from, span.score_to)
                    sums = of_span.sum().item(), len(of_span), size, 1, of_keys.sum().item(), len(of_keys)
                    losses[span.length] = DocumentLoss(document.name, *map(add, before[1:], sums))
                progress(stop - start)
            cost = scorer.take_cost()
            yield from [((length,), loss, cost) for length, loss in losses.items()]


def loss_increase(run: Run[Result], key: str) -> Estimate | None:
    """The loss of a method less that as loaded, nats per token, at its context length; None: one was not measured."""
    of_key, of_loaded = [run.by_length.get(each, {}) for each in (key, method_key(run.settings["loaded"]))]
    [changed], [plain] = [row.get(run.context_length, [None]) for row in (of_key, of_loaded)]
    return difference(changed, plain) if plain and changed and changed is not plain else None


def _scored_text(result: Result) -> str:
    setting = result.setting
    left_out = f"; documents too short: {setting.left_out}" if setting.left_out else ""
    protocol = PROTOCOLS.get(setting.protocol)  # a run of somebody else's may have a protocol of its own
    name = short(printable(setting.protocol))
    if protocol is not None and protocol.same_targets:
        return (
            f"protocol {name}: the same {result.tokens:,} tokens scored at every length, "
            f"the last {setting.targets} of {result.spans} span{'s' * (result.spans != 1)}{left_out}"
        )
    tokens = f"{result.tokens:,} tokens in {result.spans} spans at {result.length:,}"
    return f"protocol {name}: {tokens}{left_out}"


def _longppl_cell(result: Result | None, detailed: bool) -> Text:
    if result is None or result.longppl is None:
        return Text("")
    if not math.isfinite(result.longppl):
        return Text("not finite", style="red")
    value = Estimate(result.longppl, result.longppl_low, result.longppl_high, len(result.documents))
    return Text(perplexity_text(value.value) + (value.line_below(perplexity_text) if detailed else ""))


def _loss_cell(run: Run[Result], loss: Measure, result: Result | None, best: set[str], detailed: bool) -> Text:
    if result is None:
        return Text("")
    if not math.isfinite(result.loss):
        names = f"\n{', '.join(map(printable, result.nonfinite))}" if detailed else ""
        return Text(f"not finite{names}", style="red")
    mark = "*" if result.key in best else " "
    value = loss.estimate(result.key, result.length)
    mark += beyond_mark(run, result)
    text = f"{loss.text(value.value)}{mark}{value.line_below(loss.text) if detailed else ''}"
    return Text(text, style="bold green" if result.key in best else "")


def _plan(
    question: Perplexity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[PerplexityMeasurement]:
    """Load and tokenise the text, check, plan."""
    documents = load(question.data)
    asked = {name: getattr(question, name) for name in ("lengths", "protocol", "targets", "stride", "bos", "max_spans")}
    read = prepare(model, documents, tokenizer=tokenizer, **asked)
    if question.unit == "bits" and not all(document.ends for document, _ in read.documents):
        raise _no_bytes()
    name = question.data_name or documents.source
    return RunPlan(PerplexityMeasurement(read), name, unit=question.unit, **settings)


def _no_bytes() -> MethodError:
    return MethodError(
        "bits per byte need the text of the token ids, which no tokenizer gives here; give tokenizer=..., or take "
        "another unit: perplexity or nats"
    )


def _fit_sweep(question: Sweep, model: PreTrainedModel, methods: MethodChoice) -> tuple[Sweep, list[RopeMethod]]:
    """Return the question with the context length, where it is below the longest, and the methods; see `Sweep`."""
    length = patch_geometry(model, **methods.underneath).context_length
    ordered, _ = check_lengths(question.lengths, None)
    methods.check(factor_alone=True)
    chosen = replace(methods, method=methods.method or DEFAULT_METHODS)
    resolved = resolve_choice(chosen, model, ordered[-1], ordered)
    lengths = sorted({*ordered, length}) if length < ordered[-1] else ordered
    return replace(question, lengths=lengths), resolved

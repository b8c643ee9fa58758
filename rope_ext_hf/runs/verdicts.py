"""Judgements on numbers with intervals: better, worse, cannot tell, or no measure. All are made here.

    >>> str(verdict(Estimate(-0.2, -0.25, -0.15, 9), unit="nats per token"))
    'lower by 0.200 [0.150 to 0.250] nats per token'

Nothing here reads a model, a run or a file: findings come in, sentences go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import combinations, takewhile

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.pictures.charts import LineChart
from rope_ext_hf.runs.labels import short_labels
from rope_ext_hf.runs.measures import Measure
from rope_ext_hf.runs.statistics import Estimate, estimate

AS_LOADED = "the model as loaded"


class Outcome(StrEnum):
    """The judgement on the first of two, by a change."""

    BETTER = "better"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"
    NO_MEASURE = "no measure"


@dataclass(frozen=True)
class Verdict:
    """A change (None: no measure has both), what follows from it, and the text that stands behind "the loss is"."""

    outcome: Outcome
    change: Estimate | None
    text: str

    def __str__(self) -> str:
        return self.text


def verdict(
    change: Estimate | None,  # the first value less the second, paired by item where both are of the same items
    *,
    unit: str = "nats per token",
    higher_is_better: bool = False,  # of the values
    than: float = 0.0,  # the change that counts as none; better and worse are counted from there
    item: str = "document",  # the kind of item that the interval is over, in the singular
    scale: float = 1.0,  # which the change is multiplied by where it is written
    digits: int = 3,  # of it, behind the point
) -> Verdict:
    """Judge a change by its 95% interval."""
    if change is None:
        return Verdict(Outcome.NO_MEASURE, None, "not known: no measure has both")
    outcome = _outcome(change, than, higher_is_better=higher_is_better)
    value = f"{scale * change.value:+.{digits}f}"
    if change.low is None or change.high is None:
        if math.isfinite(change.value):
            few = f"{change.items} {item}{'s' * (change.items != 1)} give{'s' * (change.items == 1)} no interval"
            return Verdict(outcome, change, f"not told apart: {value} {unit}, and {few}")
        return Verdict(
            outcome, change, "not finite" if outcome is not Outcome.BETTER else "finite, the other one is not"
        )
    low, high = scale * change.low, scale * change.high
    if low <= 0 <= high:
        text = f"not told apart: {value} [{low:+.{digits}f} to {high:+.{digits}f}] {unit}"
    else:
        ends = sorted((abs(low), abs(high)))
        size = f"{abs(scale * change.value):.{digits}f} [{ends[0]:.{digits}f} to {ends[1]:.{digits}f}] {unit}"
        text = f"{'higher' if low > 0 else 'lower'} by {size}"
    return Verdict(outcome, change, text)


def _outcome(change: Estimate, than: float, *, higher_is_better: bool) -> Outcome:
    low, high = change.low, change.high
    if low is None or high is None:  # an infinite change: one of the two losses is not finite
        low = high = change.value if math.isinf(change.value) else than
    if low <= than <= high:
        return Outcome.CANNOT_TELL
    return Outcome.BETTER if (low > than) is higher_is_better else Outcome.WORSE


def _length_text(length: int, context_length: int) -> str:
    return f"{length:,} tokens ({multiple_text(length, context_length)})"


@dataclass(frozen=True)
class Findings:
    """The measures of one model with several methods, which conclusions follow from; methods go by their keys."""

    names: Mapping[str, str]  # the labels
    loaded: str
    context_length: int  # tokens that the model as loaded is for
    # each with the methods that it was measured of; two of one name are over different text
    measures: Sequence[Measure]
    times: Sequence[Measure] = ()  # seconds per token, higher is worse; one for each run that was timed
    # tokens that each method is for; a method without an end is left out
    extended: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def ordered(self) -> list[Measure]:
        """The measure closest to use first, then that of the longest length; those that decide nothing last."""
        return sorted(self.measures, key=lambda m: (bool(m.flaw), m.evidence, -m.longest, m.name))

    @cached_property
    def informative(self) -> list[Measure]:
        return [measure for measure in self.ordered if not measure.flaw]

    def called(self, key: str) -> str:
        return AS_LOADED if key == self.loaded else self.names[key]

    def beyond(self, key: str, length: int) -> bool:
        return length > self.extended.get(key, length)

    def compare(self, one: str, other: str) -> Outcome:
        """Whether a method reads better than another, by the first measure that tells them apart."""
        outcome = Outcome.NO_MEASURE
        for measure in self.informative:
            if lengths := set(measure.lengths(one)) & set(measure.lengths(other)):  # the longest of them counts
                found = self.change(measure, (one, max(lengths)), (other, max(lengths))).outcome
                if found in (Outcome.BETTER, Outcome.WORSE):
                    return found
                outcome = found if found is Outcome.CANNOT_TELL else outcome
        return outcome

    def change(self, measure: Measure, one: tuple[str, int], other: tuple[str, int], than: float = 0.0) -> Verdict:
        return verdict(
            measure.change(one, other),
            unit="points" if measure.shares else measure.unit,
            higher_is_better=measure.higher_is_better,
            than=than,
            item=measure.kind_of_item,
            scale=100.0 if measure.shares else 1.0,
            digits=1 if measure.shares else 3,
        )

    def best(self, measure: Measure, length: int) -> list[str]:
        """The methods that no other one is better than by a measure at a length; the one with the best value first."""
        keys = measure.measured(length)
        left = [key for key in keys if not any(self._better(measure, other, key, length) for other in keys)]
        return sorted(left, key=lambda key: self._place(measure, key, length))

    def _better(self, measure: Measure, one: str, other: str, length: int) -> bool:
        return one != other and self.change(measure, (one, length), (other, length)).outcome is Outcome.BETTER

    @staticmethod
    def _place(measure: Measure, key: str, length: int) -> float:
        value = measure.value(key, length)
        return math.inf if math.isnan(value) else -value if measure.higher_is_better else value

    def chart(self, measure: Measure) -> LineChart:
        """Finite values by length, shares in percent; labels are short where that tells the measure's methods apart."""
        scale, unit = (100, "percent") if measure.shares else (1, measure.unit)
        keys = [key for key in self.names if key in measure.items]
        rows = ([(n, scale * measure.value(key, n)) for n in measure.lengths(key)] for key in keys)
        finite = ([point for point in row if math.isfinite(point[1])] for row in rows)
        points = dict(zip(short_labels(self.names[key] for key in keys), finite, strict=True))
        better = "higher" if measure.higher_is_better else "lower"
        axis = f"{measure.name[0].upper()}{measure.name[1:]}, {unit}; {better} is better"
        threshold = None if measure.threshold is None else scale * measure.threshold
        return LineChart(points, self.context_length, axis, threshold)

    @cached_property
    def candidates(self) -> list[str]:
        """The methods that a measure says something of."""
        return [key for key in self.names if any(measure.lengths(key) for measure in self.informative)]

    @cached_property
    def outcomes(self) -> dict[tuple[str, str], Outcome]:
        """The outcome for the first of every two methods."""
        turned = {Outcome.BETTER: Outcome.WORSE, Outcome.WORSE: Outcome.BETTER}
        found = {pair: self.compare(*pair) for pair in combinations(self.candidates, 2)}
        return found | {(b, a): turned.get(outcome, outcome) for (a, b), outcome in found.items()}

    @cached_property
    def unbeaten(self) -> list[str]:
        """The methods that no other one is better than; the one with the best value first, where a measure has all."""
        worse = {one for (one, _), outcome in self.outcomes.items() if outcome is Outcome.WORSE}
        left = sorted(set(self.candidates) - worse, key=lambda key: (self.names[key], key))
        for measure in self.informative:
            lengths = [n for n in measure.lengths(left[0]) if {*left} <= {*measure.measured(n)}] if left else []
            if lengths:
                # As loaded comes before a method that is not told from it: it is there without one.
                return sorted(left, key=lambda key: (key != self.loaded, self._place(measure, key, lengths[-1])))
        return left

    @cached_property
    def lead(self) -> str | None:
        """The key of the method that reads best, or of the first of those that nothing tells apart; None: not known."""
        left = self.unbeaten
        alike = all(self.outcomes[pair] is not Outcome.NO_MEASURE for pair in combinations(left, 2))
        return left[0] if left and alike else None


@dataclass(frozen=True)
class Conclusion:
    """The conclusion: the key of the best method (None: not told), and of those equal to it, itself among them."""

    text: str
    best: str | None
    equal: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def conclude(findings: Findings) -> Conclusion:
    """Conclude which method reads best, up to what length, at what price, and what cannot be told."""
    known, lead, sentences = findings, findings.lead, list[str]()
    if lead is None:
        sentences.append(_undecided(known))
    else:
        sentences += [_first(known, lead), *_unlike(known, lead), *_reach(known, lead)]
        if lead != known.loaded:
            sentences += [*_price(known, lead), *_time(known, lead)]
        sentences += _otherwise(known, lead)
    sentences += [f"The {m.name} {m.flaw}, and decides nothing." for m in known.ordered if m.flaw and lead is not None]
    sentences += _beyond(known)
    return Conclusion(" ".join(each for each in sentences if each), lead, tuple(known.unbeaten) if lead else ())


def _undecided(known: Findings) -> str:
    if not known.candidates:
        reasons = " and ".join(f"the {measure.name} {measure.flaw}" for measure in known.ordered)
        measured = {key for measure in known.measures for key in measure.items}
        first = "Which method reads best cannot be told"
        if len(measured) == 1:
            first = f"{_capital(known.called(*measured))} alone was measured, and how sure that is cannot be told"
        return f"{first}: {reasons}." if reasons else ""
    if not known.unbeaten:
        return "Which method reads best cannot be told: each is worse than another one by some measure."
    left = known.unbeaten
    pair = next(pair for pair in combinations(left, 2) if known.outcomes[pair] is Outcome.NO_MEASURE)
    names = _listed(map(known.called, pair))
    return f"Which of {_listed(map(known.called, left))} reads best cannot be told: no measure has both {names}."


def _first(known: Findings, lead: str) -> str:
    """The method that reads best, with its values, or what is not told apart."""
    longest = max(measure.longest for measure in known.informative)
    values = _listed(
        text for measure in known.informative if (text := _value_text(known, measure, lead, longest)) is not None
    )
    where = _length_text(longest, known.context_length)
    if len(known.candidates) == 1:
        return f"{_capital(known.called(lead))} alone was measured. At {where}: {values}."
    if set(known.unbeaten) == set(known.candidates):
        return f"At {where}, nothing tells the methods apart. {_capital(known.called(lead))}: {values}."
    if others := known.unbeaten[1:]:
        names = _listed(map(known.called, others))
        return f"At {where}, {known.called(lead)} reads best, not told from {names}: {values}."
    return f"At {where}, {known.called(lead)} reads best: {values}."


def _unlike(known: Findings, lead: str) -> list[str]:
    apart = [key for key in known.candidates if known.outcomes.get((lead, key)) is Outcome.NO_MEASURE]
    names = _listed(map(known.called, apart))
    return [f"It cannot be told from {names}: no measure has both."] if apart else []


def _value_text(known: Findings, measure: Measure, key: str, longest: int) -> str | None:
    """A method's value at its longest length, which is named where it is not `longest`; None: it was not measured."""
    if not (lengths := measure.lengths(key)):
        return None
    length = lengths[-1]
    unit = "" if measure.shares else f" {measure.unit}"
    text = f"{measure.name} {measure.estimate(key, length).text(measure.text)}{unit}"
    if key != known.loaded and known.loaded in measure.measured(length):
        text += f" (as loaded {measure.text(measure.value(known.loaded, length))})"
    return text if length == longest else f"{text} at {_length_text(length, known.context_length)}"


def _reach(known: Findings, lead: str) -> list[str]:
    """Up to which length the method reads as well as the model as loaded does at the context length."""
    sentences = []
    for measure in known.informative:
        if lead in measure.reaches:
            plain = measure.reaches.get(known.loaded)
            text = f"Its effective length by the {measure.name} is {measure.reaches[lead]} tokens"
            sentences.append(f"{text}; as loaded {plain}." if plain and lead != known.loaded else f"{text}.")
        elif measure.rise is not None and known.loaded in measure.measured(known.context_length):
            sentences += _near(known, measure, lead, measure.rise)
    return sentences


def _near(known: Findings, measure: Measure, lead: str, rise: float) -> list[str]:
    """Up to which length a loss is surely no more than a share above that of short inputs as loaded."""
    base = (known.loaded, known.context_length)
    bound = rise * measure.value(*base)
    lengths = [length for length in measure.lengths(lead) if length > known.context_length]
    found = {length: known.change(measure, (lead, length), base, than=bound).outcome for length in lengths}
    if not lengths or Outcome.NO_MEASURE in found.values():
        return []
    held = list(takewhile(lambda length: found[length] is Outcome.BETTER, lengths))
    within = f"within {rise:.0%} of the {measure.name} as loaded at {known.context_length:,} tokens"
    sentences = [f"Up to {_length_text(held[-1], known.context_length)} it is {within}."] if held else []
    if len(held) < len(lengths):
        following = _length_text(lengths[len(held)], known.context_length)
        if found[lengths[len(held)]] is Outcome.CANNOT_TELL:
            sentences.append(f"At {following}, whether it is {within} cannot be told.")
        elif not held:
            sentences.append(f"At {following} it is not {within}.")
    return sentences


def _price(known: Findings, lead: str) -> list[str]:
    """The price of a method: its changes at the context length."""
    here = known.context_length
    changes = [
        f"the {measure.name} is {known.change(measure, (lead, here), (known.loaded, here))}"
        for measure in known.informative
        if {lead, known.loaded} <= {*measure.measured(here)}
    ]
    where = _length_text(here, here)
    return [f"Compared with {AS_LOADED} at {where}, {_listed(changes)}."] if changes else []


def _time(known: Findings, lead: str) -> list[str]:
    """The time that a method takes, where it and the model as loaded were timed in one run."""
    for times in sorted(known.times, key=lambda measure: -measure.longest):
        ratio = time_ratio(times, lead, known.loaded)
        if ratio is None or ratio.low is None or ratio.high is None:
            continue
        text = ratio.text("{:.2f}".format)
        if ratio.low <= 1 <= ratio.high:
            return [f"Its time per token is not told from that of {AS_LOADED}: {text} times as long."]
        return [f"It takes {text} times as long as {AS_LOADED}."]
    return []


def time_ratio(times: Measure, key: str, loaded: str) -> Estimate | None:
    """A method's time as a multiple of that as loaded, at the longest length at which one run has both."""
    lengths = set(times.lengths(key)) & set(times.lengths(loaded))
    if not lengths or key == loaded:
        return None
    rows = [[seconds for seconds, _ in times.items[each][max(lengths)]] for each in (key, loaded)]
    if len(rows[0]) != len(rows[1]) or not all(map(all, rows)):
        return None
    # A geometric mean over documents: a first pass may take ten times as long as the next.
    found = estimate([math.log(ours / plain) for ours, plain in zip(*rows, strict=True)])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.items)


def _otherwise(known: Findings, lead: str) -> list[str]:
    """The measures by which another method is better than the one that was chosen."""
    sentences = []
    for measure in known.informative:
        if length := max(measure.lengths(lead), default=0):
            first, *_ = known.best(measure, length)
            if known._better(measure, first, lead, length):
                sentences.append(f"By the {measure.name} alone it would be {known.called(first)}.")
    return sentences


def _beyond(known: Findings) -> list[str]:
    """The methods that were measured beyond the length that they are for."""
    longest = {
        key: max((length for measure in known.measures for length in measure.lengths(key)), default=0)
        for key in known.names
    }
    over = [
        f"{known.names[key]} ({known.extended[key]:,} tokens)"
        for key, length in longest.items()
        if key != known.loaded and known.beyond(key, length)
    ]
    return [f"Measured beyond the length that it is for: {_listed(over)}."] if over else []


def _listed(words: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *before, last = (*words,) or ("",)
    return f"{', '.join(before)} and {last}" if before else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

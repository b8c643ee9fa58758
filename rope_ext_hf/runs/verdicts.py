"""Sentences about results: which method is best, where it still reads well, and what short inputs lose.

    >>> str(verdict(Estimate(-0.2, -0.25, -0.15, 9), unit="nats per token"))
    'lower by 0.200 (0.150 to 0.250) nats per token'

Nothing here reads a model, a run or a file: numbers come in, sentences go out. A conclusion has at most four sentences,
each one of the forms below, in the unit of the table that it stands under.
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
from rope_ext_hf.runs.measures import Measure, exponential
from rope_ext_hf.runs.statistics import Estimate

_UNPATCHED = "the unpatched model"
BEST_MARK = "* best, or no significant difference from the best"
_MOST_SENTENCES = 4
_MOST_NAMED = 4  # methods in one list; of more the range of the values is said
_MANY_TIMES = 2.0  # from this ratio on, perplexities are compared by how many times one is the other


class Outcome(StrEnum):
    """How the first of two compares with the second."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no significant difference"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """A change (None: one of the two was not measured), its outcome, and the text that completes "the loss is"."""

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
    than: float = 0.0,  # the change from which better and worse are counted
    item: str = "document",  # the kind of item that the interval is over, in the singular
    scale: float = 1.0,  # factor of the change where it is written
    perplexity: bool = False,  # the change is in nats, and is written in percent of the perplexity
    digits: int = 3,  # behind the point
) -> Verdict:
    """Judge a change by its 95% confidence interval."""
    if change is None:
        return Verdict(Outcome.NOT_MEASURED, None, "not known: one of the two was not measured")
    outcome = _outcome(change, than, higher_is_better=higher_is_better)
    if perplexity:
        unit, digits = "percent", 1

    def written(value: float) -> float:
        return _percent(value) if perplexity else scale * value

    value = f"{written(change.value):+,.{digits}f} {unit}"
    if change.low is None or change.high is None:
        if math.isfinite(change.value):
            few = f"{change.items} {item}{'s' * (change.items != 1)} {'is' if change.items == 1 else 'are'} too few"
            size = f"{'lower' if change.value < 0 else 'higher'} by {abs(written(change.value)):,.{digits}f} {unit}"
            return Verdict(outcome, change, f"{size} ({few} for a confidence interval)")
        return Verdict(
            outcome, change, "finite, and the other one is not" if outcome is Outcome.BETTER else "not finite"
        )
    low, high = written(change.low), written(change.high)
    if low <= 0 <= high:
        interval = f"95% confidence interval {low:+.{digits}f} to {high:+.{digits}f}"
        return Verdict(outcome, change, f"not significantly different ({value}, {interval})")
    ends = sorted((abs(low), abs(high)))
    size = f"{abs(written(change.value)):,.{digits}f} ({ends[0]:,.{digits}f} to {ends[1]:,.{digits}f}) {unit}"
    return Verdict(outcome, change, f"{'higher' if low > 0 else 'lower'} by {size}")


def _percent(nats: float) -> float:
    """Return by how many percent a perplexity is higher for a loss that is higher by this."""
    return 100 * (exponential(nats) - 1)


def _outcome(change: Estimate, than: float, *, higher_is_better: bool) -> Outcome:
    low, high = change.low, change.high
    if low is None or high is None:  # an infinite change: one of the two losses is not finite
        low = high = change.value if math.isinf(change.value) else than
    if low <= than <= high:
        return Outcome.NO_DIFFERENCE
    return Outcome.BETTER if (low > than) is higher_is_better else Outcome.WORSE


def _length_text(length: int, context_length: int) -> str:
    return f"{length:,} tokens ({multiple_text(length, context_length)})"


@dataclass(frozen=True)
class Findings:
    """The measures of one model with several methods; methods go by their keys."""

    names: Mapping[str, str]  # labels
    loaded: str  # key of the unpatched model
    context_length: int  # tokens that the unpatched model is for
    # each with the methods that it was measured of; two of one name are over different text
    measures: Sequence[Measure]
    # tokens that each method is set for; a method without an end is left out
    extended: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def ordered(self) -> list[Measure]:
        """The measure closest to use first, then that of the longest length; last, those that compare nothing."""
        return sorted(self.measures, key=lambda m: (bool(m.flaw), m.evidence, -m.longest, m.name))

    @cached_property
    def informative(self) -> list[Measure]:
        """The measures by which methods can be compared."""
        return [measure for measure in self.ordered if not measure.flaw]

    def called(self, key: str) -> str:
        """Return what a sentence calls a method."""
        return _UNPATCHED if key == self.loaded else self.names[key]

    def beyond(self, key: str, length: int) -> bool:
        """Return whether a length is beyond the one that a method is set for."""
        return length > self.extended.get(key, length)

    def compare(self, one: str, other: str) -> Outcome:
        """Return whether a method is better than another, by the first measure with a significant difference."""
        outcome = Outcome.NOT_MEASURED
        for measure in self.informative:
            if lengths := set(measure.lengths(one)) & set(measure.lengths(other)):  # the longest of them counts
                by_measure = self.outcome(measure, (one, max(lengths)), (other, max(lengths)))
                if by_measure in (Outcome.BETTER, Outcome.WORSE):
                    return by_measure
                outcome = Outcome.NO_DIFFERENCE if by_measure is Outcome.NO_DIFFERENCE else outcome
        return outcome

    def outcome(self, measure: Measure, one: tuple[str, int], other: tuple[str, int], than: float = 0.0) -> Outcome:
        """Return how one method at a length compares with another at a length, by one measure."""
        change = measure.change(one, other)
        return verdict(change, higher_is_better=measure.higher_is_better, than=than).outcome

    def outcome_against_short(self, measure: Measure, key: str, length: int) -> Outcome:
        """Return how a method at a length compares with the unpatched model at the context length.

        Better and worse are counted from the measure's tolerance, where it has one.
        """
        bound = math.log1p(measure.tolerance or 0.0)
        return self.outcome(measure, (key, length), (self.loaded, self.context_length), than=bound)

    def reads_as_well(self, key: str, length: int) -> bool:
        """Return whether a method at a length is by no measure worse than the unpatched model at the context length.

        Any significant difference counts as worse; the measures' tolerances are not applied.
        """
        base = (self.loaded, self.context_length)
        return all(self.outcome(each, (key, length), base) is not Outcome.WORSE for each in self.measures)

    def reads_short_worse(self, measure: Measure, key: str) -> bool:
        """Return whether inputs of the context length are significantly worse under a method than unpatched."""
        here = self.context_length
        return not measure.of_positions and self.outcome(measure, (key, here), (self.loaded, here)) is Outcome.WORSE

    def best(self, measure: Measure, length: int) -> list[str]:
        """Return the methods that no other one is significantly better than, the one with the best value first."""
        keys = measure.measured(length)
        left = [key for key in keys if not any(self._better(measure, other, key, length) for other in keys)]
        return sorted(left, key=lambda key: _place(measure, key, length))

    def starred(self, measure: Measure, length: int) -> list[str]:
        """Return the methods that get the mark of the best; none where nothing is compared or all are alike."""
        keys = measure.measured(length)
        best = [] if measure.flaw or len(keys) < 2 else self.best(measure, length)
        return best if len(best) < len(keys) else []

    def _better(self, measure: Measure, one: str, other: str, length: int) -> bool:
        return one != other and self.outcome(measure, (one, length), (other, length)) is Outcome.BETTER

    def chart(self, measure: Measure) -> LineChart:
        """Return finite values by length, shares in percent, under the methods' short labels."""
        scale = 100 if measure.shares else 1
        keys = [key for key in self.names if key in measure.items]
        rows = ([(n, scale * measure.value(key, n)) for n in measure.lengths(key)] for key in keys)
        finite = ([point for point in row if math.isfinite(point[1])] for row in rows)
        points = dict(zip(short_labels(self.names[key] for key in keys), finite, strict=True))
        better = "higher" if measure.higher_is_better else "lower"
        unit = "percent" if measure.shares else measure.unit
        axis = f"{capital(measure.name)}{unit and f', {unit}'} ({better} is better)"
        threshold = None if measure.threshold is None else scale * measure.threshold
        return LineChart(points, self.context_length, axis, threshold, logarithmic=measure.exponential)

    @cached_property
    def candidates(self) -> list[str]:
        """The methods that were measured by a measure that compares methods."""
        return [key for key in self.names if any(measure.lengths(key) for measure in self.informative)]

    @cached_property
    def present(self) -> list[str]:
        """The candidates without those that the first measure has, but not at its longest length."""
        first = self.informative[0] if self.informative else None
        return [
            key for key in self.candidates if first and (first.longest in first.lengths(key) or not first.lengths(key))
        ]

    @property
    def all_alike(self) -> bool:
        """Whether no method is better than another one."""
        return len(self.present) > 1 and {*self.present} <= {*self.unbeaten}

    @cached_property
    def outcomes(self) -> dict[tuple[str, str], Outcome]:
        """How the first of every two methods compares with the second."""
        turned = {Outcome.BETTER: Outcome.WORSE, Outcome.WORSE: Outcome.BETTER}
        compared = {pair: self.compare(*pair) for pair in combinations(self.candidates, 2)}
        return compared | {(b, a): turned.get(outcome, outcome) for (a, b), outcome in compared.items()}

    @cached_property
    def unbeaten(self) -> list[str]:
        """The methods that no other one is better than.

        The unpatched model comes first, then the methods under which short inputs are not worse, then the best value;
        last, what was not measured at the longest length.
        """
        worse = {one for (one, _), outcome in self.outcomes.items() if outcome is Outcome.WORSE}
        left = sorted(set(self.candidates) - worse, key=lambda key: (self.names[key], key))
        for measure in self.informative:
            lengths = [n for n in measure.lengths(left[0]) if {*left} <= {*measure.measured(n)}] if left else []
            if lengths:
                left = sorted(left, key=lambda key: _place(measure, key, lengths[-1]))
                break

        def price(key: str) -> tuple[bool, bool, bool]:
            return key not in self.present, key != self.loaded, _costs_short_inputs(self, key)

        return sorted(left, key=price)

    @cached_property
    def lead(self) -> str | None:
        """The key of the method that is best, or of the first where several are; None where that is not known."""
        left = self.unbeaten
        compared = all(self.outcomes[pair] is not Outcome.NOT_MEASURED for pair in combinations(left, 2))
        return left[0] if left and compared else None


def _place(measure: Measure, key: str, length: int) -> float:
    """Return a number by which methods are ordered, the best value first."""
    value = measure.value(key, length)
    return math.inf if math.isnan(value) else -value if measure.higher_is_better else value


@dataclass(frozen=True)
class Conclusion:
    """A conclusion: its text, the key of the best method (None: not known), and the keys of all that equal it."""

    text: str
    best: str | None
    equal: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def conclude(known: Findings) -> Conclusion:
    """Conclude which method is best, what short inputs lose under it, and up to which length it reads well."""
    lead = known.lead
    if lead is None:
        sentences = _no_lead(known)
    else:
        sentences = _best(known, lead)
        if lead != known.loaded and not known.all_alike:
            sentences += [*_beyond(known, lead), *_short_inputs(known, lead), *_by_others(known, lead)]
        sentences += [*_reach(known, lead), *_missing(known)]
        sentences += [f"{capital(m.name)}: {m.flaw}." for m in known.ordered if m.flaw]
    return Conclusion(" ".join(sentences[:_MOST_SENTENCES]), lead, tuple(known.unbeaten) if lead else ())


def _no_lead(known: Findings) -> list[str]:
    """Say what was measured, and why that does not show which method is best."""
    if not known.candidates:
        return [_without_comparison(known, measure) for measure in known.ordered if any(measure.items.values())]
    if not known.unbeaten:
        firsts = [
            f"{known.called(known.best(measure, measure.longest)[0])} by {measure.name}"
            for measure in known.informative
        ]
        return [f"The measures disagree about which method is best: {listed(firsts)}."]
    pairs = combinations(known.unbeaten, 2)
    pair = next(pair for pair in pairs if known.outcomes[pair] is Outcome.NOT_MEASURED)
    return [
        f"{capital(listed(map(known.called, pair)))} cannot be compared: at no length were they measured on the same "
        "text or prompts."
    ]


def _without_comparison(known: Findings, measure: Measure) -> str:
    """Say what a measure has at its longest length, and why methods are not compared by it."""
    length = measure.longest
    keys = sorted(measure.measured(length), key=lambda key: _place(measure, key, length))
    where = f"At {_length_text(length, known.context_length)}"
    values = f"{known.called(keys[0])} has {_value(measure, keys[0], length)}"
    if len(keys) == 1:
        return f"{where}, {values} ({measure.flaw})."
    if not measure.too_few:
        return f"{capital(measure.name)}: {measure.flaw}."
    what = "highest" if measure.higher_is_better else "lowest"
    return f"{where}, {values}, the {what}; {measure.flaw}."


def _value(measure: Measure, key: str, length: int) -> str:
    """Return a name and a value: "perplexity 1.91", "loss 0.646 nats per token"."""
    text = measure.text(measure.value(key, length))
    return f"{measure.name} {text}{f' {measure.unit}' if measure.unit and not measure.shares else ''}"


def _best(known: Findings, lead: str) -> list[str]:
    """Say which method is best at the longest length, and which are not significantly different."""
    longest = max(measure.longest for measure in known.informative)
    where = _length_text(longest, known.context_length)
    values = listed(
        _value(measure, lead, max(lengths)) + _elsewhere(max(lengths), longest)
        for measure in known.informative
        if (lengths := measure.lengths(lead))
    )
    first, equal = known.informative[0], [key for key in known.unbeaten if key in known.present]
    if len(known.candidates) == 1:
        return [f"At {where}, {known.called(lead)} has {values}."]
    values_of_equal = [first.value(key, first.longest) for key in equal if first.lengths(key)]
    if values_of_equal and not any(map(math.isfinite, values_of_equal)):
        return [f"At {where}, {first.name} is not finite for {listed(map(known.called, equal))}."]
    if len(equal) > 1 and (lead == known.loaded or known.all_alike):
        return [f"At {where}, {_alike(known, first, equal, longest)}."]
    sentences = [f"Best at {where}: {known.called(lead)}, {values}{_of_unpatched(known, lead, longest)}."]
    if others := equal[1:]:
        sentences.append(f"No significant difference: {_with_values(known, others, longest, lead)}.")
    if beaten := [key for key in known.best(first, first.longest) if key not in equal]:
        sentences.append(f"By {first.name} alone, no significant difference: {_with_values(known, beaten, longest)}.")
    return sentences


def _elsewhere(length: int, longest: int) -> str:
    """Return " at 1,024" for a value that is not of the longest length; empty for one that is."""
    return "" if length == longest else f" at {length:,}"


def _alike(known: Findings, first: Measure, equal: Sequence[str], longest: int) -> str:
    """Say that no method is better than the unpatched model, or than another."""
    length, at = first.longest, _elsewhere(first.longest, longest)
    measured = sorted((key for key in equal if first.lengths(key)), key=lambda key: _place(first, key, length))
    texts = [first.text(first.value(key, length)) for key in measured]
    if equal[0] == known.loaded:
        own = first.text(first.value(known.loaded, length)) if known.loaded in measured else "not measured"
        nearest = f"; best value: {known.called(measured[0])}, {texts[0]}" if texts and texts[0] != own else ""
        return f"no method is significantly better than the unpatched model ({first.name} {own}{nearest}{at})"
    if len(equal) <= _MOST_NAMED:
        names = listed(map(known.called, measured))
        return f"no significant difference between {names} ({first.name} {listed(texts)}{at})"
    values = f"{first.name} {texts[0]} to {texts[-1]}{at}"
    return f"no significant difference between any two of {len(equal)} methods ({values})"


def _of_unpatched(known: Findings, lead: str, longest: int) -> str:
    """Return the values of the unpatched model in brackets, by the measures and at the lengths of the best method."""
    values = []
    for measure in known.informative:
        length = max(measure.lengths(lead), default=0)
        if known.loaded in measure.measured(length):
            values.append(measure.text(measure.value(known.loaded, length)) + _elsewhere(length, longest))
    return f" (unpatched {listed(values)})" if values and lead != known.loaded else ""


def _beyond(known: Findings, lead: str) -> list[str]:
    """Say where the longest length is beyond the one that the best method is set for."""
    longest = max(measure.longest for measure in known.informative)
    if not known.beyond(lead, longest):
        return []
    return [
        f"The extended length of {known.called(lead)} is {known.extended[lead]:,} tokens; {longest:,} is beyond it."
    ]


def _missing(known: Findings) -> list[str]:
    """Name the methods that have no value at the longest length."""
    absent = [known.called(key) for key in known.candidates if key not in known.present]
    return [f"Not measured at {known.informative[0].longest:,} tokens: {listed(absent)}."] if absent else []


def _with_values(known: Findings, keys: Sequence[str], longest: int, lead: str | None = None) -> str:
    """Return methods with their values by the first measure: "rerope (1.91) and self-extend (1.93)".

    Beside `lead`, under which short inputs are not worse, it is said of which methods they are.
    """
    first, texts = known.informative[0], list[str]()
    for key in keys:
        notes = []
        if first.lengths(key):
            notes.append(first.text(first.value(key, first.longest)) + _elsewhere(first.longest, longest))
        if lead is not None and _costs_short_inputs(known, key) and not _costs_short_inputs(known, lead):
            notes.append("short inputs get worse")
        texts.append(known.called(key) + (f" ({'; '.join(notes)})" if notes else ""))
    return listed(texts)


def _costs_short_inputs(known: Findings, key: str) -> bool:
    """Return whether short inputs are significantly worse under a method, by any measure."""
    return any(known.reads_short_worse(measure, key) for measure in known.informative)


def _short_inputs(known: Findings, lead: str) -> list[str]:
    """Say what becomes of inputs of the context length under a method."""
    here, clauses = known.context_length, []
    for measure in known.informative:
        change = measure.change((lead, here), (known.loaded, here))
        if change is None or measure.of_positions:
            continue
        before, after = [measure.text(measure.value(key, here)) for key in (known.loaded, lead)]
        match verdict(change, higher_is_better=measure.higher_is_better).outcome:
            case Outcome.WORSE:
                clauses.append(f"{measure.name} gets worse ({before} to {after})")
            case Outcome.BETTER:
                clauses.append(f"{measure.name} gets better ({before} to {after})")
            case _ if measure.identical((lead, here), (known.loaded, here)):
                clauses.append(f"{measure.name} is unchanged ({after})")
            case _:
                clauses.append(f"no significant difference in {measure.name} ({after}, unpatched {before})")
    return [f"Short inputs ({here:,} tokens): {'; '.join(clauses)}."] if clauses else []


def _by_others(known: Findings, lead: str) -> list[str]:
    """Name the measures by which another method is better than the best one."""
    sentences = []
    for measure in known.informative:
        if length := max(measure.lengths(lead), default=0):
            first, *_ = known.best(measure, length)
            if known._better(measure, first, lead, length):
                value = measure.text(measure.value(first, length))
                sentences.append(f"By {measure.name} alone, {known.called(first)} would be best ({value}).")
    return sentences


def _reach(known: Findings, lead: str) -> list[str]:
    """Say up to which length a method reads as well as the unpatched model does at the context length."""
    sentences = []
    for measure in known.informative:
        if lead in measure.reaches:
            plain = measure.reaches.get(known.loaded)
            text = f"Effective length by {measure.name}: {measure.reaches[lead].in_words(measure.longest)}"
            unpatched = f"; unpatched {plain.in_words(measure.longest)}" if plain and lead != known.loaded else ""
            sentences.append(f"{text}{unpatched}.")
        elif measure.tolerance is not None and not measure.of_positions:
            sentences += _near(known, measure, lead, measure.tolerance)
    return sentences


def _near(known: Findings, measure: Measure, lead: str, tolerance: float) -> list[str]:
    """Say up to which length a perplexity is significantly below a bound over that of short inputs, unpatched."""
    here = known.context_length
    lengths = [length for length in measure.lengths(lead) if length > here]
    outcomes = [known.outcome_against_short(measure, lead, length) for length in lengths]
    within = list(takewhile(lambda pair: pair[1] is Outcome.BETTER, zip(lengths, outcomes, strict=True)))
    name = measure.name
    under = f"the unpatched model's {name}" if lead == known.loaded else f"{name} under {known.called(lead)}"
    base = f"that {'' if lead == known.loaded else 'of the unpatched model '}at {here:,} tokens"
    sentence = ""
    if within:
        first, last = within[0][0], within[-1][0]
        several = f"From {first:,} to {last:,} tokens ({multiple_text(first, here)} to {multiple_text(last, here)})"
        at = f"At {_length_text(last, here)}" if len(within) == 1 else several
        sentence = f"{at}, {under} is within {tolerance:.0%} of {base}"
    if len(within) == len(lengths) or outcomes[len(within)] is not Outcome.WORSE:
        return [f"{sentence}."] if sentence else []
    length = lengths[len(within)]
    value, short = measure.value(lead, length), measure.value(known.loaded, here)
    ratio = value / short if measure.exponential else exponential(value - short)
    above = f"{ratio - 1:.0%} above" if ratio < _MANY_TIMES else f"{ratio:.2g} times"
    values = f"({measure.text(value)} against {measure.text(short)})"
    if sentence:
        return [f"{sentence}; at {_length_text(length, here)} it is {above} that {values}."]
    return [f"At {_length_text(length, here)}, {under} is {above} {base} {values}."]


def listed(words: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    *before, last = (*words,) or ("",)
    return f"{', '.join(before)} and {last}" if before else last


def capital(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]

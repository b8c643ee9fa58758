"""The conclusion of one or several runs, in at most four sentences.

It says which method is best, what short inputs lose under it, and up to which length it reads well. The module
`findings` judges the numbers, and this module puts the judgements into English. The numbers in a conclusion are in the
unit of the table above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rope_ext_hf.errors import capital, listed, multiple_text
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.measures import RECENT, Measure, exponential
from rope_ext_hf.runs.conclusions.verdicts import Outcome

_UNPATCHED = "the unpatched model"
_MOST_SENTENCES = 4
_MOST_NAMED = 4  # methods without a difference are named one by one up to this number
_MANY_TIMES = 2.0  # from this ratio on, a perplexity is "2.7 times" another one, and not "170% above" it


@dataclass(frozen=True)
class Conclusion:
    """The conclusion of one or several runs.

    Attributes:
        sentences: one to four sentences, the verdict first; none where nothing was measured.
        best: the key of the best method, or of the first of several; None: the best method is not known.
        equal: the keys of the best method and of all that are not significantly different from it, the best one first.
    """

    sentences: tuple[str, ...]
    best: str | None
    equal: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentences as one paragraph."""
        return " ".join(self.sentences)

    def __str__(self) -> str:
        return self.text


def conclude(findings: Findings) -> Conclusion:
    """Return which method is best, how it changes short inputs, and up to which length it reads well."""
    lead = findings.lead
    if lead is None:
        sentences = _no_lead(findings)
        return Conclusion(tuple(sentences[:_MOST_SENTENCES]), None, ())
    sentences = _best(findings, lead)
    if lead != findings.loaded and not findings.all_alike:
        sentences += _beyond(findings, lead)
        sentences += _against_recent(findings, lead)
        sentences += _short_inputs(findings, lead)
        sentences += _best_by_one_measure(findings, lead)
    sentences += _reach(findings, lead)
    sentences += _missing(findings)
    sentences += [f"{capital(measure.name)}: {measure.flaw}." for measure in findings.deciding if measure.flaw]
    return Conclusion(tuple(sentences[:_MOST_SENTENCES]), lead, tuple(findings.unbeaten))


# --- names and numbers ------------------------------------------------------------------------------------------------


def _called(findings: Findings, key: str) -> str:
    """Return the name that sentences use for the method with this key."""
    return _UNPATCHED if key == findings.loaded else findings.names[key]


def _all_called(findings: Findings, keys: Sequence[str]) -> str:
    """Return several methods as sentences name them: "linear, yarn x4 and the unpatched model"."""
    return listed(_called(findings, key) for key in keys)


def _length_text(findings: Findings, length: int) -> str:
    """Return a length in tokens and as a multiple of the context length: "256 tokens (4x)"."""
    return f"{length:,} tokens ({multiple_text(length, findings.context_length)})"


def _at_shorter(length: int, longest: int) -> str:
    """Return " at 1,024" for a length shorter than the one that the sentence names; empty if both are the same."""
    return "" if length == longest else f" at {length:,}"


def _value_text(measure: Measure, key: str, length: int) -> str:
    """Return a method's value at a length, as text without the name of the measure: "1.91"."""
    return measure.text(measure.value(key, length))


def _named_value(measure: Measure, key: str, length: int) -> str:
    """Return a method's value at a length with name and unit: "perplexity 1.91", "loss 0.646 nats per token"."""
    unit = f" {measure.unit}" if measure.unit and not measure.shares else ""
    return f"{measure.name} {_value_text(measure, key, length)}{unit}"


# --- where no method is known to be best ------------------------------------------------------------------------------


def _no_lead(findings: Findings) -> list[str]:
    """Return sentences for runs without a best method: what was measured, and why it shows no best method."""
    if not findings.candidates:
        measures = [measure for measure in findings.deciding if any(measure.items.values())]
        return [_without_comparison(findings, measure) for measure in measures]
    if not findings.unbeaten:
        best_of_each = [
            f"{_called(findings, findings.best(measure, measure.longest)[0])} by {measure.name}"
            for measure in findings.informative
        ]
        return [f"The measures disagree about which method is best: {listed(best_of_each)}."]
    pairs = combinations(findings.unbeaten, 2)
    pair = next(pair for pair in pairs if findings.outcomes[pair] is Outcome.NOT_MEASURED)
    return [
        f"{capital(_all_called(findings, pair))} cannot be compared: at no length were they measured on the same text "
        "or prompts."
    ]


def _without_comparison(findings: Findings, measure: Measure) -> str:
    """Return a sentence with the values of a measure at its longest length, and why it cannot compare methods."""
    length = measure.longest
    keys = sorted(measure.measured(length), key=lambda key: measure.sort_value(key, length))
    value = f"{_called(findings, keys[0])} has {_named_value(measure, keys[0], length)}"
    if len(keys) == 1:
        return f"At {_length_text(findings, length)}, {value} ({measure.flaw})."
    if not measure.too_few:
        return f"{capital(measure.name)}: {measure.flaw}."
    extreme = "highest" if measure.higher_is_better else "lowest"
    return f"At {_length_text(findings, length)}, {value}, the {extreme}; {measure.flaw}."


# --- which method is best ---------------------------------------------------------------------------------------------


def _best(findings: Findings, lead: str) -> list[str]:
    """Return sentences on which method is best at the longest length, and which are not significantly different."""
    where = _length_text(findings, findings.longest)
    if len(findings.candidates) == 1:
        return [f"At {where}, {_called(findings, lead)} has {_values_of_lead(findings, lead)}."]
    first = findings.informative[0]
    equal = [key for key in findings.unbeaten if key in findings.present]
    values = [first.value(key, first.longest) for key in equal if first.lengths(key)]
    if values and not any(map(math.isfinite, values)):
        return [f"At {where}, {first.name} is not finite for {_all_called(findings, equal)}."]
    if len(equal) > 1 and (lead == findings.loaded or findings.all_alike):
        return [f"At {where}, {_no_method_is_better(findings, first, equal)}."]

    name, values_of_lead = _called(findings, lead), _values_of_lead(findings, lead)
    sentences = [f"Best at {where}: {name}, {values_of_lead}{_values_of_unpatched(findings, lead)}."]
    if len(equal) > 1:
        others = _with_values(findings, equal[1:], lead)
        sentences.append(f"No significant difference: {others}.")
    equal_by_first_alone = [key for key in findings.best(first, first.longest) if key not in equal]
    if equal_by_first_alone:
        others = _with_values(findings, equal_by_first_alone)
        sentences.append(f"By {first.name} alone, no significant difference: {others}.")
    return sentences


def _values_of_lead(findings: Findings, lead: str) -> str:
    """Return the best method's values in all measures: "exact match 95.0% at 128 and perplexity 4.48"."""
    values = []
    for measure in findings.informative:
        lengths = measure.lengths(lead)
        if lengths:
            length = max(lengths)
            values.append(_named_value(measure, lead, length) + _at_shorter(length, findings.longest))
    return listed(values)


def _values_of_unpatched(findings: Findings, lead: str) -> str:
    """Return the unpatched model's values in parentheses, for the measures and lengths of the best method's values."""
    values = []
    for measure in findings.informative:
        length = max(measure.lengths(lead), default=0)
        if findings.loaded in measure.measured(length):
            values.append(_value_text(measure, findings.loaded, length) + _at_shorter(length, findings.longest))
    return f" (unpatched {listed(values)})" if values and lead != findings.loaded else ""


def _no_method_is_better(findings: Findings, first: Measure, equal: Sequence[str]) -> str:
    """Return the clause that no method is significantly better than the unpatched model, or than another.

    `equal` are the methods that are not significantly different, the unpatched model first where it is among them.
    """
    length = first.longest
    at = _at_shorter(length, findings.longest)
    measured = sorted((key for key in equal if first.lengths(key)), key=lambda key: first.sort_value(key, length))
    texts = [_value_text(first, key, length) for key in measured]
    if equal[0] == findings.loaded:
        unpatched = _value_text(first, findings.loaded, length) if findings.loaded in measured else "not measured"
        best = ""
        if texts and texts[0] != unpatched:
            best = f"; best value: {_called(findings, measured[0])}, {texts[0]}"
        return f"no method is significantly better than the unpatched model ({first.name} {unpatched}{best}{at})"
    if len(equal) <= _MOST_NAMED:
        names = _all_called(findings, measured)
        return f"no significant difference between {names} ({first.name} {listed(texts)}{at})"
    values = f"{first.name} {texts[0]} to {texts[-1]}{at}"
    return f"no significant difference between any two of {len(equal)} methods ({values})"


def _with_values(findings: Findings, keys: Sequence[str], lead: str | None = None) -> str:
    """Return methods with their values by the first measure: "rerope (1.91) and self-extend (1.93)".

    Where short inputs are not worse under the method `lead`, a note names the methods under which they are.
    """
    first = findings.informative[0]
    texts = []
    for key in keys:
        notes = []
        if first.lengths(key):
            notes.append(_value_text(first, key, first.longest) + _at_shorter(first.longest, findings.longest))
        if lead is not None and findings.costs_short_inputs(key) and not findings.costs_short_inputs(lead):
            notes.append("short inputs get worse")
        texts.append(_called(findings, key) + (f" ({'; '.join(notes)})" if notes else ""))
    return listed(texts)


# --- further sentences on the best method -----------------------------------------------------------------------------


def _beyond(findings: Findings, lead: str) -> list[str]:
    """Return a warning sentence if the longest length is beyond the length that the best method is set for."""
    if not findings.beyond(lead, findings.longest):
        return []
    extended = f"The extended length of {_called(findings, lead)} is {findings.extended[lead]:,} tokens"
    return [f"{extended}; {findings.longest:,} is beyond it."]


def _short_inputs(findings: Findings, lead: str) -> list[str]:
    """Return sentences on how results for inputs of the context length change with the best method."""
    length = findings.context_length
    clauses = []
    for measure in findings.informative:
        outcome = findings.outcome_of_short_inputs(measure, lead)
        if outcome is Outcome.NOT_MEASURED:
            continue
        before, after = _value_text(measure, findings.loaded, length), _value_text(measure, lead, length)
        if outcome is Outcome.WORSE:
            clauses.append(f"{measure.name} gets worse ({before} to {after})")
        elif outcome is Outcome.BETTER:
            clauses.append(f"{measure.name} gets better ({before} to {after})")
        elif measure.identical((lead, length), (findings.loaded, length)):
            clauses.append(f"{measure.name} is unchanged ({after})")
        else:
            clauses.append(f"no significant difference in {measure.name} ({after}, unpatched {before})")
    return [f"Short inputs ({length:,} tokens): {'; '.join(clauses)}."] if clauses else []


def _against_recent(findings: Findings, lead: str) -> list[str]:
    """Return a sentence on whether the best method does better than the model as loaded on the last tokens alone."""
    sentences = []
    for measure in findings.informative:
        length = max(measure.lengths(lead), default=0)
        if length not in measure.recent:
            continue
        before, after = _value_text(measure, RECENT, length), _value_text(measure, lead, length)
        outcome = findings.outcome(measure, (lead, length), (RECENT, length))
        comparison = {
            Outcome.BETTER: "better than",
            Outcome.WORSE: "worse than",
        }.get(outcome, "not significantly different from")
        sentences.append(
            f"Reading all {length:,} tokens is {comparison} reading the last {findings.context_length:,} unpatched "
            f"({measure.name} {after} against {before})."
        )
    return sentences


def _best_by_one_measure(findings: Findings, lead: str) -> list[str]:
    """Return sentences that name the measures by which another method than the best one would be best."""
    sentences = []
    for measure in findings.informative:
        if not measure.lengths(lead):
            continue
        length = max(measure.lengths(lead))
        best = findings.best(measure, length)[0]
        if findings.is_better(measure, best, lead, length):
            value = _value_text(measure, best, length)
            sentences.append(f"By {measure.name} alone, {_called(findings, best)} would be best ({value}).")
    return sentences


def _reach(findings: Findings, lead: str) -> list[str]:
    """Return sentences on how long inputs may get until a method does worse than the unpatched model on short ones."""
    sentences = []
    for measure in findings.informative:
        if lead in measure.reaches:
            sentences.append(_effective_length(findings, measure, lead))
        elif measure.tolerance is not None and not measure.of_positions:
            sentences += _within_tolerance(findings, measure, lead, measure.tolerance)
    return sentences


def _effective_length(findings: Findings, measure: Measure, lead: str) -> str:
    """Return a sentence with a method's effective length, and the unpatched model's where it was measured."""
    sentence = f"Effective length by {measure.name}: {measure.reaches[lead].in_words(measure.longest)}"
    unpatched = measure.reaches.get(findings.loaded)
    if unpatched is not None and lead != findings.loaded:
        sentence += f"; unpatched {unpatched.in_words(measure.longest)}"
    return f"{sentence}."


def _within_tolerance(findings: Findings, measure: Measure, lead: str, tolerance: float) -> list[str]:
    """Return a sentence on the longest length at which perplexity is close to the unpatched model's on short inputs.

    It says what the table shows, and then what of that is significant.
    """
    short = findings.context_length
    within, outside = findings.shown_reach(measure, lead)
    significant_within, significant_outside = findings.reach(measure, lead)
    if lead == findings.loaded:
        subject, base = f"the unpatched model's {measure.name}", f"that at {short:,} tokens"
    else:
        subject = f"{measure.name} under {_called(findings, lead)}"
        base = f"that of the unpatched model at {short:,} tokens"

    excess = ""
    if outside is not None:
        value, base_value = measure.value(lead, outside), measure.value(findings.loaded, short)
        ratio = value / base_value if measure.exponential else exponential(value - base_value)
        excess = f"{ratio - 1:.0%} above" if ratio < _MANY_TIMES else f"{ratio:.2g} times"
        values = f"({measure.text(value)} against {measure.text(base_value)})"
        doubt = "" if outside == significant_outside else f", not significantly more than {tolerance:.0%}"
        if not within:
            return [f"At {_length_text(findings, outside)}, {subject} is {excess} {base} {values}{doubt}."]
        excess = f"; at {_length_text(findings, outside)} it is {excess} that {values}{doubt}"
    if not within:
        return []
    if len(within) == 1:
        where = f"At {_length_text(findings, within[0])}"
    else:
        multiples = f"{multiple_text(within[0], short)} to {multiple_text(within[-1], short)}"
        where = f"From {within[0]:,} to {within[-1]:,} tokens ({multiples})"
    significant = ""
    if not significant_within:
        significant = ", but not significantly"
    elif len(significant_within) < len(within):
        significant = f", significantly up to {significant_within[-1]:,}"
    return [f"{where}, {subject} is within {tolerance:.0%} of {base}{significant}{excess}."]


def _missing(findings: Findings) -> list[str]:
    """Return a sentence that names the methods without a value at the longest length."""
    absent = [key for key in findings.candidates if key not in findings.present]
    if not absent:
        return []
    return [f"Not measured at {findings.informative[0].longest:,} tokens: {_all_called(findings, absent)}."]

"""Statistical findings on one model with several methods: which is significantly better, and up to which length.

The input is numbers, and the output is methods, lengths and outcomes. Nothing here reads a model, a run or a file. The
module `conclusions` puts the findings into sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, permutations

from rope_ext_hf.runs.conclusions.labels import Method, labels, method_key, short_labels
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from rope_ext_hf.runs.conclusions.verdicts import Outcome, outcome_of_change


@dataclass(frozen=True)
class Findings:
    """The measures for one model with several methods, and the comparisons that follow from them.

    A method is named by its key (`labels.method_key`), a measured value by the pair of a key and a length in tokens.

    Attributes:
        names: the label of each method by its key, in the order in which tables show them.
        loaded: the key that stands for the unpatched model.
        context_length: the length in tokens that the unpatched model is for.
        measures: the measures, each with a name of its own. They may have different methods and lengths.
        extended: the length in tokens that each method is set for; a method that works at any length is left out.
    """

    names: Mapping[str, str]
    loaded: str
    context_length: int
    measures: Sequence[Measure]
    extended: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def ordered(self) -> list[Measure]:
        """The measures, sorted by how close they are to practical use; those that cannot compare methods come last.

        Of two measures that are equally close, the one that was measured at the greater length comes first. Where
        hardly anything is retrieved, the share of right answers comes after their loss.
        """

        def closeness(measure: Measure) -> float:
            hardly_any = measure.evidence is Evidence.RETRIEVAL and self._at_floor(measure)
            return Evidence.ANSWER_LOSS + 0.5 if hardly_any else measure.evidence

        return sorted(self.measures, key=lambda m: (bool(m.flaw), closeness(m), -m.longest, m.name))

    @cached_property
    def deciding(self) -> list[Measure]:
        """The measures that conclusions are drawn from, in the order of `ordered`."""
        return [measure for measure in self.ordered if self._decides(measure)]

    @cached_property
    def informative(self) -> list[Measure]:
        """The measures that conclusions are drawn from and that can compare methods, in the order of `ordered`."""
        return [measure for measure in self.deciding if not measure.flaw]

    @property
    def longest(self) -> int:
        """The longest length in tokens of any measure that can compare methods; ValueError if there is none."""
        return max(measure.longest for measure in self.informative)

    def beyond(self, key: str, length: int) -> bool:
        """Return whether a length is beyond the one that the method with this key is set for."""
        return length > self.extended.get(key, length)

    def _decides(self, measure: Measure) -> bool:
        """Return whether conclusions are drawn from a measure; only one that replaces a share may be left out."""
        return measure.instead_of is None or self._at_floor(measure.instead_of)

    def _at_floor(self, share: Measure) -> bool:
        """Return whether a share of right answers says little about any method at the longest length.

        That is so if every method's share is at the floor there, and none is significantly better than another.
        """
        if share.flaw and not share.too_few:
            return True
        length = share.longest
        keys = share.measured(length)
        if not all(share.at_floor(key, length) for key in keys):
            return False
        return not any(self.is_better(share, first, second, length) for first, second in permutations(keys, 2))

    # --- one measure --------------------------------------------------------------------------------------------------

    def outcome(self, measure: Measure, first: tuple[str, int], second: tuple[str, int], than: float = 0.0) -> Outcome:
        """Compare two pairs of a method and a length by one measure, and return which is better.

        Args:
            measure: the measure whose values are compared.
            first, second: the pairs: the key of a method, and a length in tokens.
            than: the change at which better turns into worse, see `outcome_of_change`.
        """
        change = measure.change(first, second)
        return outcome_of_change(change, higher_is_better=measure.higher_is_better, than=than)

    def is_better(self, measure: Measure, first: str, second: str, length: int) -> bool:
        """Return whether the first method is significantly better than the second at one length."""
        return first != second and self.outcome(measure, (first, length), (second, length)) is Outcome.BETTER

    def outcome_against_short(self, measure: Measure, key: str, length: int) -> Outcome:
        """Return how a method at a length compares with the unpatched model at the context length.

        A perplexity may be higher by the measure's tolerance, where it has one, before it counts as worse.
        """
        bound = math.log1p(measure.tolerance or 0.0)
        return self.outcome(measure, (key, length), (self.loaded, self.context_length), than=bound)

    def outcome_of_short_inputs(self, measure: Measure, key: str) -> Outcome:
        """Return how a method compares with the unpatched model on inputs of the context length.

        It is `NOT_MEASURED` also if the measure takes values at positions in longer inputs, which say nothing about
        short inputs, and if it replaces a share of right answers that is not at the floor there.
        """
        first, second = (key, self.context_length), (self.loaded, self.context_length)
        if measure.of_positions or _share_decides(measure, first, second):
            return Outcome.NOT_MEASURED
        return self.outcome(measure, first, second)

    def reads_short_worse(self, measure: Measure, key: str) -> bool:
        """Return whether a method makes results for inputs of the context length significantly worse."""
        return self.outcome_of_short_inputs(measure, key) is Outcome.WORSE

    def best(self, measure: Measure, length: int) -> list[str]:
        """Return the keys of the methods that no other method is significantly better than, the best value first."""
        keys = measure.measured(length)
        unbeaten = [key for key in keys if not any(self.is_better(measure, other, key, length) for other in keys)]
        return sorted(unbeaten, key=lambda key: measure.sort_value(key, length))

    def starred(self, measure: Measure, length: int) -> list[str]:
        """Return the methods that a table marks as best at a length.

        There are none where the measure cannot compare methods, where there is one method only, and where no method is
        significantly better than another.
        """
        keys = measure.measured(length)
        if measure.flaw or len(keys) < 2:
            return []
        best = self.best(measure, length)
        return best if len(best) < len(keys) else []

    def reach(self, measure: Measure, key: str) -> tuple[list[int], int | None]:
        """Return the lengths up to which the values of a method stay within the tolerance of the measure.

        Only lengths beyond the context length count. The value at each is compared with the value of the unpatched
        model at the context length.

        Returns:
            Two things: the lengths that are significantly within the tolerance, up to the first that is not; and this
            first one if it is significantly outside the tolerance, else None.
        """
        within = list[int]()
        for length in measure.lengths(key):
            if length <= self.context_length:
                continue
            outcome = self.outcome_against_short(measure, key, length)
            if outcome is not Outcome.BETTER:
                return within, length if outcome is Outcome.WORSE else None
            within.append(length)
        return within, None

    def shown_reach(self, measure: Measure, key: str) -> tuple[list[int], int | None]:
        """Return the lengths up to which the values of a method, as tables show them, are within the tolerance.

        Unlike `reach`, it does not ask whether that is significant. The second is the first length outside, or None.
        """
        bound = math.log1p(measure.tolerance or 0.0)
        within = list[int]()
        for length in measure.lengths(key):
            if length <= self.context_length:
                continue
            change = measure.change((key, length), (self.loaded, self.context_length))
            if change is None or math.isnan(change.value):
                return within, None
            if change.value > bound:
                return within, length
            within.append(length)
        return within, None

    # --- all measures -------------------------------------------------------------------------------------------------

    def reads_as_well(self, key: str, length: int) -> bool:
        """Return whether a method at a length is as good as the unpatched model is at the context length.

        It is not if any measure shows it to be significantly worse; the measures' tolerances are not applied.
        """
        first, second = (key, length), (self.loaded, self.context_length)
        measures = [measure for measure in self.measures if not _share_decides(measure, first, second)]
        return all(self.outcome(measure, first, second) is not Outcome.WORSE for measure in measures)

    def costs_short_inputs(self, key: str) -> bool:
        """Return whether any measure shows that a method makes inputs of the context length significantly worse."""
        return any(self.reads_short_worse(measure, key) for measure in self.informative)

    def compare(self, first: str, second: str) -> Outcome:
        """Compare two methods by the first measure that shows a significant difference.

        Only measures that can compare methods are used, each at the longest length at which it has both methods.

        Returns:
            How the first method compares with the second. `NO_DIFFERENCE`: no measure shows a difference.
            `NOT_MEASURED`: no measure has both methods at one length, on the same items.
        """
        outcome = Outcome.NOT_MEASURED
        for measure in self.informative:
            shared_lengths = set(measure.lengths(first)) & set(measure.lengths(second))
            if not shared_lengths:
                continue
            longest = max(shared_lengths)
            places = (first, longest), (second, longest)
            if _share_decides(measure, *places):
                continue
            by_measure = self.outcome(measure, *places)
            if by_measure in (Outcome.BETTER, Outcome.WORSE):
                return by_measure
            if by_measure is Outcome.NO_DIFFERENCE:
                outcome = by_measure
        return outcome

    @cached_property
    def outcomes(self) -> dict[tuple[str, str], Outcome]:
        """The outcome for each pair of candidates, in both orders: how the first compares with the second."""
        outcomes: dict[tuple[str, str], Outcome] = {}
        for first, second in combinations(self.candidates, 2):
            outcome = self.compare(first, second)
            outcomes[first, second] = outcome
            outcomes[second, first] = outcome.reversed
        return outcomes

    @cached_property
    def candidates(self) -> list[str]:
        """The keys of the methods that any measure that can compare methods has values for."""
        return [key for key in self.names if any(measure.lengths(key) for measure in self.informative)]

    @cached_property
    def present(self) -> list[str]:
        """The candidates, without those that the first measure has values for only below its longest length."""
        if not self.informative:
            return []
        first = self.informative[0]
        return [key for key in self.candidates if not first.lengths(key) or first.longest in first.lengths(key)]

    @cached_property
    def unbeaten(self) -> list[str]:
        """The candidates that no other candidate is significantly better than, in order of preference.

        The unpatched model comes first, then methods under which short inputs are not worse, then the best value; at
        the end stand methods that were not measured at the longest length.
        """
        beaten = {first for (first, _), outcome in self.outcomes.items() if outcome is Outcome.WORSE}
        unbeaten = sorted(set(self.candidates) - beaten, key=lambda key: (self.names[key], key))
        unbeaten = self._by_value(unbeaten)

        def preference(key: str) -> tuple[bool, bool, bool]:
            """Return the sort key for a method, by the order that `unbeaten` describes; False sorts before True."""
            return key not in self.present, key != self.loaded, self.costs_short_inputs(key)

        return sorted(unbeaten, key=preference)

    def _by_value(self, keys: list[str]) -> list[str]:
        """Sort methods by value, at the longest length at which one measure, the first possible, has all of them."""
        for measure in self.informative:
            shared_lengths = [
                length
                for length in (measure.lengths(keys[0]) if keys else [])
                if set(keys) <= set(measure.measured(length))
            ]
            if shared_lengths:
                longest = shared_lengths[-1]
                return sorted(keys, key=lambda key: measure.sort_value(key, longest))
        return keys

    @property
    def all_alike(self) -> bool:
        """True if no method is significantly better than another."""
        return len(self.present) > 1 and set(self.present) <= set(self.unbeaten)

    @cached_property
    def lead(self) -> str | None:
        """The key of the best method, or of the first of several; None where the best method is not known."""
        if not self.unbeaten:
            return None
        pairs = combinations(self.unbeaten, 2)
        if any(self.outcomes[pair] is Outcome.NOT_MEASURED for pair in pairs):
            return None
        return self.unbeaten[0]


def collect_findings(
    measures: Sequence[tuple[Measure, str]],
    *,
    methods: Iterable[Method],
    loaded: Method,
    context_length: int,
    extended: Mapping[str, int | None],
) -> Findings:
    """Return the findings that follow from several measures of one model.

    Args:
        measures: pairs of a measure and the name of the text that it was measured on. Measures without any items are
            left out.
        methods: the methods in the order in which tables show them.
        loaded: the method of the unpatched model; it comes first whether it was measured or not.
        context_length: the length in tokens that the unpatched model is for.
        extended: the length in tokens that each method is set for, by its key; None: the method works at any length, or
            its length is not known.
    """
    names = labels([loaded, *methods])
    return Findings(
        names=dict(zip(names, short_labels(names.values()), strict=True)),
        loaded=method_key(loaded),
        context_length=context_length,
        measures=_with_unique_names([(measure, text) for measure, text in measures if any(measure.items.values())]),
        extended={key: length for key, length in extended.items() if length},
    )


def _share_decides(measure: Measure, *places: tuple[str, int]) -> bool:
    """Return whether a measure replaces a share of right answers, and this share is not at the floor at some place.

    `places`: pairs of the key of a method and a length in tokens.
    """
    share = measure.instead_of
    return share is not None and not all(
        share.at_floor(key, length) for key, length in places if key in share.measured(length)
    )


def _with_unique_names(measures: Sequence[tuple[Measure, str]]) -> list[Measure]:
    """Make the names of measures unique by adding the name of the text, then the longest length, then a number."""
    renamed = [measure for measure, _ in measures]
    texts = [text for _, text in measures]
    for addition in ("text", "longest length", "number"):
        count = Counter(measure.name for measure in renamed)
        numbers = Counter[str]()
        for index, measure in enumerate(renamed):
            if count[measure.name] == 1:
                continue
            numbers[measure.name] += 1
            if addition == "text":
                suffix = texts[index]
            elif addition == "longest length":
                suffix = f"to {measure.longest:,} tokens"
            else:
                suffix = str(numbers[measure.name])
            renamed[index] = replace(measure, name=f"{measure.name}, {suffix}")
    return renamed

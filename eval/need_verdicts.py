"""The verdict on how far a model reads: numbers with intervals go in, sentences come out.

Nothing here reads a model, a run or a file; `needs.py` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.runs.verdicts import Outcome, verdict
from rope_ext_hf.terminal import Rows, ShownAsTables, text_table, wrapped

_MOST_RISE = 0.02  # nats per token by which the loss may be higher than at the context length
_ENOUGH = 0.85
"""The share of its own score at the context length that a model has to keep, as in RULER (Hsieh et al. 2024, arXiv
2404.06654, whose threshold is another model's score)."""
_KNOWN = 0.5  # the score at the context length from which a task tells anything about a model
_GUESSED = 0.9  # the share of the loss of guessing by frequency from which a loss tells nothing of a model
ALL_TASKS = "all these tasks"  # the name of the prompts of several tasks that tell something, as one task


@dataclass(frozen=True, repr=False)
class NeedReport(ShownAsTables):
    """The numbers of a measurement, and the conclusion from them.

    Attributes:
        context_length: tokens that the model is for as it is, with the patch that it carries.
        target_length: tokens that are wanted; None: none were stated.
        loss: at the context length, in nats per token.
        rises: by length in tokens: how much higher the loss of the same tokens is than at the context length.
        quarter: how much higher their loss is with a quarter of the context length.
        guessing: how much higher the loss at the context length is than that of guessing each token by its share in the
            text.
        scores: by task, then by length: the share of the prompts that are answered; lengths beyond the context length
            for tasks that tell something, and for `ALL_TASKS` of those together, where there are several.
        window: the tokens that a layer sees, where every layer has a sliding window; else None.
        layers: how many layers there are.
        architecture: the settings of the model that say how far it may read, in sentences.
        notes: sentences on measures that are missing, with the reason.
    """

    context_length: int
    target_length: int | None
    loss: float
    rises: Mapping[int, Estimate]
    quarter: Estimate
    guessing: Estimate
    scores: Mapping[str, Mapping[int, Estimate]]
    window: int | None = None
    layers: int = 1
    architecture: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that were measured, ascending, the context length first."""
        return self.context_length, *self.rises

    @property
    def goal(self) -> int:
        """The length that the conclusion is about: the one that is wanted, else the longest that was measured."""
        return self.target_length or self.lengths[-1]

    @property
    def known(self) -> list[str]:
        """The tasks that tell something: the model surely answers half of them at its context length."""
        return [task for task, at in self.scores.items() if tells(at[self.context_length])]

    def judge(self, length: int) -> tuple[Outcome, str]:
        """Judge whether it reads a length, better for yes and worse for no, with the reason.

        It does where the loss surely does not rise by more than 0.02 nats per token, and it surely keeps 85% of its
        score; a rise or a loss of answers that is sure says that it does not. No measure: the loss alone.
        """
        if self.window is not None and self.window < length:
            return Outcome.WORSE, self._windowed(length)
        if length > self.context_length and length not in self.rises:
            return Outcome.CANNOT_TELL, "it was not measured"
        silent = f"it does not surely answer half of any task at its {self.context_length:,}"
        found = [] if self.known else [(Outcome.NO_MEASURE, silent)]
        if length > self.context_length:
            rise = verdict(self.rises[length], than=_MOST_RISE)
            texts = {
                Outcome.BETTER: f"the loss rises by less than {_MOST_RISE} nats per token",
                Outcome.CANNOT_TELL: f"a rise of the loss by {_MOST_RISE} is not excluded: it is {rise}",
                Outcome.WORSE: f"the loss is {rise}",
            }
            found.append((rise.outcome, texts[rise.outcome]))
            kept = {task: self._kept(task, length) for task in self.known}  # the last one is of all prompts
            found += [each for task, each in kept.items() if each[0] is Outcome.WORSE or task == self.known[-1]]
        for outcome in (Outcome.WORSE, Outcome.NO_MEASURE, Outcome.CANNOT_TELL):
            if reasons := [text for each, text in found if each is outcome]:
                return outcome, " and ".join(reasons)
        return Outcome.BETTER, " and ".join(text for _, text in found)

    def _kept(self, task: str, length: int) -> tuple[Outcome, str]:
        now, before = self.scores[task][length], self.scores[task][self.context_length]
        outcome = verdict(now.minus(before, _ENOUGH), higher_is_better=True).outcome
        unsure = f"that {_ENOUGH:.0%} of its answers stay is not sure, " if outcome is Outcome.CANNOT_TELL else ""
        return outcome, f"{unsure}it answers {share_text(now)} of {task} instead of {share_text(before)}"

    def _windowed(self, length: int) -> str:
        reach = self.layers * ((self.window or 1) - 1) + 1
        far = f"and nothing from further back than {reach:,} tokens reaches the last one through all {self.layers}"
        steps = f"and what stands further back arrives at best in steps through the {self.layers} layers"
        return f"every layer sees the last {self.window:,} tokens only, {far if reach < length else steps}"

    @cached_property
    def _decisive(self) -> tuple[Outcome, int, str]:
        """The judgement of the goal, the length that decides it, and the reason."""
        judged = [(length, *self.judge(length)) for length in (*self.lengths, self.goal) if length <= self.goal]
        order = (Outcome.WORSE, Outcome.NO_MEASURE, Outcome.CANNOT_TELL)
        decisive = (each for outcome in order for each in judged if each[1] is outcome)
        length, outcome, reason = next(decisive, judged[-1])
        return outcome, length, reason

    @property
    def outcome(self) -> Outcome:
        """Of `goal`: better: it needs nothing; worse: it does not read that length; else it cannot be told."""
        return self._decisive[0]

    @property
    def too_narrow(self) -> bool:
        """Whether every layer's sliding window is shorter than `goal`, which no method for RoPE changes."""
        return self.window is not None and self.window < self.goal

    @property
    def reads_to(self) -> int | None:
        """The longest length up to which it reads every one that was measured; None: it is not known to read any."""
        return max(takewhile(lambda length: self.judge(length)[0] is Outcome.BETTER, self.lengths), default=None)

    @property
    def doubts(self) -> list[str]:
        """Reasons for which a flat loss says less, in sentences."""
        short, guess, sentences = self.context_length, self.loss - self.guessing.value, []
        if verdict(self.guessing, than=(_GUESSED - 1) * guess).outcome is not Outcome.BETTER:
            sentences.append(
                f"Its loss at {short:,} tokens, {self.loss:.3f} nats per token, is not surely a tenth below the "
                f"{guess:.3f} of guessing each token by its share in the text: a model that guesses has as flat a loss."
            )
        gain = verdict(self.quarter, higher_is_better=True)
        if gain.outcome is not Outcome.BETTER:
            sentences.append(
                f"It gains nothing that can be told between a quarter and the whole of its {short:,} tokens (with a "
                f"quarter the loss is {gain}): a model that sees no further back has as flat a loss."
            )
        return sentences

    @property
    def conclusion(self) -> str:
        """The conclusion for `goal`, in sentences."""
        (outcome, length, reason), goal, reach = self._decisive, self.goal, self.reads_to
        reads = "" if reach is None or outcome is Outcome.BETTER else f"As it is, it reads to {reach:,} tokens. "
        if self.too_narrow:
            no_method = "no method for RoPE makes it look further back"
            return (
                f"{reads}It does not read {goal:,} tokens, whatever its loss is: {self._windowed(goal)}; {no_method}."
            )
        if outcome is Outcome.WORSE:
            return f"{reads}At {length:,} tokens {reason}. For {goal:,} tokens it needs extending."
        if outcome is Outcome.NO_MEASURE:
            text = f"Whether it reads {goal:,} tokens cannot be told from the loss alone: {reason}."
        elif outcome is Outcome.CANNOT_TELL:
            text = f"{reads}Whether it reads {goal:,} tokens cannot be told: at {length:,} tokens {reason}."
        elif self.target_length:
            text = f"It needs nothing for {goal:,} tokens: as it is, it reads them{f'; {reason}' * bool(reason)}."
        else:
            times = f"{goal / self.context_length:g} times its context length"
            text = f"It reads to at least {goal:,} tokens as it is, {times}, and needs nothing up to there; {reason}."
        return " ".join([text, *self.doubts])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with what follows."""
        follows = {"lengths": self.lengths, "reads_to": self.reads_to, "outcome": self.outcome}
        return asdict(self) | follows | {"conclusion": self.conclusion}

    @property
    def _rows(self) -> Rows:
        rises = list(self.rises.values())
        ends = [["-" if each[at] is None else f"{each[at]:+.3f}" for each in rises] for at in (1, 2)]
        rows = [
            ["tokens", *(f"{length:,}" for length in self.lengths)],
            ["loss, nats per token", f"{self.loss:.3f}", *(f"{each.value:+.3f}" for each in rises)],
            ["from", "-", *ends[0]],
            ["to", "-", *ends[1]],
        ]
        for task, at in self.scores.items():
            cells = (f"{at[length].value:.0%}" if length in at else "-" for length in self.lengths)
            rows.append([f"{task}, answered", *cells])
        return rows

    def tables(self) -> Sequence[Rows]:
        notes = [("architecture", "\n".join(self.architecture)), *(("note", each) for each in self.notes)]
        return [[("conclusion", self.conclusion)], self._rows, notes]

    def __repr__(self) -> str:
        return f"<NeedReport: {self.conclusion}>"

    def __str__(self) -> str:
        sentences = ["", *self.architecture, *self.notes, "", self.conclusion]
        return "\n".join([text_table(self._rows, "r"), *map(wrapped, sentences)])


def tells(score: Estimate) -> bool:
    """Whether a task tells something, by the score at the context length."""
    return verdict(score, than=_KNOWN, higher_is_better=True).outcome is Outcome.BETTER


def share_text(score: Estimate) -> str:
    return score.text("{:.0%}".format)

"""The report of a search: whether its find is written, and how that is printed and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rope_ext_hf.questions import command_line
from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.runs.verdicts import AS_LOADED, Outcome, verdict
from rope_ext_hf.terminal import text_table, wrapped

_UNMEASURED = ("as loaded", "chosen", "found")  # the rows of a report that are no fixed method
_WITHIN = {
    Outcome.BETTER: "within the bound of {bound:g}",
    Outcome.WORSE: "above the bound of {bound:g}",
    Outcome.CANNOT_TELL: "and whether that is within the bound of {bound:g} cannot be told",
}


def decide(
    found: str, best_fixed: str | None, change: Estimate | None, *, length: int, unit: str, is_fixed: bool = False
) -> tuple[bool, str]:
    """Whether the find of a search is written, or the best other fixed method that holds the bound, and why, in words.

    A fixed method needs no search: where the two are not told apart, it is written, be it the find itself (`is_fixed`).
    `change` is the loss of the find less that of this method, on text that the search did not read, in `unit`.
    """
    if best_fixed is None:
        return True, f"No other fixed method surely holds the bound: {found} is written."
    result = verdict(change, unit=unit, item="passage")
    keeps = result.outcome is Outcome.BETTER or (is_fixed and result.outcome is not Outcome.WORSE)
    compared = f"compared with {best_fixed}, the best {'other ' * is_fixed}fixed method, is {result}"
    written = found if keeps else best_fixed
    return keeps, f"The loss of what was found, {found}, at {length:,} tokens, {compared}: {written} is written."


@dataclass(frozen=True)
class SearchReport:
    """The results of a search. Losses are in nats per token, on documents that the search did not read.

    Attributes:
        settings: the arguments.
        context_length, target_length: in tokens.
        method: `RopeMethod.to_dict` of what was chosen, which is written.
        label: of the chosen method: the stage that it came up in, and its root, or the fixed method.
        decision: why it was chosen and not what was found, or not a fixed method, in words.
        losses: of the model as loaded, of every fixed method, of what was found where that was not chosen, and of what
            was chosen, by length.
        gains: by how much the chosen one is lower than each at the target length.
        lost: how much higher it is than the model as loaded at the context length.
        key_losses, key_gains: the same over the tokens that counted, at the target length: key tokens, or answers;
            empty where all tokens counted.
        keys_by: which tokens these are, and how many.
        trials, stopped: how many candidates were read, and how many of them not to the end.
        seconds, cpu_seconds: of the search; those of interrupted runs count, measuring and loading do not.
        folder: of the patched model.
        save_route: how its config states the method, and which programs are known to read that right.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    method: dict[str, Any]
    label: str
    decision: str
    losses: dict[str, dict[str, float]]
    gains: dict[str, Estimate]
    lost: Estimate
    key_losses: dict[str, dict[str, float]]
    key_gains: dict[str, Estimate]
    keys_by: str
    trials: int
    stopped: int
    seconds: float
    cpu_seconds: float
    folder: str
    save_route: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @property
    def best_fixed(self) -> str:
        """The fixed method with the lowest loss at the target length."""
        fixed = [name for name in self.losses if name not in _UNMEASURED]
        return min(fixed, key=lambda name: self.losses[name][str(self.target_length)])

    @property
    def findings(self) -> str:
        """What was measured, and what follows from it."""
        tables = [_table("nats per token", self.losses, self.gains)]
        if self.key_losses:
            tables += ["", _table("nats per token that counted", self.key_losses, self.key_gains), self.keys_by]
        bound = self.settings["most_lost"]
        within = _WITHIN[verdict(self.lost, than=bound).outcome].format(bound=bound)
        sentences = (
            self.decision,
            f"At {self.context_length:,} tokens, compared with {AS_LOADED}, the loss of what is written is "
            f"{verdict(self.lost, item='passage')}, {within}.",
            f"All this is of text that the search did not read; intervals are over {self.lost.items} documents or "
            "passages of it.",
            f"{self.trials} trials, {self.stopped} of them stopped early, in {self.seconds / 60:.1f} minutes "
            f"({self.cpu_seconds:.0f} CPU seconds)",
        )
        return "\n".join([*tables, "", *map(wrapped, sentences)])

    def __str__(self) -> str:
        where = wrapped(
            f"The model, extended {self.target_length / self.context_length:g} times, is in {self.folder}, as "
            f"{self.save_route}. `rope_ext_hf.from_pretrained` loads it; measure it on other text:"
        )
        command = command_line("ppl", self.folder, lengths=(self.context_length, self.target_length), data="TEXT")
        return "\n".join([self.findings, where, f"  {command}"])


def _table(head: str, losses: Mapping[str, Mapping[str, float]], gains: Mapping[str, Estimate]) -> str:
    """A line per method: its losses by length, and what its loss is compared with that of the chosen one."""
    lengths = list(next(iter(losses.values())))
    rows = [[head, *(f"{int(length):,}" for length in lengths), "compared with the chosen one"]]
    for name, row in losses.items():
        compared = str(verdict(gains[name], item="passage")) if name in gains else ""
        rows.append([name, *(f"{row[length]:.4f}" for length in lengths), compared])
    return text_table(rows, f"l{'r' * len(lengths)}l")

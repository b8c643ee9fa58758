"""The report of a fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.runs.conclusions.measures import exponential, perplexity_text
from rope_ext_hf.runs.conclusions.statistics import Estimate
from rope_ext_hf.runs.conclusions.verdicts import Verdict, verdict
from rope_ext_hf.runs.tables import BEYOND
from rope_ext_hf.terminal import Report, text_table, wrapped


@dataclass(frozen=True)
class FinetuneReport(Report):
    """The result of a fine-tuning: measurements of the model before and after it.

    Losses are in nats per token, over the same tokens at every length and for every model. In JSON, an estimate has its
    value, the ends of its interval, and the number of documents or prompts.

    Attributes:
        settings: the arguments of `finetune`, by name.
        context_length: the length that the model was made for, in tokens.
        target_length: the length that it is extended to, in tokens.
        row_length: the length of the rows that it was trained on, in tokens.
        losses: the loss, by model ("unpatched", "patched", "trained", and with a control "control" and "control,
            patched") and by length in tokens.
        gains: the amount by which the trained model's loss is lower, with its 95% confidence interval, paired by
            document; by the model it is compared with, and by length. "unpatched at 1x" is the unpatched model at its
            context length.
        retrieval: the share of prompts at the target length that are answered exactly, by patched model, with its
            confidence interval over prompts; empty: not measured.
        retrieval_gains: the amount by which the trained model's share is larger, by the model it is compared with.
        training: steps, seconds and losses of the training, and of the control.
        folder: the folder of the trained model.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    row_length: int
    losses: dict[str, dict[str, float]]
    gains: dict[str, dict[str, Estimate]]
    retrieval: dict[str, Estimate]
    retrieval_gains: dict[str, Estimate]
    training: dict[str, dict[str, Any]]
    folder: str

    @property
    def verdicts(self) -> dict[str, dict[str, Verdict]]:
        """Verdicts on how the trained model's loss compares with that of each other model, by model and length."""
        return {
            name: {length: verdict(gain, perplexity=True) for length, gain in by_length.items()}
            for name, by_length in self.gains.items()
        }

    @property
    def findings(self) -> str:
        """The findings as text: the table of perplexities, the verdicts, retrieval and duration."""
        lengths = list(self.losses["trained"])
        heads = [f"{int(length):,}{BEYOND if int(length) > self.row_length else ''}" for length in lengths]
        rows = [
            [name, *(perplexity_text(exponential(losses[length])) for length in lengths)]
            for name, losses in self.losses.items()
        ]
        lines = [text_table([["perplexity", *heads], *rows], "lr")]
        for name, by_length in self.verdicts.items():
            lines += ["", f"perplexity of the model {name!r}, compared with the trained one"]
            lines += [wrapped(str(comparison), f"{int(length):>12,}: ") for length, comparison in by_length.items()]
        lines += self._retrieval_lines()
        if any(BEYOND in head for head in heads):
            lines += ["", f"{BEYOND} longer than the model is trained for, {self.row_length:,} tokens"]
        training = self.training["trained"]
        return "\n".join([*lines, "", f"{training['steps']} steps in {training['seconds'] / 60:.1f} minutes"])

    def _retrieval_lines(self) -> list[str]:
        if not self.retrieval:
            return []
        lines = ["", f"prompts of {self.target_length:,} tokens that are answered exactly"]
        for name, share in self.retrieval.items():
            prompts = f" of {share.items} prompts" if share.low is None else ""
            lines.append(f"  {name}: {share.text('{:.0%}'.format)}{prompts}")
        for name, gain in self.retrieval_gains.items():
            comparison = verdict(gain, unit="points", higher_is_better=True, item="prompt", scale=100, digits=1)
            lines.append(wrapped(str(comparison), f"  trained, compared with {name!r}: "))
        return lines

    def __str__(self) -> str:
        return f"{self.findings}; the model is in {self.folder}"

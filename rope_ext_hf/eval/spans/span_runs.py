"""The part of a kind of run that runs over documents share: speed, and losses that are not finite, in words."""

from __future__ import annotations

from typing import Any

from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.kinds import RunKind
from rope_ext_hf.runs.run import Run


class SpanRuns(RunKind):
    """Base class for kinds of run in which a document gets a value for each context length.

    Their results have the attributes `tokens_per_second`, `gpu_bytes` and `nonfinite`.
    """

    item = "document"

    def speed(self, run: Run[Any]) -> str:
        """Return the speed of reading, from the slowest result to the fastest, and the peak of GPU memory, in words."""
        rates = sorted(result.tokens_per_second for result in run.results if result.tokens_per_second)
        if not rates:
            return "not timed"
        slowest, fastest = f"{rates[0]:,.0f}", f"{rates[-1]:,.0f}"
        text = f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} tokens per second"
        peak = max(result.gpu_bytes or 0 for result in run.results)
        return f"{text}, at most {peak / 1e9:.1f} GB of GPU memory" if peak else text

    def not_finite(self, run: Run[Any]) -> list[str]:
        """Name, in words, the documents with a value that is not finite: "yarn x4 at 4096 in war-and-peace"."""
        return sorted(
            f"{label(result.method)} at {result.length} in {name}"
            for result in run.results
            for name in result.nonfinite
        )

"""`ServerReport`: the result of checking that a running server computes what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rope_ext_hf.errors import duration
from rope_ext_hf.terminal import Rows, ShownAsTables
from rope_ext_hf.tools.servers.answers import as_text, difference_rows
from rope_ext_hf.tools.servers.mistakes import AS_MEASURED

COMPUTE_SECONDS = 600.0  # that computing a prompt here may take, where no lengths are given
STRICT_PERCENT = 1.0  # error of the softmax scale that a strict check must be able to detect


@dataclass(frozen=True, repr=False)
class ServerReport(ShownAsTables):
    """The configuration that a server runs, as far as its answers show it.

    Attributes:
        url: the server's address.
        server: the serving program with its version.
        method: the method that was measured.
        runs: the configuration that the server agrees with: "as measured", or the name of a mistake; None: none.
        closest: the configuration with the smallest difference, whether the server agrees with it or not.
        precision: the dtype whose rounding explains the remaining difference; None: no dtype explains it.
        alike: other configurations that fit the answers as well as `closest`.
        refused: the server's message for the shortest prompt that it does not answer; None: it answers all prompts.
        lengths: lengths of the prompts, in tokens.
        differences: by configuration, the root mean square difference of log-probabilities in nats, at each length up
            to the one that excludes it.
        explained: by dtype, the largest such difference that its rounding explains, at each length.
        suggested: dtypes that were not stated for the server and whose rounding would explain the difference.
        tokens: the difference between the server's tokens of a text and those of the tokenizer here; None: they are
            equal, or the server does not return tokens.
        smallest_errors: by dtype, the smallest errors in percent that these answers can reveal: of the softmax scale,
            and noise in the attention output of one layer.
        strict: whether the check had to be able to reveal an error of 1% of the softmax scale.
        left_out: the longest length that was left out as too costly to compute here; None: none was.
    """

    also = ("agrees",)
    url: str
    server: str
    method: str
    runs: str | None
    closest: str
    precision: str | None
    alike: tuple[str, ...]
    refused: str | None
    lengths: tuple[int, ...]
    differences: dict[str, tuple[float, ...]]
    explained: dict[str, tuple[float, ...]]
    suggested: tuple[str, ...] = ()
    tokens: str | None = None
    smallest_errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    strict: bool = False
    left_out: int | None = None

    @property
    def agrees(self) -> bool:
        """True if the server computes what was measured, at every length, and the check was as strict as demanded."""
        return self.runs == AS_MEASURED and self.refused is None and self.tokens is None and not self.too_coarse

    @property
    def too_coarse(self) -> bool:
        """True if a strict check was demanded, but an error of 1% of the softmax scale could not have been noticed."""
        return self.strict and self.smallest_scale_error > STRICT_PERCENT

    @property
    def smallest_scale_error(self) -> float:
        """The smallest error of the softmax scale, in percent, that the check could notice at the server's dtype."""
        scale_error, _ = self.smallest_errors.get(self.precision or "", (math.inf, math.inf))
        return scale_error

    @property
    def sentences(self) -> list[str]:
        """The verdict of the check, followed by notes on open points."""
        sentences = [f"{self.server} at {self.url} {self._verdict}"]
        if self.precision is not None:
            sentences.append(f"the remaining difference is within the rounding of {self.precision}")
        elif self.suggested:
            dtypes = " or of ".join(self.suggested)
            sentences.append(
                f"the difference would be within the rounding of {dtypes}: if the server uses it, check again with "
                "--weight-bits or --kv-bits"
            )
        if self.alike:
            sentences.append(f"these answers fit the model {', '.join(self.alike)} as well; longer prompts may decide")
        if self.refused is not None:
            sentences.append(f"the server does not answer a longer prompt: {self.refused}")
        if self.left_out is not None:
            sentences.append(
                f"prompts of up to {self.left_out:,} tokens were left out, since computing one here would take more "
                f"than {duration(COMPUTE_SECONDS)}; give --lengths to include them"
            )
        if self.tokens is not None:
            sentences.append(f"the server's tokenizer differs from the one here: {self.tokens}")
        for dtype, (scale, noise) in self.smallest_errors.items():
            sentences.append(
                f"under {dtype} these answers reveal an error of the softmax scale of {scale:.2g}% or more, and noise "
                f"in the attention output of one layer of {noise:.2g}% or more"
            )
        if self.too_coarse:
            sentences.append(
                f"a strict check has to reveal an error of {STRICT_PERCENT:g}%, and the text has too few prompts for "
                "that; give a longer one with --data"
            )
        return sentences

    @property
    def _verdict(self) -> str:
        if self.runs == AS_MEASURED:
            reach = "" if self.refused is None else f" up to {self.lengths[-1]:,} tokens"
            return f"serves what was measured{reach}: {self.method}"
        if self.runs is not None:
            return f"does not serve what was measured ({self.method}): it runs the model {self.runs}"
        return (
            f"serves neither what was measured ({self.method}) nor the model with a likely mistake; the closest, "
            f"{self.closest}, differs by more than rounding explains"
        )

    @property
    def _all_differences(self) -> dict[str, tuple[float, ...]]:
        return self.differences | {f"allowed for {dtype}": values for dtype, values in self.explained.items()}

    def tables(self) -> Sequence[Rows]:
        verdict, *notes = self.sentences
        rows = [("verdict", verdict), *(("note", note) for note in notes)]
        return [rows, difference_rows(self.lengths, self._all_differences)]

    def __str__(self) -> str:
        return as_text(self.sentences, self.lengths, self._all_differences)

"""The arguments with which the distributions of a model are compared with those of a stored run."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from rope_ext_hf.eval.measurement_options import MeasurementOptions, PplOptions, some_lengths
from rope_ext_hf.options.arguments import argument


@dataclass(frozen=True, kw_only=True)
class Divergence(MeasurementOptions):
    """Arguments for comparing the distributions of a model with those of a run that has stored its last hidden states.

    The model reads the tokens of the run, so that text, protocol and targets are those of the run.
    """

    kind = "divergence"
    command = "ppl"

    lengths: tuple[int, ...] | Any | None = argument(
        None,
        "Some of the context lengths of the run. Default: all.",
        parse=some_lengths,
        metavar="LENGTHS",
    )
    against: str | Any = argument(MISSING, PplOptions.help_of("against"), parse=str, metavar="FOLDER")
    against_method: str | None = argument(None, PplOptions.help_of("against_method"), metavar="LABEL")

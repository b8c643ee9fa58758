"""The commands `tasks` and `gain`."""

from __future__ import annotations

from rope_ext_hf.cli.evaluation import Prepared, ProcessOptions, RunOptions
from rope_ext_hf.cli.options import CONTINUES, command
from rope_ext_hf.tools.suites.suite_options import Gain, Tasks


@command("Tool box: measure", interrupted=CONTINUES)
def tasks(run_options: RunOptions, options: Tasks, processes: ProcessOptions) -> None:
    """Run a suite of tasks, such as RULER, at each length.

    Besides the scores it prints the effective length: the longest one up to which the score stays at 85% or more of the
    unpatched model's score at the shortest length.

    Example: `rope-ext tasks reference --suite json-kv --lengths 768,1024 --score rank --samples 4`
    """
    Prepared(run_options, options, processes).measure()


@command("Tool box: measure", interrupted=CONTINUES)
def gain(run_options: RunOptions, options: Gain, processes: ProcessOptions) -> None:
    """Measure how much the model uses distant context.

    Each prompt is read twice: with the evidence for an answer, and with other text in its place. The gain is the amount
    by which the evidence lowers the loss of the answer, for each length and each distance between evidence and answer.
    No text is generated, so base models can be measured too.

    Example: `rope-ext gain reference --method yarn --factor 8 --lengths 256,512,1k --samples 8`
    """
    Prepared(run_options, options, processes).measure()

"""Commands that measure tasks and the use of context: `tasks`, `gain`."""

from __future__ import annotations

from rope_ext_hf.cli.evaluation import Prepared, ProcessOptions, RunOptions
from rope_ext_hf.cli.options import CONTINUES, command
from rope_ext_hf.tools.suites.questions import Gain, Tasks


@command("Tool box: measure", interrupted=CONTINUES)
def tasks(given: RunOptions, question: Tasks, shared: ProcessOptions) -> None:
    """Ask a suite of tasks at each length: scores, and up to which length 85% of the shortest one's score is kept.

    Example: `rope-ext tasks reference --suite json-kv --lengths 768,1024 --score rank --samples 4`
    """
    Prepared(given, question, shared).measure()


@command("Tool box: measure", interrupted=CONTINUES)
def gain(given: RunOptions, question: Gain, shared: ProcessOptions) -> None:
    """Whether the model uses its context: how much evidence in it lowers the loss of an answer, by length and distance.

    Each prompt is read twice, with the evidence and with other text in its place. No text is generated: base models
    will do.

    Example: `rope-ext gain reference --method yarn --factor 8 --lengths 256,512,1k --samples 8`
    """
    Prepared(given, question, shared).measure()

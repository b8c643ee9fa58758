"""Commands that measure tasks and the use of context: `tasks`, `gain`."""

from __future__ import annotations

from rope_ext_hf.cli.evaluation import Prepared, ProcessOptions, RunOptions
from rope_ext_hf.cli.options import CONTINUES, command
from rope_ext_hf.tools.suites.questions import Gain, Tasks


@command("Tool box: measure", interrupted=CONTINUES)
def tasks(given: RunOptions, question: Tasks, shared: ProcessOptions) -> None:
    """Run a suite of tasks, such as RULER, at each length.

    Besides the scores it prints the effective length: up to where the model keeps 85% of its score at the shortest one.

    Example: `rope-ext tasks reference --suite json-kv --lengths 768,1024 --score rank --samples 4`
    """
    Prepared(given, question, shared).measure()


@command("Tool box: measure", interrupted=CONTINUES)
def gain(given: RunOptions, question: Gain, shared: ProcessOptions) -> None:
    """Measure how much the model uses distant context.

    Each prompt is read twice, with the evidence for an answer and with other text in its place: how much lower is the
    loss of the answer, by length and distance? No text is generated, so base models can be measured too.

    Example: `rope-ext gain reference --method yarn --factor 8 --lengths 256,512,1k --samples 8`
    """
    Prepared(given, question, shared).measure()

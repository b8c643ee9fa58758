"""Settings of the measurements `tasks` and `gain`, as dataclasses for `rope_ext_hf.eval.measure`.

    from rope_ext_hf.eval import measure
    from rope_ext_hf.tools.suites import Tasks
    run = measure(model, Tasks(lengths=["4k", "32k"], suite="ruler"), methods=["yarn"])

Nothing here imports torch, so that --help prints at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import parse_lengths
from rope_ext_hf.eval.measurement_options import MeasurementOptions
from rope_ext_hf.options.arguments import anything, argument, several
from rope_ext_hf.reading.text.load import check_name
from rope_ext_hf.tools.suites.base import check_suite, suite_names


@dataclass(frozen=True, kw_only=True)
class Tasks(MeasurementOptions):
    """A suite of tasks, measured by its score at each length and by the length up to which the score holds.

    A length is the most tokens that prompt and generation have together. A generated answer's score is the share of the
    right answers that it contains. Where answers are ranked, a prompt scores 1 if the first right answer has the
    highest likelihood per token among the candidates, else 0.
    """

    kind = "tasks"
    command = "tasks"

    suite: str = argument(
        "ruler", f"Suite: {', '.join(suite_names())}; short has short inputs, to see whether a method harms them."
    )
    tasks: tuple[str, ...] | Any | None = argument(
        None, "Tasks of the suite, separated by commas. Default: all.", parse=several(str), metavar="NAMES"
    )
    samples: int = argument(20, "Prompts per task and length.", least=1, most=10_000)
    haystack: Any = argument(
        "stdlib",
        "The text that facts are hidden in, in any form that --data of ppl takes; some tasks use none.",
        parse=anything,
    )
    score: str | None = argument(
        None,
        "generate: score the generated answer; rank: rank the right answer among 19 others by likelihood. Default: "
        "rank for short, generate for the other suites.",
    )
    chat_template: str = argument(
        "auto", "auto: use the tokenizer's chat template if it has one; never: use none.", among=("auto", "never")
    )
    extra_tokens: int = argument(
        0, "Tokens to generate beyond each task's budget, for models that reason first.", least=0, most=2**20
    )
    seed: int | None = argument(
        None, "Seed of the prompts. Default: the suite's own, 42 for ruler.", least=0, most=2**32 - 1
    )

    def check_early(self) -> None:
        check_name(self.haystack)
        check_suite(self.suite)


@dataclass(frozen=True, kw_only=True)
class Gain(MeasurementOptions):
    """The gain from evidence in the context: the amount by which it lowers the loss of an answer, in nats per token.

    Each prompt is read twice, with the evidence and with other text in its place. No text is generated.
    """

    kind = "gain"
    command = "gain"

    data: Any = argument(
        "docstrings",
        "Rows with the columns context, evidence (a part of the context), question and answer: a file of JSON lines, "
        "CSV or parquet, or hf:OWNER/NAME. Default: docstrings of Python modules that the bundled model was not "
        "trained on.",
        parse=anything,
        metavar="ROWS",
    )
    distances: tuple[int, ...] | Any | None = argument(
        None,
        "Tokens between evidence and answer, e.g. 1k,4k. Default: half of each length.",
        parse=lambda value: None if value is None else tuple(parse_lengths(value)),
        metavar="LENGTHS",
    )
    samples: int = argument(32, "Read at most this many rows, spread evenly over all that fit.", least=1, most=10_000)
    haystack: Any = argument(
        None,
        "Text that fills the prompt where a context is too short, in any form that --data of ppl takes. Default: the "
        "contexts of the other rows.",
        parse=anything,
    )

    def check_early(self) -> None:
        check_name(self.haystack)

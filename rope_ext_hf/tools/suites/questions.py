"""The questions of this tool box's suites, as values; `rope_ext_hf.eval.measure` answers them.

    from rope_ext_hf.eval import measure
    from rope_ext_hf.tools.suites import Tasks
    run = measure(model, Tasks(lengths=["4k", "32k"], suite="ruler"), methods=["yarn"])

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import parse_lengths
from rope_ext_hf.eval.questions import LengthsQuestion
from rope_ext_hf.questions import anything, argument, several
from rope_ext_hf.reading.corpora import check_name
from rope_ext_hf.tools.suites.base import check_suite, suite_names


@dataclass(frozen=True, kw_only=True)
class Tasks(LengthsQuestion):
    """A suite of tasks: scores by length, and up to which length they hold.

    The lengths are those of prompt and generation together, at most. Generated answers are scored by the share of the
    right answers that they hold; ranked ones by whether the first right answer has the highest likelihood per token.
    """

    kind = "tasks"
    command = "tasks"

    suite: str = argument("ruler", f"{', '.join(suite_names())}; short is a guard for short inputs.")
    tasks: tuple[str, ...] | Any | None = argument(
        None, "Tasks of the suite, by commas. Default: all.", parse=several(str), metavar="NAMES"
    )
    samples: int = argument(20, "Prompts per task and length.", least=1, most=10_000)
    haystack: Any = argument(
        "stdlib", "The text that facts are hidden in, named as in --data of ppl; some tasks use none.", parse=anything
    )
    score: str | None = argument(
        None,
        "generate: the share of right answers generated; rank: the right one among 19 others. Default: generate; of "
        "short rank.",
    )
    chat_template: str = argument(
        "auto", "auto: the tokenizer's chat template, where it has one; never.", among=("auto", "never")
    )
    extra_tokens: int = argument(
        0, "Tokens to generate beyond each task's budget, for models that reason first.", least=0, most=2**20
    )
    seed: int | None = argument(
        None, "Of the prompts. Default: the suite's own, 42 for ruler.", least=0, most=2**32 - 1
    )

    def check_early(self) -> None:
        check_name(self.haystack)
        check_suite(self.suite)


@dataclass(frozen=True, kw_only=True)
class Gain(LengthsQuestion):
    """Whether a model uses its context: by how much evidence in it lowers the loss of an answer.

    Each prompt is read twice, with the evidence and with other text in its place. No text is generated.
    """

    kind = "gain"
    command = "gain"

    data: Any = argument(
        "docstrings",
        "'docstrings' (of modules of Python's library that the bundled model was not trained on), or rows with the "
        "columns context, evidence (a part of context), question and answer: JSON lines, parquet, hf:OWNER/NAME.",
        parse=anything,
        metavar="ROWS",
    )
    distances: tuple[int, ...] | Any | None = argument(
        None,
        "Tokens between evidence and answer, e.g. 1k,4k. Default: half of each length.",
        parse=lambda given: None if given is None else tuple(parse_lengths(given)),
        metavar="LENGTHS",
    )
    samples: int = argument(32, "Rows that are read at most, spread evenly over all that fit.", least=1, most=10_000)
    haystack: Any = argument(
        None,
        "Text that fills prompts where a context is too short, named as in --data of ppl. Default: the other contexts.",
        parse=anything,
    )

    def check_early(self) -> None:
        check_name(self.haystack)

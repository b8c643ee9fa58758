"""What is asked of a fine-tuning and of a search, as values: arguments, options of a command, settings of a run.

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass
from typing import Any

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.method_choice import PatchChoice, check_method_names
from rope_ext_hf.questions import Question, anything, asked, option_text, several
from rope_ext_hf.reading.corpora import check_name

_LOGGERS = ("none", "tensorboard", "trackio", "wandb")
_UNITS = {"s": 1 / 60, "m": 1.0, "h": 60.0}


def _minutes(given: Any) -> float | None:
    if not isinstance(given, str):
        return None if given is None else float(given)
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", given.strip())
    if match is None or not float(match[1]):
        raise MethodError(f"--budget takes a time, e.g. 90s, 10m or 2h; got {short(given)!r}")
    return float(match[1]) * _UNITS[match[2]]


def _method_names(given: Any) -> tuple[str, ...] | None:
    if (names := several(str)(given)) == ():
        raise MethodError("--methods names no method; leave it out to begin with the default ones")
    return names


@dataclass(frozen=True, kw_only=True)
class OfModel(Question):
    """What is done to a model that is loaded for it."""

    model: str = asked(MISSING, "A folder, a Hub id or 'reference'.", option=False)
    dtype: str = asked("auto", "Of the weights.", option=False)
    device: str = asked("auto", "Where the model runs.", option=False)
    revision: str | None = asked(None, "Branch, tag or commit on the Hub.", option=False)
    trust_remote_code: bool = asked(False, "Run the Python code that comes with the model.", option=False)

    @property
    def source(self) -> dict[str, Any]:
        """Where the model is."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True, kw_only=True)
class Finetuning(OfModel, PatchChoice):
    """What is asked of a fine-tuning."""

    PANEL = None
    command = "finetune"

    dtype: str = asked(
        "float32", "Of the weights.", option=False, parse=lambda given: "float32" if given == "auto" else given
    )
    data: Any = asked(
        MISSING, "The text to train on, as in `rope-ext ppl`; 'stdlib' is for a trial.", parse=anything, metavar="TEXT"
    )
    minutes: float | None = asked(
        None, "How long is trained, measurements left out.", least=0, metavar="N", instead_of=("steps",)
    )
    steps: int | None = asked(None, "Steps instead of minutes.", least=1, metavar="N", instead_of=("minutes",))
    eval_data: Any = asked(
        None, "What is measured. Default: a tenth of --data that is not trained on.", parse=anything, metavar="TEXT"
    )
    train_all: bool = asked(False, "Train all weights. Default: adapters, norms and embeddings.")
    rank: int = asked(16, "Rank of the adapters.", least=1, metavar="N")
    learning_rate: float = asked(
        2e-4, "Its peak; for large models whose weights are all trained commonly 2e-5.", metavar="RATE"
    )
    batch: int = asked(1, "Long rows in a pass.", least=1, metavar="N")
    accumulate: int = asked(4, "Passes in a step.", least=1, metavar="N")
    guard: float = asked(
        1.0,
        "How strongly short inputs are held to the model before; 0: not, and no second model is in memory.",
        least=0,
        metavar="WEIGHT",
    )
    control: bool = asked(False, "Also train the model without the patch for as long, and compare.")
    retrieval: str | None = asked(
        None, "Measure a task of `rope-ext passkey` at the extended length, e.g. needle.", metavar="TASK"
    )
    max_spans: int = asked(48, "Spans of text measured at each length.", least=1, metavar="N")
    report_to: str = asked(
        "none",
        f"Where the training is logged, with losses by length: {', '.join(_LOGGERS)}.",
        among=_LOGGERS,
        metavar="NAME",
    )
    seed: int = asked(0, "Of what is drawn.", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.steps is None):
            raise MethodError("give one of minutes and steps: how long is trained")
        if self.minutes == 0:
            raise MethodError("the training must be longer than nothing, got minutes=0")
        self.check_single(required=True)

    def check_early(self) -> None:
        super().check_early()
        check_name(self.data)
        check_name(self.eval_data)


@dataclass(frozen=True, kw_only=True)
class Searching(OfModel):
    """What is asked of a search."""

    command = "search"

    target_length: int | Any = asked(MISSING, "The longer length, e.g. 32k.", parse=parse_length, metavar="TOKENS")
    data: Any = asked(
        MISSING,
        "The text, as in `rope-ext ppl`; half of it is not searched on but measured at the end.",
        parse=anything,
        metavar="TEXT",
    )
    minutes: float | Any | None = asked(
        None,
        "How long is searched and measured: 90s, 10m or 2h.",
        names=("--budget",),
        parse=_minutes,
        show=lambda minutes: f"{option_text(minutes)}m",
        metavar="TIME",
        instead_of=("trials",),
    )
    trials: int | None = asked(None, "Candidates instead of a time.", least=1, metavar="N", instead_of=("minutes",))
    methods: tuple[str, ...] | Any | None = asked(
        None,
        "Methods to begin with. Default: linear, ntk, by-parts, yarn, llama3 and mrrope.",
        parse=_method_names,
        metavar="NAMES",
    )
    static: bool = asked(
        False,
        "The same frequencies for inputs of every length. Default: what is found is for inputs beyond the context "
        "length alone.",
    )
    most_lost: float = asked(
        0.02,
        "The most that the loss may rise at the context length, in nats per token: 0.02 is 2% of perplexity.",
        names=("--most-lost-at-1x",),
        metavar="NATS",
    )
    fitness: str = asked(
        "loss",
        "Whose loss counts. loss: of all tokens; key-tokens: of those that need the long context; or of the "
        "answers of a task of `rope-ext passkey`, e.g. needle.",
        metavar="WHAT",
    )
    eval_data: Any = asked(
        None, "What is measured at the end, instead of half of --data.", parse=anything, metavar="TEXT"
    )
    passages: int = asked(24, "Passages that each candidate reads.", least=1, metavar="N")
    max_spans: int = asked(32, "Passages measured at the end.", least=1, metavar="N")
    over: str = asked("own", "As in `rope-ext patch`.", metavar="WHAT")
    context_length: int | Any | None = asked(None, "As in `rope-ext patch`.", parse=parse_length, metavar="TOKENS")
    seed: int = asked(0, "Of what is drawn.", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.trials is None):
            raise MethodError("how long is searched? Give minutes (--budget) or trials, one of the two")
        if self.minutes is not None and not self.minutes > 0:
            raise MethodError(f"minutes must be above 0, got {self.minutes}")

    def check_early(self) -> None:
        check_name(self.data)
        check_name(self.eval_data)
        check_method_names(self.methods or ())

    @property
    def underneath(self) -> dict[str, Any]:
        """What is extended, as `rope_ext_hf.patch` takes it."""
        return {"over": self.over, "context_length": self.context_length}

"""What is asked of a fine-tuning and of a search, as values: arguments, options of a command, settings of a run.

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.method_choice import PatchChoice
from rope_ext_hf.questions import Question, asked, several

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


def _corpus(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class OfModel(Question):
    """What is done to a model that is loaded for it.

    Attributes:
        model: a folder, a Hub id or "reference".
        dtype, device: of the model.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
    """

    model: str = asked(option=False)
    dtype: str = asked("auto", option=False)
    device: str = asked("auto", option=False)
    revision: str | None = asked(None, option=False)
    trust_remote_code: bool = asked(False, option=False)

    @property
    def source(self) -> dict[str, Any]:
        """Where the model is."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True, kw_only=True)
class Finetuning(OfModel, PatchChoice):
    """What is asked of a fine-tuning.

    Attributes:
        data: the text to train on, as `rope_ext_hf.eval.perplexity` takes it.
        method, factor, target_length, over, context_length, parameters: as `rope_ext_hf.patch` takes them.
        minutes, steps: how long is trained; one of the two. With minutes the result depends on the machine's speed.
        eval_data: the text that is measured; None: one in ten documents of `data`, or the last tenth of a single one,
            which are not trained on.
        train_all: train all weights instead of adapters (LoRA of all linear layers, with norms and embeddings trained
            whole, as LongLoRA needs them), which are merged at the end.
        rank: of the adapters.
        learning_rate: its peak. Large models trained whole commonly take 2e-5.
        batch, accumulate: long rows of a pass on each device, and passes of a step.
        guard: how strongly the model is held to the one before the patch on inputs of the context length; 0: not, and
            no second copy of the model is in memory.
        control: also train the model without the patch for as long, on as many tokens in rows of the context length.
        retrieval: a task of `rope_ext_hf.eval.passkey`, e.g. "needle", that is measured at the target length.
        max_spans: spans of text measured at each length.
        seed: of what is drawn.

    Raises:
        MethodError: not one of minutes and steps.
    """

    PANEL = None

    dtype: str = asked("float32", option=False, parse=lambda given: "float32" if given == "auto" else given)
    data: Any = asked(
        parse=_corpus, metavar="TEXT", help="The text to train on, as in `rope-ext ppl`; 'stdlib' is for a trial."
    )
    minutes: float | None = asked(None, least=0, metavar="N", help="How long is trained, measurements left out.")
    steps: int | None = asked(None, least=1, metavar="N", help="Steps instead of minutes.")
    eval_data: Any = asked(
        None,
        parse=_corpus,
        metavar="TEXT",
        help="What is measured. Default: a tenth of --data that is not trained on.",
    )
    train_all: bool = asked(False, help="Train all weights. Default: adapters, norms and embeddings.")
    rank: int = asked(16, least=1, metavar="N", help="Rank of the adapters.")
    learning_rate: float = asked(2e-4, metavar="RATE", help="Its peak.")
    batch: int = asked(1, least=1, metavar="N", help="Long rows in a pass.")
    accumulate: int = asked(4, least=1, metavar="N", help="Passes in a step.")
    guard: float = asked(
        1.0, least=0, metavar="WEIGHT", help="How strongly short inputs are held to the model before; 0: not."
    )
    control: bool = asked(False, help="Also train the model without the patch for as long, and compare.")
    retrieval: str | None = asked(None, metavar="TASK", help="Measure retrieval at the extended length, e.g. needle.")
    max_spans: int = asked(48, least=1, metavar="N", help="Spans of text measured at each length.")
    seed: int = asked(0, metavar="N", help="Of what is drawn.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.steps is None):
            raise MethodError("give one of minutes and steps: how long is trained")
        if self.minutes == 0:
            raise MethodError("the training must be longer than nothing, got minutes=0")
        self.check_single(required=True)


@dataclass(frozen=True, kw_only=True)
class Searching(OfModel):
    """What is asked of a search.

    Attributes:
        data: the text, as `rope_ext_hf.eval.perplexity` takes it; half of it is kept for the measurement at the end.
        target_length: in tokens.
        minutes: the time for search and measurement, the latter by estimate.
        trials: the number of candidates, instead of minutes; the result does not depend on the machine's speed then.
        methods: names of the methods to begin with, each fitted to the target length; default: `linear`, `ntk`,
            `by-parts`, `yarn` and `llama3`, those that declare `begins_search`.
        static: the same frequencies for inputs of every length. Default: inputs up to the context length keep those of
            the model (the two lists of `longrope`).
        most_lost: the most that the loss at the context length may rise, in nats per token, interval included.
        fitness: the loss that counts: "loss", of the end of each passage, half a context length; "key-tokens", of the
            key tokens there (`rope_ext_hf.eval.key_tokens`), found by the model under a fixed method; or a task of
            `rope_ext_hf.eval.passkey`, e.g. "needle", of its right answers.
        eval_data: the text of the measurement, instead of half of `data`.
        passages: the passages that a candidate reads, unless it is stopped.
        max_spans: passages measured at the end.
        over, context_length: as `rope_ext_hf.patch` takes them.
        seed: of what is drawn.

    Raises:
        MethodError: not one of minutes and trials.
    """

    target_length: int | Any = asked(parse=parse_length, metavar="TOKENS", help="The longer length, e.g. 32k.")
    data: Any = asked(
        parse=_corpus,
        metavar="TEXT",
        help="The text, as in `rope-ext ppl`; half of it is not searched on but measured at the end.",
    )
    minutes: float | Any | None = asked(
        None,
        names=("--budget",),
        parse=_minutes,
        show=lambda minutes: f"{minutes:g}m",
        metavar="TIME",
        help="How long is searched and measured: 90s, 10m or 2h.",
    )
    trials: int | None = asked(None, least=1, metavar="N", help="Candidates instead of a time.")
    methods: tuple[str, ...] | Any | None = asked(
        None,
        parse=_method_names,
        metavar="NAMES",
        help="Methods to begin with. Default: linear, ntk, by-parts, yarn and llama3.",
    )
    static: bool = asked(
        False,
        help="The same frequencies for inputs of every length. Default: what is found is for inputs beyond the context "
        "length alone.",
    )
    most_lost: float = asked(
        0.02,
        names=("--most-lost-at-1x",),
        metavar="NATS",
        help="The most that the loss per token may rise at the context length.",
    )
    fitness: str = asked(
        "loss",
        metavar="WHAT",
        help="Whose loss counts. loss: of all tokens; key-tokens: of those that need the long context; or of the "
        "answers of a task of `rope-ext passkey`, e.g. needle.",
    )
    eval_data: Any = asked(
        None, parse=_corpus, metavar="TEXT", help="What is measured at the end, instead of half of --data."
    )
    passages: int = asked(24, least=1, metavar="N", help="Passages that each candidate reads.")
    max_spans: int = asked(32, least=1, metavar="N", help="Passages measured at the end.")
    over: str = asked("own", metavar="WHAT", help="As in `rope-ext patch`.")
    context_length: int | Any | None = asked(None, parse=parse_length, metavar="TOKENS", help="As in `rope-ext patch`.")
    seed: int = asked(0, metavar="N", help="Of what is drawn.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.trials is None):
            raise MethodError("how long is searched? Give minutes (--budget) or trials, one of the two")
        if self.minutes is not None and not self.minutes > 0:
            raise MethodError(f"minutes must be above 0, got {self.minutes}")

    @property
    def underneath(self) -> dict[str, Any]:
        """What is extended, as `rope_ext_hf.patch` takes it."""
        return {"over": self.over, "context_length": self.context_length}

"""Values that state a fine-tuning: arguments, options of the command, settings of a run.

Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.method_choice import PatchChoice
from rope_ext_hf.questions import anything, argument
from rope_ext_hf.reading.corpora import check_name

_LOGGERS = ("none", "tensorboard", "trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class Finetuning(PatchChoice):
    """A model, a patch, the text to train on, and how long it is trained."""

    PANEL = None
    command = "finetune"

    model: str = argument(MISSING, "A folder, a Hub id or 'reference'.", option=False)
    dtype: str = argument(
        "float32", "Of the weights.", option=False, parse=lambda given: "float32" if given == "auto" else given
    )
    device: str = argument("auto", "Where the model runs.", option=False)
    revision: str | None = argument(None, "Branch, tag or commit on the Hub.", option=False)
    trust_remote_code: bool = argument(False, "Run the Python code that comes with the model.", option=False)
    data: Any = argument(
        MISSING, "The text to train on, as in `rope-ext ppl`; 'stdlib' is for a trial.", parse=anything, metavar="TEXT"
    )
    minutes: float | None = argument(
        None, "How long is trained, measurements left out.", least=0, metavar="N", instead_of=("steps",)
    )
    steps: int | None = argument(None, "Steps instead of minutes.", least=1, metavar="N", instead_of=("minutes",))
    eval_data: Any = argument(
        None, "What is measured. Default: a tenth of --data that is not trained on.", parse=anything, metavar="TEXT"
    )
    train_all: bool = argument(False, "Train all weights. Default: adapters, norms and embeddings.")
    rank: int = argument(16, "Rank of the adapters.", least=1, metavar="N")
    learning_rate: float = argument(
        2e-4, "Its peak; for large models whose weights are all trained commonly 2e-5.", metavar="RATE"
    )
    batch: int = argument(1, "Long rows in a pass.", least=1, metavar="N")
    accumulate: int = argument(4, "Passes in a step.", least=1, metavar="N")
    guard: float = argument(
        1.0,
        "How strongly short inputs are held to the model before; 0: not, and no second model is in memory.",
        least=0,
        metavar="WEIGHT",
    )
    control: bool = argument(False, "Also train the model without the patch for as long, and compare.")
    retrieval: str | None = argument(
        None, "Measure a task of `rope-ext passkey` at the extended length, e.g. needle.", metavar="TASK"
    )
    max_spans: int = argument(48, "Spans of text measured at each length.", least=1, metavar="N")
    report_to: str = argument(
        "none",
        f"Where the training is logged, with losses by length: {', '.join(_LOGGERS)}.",
        among=_LOGGERS,
        metavar="NAME",
    )
    seed: int = argument(0, "Of what is drawn.", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.steps is None):
            raise MethodError("give one of minutes and steps: how long is trained")
        if self.minutes == 0:
            raise MethodError("the training must be longer than nothing, got minutes=0")
        self.check_single(required=True)

    @property
    def source(self) -> dict[str, Any]:
        """Revision of the model, and whether its own code may run, as functions that load it take them."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def check_early(self) -> None:
        super().check_early()
        check_name(self.data)
        check_name(self.eval_data)

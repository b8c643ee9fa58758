"""The settings of a fine-tuning: arguments in Python, options of the command, and settings of a run.

Nothing here imports torch, so that --help prints at once.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.options.arguments import anything, argument
from rope_ext_hf.options.method_choice import LayerChoice
from rope_ext_hf.reading.text.load import check_name

_LOGGERS = ("none", "tensorboard", "trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class Finetuning(LayerChoice):
    """Arguments for a fine-tuning: a model, its patch, the text to train on, and the settings of the training."""

    PANEL = None
    command = "finetune"

    model: str = argument(MISSING, "A folder, a Hub id or 'reference'.", option=False)
    dtype: str = argument(
        "float32",
        "Dtype of the weights.",
        option=False,
        parse=lambda value: "float32" if value == "auto" else value,
    )
    device: str = argument("auto", "Device of the model.", option=False)
    revision: str | None = argument(None, "Branch, tag or commit on the Hub.", option=False)
    trust_remote_code: bool = argument(False, "Run the Python code that comes with the model.", option=False)
    data: Any = argument(
        MISSING,
        "The text to train on, in any form that --data of ppl takes; 'stdlib' is for a trial.",
        parse=anything,
        metavar="TEXT",
    )
    minutes: float | None = argument(
        None, "Minutes of training; measurements do not count.", least=0, metavar="N", instead_of=("steps",)
    )
    steps: int | None = argument(
        None, "Steps of training, instead of minutes.", least=1, metavar="N", instead_of=("minutes",)
    )
    eval_data: Any = argument(
        None,
        "The text to measure. Default: a tenth of --data, which is then not trained on.",
        parse=anything,
        metavar="TEXT",
    )
    train_all: bool | None = argument(
        None, "Train all weights, not only adapters, norms and embeddings. Default: yes for nope, no for other methods."
    )
    rank: int = argument(16, "Rank of the adapters.", least=1, metavar="N")
    learning_rate: float | None = argument(
        None,
        "Peak learning rate; with --train-all, large models commonly take 2e-5. Default: 2e-4, and 3e-4 for nope.",
        metavar="RATE",
    )
    batch: int = argument(
        1, "Rows per pass, as long as the extended length; for nope, as the context length.", least=1, metavar="N"
    )
    accumulate: int = argument(4, "Passes per step.", least=1, metavar="N")
    guard: float | None = argument(
        None,
        "Weight of keeping the unpatched model's predictions on short inputs; 0: do not keep them, and hold no second "
        "model in memory. Default: 1, and 0 for nope.",
        least=0,
        metavar="WEIGHT",
    )
    control: bool = argument(False, "Also train the unpatched model for as long, and compare.")
    retrieval: str | None = argument(
        None, "Also measure a task of `rope-ext passkey` at the extended length, e.g. needle.", metavar="TASK"
    )
    max_spans: int = argument(48, "Spans of text to measure at each length.", least=1, metavar="N")
    report_to: str = argument(
        "none",
        f"Logger of the training, which also gets the losses by length: {', '.join(_LOGGERS)}.",
        among=_LOGGERS,
        metavar="NAME",
    )
    seed: int = argument(0, "Seed of the adapters and of the rows.", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.minutes is None) == (self.steps is None):
            raise MethodError("give either minutes or steps, the duration of the training")
        if self.minutes == 0:
            raise MethodError("minutes must be above 0, got 0")
        self.check_single(required=True)

    @property
    def source(self) -> dict[str, Any]:
        """The revision of the model and the permission to run its code, as arguments of functions that load it."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def check_early(self) -> None:
        super().check_early()
        check_name(self.data)
        check_name(self.eval_data)

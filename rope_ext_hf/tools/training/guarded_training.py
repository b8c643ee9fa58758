"""The guarded training of `finetune`: it extends a model on long rows, and keeps its predictions on short ones.

A step reads windows of the extended length, whose next tokens are predicted, and as many tokens in windows of the
context length, on which the Kullback-Leibler divergence from the unpatched model is kept small (distillation). Without
the short windows, a small model overfits its text, and any model loses on short inputs what it gains on long ones.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from rope_ext_hf.errors import FileError
from rope_ext_hf.tools.training.callback import RopeCallback
from rope_ext_hf.tools.training.finetuning_options import Finetuning
from rope_ext_hf.tools.training.run_folder import read_checked, saving, write_checked

_CLOCK = "clock.json"
"""The last file of a checkpoint, written atomically: the seconds of training, and a checksum of each other file."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,9})")
_ENDLESS = 10**9  # steps, where the time ends a training


@dataclass(frozen=True)
class Budget:
    """The limit of a training, in minutes or in optimizer steps; exactly one of the two is given."""

    minutes: float | None = None  # of training, over interruptions; measurements and loading do not count
    steps: int | None = None  # of the optimizer

    def share_used(self, seconds: float, steps: int) -> float:
        """Return the share of the budget that is used, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, steps / self.steps)
        return min(1.0, seconds / (60 * (self.minutes or 0.0)))

    def seconds_left(self, seconds: float, steps: int) -> float:
        """Return an estimate of the seconds that are left, from the pace so far."""
        used = self.share_used(seconds, steps)
        return seconds * (1 - used) / used if used else 0.0


class Rows(Dataset[dict[str, Tensor]]):
    """A data set of random windows of a text; the windows at an index are the same in every run.

    An item has one long window, and several short windows that have as many tokens together. A window may go from one
    document into the next.

    Args:
        documents: token ids of each document, (tokens,) int64.
        length: tokens of a long window.
        short_length: tokens of a short window.
        prefix: tokens that every document and every window begins with, as every span of a measurement does.
        end: the token between documents; None: there is none.
        seed: the seed for drawing the windows.
    """

    def __init__(
        self,
        documents: Sequence[Tensor],
        length: int,
        short_length: int,
        *,
        prefix: Sequence[int] = (),
        end: int | None,
        seed: int,
    ) -> None:
        self.prefix = torch.tensor(prefix, dtype=torch.int64)
        separator = torch.tensor([] if end is None else [end], dtype=torch.int64)
        pieces, may_start = [], []
        for ids in documents:
            pieces += [self.prefix, ids, separator]
            # A window begins with a prefix of its own, so it never starts inside the prefix of a document.
            may_start.append(torch.tensor([False] * len(prefix) + [True] * (len(ids) + len(separator))))
        self.text = torch.cat(pieces)
        self.starts = torch.cat(may_start).nonzero().flatten()
        self.length, self.short_length, self.seed = length, short_length, seed

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * _ENDLESS + index)
        return {
            "long": self._windows(1, self.length, generator),
            "short": self._windows(max(1, self.length // self.short_length), self.short_length, generator),
        }

    def _windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Return `count` random windows of the text, (count, length) int64."""
        text_tokens = length - len(self.prefix)
        fitting = int(torch.searchsorted(self.starts, len(self.text) - text_tokens, right=True))
        starts = self.starts[torch.randint(0, fitting, (count, 1), generator=generator)]
        return torch.cat([self.prefix.expand(count, -1), self.text[starts + torch.arange(text_tokens)]], dim=1)

    @staticmethod
    def collate(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch: "long", (rows, length), and "short", (rows, short_length), both int64."""
        return {key: torch.cat([example[key] for example in examples]) for key in ("long", "short")}


class _GuardedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose loss also keeps the predictions on short rows close to those of the unpatched model.

    Args:
        teacher: the unpatched model; None: short rows are not read.
        guard: the weight of the divergence from the teacher in the loss.
        first: the index of the first token of a long row that is predicted; the prefix before it is not.
    """

    def __init__(self, *args: Any, teacher: nn.Module | None, guard: float, first: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.guard, self.first = teacher, guard, first
        self.model_accepts_loss_kwargs = False  # the loss is a mean, which the Trainer divides by accumulated passes

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss of the long rows in nats per token, plus the weighted divergence on the short rows."""
        ids = inputs["long"]
        outputs = model(input_ids=ids, use_cache=False)
        loss = functional.cross_entropy(outputs.logits[:, self.first - 1 : -1].float().mT, ids[:, self.first :])
        if self.teacher is not None:
            short = inputs["short"]
            with torch.no_grad():
                expected = self.teacher(input_ids=short, use_cache=False).logits.float().log_softmax(-1)
            predicted = model(input_ids=short, use_cache=False).logits.float().log_softmax(-1)
            divergence = functional.kl_div(predicted, expected, log_target=True, reduction="none").sum(-1).mean()
            loss = loss + self.guard * divergence
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


class Clock(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback that counts seconds of training, over interruptions, and ends the training at its budget.

    It has to be the last callback, since the file that it writes completes a checkpoint.

    Args:
        budget: the time or the steps that the training may take.
        seconds: seconds of training in earlier processes.
        report: called at every log with the step, the loss and an estimate of the seconds that are left.
    """

    def __init__(
        self, budget: Budget, seconds: float, report: Callable[[int, float, float], object] | None = None
    ) -> None:
        self.budget, self.seconds, self.report = budget, seconds, report
        self.steps = 0  # of the whole training
        self._since = time.monotonic()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.monotonic()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds += time.monotonic() - self._since  # measurements come later, at the end of a step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step
        if self.budget.share_used(self.seconds, self.steps) >= 1:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_checked(folder / _CLOCK, {"seconds": self.seconds, "files": _checksums(folder)})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.report is not None and logs and "loss" in logs:
            self.report(state.global_step, logs["loss"], self.budget.seconds_left(self.seconds, state.global_step))

    def rate(self, step: int) -> float:
        """Return the learning rate as a share of its peak: a rise over 5% of the budget, then a cosine down to 0."""
        used = self.budget.share_used(self.seconds, step)
        return min(1.0, (used + 0.002) / 0.05) * 0.5 * (1 + math.cos(math.pi * used))


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each file in a checkpoint, by its path there, without the file that the clock writes.

    Without checksums, a damaged file would load without an error, and other weights would be trained.
    """
    return {
        str(path.relative_to(folder)): _crc(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _CLOCK
    }


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def find_checkpoint(folder: Path, say: Callable[[str], object]) -> tuple[Path, float] | None:
    """Return the newest undamaged checkpoint and its seconds of training, or None where there is none.

    Newer checkpoints that are damaged are removed; `say` is called with a sentence about each.
    """
    numbers = {}
    for path in folder.glob("*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            numbers[int(match[1])] = path
    for _, path in sorted(numbers.items(), reverse=True):
        try:
            clock = read_checked(path / _CLOCK)
            now = _checksums(path)
            changed = sorted(name for name, value in clock["files"].items() if now.get(name) != value)
            if not changed:
                return path, float(clock["seconds"])
            reason = f"{', '.join(changed)} changed since it was written"
        except FileError:
            reason = f"its {_CLOCK}, which is written last, is missing or damaged"
        say(f"{path.name} is removed: {reason}. The training continues from an earlier checkpoint, or from its start")
        shutil.rmtree(path)
    return None


def train(
    options: Finetuning,
    model: Any,
    teacher: nn.Module | None,
    rows: Rows,
    folder: Path,
    *,
    batch: int,
    save_every: int = 20,
    report: Callable[[int, float, float], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
    checks: RopeCallback | None = None,
) -> dict[str, Any]:
    """Train a model, patched or not, in place, from its newest undamaged checkpoint on.

    Args:
        options: the settings of the training.
        model: the model to train.
        teacher: the unpatched model, whose predictions on short rows are kept; None: they are not.
        rows: the windows to train on.
        folder: the folder of the checkpoints.
        batch: the number of long rows per pass on each device.
        save_every: steps between checkpoints.
        report: called with the step, the loss and an estimate of the seconds that are left.
        say: called with a sentence on each checkpoint that is removed.
        checks: the callback that checks the model, and may measure losses by length for the logger.

    Returns:
        The steps, the seconds, and the losses every ten steps.
    """
    assert options.learning_rate is not None  # `with_defaults` has filled in both
    assert options.guard is not None
    budget = Budget(options.minutes, options.steps)
    last, seconds = find_checkpoint(folder, say) or (None, 0.0)
    clock = Clock(budget, seconds, report)
    clock.steps = int(last.name.partition("-")[2]) if last else 0
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, clock.rate)
    arguments = TrainingArguments(
        str(folder),
        max_steps=budget.steps or _ENDLESS,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=options.accumulate,
        max_grad_norm=1.0,
        save_steps=save_every,
        save_total_limit=2,
        logging_steps=10,
        report_to=options.report_to,
        run_name=f"{folder.resolve().parent.name}, {folder.name}",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=learned[0].device.type == "cpu",
    )
    checks = checks or RopeCallback()
    trainer = _GuardedTrainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=Rows.collate,
        optimizers=(optimizer, schedule),
        callbacks=[checks, clock],
        teacher=None if teacher is None else teacher.to(arguments.device),
        guard=options.guard,
        first=max(1, len(rows.prefix)),
    )
    checks.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    if budget.share_used(clock.seconds, clock.steps) < 1 or last is None:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    else:  # an earlier process was stopped after the last step, before the model was measured and saved
        trainer._load_from_checkpoint(str(last))
        trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
    curve = [{"step": entry["step"], "loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry]
    model.eval()
    return {"steps": clock.steps, "seconds": round(clock.seconds, 1), "losses": curve}

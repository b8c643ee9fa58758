"""The guarded training of `finetune`: long rows under the method, short rows held to the model before the patch.

A step reads windows of the extended length, whose next tokens are predicted, and as many tokens in windows of the
context length, on which the Kullback-Leibler divergence from the model before is kept small (distillation). Without
that, a small model over-trains on its own text, and any model loses at short inputs what it gains at long ones.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from rope_ext_hf.errors import FileError
from rope_ext_hf.runs.folder import read_whole, write_whole
from rope_ext_hf.tools.training.callback import RopeCallback
from rope_ext_hf.tools.training.questions import Finetuning
from rope_ext_hf.tools.training.run_folder import Budget, saving

_CLOCK = "clock.json"
"""The last file of a checkpoint, written atomically: the seconds of training, and a checksum of each other file."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,9})")
_ENDLESS = 10**9  # steps


class Rows(Dataset[dict[str, Tensor]]):
    """Random windows of a text, those of a number the same in every run.

    A window may go from one document, (tokens,) int64, into the next, over the token `end`. Every document and every
    window begins with the tokens `prefix`, as the tokenizer begins a text and as every span does in a measurement. As
    many short windows, of `short_length`, are drawn as a long one has tokens.
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
        closing = [] if end is None else [end]
        self.prefix = torch.tensor(prefix, dtype=torch.int64)
        parts = [(ids, ids.new_tensor(closing)) for ids in documents]
        self.text = torch.cat([part for ids, after in parts for part in (self.prefix, ids, after)])
        # A window begins with a prefix of its own, thus never inside that of a document.
        inside = [torch.tensor([False] * len(prefix) + [True] * (len(ids) + len(after))) for ids, after in parts]
        self.starts = torch.cat(inside).nonzero().flatten()
        self.length, self.short_length, self.seed = length, short_length, seed

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(self.seed * _ENDLESS + index)
        return {
            "long": self._windows(1, self.length, draws),
            "short": self._windows(max(1, self.length // self.short_length), self.short_length, draws),
        }

    def _windows(self, count: int, length: int, draws: torch.Generator) -> Tensor:
        read = length - len(self.prefix)
        fitting = int(torch.searchsorted(self.starts, len(self.text) - read, right=True))
        starts = self.starts[torch.randint(0, fitting, (count, 1), generator=draws)]
        return torch.cat([self.prefix.expand(count, -1), self.text[starts + torch.arange(read)]], dim=1)

    @staticmethod
    def collate(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """long (rows, length) and short (rows, short_length) int64."""
        return {key: torch.cat([example[key] for example in examples]) for key in ("long", "short")}


class _GuardedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that also holds short rows to the teacher, the model before the patch, with the weight `guard`."""

    def __init__(self, *args: Any, teacher: nn.Module | None, guard: float, first: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.guard = teacher, guard
        self.first = first  # the first token of a row that is predicted: those of its prefix are not
        self.model_accepts_loss_kwargs = False  # the loss is a mean: the Trainer divides it by the rows accumulated

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Nats per token of the long rows, plus the divergence on the short ones."""
        ids = inputs["long"]
        outputs = model(input_ids=ids, use_cache=False)
        loss = functional.cross_entropy(outputs.logits[:, self.first - 1 : -1].float().mT, ids[:, self.first :])
        if self.teacher is not None:
            short = inputs["short"]
            with torch.no_grad():
                expected = self.teacher(input_ids=short, use_cache=False).logits.float().log_softmax(-1)
            given = model(input_ids=short, use_cache=False).logits.float().log_softmax(-1)
            divergence = functional.kl_div(given, expected, log_target=True, reduction="none").sum(-1).mean()
            loss = loss + self.guard * divergence
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the seconds of training, over interruptions, and ends it when the budget is used.

    It is the last callback: the file that it writes makes a checkpoint whole. `report` is called at every log, with the
    step, the loss and about how many seconds are left.
    """

    def __init__(
        self, budget: Budget, seconds: float, report: Callable[[int, float, float], object] | None = None
    ) -> None:
        self.budget, self.seconds, self.report, self.steps = budget, seconds, report, 0
        self._since = time.monotonic()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.monotonic()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds += time.monotonic() - self._since  # what is measured at the end of a step does not count

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step
        if self.budget.share_used(self.seconds, self.steps) >= 1:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_whole(folder / _CLOCK, {"seconds": self.seconds, "files": _checksums(folder)})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.report is not None and logs and "loss" in logs:
            self.report(state.global_step, logs["loss"], self.budget.seconds_left(self.seconds, state.global_step))

    def rate(self, step: int) -> float:
        """The learning rate's share of its peak: a short rise over 5% of the budget, then a cosine down to 0."""
        used = self.budget.share_used(self.seconds, step)
        return min(1.0, (used + 0.002) / 0.05) * 0.5 * (1 + math.cos(math.pi * used))


def _checksums(folder: Path) -> dict[str, int]:
    """The CRC-32 of each file of a checkpoint but the clock's own; one core reads 2 GB/s.

    A file that is damaged otherwise loads without an error, and trains other weights.
    """
    return {
        str(path.relative_to(folder)): _crc(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _CLOCK
    }


def _crc(path: Path) -> int:
    with path.open("rb") as file:
        return reduce(lambda crc, block: zlib.crc32(block, crc), iter(partial(file.read, 2**22), b""), 0)


def find_checkpoint(folder: Path, say: Callable[[str], object]) -> tuple[Path, float] | None:
    """The newest checkpoint that is as it was written, with its seconds of training; damaged newer ones are removed."""
    numbers = {int(name[1]): path for path in folder.glob("*") if (name := _CHECKPOINT.fullmatch(path.name))}
    for number in sorted(numbers, reverse=True):
        path = numbers[number]
        try:
            clock = read_whole(path / _CLOCK)
            now = _checksums(path)
            changed = sorted(name for name, value in clock["files"].items() if now.get(name) != value)
            if not changed:
                return path, float(clock["seconds"])
            why = f"{', '.join(changed)} changed since it was written"
        except FileError:
            why = f"its {_CLOCK}, which is written last, is missing or damaged"
        say(f"{path.name} is removed: {why}. The training goes on from the one before, or else from its beginning")
        shutil.rmtree(path)
    return None


def train(
    asked: Finetuning,
    model: Any,
    teacher: nn.Module | None,
    rows: Rows,
    folder: Path,
    *,
    batch: int,  # long rows of a pass on each device
    save_every: int = 20,  # steps between checkpoints
    report: Callable[[int, float, float], object] | None = None,  # as `Clock` takes it
    say: Callable[[str], object] = lambda line: None,  # called with a sentence on each checkpoint that is left out
    checks: RopeCallback | None = None,  # may measure losses by length for the logger, too
) -> dict[str, Any]:
    """Train a model, patched or not, in place, from its newest whole checkpoint: steps, seconds, loss by ten steps."""
    budget = Budget(asked.minutes, asked.steps)
    last, seconds = find_checkpoint(folder, say) or (None, 0.0)
    clock = Clock(budget, seconds, report)
    clock.steps = int(last.name.partition("-")[2]) if last else 0
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=asked.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, clock.rate)
    arguments = TrainingArguments(
        str(folder),
        max_steps=budget.steps or _ENDLESS,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=asked.accumulate,
        max_grad_norm=1.0,
        save_steps=save_every,
        save_total_limit=2,
        logging_steps=10,
        report_to=asked.report_to,
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
        guard=asked.guard,
        first=max(1, len(rows.prefix)),
    )
    checks.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    if budget.share_used(clock.seconds, clock.steps) < 1 or last is None:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    else:  # stopped between the last step and what follows the training
        trainer._load_from_checkpoint(str(last))
        trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
    curve = [{"step": entry["step"], "loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry]
    model.eval()
    return {"steps": clock.steps, "seconds": round(clock.seconds, 1), "losses": curve}

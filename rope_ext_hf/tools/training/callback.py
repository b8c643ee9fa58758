"""`RopeCallback`: a Trainer callback that checks a model's rotations, and measures its loss by length.

    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[RopeCallback()])

A wrapper, a config file or a checkpoint may silently drop a RoPE scaling. Without this check, training would go on with
rotations that differ from those of the model that is served later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from rope_ext_hf.bounds import Length, parse_lengths
from rope_ext_hf.errors import CheckpointError, FingerprintError, MethodError
from rope_ext_hf.eval.evaluations import perplexity
from rope_ext_hf.files.whole import json_text, read_json, write_text
from rope_ext_hf.hub import fingerprint, read_config
from rope_ext_hf.patches.saved.fingerprint import Fingerprint
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.patches.trials.refusals import check_context_parallel, check_trainers_above, unwrapped
from rope_ext_hf.runs.conclusions.labels import label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments

_FILE = "rope_fingerprint.json"


class RopeCallback(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback that stops the training if the model does not rotate as expected, and logs losses by length.

    It works with transformers' and TRL's trainers. In every process, it compares with `expected` the rotations of:

    - the model, when training begins, after the first step, and at every save;
    - each folder that was saved, which also gets the fingerprint as rope_fingerprint.json;
    - the checkpoint that a training continues from: `args.resume_from_checkpoint`, or the one of its step in the output
      folder.

    A reference model that the trainer has loaded itself, from the same name as the model, is compared with the model
    when training begins. Losses are in the trainer's log as `loss_at_4096`, in nats per token.

    Args:
        expected: a `Fingerprint`, or anything that `rope.fingerprint` takes, such as a model, a folder or a config;
            None: the model as it is when training begins.
        data: the text whose loss is measured, in any form that `rope_ext_hf.eval.perplexity` takes; None: no loss is
            measured.
        lengths: context lengths to measure at, in tokens, such as 4096 or "4k"; all have the same target tokens.
        every: the number of steps between measurements.
        max_spans: the largest number of spans (texts read at once) per length.
        tokenizer: the tokenizer of the text; default: the one beside the model's weights.

    Raises:
        MethodError: text is given without lengths, or lengths without text. During training: `check_context_parallel`
            refuses the model.
        FingerprintError: during training, if the model, its reference model or a saved folder rotates otherwise; the
            message names the differences.

    Attributes:
        trainer: the trainer, or None. A trainer does not pass itself to its callbacks; set this attribute, so that the
            trainer's loggers (`report_to`) get the losses, too.
    """

    def __init__(
        self,
        expected: Fingerprint | nn.Module | str | Path | Any = None,
        *,
        data: Any = None,
        lengths: Length | Sequence[Length] = (),
        every: int = 100,
        max_spans: int = 8,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if (data is None) != (not lengths):
            raise MethodError("data and lengths belong together: give the text, and the lengths to measure it at")
        if every < 1:
            raise MethodError(f"every must be at least 1 step, got {every}")
        self.expected = expected if isinstance(expected, Fingerprint) or expected is None else fingerprint(expected)
        self.data, self.lengths = data, parse_lengths(lengths) if lengths else []
        self.every, self.max_spans = every, max_spans
        self.tokenizer = tokenizer
        self.trainer: Trainer | None = None
        self._first = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = unwrapped(kwargs["model"])
        self.expected = self.expected or fingerprint(model)
        self._first = True
        self._check(fingerprint(model), "the model that is to be trained")
        check_trainers_above()
        self._check_checkpoint(model, args, state)
        parallel = getattr(args, "parallelism_config", None)
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            check_context_parallel(model)
        self._measure(model, state, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = unwrapped(kwargs["model"])
        if self._first:  # only now are the trainer's wrappers and kernels in the model
            self._first = False
            self._check(fingerprint(model), "the model after the first step")
        if state.global_step % self.every == 0:
            self._measure(model, state, kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check(fingerprint(unwrapped(kwargs["model"])), "the model that was saved")
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir() and self.expected is not None:
            write_text(folder / _FILE, json_text(self.expected.to_dict()) + "\n")
            saved = _stated_fingerprint(folder)
            if saved is not None:
                self._check(saved, f"the folder {str(folder)!r}")

    def _check_checkpoint(self, model: Any, args: TrainingArguments, state: TrainerState) -> None:
        """Raise FingerprintError if the checkpoint to continue from was trained with other rotations."""
        if not state.global_step:
            return
        resumed = args.resume_from_checkpoint
        folder = Path(resumed) if isinstance(resumed, str) else _checkpoint(args, state)
        trained = fingerprint(folder / _FILE) if (folder / _FILE).is_file() else _stated_fingerprint(folder)
        if trained is None:
            return
        assert self.expected is not None
        differences = self.expected.differences(trained)
        if differences:
            patches = active_patches(model)
            raise FingerprintError(
                f"the checkpoint {str(folder)!r} was trained under {_method_in(folder)} (fingerprint "
                f"{trained.digest}), but the model that would continue from it runs "
                f"{label(patches[-1].method.to_dict() if patches else None)} (fingerprint {self.expected.digest}). "
                f"In the checkpoint: {' '.join(differences)} Patch the model with the method of the checkpoint, or "
                "train in another folder"
            )

    def _check(self, actual: Fingerprint, source: str) -> None:
        """Raise FingerprintError if a fingerprint differs from the expected one; `source` names its origin in words."""
        assert self.expected is not None
        differences = self.expected.differences(actual)
        if differences:
            raise FingerprintError(f"{source} does not rotate as expected: {' '.join(differences)}")

    def _measure(self, model: Any, state: TrainerState, kwargs: dict[str, Any]) -> None:
        """Log the loss at each length; all processes take part, since each may hold only a part of the weights."""
        if self.data is None:
            return
        tokenizer = self.tokenizer or kwargs.get("processing_class")
        results = perplexity(model, self.data, lengths=self.lengths, max_spans=self.max_spans, tokenizer=tokenizer)
        losses = {f"loss_at_{result.length}": result.loss for result in results}
        if self.trainer is not None:
            should_log = self.trainer.control.should_log
            self.trainer.log(losses)
            self.trainer.control.should_log = should_log  # logging resets it, and the step's own loss would be lost
        else:
            state.log_history.append({"step": state.global_step, **losses})


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint at the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _stated_fingerprint(folder: Path) -> Fingerprint | None:
    """Return the fingerprint (a digest of the rotations) of the model that a folder holds.

    It is None for weights without a config, and for an adapter that does not name the folder of its model.
    """
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return fingerprint(folder) if read_json(adapter).get("base_model_name_or_path") else None
    return fingerprint(folder) if (folder / "config.json").is_file() else None


def _method_in(folder: Path) -> str:
    """Return the label of the method that a checkpoint records."""
    try:
        _, record = read_config(folder)
    except CheckpointError:  # weights without a config, or the adapter of a model that was made in memory
        return "another method"
    return label(record and record["method"])

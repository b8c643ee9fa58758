"""`RopeCallback`: a Trainer callback that checks what the model rotates, and measures its loss by length.

    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[RopeCallback()])

A scaling that a wrapper, a config file or a checkpoint drops raises no error: another model is trained than served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from rope_ext_hf.bounds import Length, parse_lengths
from rope_ext_hf.errors import CheckpointError, FingerprintError, MethodError
from rope_ext_hf.eval.measuring import perplexity
from rope_ext_hf.files import json_text, read_json, write_text
from rope_ext_hf.hub import fingerprint
from rope_ext_hf.patches.adapters import ADAPTER_CONFIG
from rope_ext_hf.patches.fingerprint import Fingerprint, fingerprint_of
from rope_ext_hf.patches.loading import find_config
from rope_ext_hf.patches.patching import check_context_parallel, patched_method
from rope_ext_hf.patches.reference_models import check_trainers_above, unwrapped
from rope_ext_hf.runs.labels import label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl, TrainerState, TrainingArguments

_FILE = "rope_fingerprint.json"


class RopeCallback(TrainerCallback):  # type: ignore[misc]
    """Stop a training whose model does not rotate as asked for, and log its loss at several lengths.

    The model is compared with `expected` when training begins, after the first step, and at every save, in every
    process; so is the folder that was saved, which also gets the fingerprint, as rope_fingerprint.json, and the
    checkpoint that a training goes on from: `args.resume_from_checkpoint`, or the one of its step in the output folder.
    A reference model that the trainer loaded by the name of the model is compared with the model when training begins.

    Args:
        expected: a `Fingerprint`, or what `rope.fingerprint` takes: a model, a folder, a config; None: the model as it
            is when training begins.
        data: text whose loss is measured, as `rope_ext_hf.eval.perplexity` takes it; None: none is.
        lengths: context lengths that it is measured at, in tokens, 4096 or "4k", on the same target tokens.
        every: steps between measurements.
        max_spans: spans of text per length.
        tokenizer: of the text; default: the one beside the model's weights.

    Raises:
        MethodError: text without lengths, or lengths without text; from the training, what `check_context_parallel`
            refuses.
        FingerprintError: from the training, where the model, its reference model or a saved folder rotates otherwise;
            the message names how.

    Losses are in the trainer's log as `loss_at_4096`, in nats per token. Works with transformers' and TRL's trainers.

    Attributes:
        trainer: set it to the trainer, and its loggers (`report_to`) get the losses too: what calls a callback does not
            say which trainer it is.
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
            raise MethodError("data and lengths belong together: give the text and the lengths it is measured at")
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
        self.expected = self.expected or fingerprint_of(model)
        self._first = True
        self._check(fingerprint_of(model), "the model that is to be trained")
        check_trainers_above()
        self._check_checkpoint(model, args, state)
        parallel = getattr(args, "parallelism_config", None)
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            check_context_parallel(model)
        self._measure(model, state, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = unwrapped(kwargs["model"])
        if self._first:  # wrappers and kernels that a trainer puts in are there now
            self._first = False
            self._check(fingerprint_of(model), "the model after the first step")
        if state.global_step % self.every == 0:
            self._measure(model, state, kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check(fingerprint_of(unwrapped(kwargs["model"])), "the model that was saved")
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir() and self.expected is not None:
            write_text(folder / _FILE, json_text(self.expected.to_dict()) + "\n")
            if (saved := _rotated_by(folder)) is not None:
                self._check(saved, f"the folder {str(folder)!r}")

    def _check_checkpoint(self, model: Any, args: TrainingArguments, state: TrainerState) -> None:
        """Check that the checkpoint that a training goes on from was trained as this model rotates."""
        if not state.global_step:
            return
        given = args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, str) else _checkpoint(args, state)
        trained = fingerprint(folder / _FILE) if (folder / _FILE).is_file() else _rotated_by(folder)
        assert self.expected is not None
        if trained is not None and (sentences := self.expected.differences(trained)):
            method = patched_method(model)
            raise FingerprintError(
                f"the checkpoint {str(folder)!r} was trained under {_method_in(folder)} (fingerprint "
                f"{trained.digest}), and the model that would go on from it runs "
                f"{label(method.to_dict() if method else None)} (fingerprint {self.expected.digest}). In the "
                f"checkpoint: {' '.join(sentences)} Patch the model as that was trained, or train "
                "in another folder"
            )

    def _check(self, actual: Fingerprint, what: str) -> None:
        assert self.expected is not None
        if sentences := self.expected.differences(actual):
            raise FingerprintError(f"{what} does not rotate as expected: {' '.join(sentences)}")

    def _measure(self, model: Any, state: TrainerState, kwargs: dict[str, Any]) -> None:
        """Log the loss by length; in all processes, since the weights of one may be shared with others."""
        if self.data is None:
            return
        tokenizer = self.tokenizer or kwargs.get("processing_class")
        results = perplexity(model, self.data, lengths=self.lengths, max_spans=self.max_spans, tokenizer=tokenizer)
        losses = {f"loss_at_{result.length}": result.loss for result in results}
        if self.trainer is not None:
            due = self.trainer.control.should_log
            self.trainer.log(losses)
            self.trainer.control.should_log = due  # what is logged counts as the loss of this step, too
        else:
            state.log_history.append({"step": state.global_step, **losses})


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _rotated_by(folder: Path) -> Fingerprint | None:
    """The fingerprint of the model that a folder states; None: shards without a config, or an adapter of no folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        return fingerprint(folder) if named else None
    return fingerprint(folder) if (folder / "config.json").is_file() else None


def _method_in(folder: Path) -> str:
    try:
        _, record, _ = find_config(folder)
    except CheckpointError:  # shards, or the adapter of a model that was made in memory
        return "another method"
    return label(record and record["method"])

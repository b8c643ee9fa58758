"""Perplexity runs that store the last hidden state of each scored token, for comparisons with other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import EvalPlan
from rope_ext_hf.runs.conclusions.labels import Method
from rope_ext_hf.runs.measurement import Listener, Reading, Record, RunPlan
from rope_ext_hf.tools.divergence.states_files import head_of, stored_bytes, token_names
from rope_ext_hf.tools.divergence.states_writer import StatesWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def store_states(
    plan: RunPlan[PerplexityMeasurement],
    options: Perplexity,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> RunPlan[PerplexityMeasurement]:
    """Return the plan of a perplexity run extended so that last hidden states are stored, in `options.store_states`.

    Args:
        plan: the plan, without key tokens.
        options: the arguments of the run.
        model: the model; it may be on the meta device.
        tokenizer: its tokenizer; default: the one beside its weights.

    Raises:
        UnsupportedModelError: the model has no hidden states that could be stored.
    """
    assert options.store_states is not None
    text = plan.measurement.plan
    names = token_names(model, tokenizer, text)
    head_of(model)  # raises an error where the states could not be stored
    return replace(plan, measurement=_StoringMeasurement(text, states=options.store_states, names=names))


class _StoringMeasurement(PerplexityMeasurement):
    """The measurement of the losses of documents, which stores the hidden states that the losses are computed from.

    Args:
        plan, keys, keys_from: as in `PerplexityMeasurement`.
        states: the dtype of the stored states: "model" (that of the model), "float16" or "float32".
        names: the digest of the names of the tokens, which is stored beside them, see `token_names`.
    """

    takes_outputs = True

    def __init__(
        self, plan: EvalPlan, keys: Sequence[Tensor] | None = None, keys_from: str = "", *, states: str, names: str
    ) -> None:
        super().__init__(plan, keys, keys_from)
        self.setting = replace(self.setting, states=states)
        self.states, self.names = states, names
        self._storage = _Storage(self)
        self.listeners = [self._storage]

    @property
    def computed_by(self) -> tuple[str, ...]:
        return (*super().computed_by, StatesWriter.__module__, token_names.__module__)

    def with_keys(self, keys: Sequence[Tensor], keys_from: str) -> PerplexityMeasurement:
        """Return the same measurement with key tokens, see `PerplexityMeasurement.with_keys`."""
        return _StoringMeasurement(self.plan, keys, keys_from, states=self.states, names=self.names)

    def stored_bytes(self, model: PreTrainedModel, dtype: torch.dtype, methods: int) -> int:
        """Return the bytes that the last hidden states take, see `Measurement.stored_bytes`."""
        return stored_bytes(model, self.plan, self.states, dtype, methods)

    def losses(self, scorer: TokenScorer, readings: Sequence[Reading]) -> Sequence[Tensor]:
        """Return the losses of the scored tokens of some passes, and store the hidden states that predict them."""

        def use(number: int, begin: int, outputs: Tensor, targets: Tensor) -> Tensor:
            self._storage.writer.put(readings[number].item, readings[number].what, begin, outputs)
            return scorer.head.losses(outputs, targets).cpu()

        parts = scorer.outputs_together(self.texts(readings), use, length=readings[0].what.context)
        return [torch.cat(parts_of_pass) for parts_of_pass in parts]


class _Storage(Listener):
    """A listener to a run that stores hidden states: it opens a file for each method, and completes its parts.

    The states of a document and length are on disk before the journal has their loss.

    `measurement`: what the run measures.
    """

    writer: StatesWriter
    _folder: Path | None = None

    def __init__(self, measurement: _StoringMeasurement) -> None:
        self._measurement = measurement

    def started(self, folder: Path, done: int, units: int) -> None:
        self._folder = folder

    def begins(self, method: Method, scorer: TokenScorer) -> None:
        """Get ready to store the last hidden states under a method.

        Raises:
            MethodError: the run is without files.
            UnsupportedModelError: the model has no hidden states that could be stored.
        """
        if self._folder is None:
            raise MethodError("store_states needs the folder of a run, in which states are stored; give out=...")
        scorer.check_outputs()
        self.writer = StatesWriter(
            self._folder,
            method,
            self._measurement.plan,
            text=self._measurement.fingerprint(),
            names=self._measurement.names,
            dtype=self._measurement.states,
            model=scorer.model,
            head=scorer.head,
        )

    def measured(self, record: Record) -> None:
        self.writer.finish(record.item, int(record.cell[0]))

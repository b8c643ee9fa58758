"""Perplexity runs that store the last hidden state of each scored token, for comparisons with other models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss, PerplexityMeasurement
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Pass
from rope_ext_hf.runs.conclusions.labels import Method
from rope_ext_hf.runs.measurement import Cell, Passed, RunPlan
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
    _writer: StatesWriter

    def __init__(
        self, plan: EvalPlan, keys: Sequence[Tensor] | None = None, keys_from: str = "", *, states: str, names: str
    ) -> None:
        super().__init__(plan, keys, keys_from)
        self.setting = replace(self.setting, states=states)
        self.states, self.names = states, names

    @property
    def computed_by(self) -> tuple[str, ...]:
        return (*super().computed_by, StatesWriter.__module__, token_names.__module__)

    def with_keys(self, keys: Sequence[Tensor], keys_from: str) -> PerplexityMeasurement:
        """Return the same measurement with key tokens, see `PerplexityMeasurement.with_keys`."""
        return _StoringMeasurement(self.plan, keys, keys_from, states=self.states, names=self.names)

    def stored_bytes(self, model: PreTrainedModel, dtype: torch.dtype, methods: int) -> int:
        """Return the bytes that the last hidden states take, see `Measurement.stored_bytes`."""
        return stored_bytes(model, self.plan, self.states, dtype, methods)

    def begin(self, folder: Path | None, method: Method, scorer: TokenScorer) -> None:
        """Get ready to store the last hidden states under a method.

        Raises:
            MethodError: the run is without files.
            UnsupportedModelError: the model has no hidden states that could be stored.
        """
        if folder is None:
            raise MethodError("store_states needs the folder of a run, in which states are stored; give out=...")
        scorer.check_outputs()
        self._writer = StatesWriter(
            folder,
            method,
            self.plan,
            text=self.fingerprint(),
            names=self.names,
            dtype=self.states,
            model=scorer.model,
            head=scorer.head,
        )

    def measure_items(
        self, scorer: TokenScorer, missing: Iterable[tuple[int, Sequence[Cell]]], progress: Passed
    ) -> Iterator[tuple[int, Cell, DocumentLoss, Cost]]:
        """Score documents at some lengths; the states of a document and length are on disk before its loss is recorded.

        See `SpanMeasurement.measure_items`.
        """
        for item, cell, loss, cost in super().measure_items(scorer, missing, progress):
            self._writer.finish(item, int(cell[0]))
            yield item, cell, loss, cost

    def losses(self, scorer: TokenScorer, batch: Sequence[tuple[int, Pass]]) -> Sequence[Tensor]:
        """Return the losses of the scored tokens of some passes, and store the hidden states that predict them."""

        def use(number: int, begin: int, outputs: Tensor, targets: Tensor) -> Tensor:
            item, one_pass = batch[number]
            self._writer.put(item, one_pass, begin, outputs)
            return scorer.head.losses(outputs, targets).cpu()

        parts = scorer.outputs_together(self.texts(batch), use, length=batch[0][1].context)
        return [torch.cat(parts_of_pass) for parts_of_pass in parts]

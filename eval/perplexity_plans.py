"""Plans of runs that measure perplexity: which text, which lengths, which methods, and which key tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.key_token_runs import keys_of_run, mark_keys, plan_keys
from rope_ext_hf.eval.key_tokens import read_keys
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.eval.questions import DEFAULT_METHODS, Perplexity
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.choosing import resolve_choice
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.protocols import check_lengths
from rope_ext_hf.reading.spans import prepare
from rope_ext_hf.runs.kinds import Run, RunPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Planned = Callable[["PreTrainedModel", "PreTrainedTokenizerBase"], RunPlan[Any]]


def plan_perplexity(
    question: Perplexity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[PerplexityMeasurement]:
    """Load and tokenise the text, check, plan; see `Perplexity.plan`."""
    documents = load(question.data)
    read = prepare(
        model,
        documents,
        tokenizer=tokenizer,
        lengths=question.lengths,
        protocol=question.protocol,
        targets=question.targets,
        stride=question.stride,
        bos=question.bos,
        max_spans=question.max_spans,
    )
    return RunPlan(PerplexityMeasurement(read), question.data_name or documents.source, **settings)


def fit_sweep(
    question: Perplexity, model: PreTrainedModel, methods: MethodChoice
) -> tuple[Perplexity, list[RopeMethod]]:
    """See `Sweep.fit`."""
    length = patch_geometry(model, **methods.underneath).context_length
    ordered, _ = check_lengths(question.lengths, None)
    methods.check(factor_alone=True)
    chosen = replace(methods, method=methods.method or DEFAULT_METHODS)
    resolved = resolve_choice(chosen, model, ordered[-1], ordered)
    lengths = sorted({*ordered, length}) if length < ordered[-1] else ordered
    return replace(question, lengths=lengths), resolved


def with_keys(
    plan: RunPlan[PerplexityMeasurement],
    question: Perplexity,
    find: Callable[[str, _Planned], tuple[Run[Any], RunPlan[Any]]],
    *,
    write: bool = True,  # keys.json into the folder of that run
) -> RunPlan[PerplexityMeasurement]:
    """The plan with the key tokens of the question, where it has some: of a file, or of a model.

    `find` carries out a plan with the model of this name, which may be on the meta device when the plan is made.
    """
    source, window = question.keys_by, question.key_window
    if source is None:
        return plan
    if os.path.isfile(source):  # noqa: PTH113 - Path.is_file raises where a name is too long for a path
        return mark_keys(plan, read_keys(source, window))

    def planned(evaluator: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RunPlan[Any]:
        reading: dict[str, Any] = {"chunk": plan.chunk, "offload_cache": plan.offload_cache}
        read = plan.measurement.plan
        return plan_keys(evaluator, read, tokenizer=tokenizer, data=plan.data, window=window, **reading)

    run, of_keys = find(source, planned)
    return mark_keys(plan, keys_of_run(run, of_keys, write=write))

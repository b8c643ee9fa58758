"""Perplexity of methods x factors x lengths on one loaded model, in a folder that survives being killed.

from rope_ext_hf.eval import sweep
run = sweep(model, "stdlib", methods=["ntk", "yarn"], factors=[2, 4, 8], lengths=[256, 1024, 2048], out="runs")
print(run.folder)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.measuring import PerplexityMeasurement
from rope_ext_hf.eval.plan import Tokens, prepare
from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.run_folder import Run
from rope_ext_hf.eval.runner import run_methods
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, resolve_method
from rope_ext_hf.patches.geometry import bind, patch_geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DEFAULT_METHODS", "expand", "plan_sweep", "sweep"]

DEFAULT_METHODS = ("linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "llama3")
"""Methods that follow from a factor alone, or from nothing."""


def expand(names: Sequence[str | RopeMethod], factors: Sequence[float], rotary: Rotary) -> list[RopeMethod]:
    """Method objects for names and factors: one per factor where a method takes one, else one.

    Raises:
        MethodError: an unknown method, or one that needs more than a factor; give an object for that.
    """
    methods: list[RopeMethod] = []
    for name in names:
        if isinstance(name, str) and accepts_factor(name):
            methods += [resolve_method(name, rotary, factor=factor) for factor in factors]
        else:
            methods.append(resolve_method(name, rotary))
    return list(dict.fromkeys(methods))


def _factors_for(lengths: Sequence[int], context_length: int) -> list[float]:
    """The factor that each length beyond the context length needs; 1 where there is none beyond."""
    return [length / context_length for length in lengths if length > context_length] or [1.0]


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep measures: methods (None: as loaded), the same spans with each, and what the text is called."""

    methods: tuple[RopeMethod | None, ...]
    measurement: PerplexityMeasurement
    data: str


def plan_sweep(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    lengths: Sequence[int],
    methods: Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: Sequence[float] | None = None,
    data: str | None = None,
    over: str = "own",
    context_length: int | None = None,
    **options: Any,
) -> SweepPlan:
    """Load and tokenise the text, check, plan; the arguments are those of `sweep`.

    The model may be on the meta device: no weights are read.
    """
    under: dict[str, Any] = {"over": over, "context_length": context_length}
    rotary = patch_geometry(model, **under)
    length = rotary.context_length
    wanted = sorted({*lengths, *([length] if length < max(lengths, default=0) else [])})
    chosen = expand(methods, factors or _factors_for(wanted, length), rotary)
    plan = prepare(model, corpus, lengths=wanted, **options)
    chosen = [bind(model, method, max(wanted[-1], length), **under) for method in chosen]
    name = data or (corpus if isinstance(corpus, str) else "documents")
    return SweepPlan((None, *chosen), PerplexityMeasurement(plan), name)


def sweep(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    lengths: Sequence[int],
    methods: Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: Sequence[float] | None = None,
    data: str | None = None,
    out: str | Path = "rope-ext-results",
    chunk: int | None = None,
    offload_cache: bool = False,
    over: str = "own",
    context_length: int | None = None,
    progress: Callable[[str, int], None] | None = None,
    **options: Any,
) -> Run[Result]:
    """Measure the model as loaded and every method on the same text, resumable.

    Args:
        model, corpus: as `perplexity` takes them; so do further options (protocol, targets, stride, tokenizer, bos,
            max_spans).
        lengths: context lengths in tokens; the context length of the model as loaded is added where it is below the
            longest, to show how a method changes the loss there.
        methods: names, or method objects.
        factors: one method object per factor; default: for each length beyond the context length the factor that it
            needs, since a method costs short inputs more the larger its factor is.
        data: what the text is called in the results; default: `corpus` where it is a string.
        out: the folder that the run's folder is made in.
        chunk, offload_cache: as `TokenScorer` takes them.
        over, context_length: what the methods extend, as `patch` takes them.
        progress: called with the method's label and the tokens read, after each pass.

    Raises:
        FileError: another process is writing this run, or its folder is damaged or cannot be written.
        CorpusError, MethodError: as `perplexity` does.
    """
    under: dict[str, Any] = {"over": over, "context_length": context_length}
    plan = plan_sweep(model, corpus, lengths=lengths, methods=methods, factors=factors, data=data, **under, **options)
    return run_methods(
        model,
        plan.methods,
        plan.measurement,
        data=plan.data,
        out=out,
        chunk=chunk,
        offload_cache=offload_cache,
        progress=progress,
        **under,
    )

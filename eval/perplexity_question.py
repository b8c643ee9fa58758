"""Perplexity of held-out text, by context length: of a model as it is, or of many methods on it.

    from rope_ext_hf.eval import perplexity, sweep
    for result in perplexity(model, "stdlib", lengths=[256, 1024]):
        print(result.length, result.perplexity)
    run = sweep(model, "stdlib", methods=["ntk", "yarn"], factors=[2, 4, 8], lengths=[256, 1024, 2048], out="runs")

A protocol cuts documents into spans (`protocols.py`, `spans.py`), a scorer reads the spans in fixed memory
(`scorer.py`), and sums per document make a result with its confidence interval (`perplexity_results.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import Length, listed
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.key_token_runs import keys_of_run, mark_keys, plan_keys
from rope_ext_hf.eval.key_tokens import is_file, read_keys
from rope_ext_hf.eval.perplexity_results import Result
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.hub import load_model, load_tokenizer, model_by_name
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, resolve_method
from rope_ext_hf.patches.geometry import bind, patch_geometry
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Corpus
from rope_ext_hf.reading.protocols import check_lengths
from rope_ext_hf.reading.spans import prepare
from rope_ext_hf.runs.kinds import Results, Run, RunPlan
from rope_ext_hf.runs.runner import Progress, ProgressBar, measure, progress_of_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DEFAULT_METHODS = ("linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "llama3")
"""Methods that follow from a factor alone, or from nothing."""


def expand(
    names: str | RopeMethod | Sequence[str | RopeMethod], factors: float | Sequence[float], rotary: Rotary
) -> list[RopeMethod]:
    """Method objects for names and factors: one per factor where a method takes one, else one.

    Raises:
        MethodError: an unknown method, or one that needs more than a factor; give an object for that.
    """
    methods: list[RopeMethod] = []
    for name in listed(names):
        if isinstance(name, str) and accepts_factor(name):
            methods += [resolve_method(name, rotary, factor=factor) for factor in listed(factors)]
        else:
            methods.append(resolve_method(name, rotary))
    return list(dict.fromkeys(methods))


def fit_methods(
    model: PreTrainedModel,
    lengths: Length | Sequence[Length],
    methods: str | RopeMethod | Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: float | Sequence[float] | None = None,
    *,
    over: str = "own",
    context_length: int | None = None,
) -> tuple[list[int], tuple[RopeMethod | None, ...]]:
    """The lengths and methods of a sweep; the arguments are those of `sweep`.

    Returns:
        The lengths, with the context length where it is below the longest; the model as it is (None), and each method
        with each factor, by default the one that each length beyond the context length needs, bound to the model.
    """
    under: dict[str, Any] = {"over": over, "context_length": context_length}
    rotary = patch_geometry(model, **under)
    length = rotary.context_length
    ordered, _ = check_lengths(lengths, None)
    ordered = sorted({*ordered, length}) if length < ordered[-1] else ordered
    needed = [each / length for each in ordered if each > length] or [1.0]
    chosen = expand(methods, factors or needed, rotary)
    return ordered, (None, *(bind(model, method, max(ordered[-1], length), **under) for method in chosen))


def plan_perplexity(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    data: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> RunPlan[PerplexityMeasurement]:
    """Load and tokenise the text, check, plan, before any weights are read: the model may be on the meta device.

    Args:
        model, corpus, data: as `sweep` takes them.
        settings: further fields of the plan; methods are bound to the model.
        **options: those of `perplexity` that say what is read and scored.
    """
    documents = load(corpus)
    measurement = PerplexityMeasurement(prepare(model, documents, **options))
    return RunPlan(measurement, data or documents.source, **(settings or {}))


def perplexity(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    lengths: Length | Sequence[Length],
    protocol: str = "matched",
    targets: int | None = None,
    stride: int = 256,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_spans: int | None = None,
    keys_by: str | Path | None = None,
    key_window: int | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    data: str | None = None,
    progress: Callable[[int], None] | bool | None = None,
) -> Results[Result]:
    """Measure the perplexity of a model at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device; or a folder, a Hub id or
            "reference", which is loaded.
        corpus: a list of texts, token ids, a `datasets.Dataset`, documents, or a name: "stdlib", a file, a folder, a
            pattern, hf:OWNER/NAME; see `rope_ext_hf.reading.corpora.load`.
        lengths: context lengths in tokens, 4096 or "4k"; one, or several.
        protocol: a name of `rope_ext_hf.reading.protocols.PROTOCOLS`.
        targets: tokens scored per span, under a protocol that uses it; default half the shortest length.
        stride: tokens between the starts of spans, under a protocol that uses it.
        tokenizer: default: the one beside the model's weights.
        bos: begin every span with the tokenizer's BOS token; default: if the tokenizer itself does so, or as the code
            that the protocol is from does.
        max_spans: at most this many spans per length, taken evenly over the corpus.
        keys_by: measure LongPPL, too: the folder or Hub id of the model that finds the key tokens, or the keys.json
            that another run left. The corpus must be text.
        key_window: tokens of the short context that it compares with; default: an eighth of the longest length, at
            most 4,096.
        chunk: tokens per pass of the decoder; default: by the free memory, within a fixed budget.
        offload_cache: keep keys and values in main memory, and on the model's device only those of one layer.
        out: write a run's folder into this folder, as `rope-ext ppl` does, and continue the run where it is there
            already; default: no files.
        data: what the text is called in the run's folder; default: its name where `corpus` is one.
        progress: called with the number of tokens read, after each pass; True: a bar of tqdm.

    Returns:
        One Result per length, shortest first, as a list that a notebook shows as a table. A span with a loss that is
        not finite makes its whole result non-finite; the result names its document.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown protocol, or lengths, targets and stride that do not fit.
        FileError: the run's folder cannot be written, or is damaged.

    Length-dependent methods are held at each context length (`fixed_length`). A warning counts the layers whose sliding
    window is shorter than the longest span.
    """
    model = model_by_name(model)
    plan = plan_perplexity(
        model,
        corpus,
        lengths=lengths,
        protocol=protocol,
        targets=targets,
        stride=stride,
        tokenizer=tokenizer,
        bos=bos,
        max_spans=max_spans,
        data=data,
        settings={"chunk": chunk, "offload_cache": offload_cache},
    )
    plan = _with_keys(plan, model, keys_by, key_window, out)
    return Results(measure(model, plan, out=out, progress=progress_of_tokens(progress, plan)))


def sweep(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    lengths: Length | Sequence[Length],
    methods: str | RopeMethod | Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: float | Sequence[float] | None = None,
    data: str | None = None,
    out: str | Path = "rope-ext-results",
    chunk: int | None = None,
    offload_cache: bool = False,
    over: str = "own",
    context_length: int | None = None,
    keys_by: str | Path | None = None,
    key_window: int | None = None,
    progress: Callable[[str, int], None] | bool | None = None,
    **options: Any,
) -> Run[Result]:
    """Measure the model as loaded and every method on the same text, resumable.

    Args:
        model, corpus, keys_by, key_window: as `perplexity` takes them; so do further options (protocol, targets,
            stride, tokenizer, bos, max_spans).
        lengths: context lengths in tokens; the context length of the model as loaded is added where it is below the
            longest, to show how a method changes the loss there.
        methods: names or method objects; one, or several.
        factors: one method object per factor; default: for each length beyond the context length the factor that it
            needs, since a method costs short inputs more the larger its factor is.
        data: what the text is called in the results; default: its name where `corpus` is one.
        out: the folder that the run's folder is made in.
        chunk, offload_cache: as `TokenScorer` takes them.
        over, context_length: what the methods extend, as `patch` takes them.
        progress: called with the method's label and the tokens read, after each pass; True: a bar of tqdm.

    Raises:
        FileError: another process is writing this run, or its folder is damaged or cannot be written.
        CorpusError, MethodError: as `perplexity` does.
    """
    model = model_by_name(model)
    under: dict[str, Any] = {"over": over, "context_length": context_length}
    lengths, chosen = fit_methods(model, lengths, methods, factors, **under)
    settings = under | {"methods": chosen, "chunk": chunk, "offload_cache": offload_cache}
    plan = plan_perplexity(model, corpus, data=data, settings=settings, lengths=lengths, **options)
    plan = _with_keys(plan, model, keys_by, key_window, out)
    shown = ProgressBar(plan) if progress is True else Progress(progress or None)
    return measure(model, plan, out=out, progress=shown)


def _with_keys(
    plan: RunPlan[PerplexityMeasurement],
    model: PreTrainedModel,
    keys_by: str | Path | None,
    window: int | None,
    out: str | Path | None,
) -> RunPlan[PerplexityMeasurement]:
    """The plan with key tokens, from a file or by an evaluator on the model's device, in its dtype."""
    if keys_by is None:
        if window is not None:
            raise MethodError("key_window is the short context of what keys_by names; give keys_by, too")
        return plan
    if is_file(keys_by):
        return mark_keys(plan, read_keys(keys_by, window))
    evaluator, tokenizer = load_model(keys_by, device=str(model.device), dtype=model.dtype), load_tokenizer(keys_by)
    reading: dict[str, Any] = {"chunk": plan.chunk, "offload_cache": plan.offload_cache}
    of_keys = plan_keys(evaluator, plan.measurement.plan, tokenizer=tokenizer, data=plan.data, window=window, **reading)
    return mark_keys(plan, keys_of_run(measure(evaluator, of_keys, out=out), of_keys))

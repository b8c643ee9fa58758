"""Measure a model at several context lengths, as it is or with many methods.

from rope_ext_hf.eval import Perplexity, measure
run = measure(model, Perplexity(lengths=["1k", "4k"]), methods=["ntk", "yarn"], out="runs")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import did_you_mean
from rope_ext_hf.eval.measurement_options import DEFAULT_METHODS, MeasurementOptions, Passkey, Perplexity, Sweep
from rope_ext_hf.eval.retrieval.retrieval_runs import Retrieval
from rope_ext_hf.eval.spans.perplexity_runs import Result
from rope_ext_hf.hub import load_empty, load_tokenizer
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.options.arguments import with_fields_of
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.larger.offloaded_weights import device_of_ids
from rope_ext_hf.reading.text.documents import Corpus
from rope_ext_hf.runs.folder.run_file import RunFile, run_file
from rope_ext_hf.runs.listeners import as_listener
from rope_ext_hf.runs.measurement import Listener, RunPlan
from rope_ext_hf.runs.preflight import load_for_run
from rope_ext_hf.runs.run import Results, Run
from rope_ext_hf.runs.runner import carry_out

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Methods = str | RopeMethod | Sequence[str | RopeMethod]


@dataclass(frozen=True)
class _EvaluatorRuns:
    """A callable that loads a second model, which chooses LongPPL's key tokens, and carries out a plan with it.

    Attributes:
        device, dtype: the device and dtype for this model, those of the model that is measured.
        out, file: as `measure` takes them.
    """

    device: str
    dtype: torch.dtype
    out: str | Path | None
    file: RunFile | None

    def __call__(
        self, source: str, make: Callable[[PreTrainedModel, PreTrainedTokenizerBase], RunPlan[Any]]
    ) -> Run[Any]:
        """Load a model and its tokenizer, let `make` make a plan for them, and return the run of this plan.

        `source`: the folder or Hub id of the model.
        """
        empty = load_empty(source)
        plan = make(empty, load_tokenizer(source))
        evaluator = load_for_run(source, empty, plan, device=self.device, dtype=self.dtype)
        return carry_out(evaluator, plan, out=self.out, file=self.file)


def measure(
    model: PreTrainedModel | str | Path,
    options: MeasurementOptions,
    *,
    methods: _Methods | MethodChoice | None = None,
    factors: float | Sequence[float] | None = None,
    over: str = "own",
    context_length: Length | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Listener | Callable[[str, int], object] | bool | None = None,
    file: RunFile | None = None,
) -> Run[Any]:
    """Measure a model at several context lengths, and the same model with each of several methods.

    Length-dependent methods are held at each context length (`fixed_length`). A warning counts the layers whose sliding
    window is shorter than the longest input. A loss that is not finite makes the whole result of its length not finite.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device; or a folder, a Hub id or
            "reference", which is loaded. Layers that do not fit its device are then read from main memory or disk, as
            by `rope-ext ppl`.
        options: the measurement with its arguments: a `Perplexity`, `Sweep`, `Passkey` or `Divergence`.
        methods: one or several names or method objects, measured beside the model as loaded; None: the model as it is,
            alone.
        factors: factors of each method that is given by name; default: the factor that the longest length needs, in a
            `Sweep` the factor that each length needs.
        over, context_length: what the methods extend, as `rope_ext_hf.patch` takes them.
        tokenizer: default: the one beside the model's weights. Texts begin with its BOS token if it adds one itself.
        chunk: tokens per pass of the decoder; default: as many as the free memory allows, up to a fixed number.
        offload_cache: keep keys and values in main memory while prompts are answered; the model's device holds those of
            one layer at a time. Losses need those of one layer in any case.
        out: a folder in which the run's folder is written, as by `rope-ext ppl`; a run that is there already is
            continued. Default: no files.
        progress: called with the method's label and the number of tokens read, after each pass; True: a progress bar of
            tqdm; or a `rope_ext_hf.runs.measurement.Listener`.
        file: the description of the run that its folder keeps as run.yaml; default: it is made from `options`.

    Returns:
        The run: `.results`, `.conclusion`, `.table()`, `.plot()`.

    Raises:
        CheckpointError: a model that is given by its name cannot be loaded, or needs more memory than is free.
        CorpusError: no document is as long as the longest length, or the model's vocabulary lacks a token id.
        MethodError: an unknown method, protocol or task, or a number out of range.
        FileError: another process is writing this run, or its folder is damaged or cannot be written.
    """
    name, choice = model, methods
    if choice is not None and not isinstance(choice, MethodChoice):
        choice = MethodChoice(method=choice, factor=factors or (), over=over, context_length=context_length)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "chunk": chunk, "offload_cache": offload_cache}
    if isinstance(model, (str, Path)):
        empty = load_empty(model)
        empty.name_or_path = str(model)  # an adapter's own folder may hold the tokenizer
        plan = options.plan(empty, choice, **settings)
        model = load_for_run(model, empty, plan)
    else:
        plan = options.plan(model, choice, **settings)
    if out is not None and file is None:
        further: dict[str, Any] = {"tokens_per_pass": chunk, "offload_cache": offload_cache or None, "out": out}
        file = run_file(options, name, *([choice] if choice else []), tokenizer=tokenizer, **further)
    if isinstance(options, Perplexity):
        plan = options.with_key_tokens(plan, _EvaluatorRuns(str(device_of_ids(model)), model.dtype, out, file))
    return carry_out(model, plan, out=out, progress=as_listener(progress), file=file)


@with_fields_of(Perplexity)
def perplexity(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    data: str | None = None,
    progress: Callable[[int], object] | bool | None = None,
    **options: Any,
) -> Results[Result]:
    """Measure the perplexity of a model at several context lengths; errors are those of `measure`.

    Args:
        model: as `measure` takes it.
        corpus: a list of texts, token ids, a `datasets.Dataset`, documents, or a name: "stdlib", a file, a folder, a
            pattern, hf:OWNER/NAME; see `rope_ext_hf.reading.text.load.load`.
        data: what the text is called in results; default: its name where `corpus` is one.
        progress: called with the number of tokens read, after each pass; True: a bar of tqdm.
        **options: fields of `Perplexity`, and tokenizer, chunk, offload_cache and out of `measure`.

    Returns:
        One Result per length, shortest first, as a list that a notebook shows as a table.
    """
    return results_of(model, Perplexity, options | {"data": corpus, "data_name": data}, progress)


@with_fields_of(Passkey)
def passkey(
    model: PreTrainedModel | str | Path, *, progress: Callable[[int], object] | bool | None = None, **options: Any
) -> Results[Retrieval]:
    """Measure retrieval: how well a model finds a statement at several depths in texts of several context lengths.

    Errors are those of `measure`. Every prompt is read once, in fixed memory, and its `distractors + 1` answers of a
    few tokens each continue from its cache. Nothing is generated: greedy decoding would give the right answer if and
    only if each of its tokens is the likeliest one after the tokens before it. No chat template is applied.

    Args:
        model: as `measure` takes it.
        progress: called with the number of tokens read, after each prompt; True: a bar of tqdm.
        **options: fields of `Passkey`, and further arguments of `measure`: methods, out and others.

    Returns:
        One Retrieval per length and depth, in ascending order, as a list that a notebook shows as a table.

    Raises:
        UnsupportedModelError: the model gives NaN in place of losses.
    """
    return results_of(model, Passkey, options, progress)


@with_fields_of(Sweep)
def sweep(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    methods: _Methods = DEFAULT_METHODS,
    out: str | Path = "rope-ext-results",
    data: str | None = None,
    progress: Callable[[str, int], object] | bool | None = None,
    **options: Any,
) -> Run[Result]:
    """Measure the perplexity of a model as loaded and with every method, on the same text.

    A run that was stopped is continued by the same call. Errors are those of `measure`.

    Args:
        model, corpus, data: as `perplexity` takes them.
        methods: one or several names or method objects.
        out: the folder in which the run's folder is created.
        progress: called with the method's label and the tokens read, after each pass; True: a bar of tqdm.
        **options: fields of `Sweep`; factors, over, context_length, tokenizer, chunk and offload_cache of `measure`.

    Returns:
        The run, with a result for each method and length.
    """
    fields, others = _apart(Sweep, options | {"data": corpus, "data_name": data})
    return measure(model, Sweep(**fields), methods=methods, out=out, progress=progress, **others)


def results_of(model: Any, kind: type[MeasurementOptions], options: dict[str, Any], progress: Any) -> Results[Any]:
    """Measure a model, and return the results as a list.

    Args:
        model: as `measure` takes it.
        kind: the class with the arguments of the measurement, such as `Perplexity`.
        options: fields of this class, and further arguments of `measure`.
        progress: as in `measure`, but a function is called with the number of tokens alone, without the method's label.
    """
    fields, others = _apart(kind, options)
    listener = (lambda _, tokens: progress(tokens)) if callable(progress) else progress
    return Results(measure(model, kind(**fields), progress=listener, **others))


def _apart(kind: type[MeasurementOptions], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are fields of a class of options, and those that are arguments of `measure`.

    Raises:
        TypeError: an option is neither; the message names the nearest one.
    """
    fields, others = kind.split_kwargs(options)
    known = inspect.signature(measure).parameters.keys() - {"model", "options", "progress"}
    for name in others:
        if name not in known:
            every = sorted(known | {field.name for field, _ in kind.described_fields()})
            raise TypeError(f"unexpected argument {name!r}.{did_you_mean(name, every)} Known: {', '.join(every)}")
    return fields, others

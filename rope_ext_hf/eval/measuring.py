"""Ask a model a question at several context lengths, as it is or with many methods.

from rope_ext_hf.eval import Perplexity, measure
run = measure(model, Perplexity(lengths=["1k", "4k"]), methods=["ntk", "yarn"], out="runs")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import Length
from rope_ext_hf.eval.perplexity_runs import Result
from rope_ext_hf.eval.questions import DEFAULT_METHODS, LengthsQuestion, Passkey, Perplexity, Sweep
from rope_ext_hf.eval.retrieval_runs import Retrieval
from rope_ext_hf.hub import load_model, load_tokenizer, model_by_name
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.questions import forward
from rope_ext_hf.reading.documents import Corpus
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.results import Results
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.run_file import RunFile, run_file
from rope_ext_hf.runs.runner import Progress, carry_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Methods = str | RopeMethod | Sequence[str | RopeMethod]


def measure(
    model: PreTrainedModel | str | Path,
    question: LengthsQuestion,
    *,
    methods: _Methods | MethodChoice | None = None,
    factors: float | Sequence[float] | None = None,
    over: str = "own",
    context_length: Length | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    progress: Progress | Callable[[str, int], object] | bool | None = None,
    file: RunFile | None = None,
) -> Run[Any]:
    """Ask a model a question, and the model with each method.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device; or a folder, a Hub id or
            "reference", which is loaded.
        question: asked of each of them.
        methods: names or method objects, one or several, measured beside the model as loaded; None: the model as it is,
            alone.
        factors: a method object per factor; default: fitted to the longest length, by a `Sweep` to each length.
        over, context_length: what the methods extend, as `rope_ext_hf.patch` takes them.
        tokenizer: default: the one beside the model's weights. Its BOS token stands first if it adds one itself.
        chunk: tokens per pass of the decoder; default: by the free memory, within a fixed budget.
        offload_cache: keep keys and values in main memory, and on the model's device only those of one layer.
        out: write a run's folder into this folder, as `rope-ext ppl` does, and continue the run where it is there
            already; default: no files.
        progress: called with the method's label and the tokens read, after each pass; True: a bar of tqdm; or what is
            told more, see `rope_ext_hf.runs.runner.Progress`.
        file: what the run's folder keeps as its run.yaml; default: this question.

    Returns:
        The run: `.results`, `.conclusion`, `.table()`, `.plot()`.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown method, protocol or task, or numbers that do not fit.
        FileError: another process is writing this run, or its folder is damaged or cannot be written.

    Length-dependent methods are held at each context length (`fixed_length`). A warning counts the layers whose sliding
    window is shorter than the longest input. A span with a loss that is not finite makes its whole result non-finite.
    """
    name, model = model, model_by_name(model)
    choice = methods
    if choice is not None and not isinstance(choice, MethodChoice):
        choice = MethodChoice(method=choice, factor=factors or (), over=over, context_length=context_length)
    plan = question.plan(model, choice, tokenizer=tokenizer, chunk=chunk, offload_cache=offload_cache)
    if out is not None and file is None:
        how: dict[str, Any] = {"tokens_per_pass": chunk, "offload_cache": offload_cache or None, "out": out}
        file = run_file(question, name, *([choice] if choice else []), tokenizer=tokenizer, **how)
    if isinstance(question, Perplexity):
        device, dtype = str(model.device), model.dtype

        def measure_with(source: str, make: Callable[[Any, Any], RunPlan[Any]]) -> Run[Any]:
            evaluator = load_model(source, device=device, dtype=dtype)
            return carry_out(evaluator, make(evaluator, load_tokenizer(source)), out=out, file=file)

        plan = question.with_key_tokens(plan, measure_with)
    return carry_out(model, plan, out=out, progress=Progress.of(progress), file=file)


@forward(Perplexity)
def perplexity(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    data: str | None = None,
    progress: Callable[[int], object] | bool | None = None,
    **asked: Any,
) -> Results[Result]:
    """Measure the perplexity of a model at several context lengths; model and errors are those of `measure`.

    Args:
        corpus: a list of texts, token ids, a `datasets.Dataset`, documents, or a name: "stdlib", a file, a folder, a
            pattern, hf:OWNER/NAME; see `rope_ext_hf.reading.corpora.load`.
        data: what the text is called in results; default: its name where `corpus` is one.
        progress: called with the number of tokens read, after each pass; True: a bar of tqdm.
        **asked: fields of `Perplexity`, and tokenizer, chunk, offload_cache and out of `measure`.

    Returns:
        One Result per length, shortest first, as a list that a notebook shows as a table.
    """
    return results_of(model, Perplexity, asked | {"data": corpus, "data_name": data}, progress)


@forward(Passkey)
def passkey(
    model: PreTrainedModel | str | Path, *, progress: Callable[[int], object] | bool | None = None, **asked: Any
) -> Results[Retrieval]:
    """Measure retrieval from several depths of several context lengths; model and errors are those of `measure`.

    Every prompt is read once, in fixed memory; its `distractors + 1` answers of a few tokens each start from its cache.
    Nothing is generated: greedy decoding gives the right answer exactly if each of its tokens is the likeliest after
    those before. A chat template is not applied. UnsupportedModelError: the model gives NaN in place of losses.

    Args:
        progress: called with the number of tokens read, after each prompt; True: a bar of tqdm.
        **asked: fields of `Passkey`, and further arguments of `measure`: methods, out and others.

    Returns:
        One Retrieval per length and depth, in ascending order, as a list that a notebook shows as a table.
    """
    return results_of(model, Passkey, asked, progress)


@forward(Sweep)
def sweep(
    model: PreTrainedModel | str | Path,
    corpus: Corpus,
    *,
    methods: _Methods = DEFAULT_METHODS,
    out: str | Path = "rope-ext-results",
    data: str | None = None,
    progress: Callable[[str, int], object] | bool | None = None,
    **asked: Any,
) -> Run[Result]:
    """Measure the model as loaded and every method on the same text, resumable; errors are those of `measure`.

    Args:
        model, corpus, data: as `perplexity` takes them.
        methods: names or method objects; one, or several.
        out: the folder that the run's folder is made in.
        progress: called with the method's label and the tokens read, after each pass; True: a bar of tqdm.
        **asked: fields of `Sweep`, and factors, over, context_length, tokenizer, chunk and offload_cache of `measure`.
    """
    fields, how = Sweep.apart(asked | {"data": corpus, "data_name": data})
    return measure(model, Sweep(**fields), methods=methods, out=out, progress=progress, **how)


def results_of(model: Any, question: type[LengthsQuestion], given: dict[str, Any], progress: Any) -> Results[Any]:
    """Return the results of one question, for a function whose `**fields` are those of the question and of `measure`.

    `progress` as in `measure`, except that a function is called with the tokens read alone, without the method's label.
    """
    fields, how = question.apart(given)
    called = (lambda _, tokens: progress(tokens)) if callable(progress) else progress
    return Results(measure(model, question(**fields), progress=called, **how))

"""`divergence`: a function that compares the distributions of a model with those of a stored run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.evaluations import results_of
from rope_ext_hf.options.arguments import with_fields_of
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.run import Results, Run
from rope_ext_hf.tools.divergence.divergence_options import Divergence
from rope_ext_hf.tools.divergence.divergence_runs import DivergenceResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@with_fields_of(Divergence)
def divergence(
    model: PreTrainedModel | str | Path,
    against: str | Path | Run[Any],
    *,
    progress: Callable[[int], object] | bool | None = None,
    **options: Any,
) -> Results[DivergenceResult]:
    """Compare the distributions of a model with those of a run that has stored its last hidden states.

    The model reads the tokens of that run. At each scored token, the distribution Q of the model is compared with P of
    the run: by KL(P || Q) in nats, and by whether both have the same likeliest token. P is computed from the stored
    states by the stored head, in the dtype of the run's model; softmax and divergence are computed in float32. No
    tensor of the size length x vocabulary is made.

    Args:
        model: as `rope_ext_hf.eval.measure` takes it.
        against: the folder of a perplexity run that was measured with `store_states`; or that run, whose first method
            is compared with.
        progress: called with the number of tokens read, after each pass; True: a bar of tqdm.
        **options: fields of `Divergence`, and further arguments of `measure`: methods, out and others.

    Returns:
        One DivergenceResult per length, shortest first, as a list that a notebook shows as a table.

    Raises:
        CorpusError: the model has another vocabulary, or its tokenizer other tokens.
        FileError: the folder holds no run with stored states, or a file in it is missing or damaged.
        MethodError: the run has no such length, or no method with such a label.
        UnsupportedModelError: the model is read whole, so that it gives no last hidden states.
    """
    if isinstance(against, Run):
        if against.results:  # the folder may hold the states of further methods
            label = read_run(against.folder).names[against.results[0].key]
            options = {"against_method": label} | options
        against = against.folder
    return results_of(model, Divergence, options | {"against": against}, progress)

"""Measure how well a model reads at long context lengths: perplexity, retrieval, lm-evaluation-harness.

from rope_ext_hf.eval import Perplexity, measure
from rope_ext_hf.eval import divergence, passkey, perplexity, sweep
from rope_ext_hf.eval import RopeHFLM      # needs lm-eval
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.lazy import lazy_names
from rope_ext_hf.plug_ins import needed_plug_in

if TYPE_CHECKING:
    from rope_ext_hf.eval.evaluations import measure as measure
    from rope_ext_hf.eval.evaluations import passkey as passkey
    from rope_ext_hf.eval.evaluations import perplexity as perplexity
    from rope_ext_hf.eval.evaluations import sweep as sweep
    from rope_ext_hf.eval.lm_eval.lm_eval_adapter import RopeHFLM as RopeHFLM
    from rope_ext_hf.eval.measurement_options import Passkey as Passkey
    from rope_ext_hf.eval.measurement_options import Perplexity as Perplexity
    from rope_ext_hf.eval.measurement_options import Sweep as Sweep
    from rope_ext_hf.eval.retrieval.retrieval_runs import Retrieval as Retrieval
    from rope_ext_hf.eval.spans.perplexity_runs import Result as Result
    from rope_ext_hf.options.method_choice import MethodChoice as MethodChoice
    from rope_ext_hf.reading.text.documents import Document as Document
    from rope_ext_hf.runs.comparison import Comparison as Comparison
    from rope_ext_hf.runs.comparison import compare_runs as compare_runs
    from rope_ext_hf.runs.folder.folder import read_run as read_run
    from rope_ext_hf.runs.run import Results as Results
    from rope_ext_hf.runs.run import Run as Run

    Divergence: Any  # rope_ext_hf.tools has the types of these three
    DivergenceResult: Any
    divergence: Any

_OF_TOOLS = ("Divergence", "DivergenceResult", "divergence")
__all__, _own, __dir__ = lazy_names(__name__, *_OF_TOOLS)


def __getattr__(name: str) -> Any:
    """Return a name of this package when it is first used.

    Raises:
        ImportError: the tool box, which has the name, is not installed.
    """
    if name not in _OF_TOOLS:
        return _own(name)
    try:
        return needed_plug_in("parts", name, by=f"{__name__}.{name}")
    except MethodError as error:
        raise ImportError(str(error)) from error

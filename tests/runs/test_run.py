"""Runs with made-up results, as a notebook and Python show them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.retrieval.retrieval_runs import RetrievalRuns
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns, Result
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.run import Results, Run


def run_of_yarn(losses: Sequence[float] = (1.0, 2.0, 1.5, 1.6)) -> Run[Result]:
    setting, yarn = Setting("matched", 5, 256, False, 0), Yarn(factor=2.0).to_dict()
    kind, places = PerplexityRuns(), [(method, length) for method in (None, yarn) for length in (64, 128)]
    results = [
        kind.result(method, setting, (length,), [DocumentLoss(name, 10 * loss, 10, 12, 1) for name in "abc"])
        for (method, length), loss in zip(places, losses, strict=False)
    ]
    settings = {"kind": "perplexity", "context_length": 64, "over": "own", "loaded": None, "model": "m", "data": "<d>"}
    return Run(None, settings, results, kind)


def test_a_notebook_shows_conclusion_and_table() -> None:
    run = run_of_yarn()
    for shown in (run, Results(run)):
        page = shown._repr_html_()
        assert "Best at 128 tokens (2x): yarn x2, perplexity 4.95" in page
        assert (page.count("<svg"), page.count("<table")) == (0, 1)  # a chart only for more than two lengths
        assert "<d>" not in page
    assert "Nothing is finished" in run_of_yarn(())._repr_html_()


def test_results_as_a_dataframe() -> None:
    run = run_of_yarn()
    for table in (run.to_dataframe(), Results(run).to_dataframe()):
        assert list(table.columns) == run.columns
        assert list(table["method"]) == ["unpatched", "unpatched", "yarn x2", "yarn x2"]
        assert list(table["loss_nats"]) == [1.0, 2.0, 1.5, 1.6]
        assert table.pivot(index="method", columns="length", values="loss_nats").loc["yarn x2", 128] == 1.6
    assert list(run_of_yarn(()).to_dataframe().columns) == list(table.columns)


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        run_of_yarn().to_dataframe()


@pytest.mark.slow
def test_a_notebook_shows_the_plot(tmp_path: Path) -> None:
    run = run_of_yarn()
    figure = Results(run).plot(tmp_path / "plot.png")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    lines = [list(line.get_ydata()) for line in axes.lines]
    assert [pytest.approx(result.perplexity) for result in run.results[2:]] in lines
    with pytest.raises(ValueError, match="nothing to plot"):
        run_of_yarn(()).plot()


def test_results_are_a_list() -> None:
    run = run_of_yarn()
    results = Results(run)
    assert results == list(run.results)
    assert copy.copy(results).run is run
    assert pickle.loads(pickle.dumps(results)) == results


def test_a_run_is_shown_in_another_unit() -> None:
    run = run_of_yarn()
    assert "loss 1.600 nats per token" in str(run.in_unit("nats").conclusion)
    with pytest.raises(MethodError, match=r"'perplexity', 'nats' and 'bits'.*got 'miles'"):
        run.in_unit("miles")
    other: Run[Any] = Run(None, run.settings | {"kind": "passkey"}, [], RetrievalRuns())
    with pytest.raises(MethodError, match="a passkey run has one unit only"):
        other.in_unit("nats")


def test_a_run_of_some_methods_only() -> None:
    run, yarn = run_of_yarn(), Yarn(factor=2.0).to_dict()
    assert run.select([None, yarn]) is run
    turned = run.select([yarn, None])
    assert [result.method for result in turned.results] == [yarn, yarn, None, None]
    alone = run.select([yarn])
    assert list(alone.by_length) == [method_key(yarn)]
    assert list(alone.names.values()) == ["yarn x2"]

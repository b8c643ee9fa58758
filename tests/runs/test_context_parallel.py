"""Spans that two processes read together: the losses are those of one ordinary forward."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.eval.questions import Perplexity
from rope_ext_hf.methods.remapping import ReRoPE
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.runs.context_parallel import Share, SpreadScorer, spread_over
from rope_ext_hf.runs.kinds import RunPlan
from rope_ext_hf.runs.workers import Workers
from tests.support.forks import run_forked
from tests.support.models import build, build_known, logits, tokens

TOKENS = 203  # three times what the models are for, and no multiple of the pieces
FIRST = 37
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "unpatched": ("llama", None, {}),
    "yarn": ("llama", "yarn", {"factor": 4}),
    "dynamic-yarn, its length held": ("llama", "dynamic-yarn", {}),
    "windows": ("gemma3", "yarn", {"factor": 4}),
    "softcaps": ("gemma2", None, {}),
    "sinks": ("gpt_oss", None, {}),
    "chunks of attention": ("llama4", None, {}),
    "latent attention": ("deepseek_v3", "linear", {"factor": 4}),
    "a part of each head": ("gpt_neox", "ntk", {"factor": 4}),
}
AGREE = 1e-4
"""Nats: float32 sums in another order; a method moves losses by 0.1 and more."""


def model_of(case: str) -> Any:
    name, method, params = CASES[case]
    model = build(name)
    return model if method is None else rope.patch(model, method, **params)


def read_together(rank: int, folder: Path) -> None:
    """What each of two processes does; the losses of all cases go to a file of its own."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    losses = {}
    for case in CASES:
        scorer = SpreadScorer(model_of(case), rank=rank, count=2)
        losses[case] = scorer.losses(tokens(TOKENS)[0], FIRST)
        losses[f"{case}, short"] = scorer.losses(tokens(3)[0], 1)
    torch.save(losses, folder / f"losses.{rank}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """The losses that each of two processes has."""
    folder = tmp_path_factory.mktemp("together")
    with ThreadPoolExecutor(2) as pool:
        environment = {"GLOO_SOCKET_IFNAME": "lo"}
        each = [
            pool.submit(run_forked, read_together, rank, folder, folder=folder, environment=environment)
            for rank in range(2)
        ]
        for process in each:
            process.result()
    return [torch.load(folder / f"losses.{rank}") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_forward(case: str, together: list[dict[str, Tensor]]) -> None:
    model = model_of(case)
    for name, ids, first in ((case, tokens(TOKENS), FIRST), (f"{case}, short", tokens(3), 1)):
        held = rope.fixed_length(model, ids.shape[1]) if CASES[case][1] else nullcontext()
        with held:
            scores = logits(model, ids).double().log_softmax(-1)[0, first - 1 : -1]
        expected = -scores.gather(-1, ids[0, first:, None])[:, 0]
        assert torch.equal(*(losses[name] for losses in together))
        assert float((together[0][name] - expected).abs().max()) < AGREE


def test_every_token_is_in_one_share_and_shares_cost_the_same() -> None:
    shares = [Share(rank, 4, 3).places(torch.device("cpu")) for rank in range(4)]
    assert torch.cat(shares).sort().values.tolist() == list(range(24))
    assert len({int((share + 1).sum()) for share in shares}) == 1  # pairs of a query and a key


def test_a_model_whose_state_goes_from_token_to_token_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="cannot be read by several processes together: its cache has layers"
    ):
        SpreadScorer(build_known("qwen3_next"), rank=0, count=2)


def plan(model: Any, *methods: Any, **settings: Any) -> RunPlan[Any]:
    text = [Tokens("d", tokens(128)[0], tuple(range(1, 129)))]
    made: RunPlan[Any] = Perplexity(data=text, lengths=[64], bos=False).plan(model)
    return replace(made, methods=methods, **settings)


@pytest.mark.parametrize(
    ("methods", "settings", "count", "error"),
    [
        ((None, ReRoPE()), {}, 2, "gives each process a part of every span, and rerope needs all keys"),
        ((None,), {"offload_cache": True}, 2, "keeps no cache; leave out --offload-cache"),
        ((None,), {}, 1, "needs several processes: torchrun"),
    ],
)
def test_what_needs_whole_spans_is_refused_before_weights_are_read(
    methods: Any, settings: dict[str, Any], count: int, error: str
) -> None:
    model = build("llama")
    with pytest.raises(MethodError, match=error):
        spread_over(model, plan(model, *methods, **settings), Workers(0, count))


def test_a_model_as_loaded_that_takes_its_length_from_each_part() -> None:
    """transformers takes the length of its dynamic scaling from the positions that a process has."""
    model = build("llama", {"rope_type": "dynamic", "factor": 4.0})
    changed, workers, left_out = spread_over(model, plan(model, None, Yarn(factor=4.0)), Workers(0, 2))
    assert changed.methods == (Yarn(factor=4.0),)
    assert workers.together
    assert "the model as loaded: under context parallelism" in str(left_out)
    with pytest.raises(MethodError, match="the model's own dynamic-ntk takes the length of the input"):
        spread_over(model, plan(model, None), Workers(0, 2))


COMMAND = ["ppl", "reference", "--method", "dynamic-yarn", "--lengths", "256,1000", "--max-spans", "2"]
COMMAND += ["--dtype", "float32", "--json", "--out"]


@pytest.mark.thorough
def test_a_run_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "rope_ext_hf", *COMMAND, str(tmp_path), "--parallel", "context"]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    together, again = map(json.loads, done)
    assert again == together  # read from the folder
    alone = json.loads(CliRunner().invoke(app, [*COMMAND, str(tmp_path)]).stdout)
    assert together["provenance"]["parallel"] == "context, 2 processes"
    assert [r["loss"] for r in together["results"]] == pytest.approx([r["loss"] for r in alone["results"]], abs=AGREE)
    assert len(list(tmp_path.iterdir())) == 2  # runs of their own
    assert len(list(tmp_path.glob("*/records.*.jsonl"))) == 3  # the second process has none to write

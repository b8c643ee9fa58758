"""`ppl --engine vllm` with a stand-in for vLLM that runs stock transformers; `make test-vllm` runs the real one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from rope_ext_hf.cli.app import app
from rope_ext_hf.eval.questions import Perplexity
from rope_ext_hf.hub import load_model
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools.servers.vllm_scorer import _first_spans
from tests.support.texts import ONE_MODULE

TEXT = ONE_MODULE
READ = ("--lengths", "64,512", "--max-spans", "2", "--data", TEXT, "--dtype", "float32", "--json")
COMMAND = ("ppl", "reference", *READ)


class Engine:
    """As vllm.LLM: a folder under overrides of its config, run by stock transformers.

    Attributes:
        started: the arguments of every engine that was started.
        obeys: whether overrides are followed.
        right_up_to: tokens up to which a prompt is read; beyond, the rest of it is scored as the token 0 would be.
    """

    started: list[dict[str, Any]]
    obeys = True
    right_up_to = 10**6

    def __init__(
        self, *, model: str, dtype: str, hf_overrides: dict[str, Any], max_model_len: int, **more: Any
    ) -> None:
        type(self).started.append({"overrides": hf_overrides, "max_model_len": max_model_len} | more)
        config = AutoConfig.from_pretrained(model)
        if self.obeys:
            config.update(hf_overrides)
        self.model = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype).eval()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.most = max_model_len

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.prompt_logprobs == 0
        answers = []
        for prompt in prompts:
            ids = torch.tensor(prompt["prompt_token_ids"])
            assert len(ids) + params.max_tokens <= self.most  # else vLLM refuses the prompt
            seen = torch.where(torch.arange(len(ids)) < self.right_up_to, ids, 0)
            with torch.no_grad():
                scores = self.model(seen[None]).logits[0].log_softmax(-1)
            given = [{t: SimpleNamespace(logprob=float(s[t]))} for t, s in zip(ids[1:].tolist(), scores, strict=False)]
            answers.append(SimpleNamespace(prompt_logprobs=[None, *given]))
        return answers


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    stand_in = type("LLM", (Engine,), {"started": []})
    module = ModuleType("vllm")
    vars(module).update(LLM=stand_in, SamplingParams=SimpleNamespace, __version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return stand_in


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """Return the JSON that a command prints, and its notes or its error."""
    result = CliRunner().invoke(app, list(arguments))
    return json.loads(result.stdout) if result.exit_code == 0 else {}, result.stderr


def losses(printed: dict[str, Any]) -> dict[tuple[str, int], float]:
    return {((r["method"] or {}).get("method", ""), r["length"]): r["loss"] for r in printed["results"]}


@pytest.mark.slow
def test_losses_are_those_of_transformers_in_a_run_of_its_own(engine: type[Engine], tmp_path: Path) -> None:
    arguments = (*COMMAND, "--method", "yarn,linear", "--factor", "2", "--out", str(tmp_path))
    served, notes = run(*arguments, "--engine", "vllm")
    assert "read     by vLLM in steps of 1,024 tokens" in notes
    assert served["provenance"]["engine"] == "vllm 0.32.0"
    assert [each["overrides"].get("rope_parameters", {}).get("rope_type") for each in engine.started] == [
        *(None, "yarn", "linear")
    ]
    assert {each["max_model_len"] for each in engine.started} == {513}
    here, _ = run(*arguments)
    assert "engine" not in here["provenance"]
    assert losses(served) == pytest.approx(losses(here), abs=1e-5)
    assert served["results"][0]["tokens"] == here["results"][0]["tokens"]
    assert len(list(tmp_path.iterdir())) == 2
    page = next(path for path in tmp_path.iterdir() if "Read by vllm 0.32.0" in (path / "report.html").read_text())
    assert (page / "results.csv").read_text().startswith("method,length,perplexity")
    assert run(*arguments, "--engine", "vllm")[0]["results"] == served["results"]
    assert len(engine.started) == 3  # a run that is complete starts none


@pytest.mark.slow
def test_an_engine_that_computes_something_else_is_refused(engine: type[Engine], tmp_path: Path) -> None:
    engine.obeys = False  # as a server without its overrides: the loss as loaded, in place of YaRN's
    _, error = run(*COMMAND, "--method", "yarn", "--factor", "2", "--engine", "vllm", "--out", str(tmp_path))
    losses = re.search(
        r"vLLM does not compute yarn x2 as transformers does: the first span of 64 tokens has a loss of ([0-9.]+) nats "
        r"per token in vLLM and ([0-9.]+) in transformers; .* where torch.float32 allows 0.001\.",
        error,
    )
    assert losses is not None
    scorer = TokenScorer(load_model("reference", dtype="float32"))
    plan = Perplexity(lengths=[64, 512], max_spans=2, data=TEXT).plan(scorer.model)
    [ids] = [ids for ids, length in _first_spans(plan.measurement.plan) if length == 64]
    assert float(losses[1]) == pytest.approx(float(scorer.losses(ids, 1).mean()), abs=1e-4)
    assert abs(float(losses[1]) - float(losses[2])) > 1e-3


@pytest.mark.slow
def test_each_length_is_compared(engine: type[Engine], tmp_path: Path) -> None:
    engine.right_up_to = 300
    _, error = run(*COMMAND, "--engine", "vllm", "--out", str(tmp_path))
    assert "vLLM does not compute unpatched as transformers does: the first span of 512 tokens has" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--method", "dynamic-yarn"), "dynamic-yarn follows the length of every input"),
        (("--method", "rerope"), "changes the relative positions that queries see, and no serving engine does that"),
        (
            ("--method", "yarn", "--factor", "1.5"),
            "vLLM would serve 384 tokens with yarn x1.5, and the longest length is 512",
        ),
        (("--offload-cache",), "leave out --offload-cache"),
        (("--device-map", "auto"), "--engine vllm runs from one process, without --device-map"),
    ],
)
def test_what_vllm_cannot_run_is_refused_before_it_starts(
    engine: type[Engine], tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    assert error in run(*COMMAND, *arguments, "--engine", "vllm", "--out", str(tmp_path))[1].replace("\n", " ")
    assert not engine.started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_an_adapter_is_refused_before_it_starts(engine: type[Engine], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference_folder())
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    command = ("ppl", str(tmp_path / "adapter"), *READ, "--engine", "vllm", "--out", str(tmp_path / "runs"))
    assert "is an adapter, and --engine reads whole models" in run(*command)[1].replace("\n", " ")
    assert not engine.started


@pytest.mark.slow
def test_a_model_as_loaded_that_vllm_cannot_run_is_left_out(engine: type[Engine], tmp_path: Path) -> None:
    folder = tmp_path / "dynamic"
    shutil.copytree(reference_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("ppl", str(folder), *READ, "--out", str(tmp_path / "runs"), "--engine", "vllm")
    more = ("--method", "yarn", "--factor", "2", "--over", "original")
    printed, notes = run(*arguments, *more)
    assert set(losses(printed)) == {("yarn", 64), ("yarn", 512)}, notes
    assert "without  the unpatched model: unpatched has other frequencies for inputs of 64 tokens than for 512" in notes


@pytest.mark.slow
def test_other_engines_and_a_missing_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    error = run(*COMMAND, "--engine", "vllm", "--out", str(tmp_path))[1]
    assert "--engine vllm needs vLLM in this environment" in error
    assert "--engine takes vllm, got 'sglang';" in run(*COMMAND, "--engine", "sglang", "--out", str(tmp_path))[1]

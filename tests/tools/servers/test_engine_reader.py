"""`ppl --engine` with stand-ins for vLLM and SGLang that run stock transformers.

`nox -s vllm` and `nox -s sglang` run the real ones. The stand-in for SGLang answers in the form that a real one
answered in, which is in recorded/sglang.json.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rope_ext_hf.cli.app import app
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.hub import load_model
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools.engines.programs.vllm import HF_FORMAT
from rope_ext_hf.tools.servers.engine_reader import EngineScorer, EngineSettings, ReadingEngine, _first_spans
from rope_ext_hf.tools.servers.sglang_reader import SGLangReader
from rope_ext_hf.tools.servers.vllm_reader import VLLMReader
from tests.support.texts import ONE_MODULE

TEXT = ONE_MODULE
READ = ("--lengths", "64,512", "--max-spans", "2", "--data", TEXT, "--dtype", "float32", "--json")
COMMAND = ("ppl", "reference", *READ)
RECORDED = json.loads((Path(__file__).parent / "recorded" / "sglang.json").read_text(encoding="utf-8"))


class Engine:
    """A folder under overrides of its config, run by stock transformers.

    Attributes:
        started: the arguments of every engine that was started.
        calls: the lengths of the texts that it got at once, for each call.
        obeys: whether overrides are followed.
        right_up_to: tokens up to which a prompt is read; beyond, the rest of it is scored as the token 0 would be.
        fails_at: the number of the call that raises an error.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    started: ClassVar[list[dict[str, Any]]]
    calls: ClassVar[list[list[int]]]
    obeys = True
    right_up_to = 10**6
    fails_at = 0

    def load(self, model: str, dtype: str, overrides: dict[str, Any], arguments: dict[str, Any]) -> None:
        type(self).started.append({"overrides": overrides} | arguments)
        config = AutoConfig.from_pretrained(model)
        if self.obeys:
            config.update(overrides)
        self.model = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype).eval()

    def take(self, lengths: list[int]) -> None:
        """Note a call."""
        self.calls.append(lengths)
        if len(self.calls) == self.fails_at:
            raise RuntimeError("a process died")

    def scores(self, ids: list[int]) -> Tensor:
        """Return the log-probability of each token but the first, (tokens - 1,)."""
        text = torch.tensor(ids)
        seen = torch.where(torch.arange(len(ids)) < self.right_up_to, text, 0)
        with torch.no_grad():
            scores: Tensor = self.model(seen[None]).logits[0].log_softmax(-1)
        return scores[:-1].gather(-1, text[1:, None])[:, 0]


class VLLM(Engine):
    """As vllm.LLM."""

    name, title, version = "vllm", "vLLM", "0.32.0"

    def __init__(
        self, *, model: str, dtype: str, hf_overrides: dict[str, Any], max_model_len: int, **more: Any
    ) -> None:
        self.load(model, dtype, hf_overrides, {"served": max_model_len} | more)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.most = max_model_len

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.prompt_logprobs == 0
        texts = [prompt["prompt_token_ids"] for prompt in prompts]
        self.take([len(ids) for ids in texts])
        answers = []
        for ids in texts:
            assert len(ids) + params.max_tokens <= self.most  # else vLLM refuses the prompt
            given = zip(ids[1:], self.scores(ids).tolist(), strict=True)
            logprobs = [{token: SimpleNamespace(logprob=score)} for token, score in given]
            answers.append(SimpleNamespace(prompt_logprobs=[None, *logprobs]))
        return answers


class SGLang(Engine):
    """As sglang.Engine."""

    name, title, version = "sglang", "SGLang", "0.5.23"

    def __init__(
        self, *, model_path: str, dtype: str, json_model_override_args: str, context_length: int, **more: Any
    ) -> None:
        self.load(model_path, dtype, json.loads(json_model_override_args), {"served": context_length} | more)
        self.most = context_length - 6  # get_worker_info of managers/tp_worker.py

    def generate(
        self,
        *,
        input_ids: list[list[int]],
        sampling_params: dict[str, Any],
        return_logprob: bool,
        logprob_start_len: list[int],
    ) -> list[dict[str, Any]]:
        asked = {"sampling_params": sampling_params, "return_logprob": return_logprob}
        assert asked == {key: RECORDED["arguments"][key] for key in asked}
        self.take([len(ids) for ids in input_ids])
        answers = []
        for ids, start in zip(input_ids, logprob_start_len, strict=True):
            assert len(ids) < self.most  # else SGLang refuses the prompt: validate_input_length of managers/utils.py
            scores = [None, *self.scores(ids)[start:].tolist()]
            given = [[score, token, None] for score, token in zip(scores, ids[start:], strict=True)]
            answers.append({"output_ids": [0], "meta_info": {"input_token_logprobs": given}})
        return answers

    def shutdown(self) -> None:
        pass


MODULES: dict[type[Engine], dict[str, Any]] = {
    VLLM: {"LLM": VLLM, "SamplingParams": SimpleNamespace},
    SGLang: {"Engine": SGLang},
}
"""The names of each engine's package; the class of the stand-in is replaced by one of each test."""


def installed(monkeypatch: pytest.MonkeyPatch, engine: type[Engine]) -> type[Engine]:
    """Put a stand-in in place of an engine's package, and return its class, which no other test shares."""
    stand_in = type(engine.__name__, (engine,), {"started": [], "calls": []})
    module = ModuleType(engine.name)
    names = {name: stand_in if value is engine else value for name, value in MODULES[engine].items()}
    vars(module).update(names, __version__=engine.version)
    monkeypatch.setitem(sys.modules, engine.name, module)
    return stand_in


@pytest.fixture(params=MODULES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    return installed(monkeypatch, request.param)


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """Return the JSON that a command prints, and its notes or its error."""
    result = CliRunner().invoke(app, list(arguments))
    return json.loads(result.stdout) if result.exit_code == 0 else {}, result.stderr


def losses(printed: dict[str, Any]) -> dict[tuple[str, int], float]:
    return {((r["method"] or {}).get("method", ""), r["length"]): r["loss"] for r in printed["results"]}


@pytest.mark.slow
def test_losses_are_those_of_transformers_in_a_run_of_its_own(engine: type[Engine], tmp_path: Path) -> None:
    arguments = (*COMMAND, "--method", "yarn,linear", "--factor", "2", "--out", str(tmp_path))
    served, notes = run(*arguments, "--engine", engine.name)
    assert f"read     by {engine.title} in steps of 4,096 tokens" in notes
    assert served["provenance"]["engine"] == f"{engine.name} {engine.version}"
    assert [each["overrides"].get("rope_parameters", {}).get("rope_type") for each in engine.started] == [
        *(None, "yarn", "linear")
    ]
    here, _ = run(*arguments)
    assert "engine" not in here["provenance"]
    assert losses(served) == pytest.approx(losses(here), abs=1e-5)
    assert served["results"][0]["tokens"] == here["results"][0]["tokens"]
    assert len(list(tmp_path.iterdir())) == 2
    read_by = f"Read by {engine.name} {engine.version}"
    page = next(path for path in tmp_path.iterdir() if read_by in (path / "report.html").read_text())
    assert (page / "results.csv").read_text().startswith("method,label,length,perplexity")
    assert run(*arguments, "--engine", engine.name)[0]["results"] == served["results"]
    assert len(engine.started) == 3  # a run that is complete starts none


@pytest.mark.slow
def test_an_engine_gets_texts_of_all_lengths_at_once(engine: type[Engine], tmp_path: Path) -> None:
    run(*COMMAND, "--engine", engine.name, "--out", str(tmp_path))
    compared, read = engine.calls
    assert compared == [64, 512]  # the first span of each length
    assert sorted(read) == [64, 64, 512, 512]


@pytest.mark.slow
def test_a_text_that_holds_the_shorter_ones_is_read_once(engine: type[Engine], tmp_path: Path) -> None:
    arguments = (*COMMAND, "--protocol", "same-start", "--out", str(tmp_path))
    served, _ = run(*arguments, "--engine", engine.name)
    assert engine.calls[1] == [512, 512]  # and then the last tokens before the same targets, 256 of them
    here, _ = run(*arguments)
    assert losses(served) == pytest.approx(losses(here), abs=1e-5)
    recent = [result["recent_loss"] for result in here["results"]]
    assert [result["recent_loss"] for result in served["results"]] == pytest.approx(recent, abs=1e-5)


@pytest.mark.slow
def test_a_run_whose_engine_died_continues_with_the_texts_that_were_not_read(
    engine: type[Engine], tmp_path: Path
) -> None:
    # steps of 16 tokens: 256 tokens are read together
    arguments = (*COMMAND, "--tokens-per-pass", "16", "--out", str(tmp_path))
    engine.fails_at = 3
    printed, error = run(*arguments, "--engine", engine.name)
    assert not printed
    assert f"{engine.title} failed while it was reading: a process died" in error.replace("\n", " ")
    assert engine.calls[1] == [64, 64]
    engine.fails_at, engine.calls[:] = 0, []
    served, _ = run(*arguments, "--engine", engine.name)
    assert engine.calls == [[64, 512], [512], [512]]
    assert losses(served) == pytest.approx(losses(run(*arguments)[0]), abs=1e-5)


@pytest.mark.slow
def test_an_engine_that_computes_something_else_is_refused(engine: type[Engine], tmp_path: Path) -> None:
    engine.obeys = False  # as a server without its overrides: the loss as loaded, in place of YaRN's
    _, error = run(*COMMAND, "--method", "yarn", "--factor", "2", "--engine", engine.name, "--out", str(tmp_path))
    losses = re.search(
        rf"{engine.title} does not compute yarn x2 as transformers does: the first span of 64 tokens has a loss of "
        rf"([0-9.]+) nats per token in {engine.title} and ([0-9.]+) in transformers; .* where torch.float32 allows "
        r"0.001\.",
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
    _, error = run(*COMMAND, "--engine", engine.name, "--out", str(tmp_path))
    assert f"{engine.title} does not compute unpatched as transformers does: the first span of 512 tokens has" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--method", "dynamic-yarn"), "dynamic-yarn follows the length of every input"),
        (("--method", "rerope"), "changes the relative positions that queries see, and no serving engine does that"),
        (
            ("--method", "yarn", "--factor", "1.5"),
            "{title} would serve 384 tokens with yarn x1.5, and the longest length is 512",
        ),
        (("--offload-cache",), "leave out --offload-cache"),
        (("--device-map", "auto"), "--engine {name} runs from one process, without --device-map"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_before_it_starts(
    engine: type[Engine], tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    said = run(*COMMAND, *arguments, "--engine", engine.name, "--out", str(tmp_path))[1].replace("\n", " ")
    assert error.format(title=engine.title, name=engine.name) in said
    assert not engine.started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
def test_an_adapter_is_refused_before_it_starts(engine: type[Engine], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference_folder())
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    command = ("ppl", str(tmp_path / "adapter"), *READ, "--engine", engine.name, "--out", str(tmp_path / "runs"))
    assert "is an adapter, and --engine reads whole models" in run(*command)[1].replace("\n", " ")
    assert not engine.started


@pytest.mark.slow
def test_a_model_as_loaded_that_an_engine_cannot_run_is_left_out(engine: type[Engine], tmp_path: Path) -> None:
    folder = tmp_path / "dynamic"
    shutil.copytree(reference_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("ppl", str(folder), *READ, "--out", str(tmp_path / "runs"), "--engine", engine.name)
    more = ("--method", "yarn", "--factor", "2", "--over", "original")
    printed, notes = run(*arguments, *more)
    assert set(losses(printed)) == {("yarn", 64), ("yarn", 512)}, notes
    assert "without  the unpatched model: unpatched has other frequencies for inputs of 64 tokens than for 512" in notes


@pytest.mark.slow
def test_an_unknown_engine_and_one_that_is_not_installed(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, engine.name, None)
    error = run(*COMMAND, "--engine", engine.name, "--out", str(tmp_path))[1]
    assert f"--engine {engine.name} needs {engine.title} in this environment" in error
    error = run(*COMMAND, "--engine", "llama-cpp", "--out", str(tmp_path))[1]
    assert "--engine takes sglang, vllm, got 'llama-cpp';" in error


@pytest.mark.parametrize(("reader", "most"), [(VLLMReader, 2 * 2**30), (SGLangReader, None)])
@pytest.mark.parametrize("vocabulary", [384, 32_000, 151_936, 262_144])
def test_steps_are_shorter_where_an_engine_makes_all_logits_of_a_large_vocabulary(
    reader: type[ReadingEngine], most: int | None, vocabulary: int
) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1))
    measurement: Any = SimpleNamespace(passes=[256], plan=SimpleNamespace(documents=[]))
    arguments: dict[str, Any] = {"measurement": measurement, "configs": {}, "source": {}}
    scorer = EngineScorer(model, chunk=None, offload_cache=False, longest=256, engine=reader, **arguments)
    in_float32_three_times = 12 * vocabulary
    if most is None or vocabulary < 40_000:
        assert scorer.chunk == 4096
    else:
        assert scorer.chunk * in_float32_three_times <= most < 2 * scorer.chunk * in_float32_three_times
    assert scorer.logit_rows * in_float32_three_times <= 2 * 2**30
    assert EngineScorer(model, chunk=32, offload_cache=False, longest=256, engine=reader, **arguments).chunk == 32


# --- what one engine alone has ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vllm_reads_a_folder_with_files_in_mistrals_format_by_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = installed(monkeypatch, VLLM)
    folder = tmp_path / "model"
    shutil.copytree(reference_folder(), folder)
    (folder / "params.json").write_text("{}")
    run("ppl", str(folder), *READ, "--engine", "vllm", "--out", str(tmp_path / "runs"))
    config_format, load_format = HF_FORMAT[1::2]
    (started,) = engine.started
    assert (started["config_format"], started["load_format"]) == (config_format, load_format)


def test_sglangs_recorded_answers_are_read_as_the_losses_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(**arguments: Any) -> Any:
        assert arguments == RECORDED["arguments"]
        return RECORDED["answers"]

    class Recorded:
        def __init__(self, **_: Any) -> None:
            self.generate = generate

    installed(monkeypatch, SGLang)
    monkeypatch.setattr(sys.modules["sglang"], "Engine", Recorded)
    config = SimpleNamespace(overrides=None)
    settings: Any = {"config": config, "shortest": 2, "longest": 256, "step": 16, "logit_rows": 16}
    reader = SGLangReader(EngineSettings("reference", dtype="float32", **settings))
    asked = RECORDED["arguments"]
    texts = [(ids, start + 1) for ids, start in zip(asked["input_ids"], asked["logprob_start_len"], strict=True)]
    model = load_model("reference", dtype="float32")
    for (ids, first), answer in zip(texts, reader.log_probabilities(texts), strict=True):
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(
                model(torch.tensor([ids])).logits[0, first - 1 : -1], torch.tensor(ids[first:]), reduction="none"
            )
        assert answer == pytest.approx((-loss).tolist(), abs=1e-4)

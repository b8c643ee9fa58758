"""`check_server` against servers on the loopback address that run a model of transformers, right or with a mistake."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import ServingError
from rope_ext_hf.reference import path as reference_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model under YaRN x4, saved with its tokenizer."""
    made: Path = tmp_path_factory.mktemp("served") / "reference-yarn"
    assert (
        CliRunner()
        .invoke(app, ["patch", "reference", "--method", "yarn", "--factor", "4", "--out", str(made)])
        .exit_code
        == 0
    )
    return made


def plain(**rope_parameters: Any) -> Any:
    """The bundled model as stock transformers builds it from rope settings."""
    config = {"rope_type": "default", "rope_theta": 10000.0} | rope_parameters
    return AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32, rope_parameters=config).eval()


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return scores


def vllm(model: Any, body: Any) -> Any:
    ids = body["prompt"]
    scores = logprobs(model, ids)
    listed = [None, *({str(ids[i]): {"logprob": float(scores[i - 1, ids[i]])}} for i in range(1, len(ids)))]
    return {"choices": [{"prompt_logprobs": listed}]}


def sglang(model: Any, body: Any) -> Any:
    ids, start = body["input_ids"], body["logprob_start_len"]
    scores = logprobs(model, ids)
    listed = [
        [None, ids[start], None],
        *([float(scores[i - 1, ids[i]]), ids[i], None] for i in range(start + 1, len(ids))),
    ]
    return {"meta_info": {"input_token_logprobs": listed}}


def llama_cpp(model: Any, body: Any) -> Any:
    values, tokens = logprobs(model, body["prompt"])[-1].topk(body["n_probs"])
    top = [{"id": int(token), "logprob": float(value)} for value, token in zip(values, tokens, strict=True)]
    return {"completion_probabilities": [{"top_logprobs": top}]}


def openai(model: Any, body: Any) -> Any:
    ids = body["prompt"]
    scores = logprobs(model, ids)
    listed = [None, *(float(scores[i - 1, ids[i]]) for i in range(1, len(ids)))]
    return {"choices": [{"logprobs": {"token_logprobs": listed}}]}


MODELS = {"data": [{"id": "served"}]}
KINDS: dict[str, tuple[dict[str, Any], str, Callable[[Any, Any], Any]]] = {
    "vLLM 0.33.0": ({"/version": {"version": "0.33.0"}, "/v1/models": MODELS}, "/v1/completions", vllm),
    "SGLang": ({"/get_model_info": {"model_path": "x"}}, "/generate", sglang),
    "llama.cpp b1": ({"/props": {"build_info": "b1"}}, "/completion", llama_cpp),
    "a server with OpenAI's completions": ({"/v1/models": MODELS}, "/v1/completions", openai),
}


@contextmanager
def serving(kind: str, model: Any, answer: Callable[[Any, Any], Any] | None = None) -> Iterator[str]:
    """The address of a server of this kind."""
    gets, at, usual = KINDS[kind]

    class Handler(BaseHTTPRequestHandler):
        def reply(self, value: Any) -> None:
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(value or {"error": "no such path"}).encode())

        def do_GET(self) -> None:
            self.reply(gets.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply((answer or usual)(model, body) if self.path == at else None)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_server_of_each_kind(kind: str, folder: Path) -> None:
    with serving(kind, plain(**YARN)) as url:
        report = rope.check_server(url, folder, lengths=[128, 600])
    assert report.agrees
    assert (report.server, report.lengths) == (kind, (128, 600))
    assert max(report.differences["as measured"]) < 1e-3
    assert "serves what was measured: yarn x4" in str(report)


def squared(module: Any) -> None:
    module.attention_scaling **= 2


def twice(module: Any) -> None:
    module.inv_freq = module.inv_freq**2 / plain().model.rotary_emb.inv_freq


def changed(change: Callable[[Any], None]) -> Any:
    model = plain(**YARN)
    change(model.model.rotary_emb)
    return model


MISTAKES: dict[str, Callable[[], Any]] = {
    "without the patch": plain,
    "with no attention factor": lambda: plain(**YARN, attention_factor=1.0),
    "with the attention factor applied twice": lambda: changed(squared),
    "with the scaling applied twice": lambda: changed(twice),
    "with the extended length as the original one": lambda: plain(**YARN | {"original_max_position_embeddings": 1024}),
    "with weights of the other pairing": lambda: wrongly_paired(),
}


def wrongly_paired() -> Any:
    with pytest.warns(UserWarning, match="interleaved now"):
        return rope.convert(plain(**YARN), to="interleaved")


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("kind", ["vLLM 0.33.0", pytest.param("llama.cpp b1", marks=pytest.mark.slow)])
def test_a_mistake_is_named(kind: str, name: str, folder: Path) -> None:
    with serving(kind, MISTAKES[name]()) as url:
        report = rope.check_server(url, folder, lengths=[200, 700])
    assert not report.agrees
    assert report.runs == name, str(report)


def test_a_server_in_bfloat16_is_right_too(folder: Path) -> None:
    with serving("vLLM 0.33.0", plain(**YARN).to(torch.bfloat16)) as url:
        report = rope.check_server(url, folder, lengths=[200, 700])
    assert report.agrees, str(report)


@pytest.mark.slow
def test_the_patch_is_as_before_after_all_mistakes_were_tried(folder: Path) -> None:
    """Weights and frequencies come back: another model here would call a right server wrong the next time."""
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.serving.server_check import _configurations
    from rope_ext_hf.serving.target import open_model

    model = load_model(folder, dtype="float32", device="cpu")
    before, ids = {k: v.clone() for k, v in model.state_dict().items()}, list(range(5, 205))
    expected = logprobs(model, ids)
    for _, configuration in _configurations(model, open_model(folder).described.rotary):
        with configuration:
            pass
    assert torch.equal(logprobs(model, ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="begins with http"):
        rope.check_server("localhost:8000", folder)
    with pytest.raises(ServingError, match="does not answer"):
        rope.check_server("http://127.0.0.1:9", folder, seconds=2.0)
    with (
        serving("vLLM 0.33.0", None, lambda *_: {"choices": [{}]}) as url,
        pytest.raises(ServingError, match="no log-prob"),
    ):
        rope.check_server(url, folder, lengths=[64])
    (wrong := tmp_path / "answers.json").write_text('{"prompts": []}')
    with pytest.raises(ServingError, match="does not hold answers"):
        rope.check_server("none", folder, from_file=wrong)
    wrong.write_text('{"prompts": [{"ids": [1, 99999], "answers": [[1, 2, -1.0]]}]}')
    with pytest.raises(ServingError, match=r"token 99999.* vocabulary of 259"):
        rope.check_server("none", folder, from_file=wrong)


def test_answers_collected_elsewhere_and_the_command(folder: Path, tmp_path: Path) -> None:
    ids = [5 + i % 200 for i in range(300)]
    scores = logprobs(plain(**YARN), ids)
    answers = [[i, ids[i], float(scores[i - 1, ids[i]])] for i in range(270, 300)]
    (collected := tmp_path / "answers.json").write_text(json.dumps({"prompts": [{"ids": ids, "answers": answers}]}))
    arguments = ["check-server", "elsewhere", str(folder), "--from-file", str(collected)]
    right = CliRunner().invoke(app, arguments)
    assert right.exit_code == 0, right.output
    wrong = CliRunner().invoke(app, ["check-server", "elsewhere", "reference", "--from-file", str(collected), "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["agrees"] is False

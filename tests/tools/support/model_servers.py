"""Servers on the loopback address that run a model of transformers and answer like vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of all tokens after each prefix, (tokens, vocabulary) float32."""
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return scores


def vllm(model: Any, body: Any) -> Any:
    ids = body["prompt"]
    scores = logprobs(model, ids)
    logprob_list = [None, *({str(ids[i]): {"logprob": float(scores[i - 1, ids[i]])}} for i in range(1, len(ids)))]
    return {"choices": [{"prompt_logprobs": logprob_list}]}


def sglang(model: Any, body: Any) -> Any:
    ids, start = body["input_ids"], body["logprob_start_len"]
    scores = logprobs(model, ids)
    logprob_list = [
        [None, ids[start], None],
        *([float(scores[i - 1, ids[i]]), ids[i], None] for i in range(start + 1, len(ids))),
    ]
    return {"meta_info": {"input_token_logprobs": logprob_list}}


def llama_cpp(model: Any, body: Any) -> Any:
    values, tokens = logprobs(model, body["prompt"])[-1].topk(body["n_probs"])
    top = [{"id": int(token), "logprob": float(value)} for value, token in zip(values, tokens, strict=True)]
    return {"completion_probabilities": [{"top_logprobs": top}]}


def openai(model: Any, body: Any) -> Any:
    ids = body["prompt"]
    scores = logprobs(model, ids)
    logprob_list = [None, *(float(scores[i - 1, ids[i]]) for i in range(1, len(ids)))]
    return {"choices": [{"logprobs": {"token_logprobs": logprob_list}}]}


MODELS = {"data": [{"id": "served"}]}
KINDS: dict[str, tuple[dict[str, Any], str, Callable[[Any, Any], Any]]] = {
    "vLLM 0.33.0": ({"/version": {"version": "0.33.0"}, "/v1/models": MODELS}, "/v1/completions", vllm),
    "SGLang": ({"/get_model_info": {"model_path": "x"}}, "/generate", sglang),
    "llama.cpp b1": ({"/props": {"build_info": "b1"}}, "/completion", llama_cpp),
    "a server with OpenAI's completions": ({"/v1/models": MODELS}, "/v1/completions", openai),
}
"""By title: the JSON at paths of a server, the path that answers about prompts, and the function that answers."""


@contextmanager
def serving(
    kind: str,
    model: Any,
    answer: Callable[[Any, Any], Any] | None = None,
    *,
    states: dict[str, Any] | None = None,
    tokenize: Callable[[str, bool], list[int]] | None = None,
) -> Iterator[str]:
    """Yield the address of a server of this kind.

    Args:
        kind: a key of `KINDS`.
        model: the model that the server runs.
        answer: makes the answer about a prompt, in place of the kind's own function.
        states: the JSON at further paths.
        tokenize: returns the tokens of a text, with special ones if its second argument is True.
    """
    gets, prompt_path, usual = KINDS[kind]

    class Handler(BaseHTTPRequestHandler):
        def reply(self, value: Any) -> None:
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(value or {"error": "no such path"}).encode())

        def do_GET(self) -> None:
            self.reply((gets | (states or {})).get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and tokenize is not None:
                text = body.get("prompt", body.get("content"))
                self.reply({"tokens": tokenize(text, body.get("add_special_tokens", body.get("add_special")))})
                return
            self.reply((answer or usual)(model, body) if self.path == prompt_path else None)

        def log_message(self, *_: Any) -> None:
            return

    with listening(Handler) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server with this handler, which runs in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

"""What a client asks of a server, and what it makes of answers that are wrong, late, large or from elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rope_ext_hf.errors import ServingError
from rope_ext_hf.serving import server_clients
from rope_ext_hf.serving.server_clients import Answer, connect
from tests.support.model_servers import MODELS

IDS = list(range(10, 20))
Reply = Callable[[BaseHTTPRequestHandler, Any], None]


@contextmanager
def answering(gets: dict[str, Any], reply: Reply | None = None) -> Iterator[tuple[str, list[BaseHTTPRequestHandler]]]:
    """The address of a server with JSON at these paths, which hands what is posted to `reply`; the requests it got."""
    requests: list[BaseHTTPRequestHandler] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self)
            send(
                self,
                json.dumps(gets[self.path]).encode() if self.path in gets else b"no",
                200 if self.path in gets else 404,
            )

        def do_POST(self) -> None:
            requests.append(self)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert reply is not None
            reply(self, body)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def sent(value: Any) -> Reply:
    return lambda handler, _: send(handler, json.dumps(value).encode())


VLLM = {"/version": {"version": "1"}, "/v1/models": MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_sglang_is_known_by_its_present_and_its_former_path(path: str) -> None:
    """http_server.py of SGLang 0.5.23 has both; the second is deprecated."""
    with answering({path: {"model_path": "x"}}) as (url, _):
        assert connect(url, None, 5.0).program == "SGLang"


@pytest.mark.slow
def test_sglang_leaves_out_the_first_log_probability() -> None:
    """As logprob_result_processor.py of SGLang 0.5.23 does: None stands before those of the tokens that follow."""

    def reply(handler: BaseHTTPRequestHandler, body: Any) -> None:
        start = body["logprob_start_len"]
        listed = [
            [None, body["input_ids"][start], None],
            *([-1.0, token, None] for token in body["input_ids"][start + 1 :]),
        ]
        send(handler, json.dumps({"meta_info": {"input_token_logprobs": listed}}).encode())

    with answering({"/model_info": {}}, reply) as (url, _):
        answers = connect(url, None, 5.0).answers(IDS)
    assert answers == [Answer(at, IDS[at], -1.0) for at in range(1, len(IDS))]


@pytest.mark.slow
def test_llama_cpp_is_asked_for_the_tokens_alone_and_for_a_whole_character() -> None:
    asked: list[Any] = []

    def reply(handler: BaseHTTPRequestHandler, body: Any) -> None:
        asked.append(body)
        top = [{"id": 5, "logprob": -0.5}]
        send(handler, json.dumps({"completion_probabilities": [{"top_logprobs": top}]}).encode())

    with answering({"/props": {"build_info": "b1"}}, reply) as (url, _):
        answers = connect(url, None, 5.0).answers(IDS)
    assert [body["prompt"] for body in asked] == [IDS[:stop] for stop in range(3, 11)]
    assert {(body["n_predict"], body["post_sampling_probs"]) for body in asked} == {(1, False)}
    assert answers == [Answer(stop, 5, -0.5) for stop in range(3, 11)]


@pytest.mark.slow
def test_the_api_key_goes_to_the_address_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPE_EXT_API_KEY", "secret")
    with (
        answering(VLLM) as (elsewhere, others),
        answering(VLLM, lambda handler, _: send(handler, b"", 307, Location=f"{elsewhere}/v1/completions")) as (
            url,
            requests,
        ),
        pytest.raises(ServingError, match="status 307"),
    ):
        connect(url, None, 5.0).answers(IDS)
    assert others == []
    assert {request.headers["Authorization"] for request in requests} == {"Bearer secret"}
    monkeypatch.delenv("ROPE_EXT_API_KEY")
    with answering(VLLM) as (url, requests):
        connect(url, None, 5.0)
    assert requests[0].headers["Authorization"] is None


def drip(handler: BaseHTTPRequestHandler, _: Any) -> None:
    """A byte at a time, each within the time limit of a socket."""
    handler.send_response(200)
    handler.end_headers()
    for _each in range(100):
        try:
            handler.wfile.write(b" ")
            time.sleep(0.1)
        except OSError:
            return


def hang(handler: BaseHTTPRequestHandler, _: Any) -> None:
    time.sleep(3)


@pytest.mark.slow
@pytest.mark.parametrize("reply", [drip, hang])
def test_an_answer_that_does_not_end_is_given_up(reply: Reply) -> None:
    with (
        answering(VLLM, reply) as (url, _),
        pytest.raises(ServingError, match=r"does not answer: .*(complete|timed out)"),
    ):
        connect(url, "served", 0.5).answers(IDS)


@pytest.mark.slow
def test_an_answer_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_clients, "MOST_BYTES", 1000)
    with (
        answering(VLLM, lambda handler, _: send(handler, b" " * 5000)) as (url, _),
        pytest.raises(ServingError, match="more than 1,000 bytes"),
    ):
        connect(url, "served", 5.0).answers(IDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda handler, _: send(handler, b"<html>"), "does not answer with JSON"),
        (lambda handler, _: send(handler, b'{"error": "model not found"}', 400), "status 400.*model not found"),
        (sent([]), "no log-probabilities"),
        (sent({"choices": None}), "no log-probabilities"),
        (sent({"choices": [{"prompt_logprobs": [None, {"11": {"logprob": 10**400}}]}]}), "no log-probabilities"),
        (
            sent({"choices": [{"prompt_logprobs": [None, *({str(i): {"logprob": float("nan")}} for i in IDS[1:])]}]}),
            "nan",
        ),
    ],
)
def test_an_answer_of_another_form_is_one_clear_error(reply: Reply, message: str) -> None:
    with answering(VLLM, reply) as (url, _), pytest.raises(ServingError, match=message):
        connect(url, "served", 5.0).finite_answers(IDS)


@pytest.mark.slow
def test_an_address_without_a_server_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServingError, match="/version does not answer"):
        connect("http://127.0.0.1:9", None, 2.0)
    with answering({}) as (url, _), pytest.raises(ServingError, match="status 404"):
        connect(url, None, 2.0)
    with (
        answering({"/version": VLLM["/version"], "/v1/models": {}}) as (url, _),
        pytest.raises(ServingError, match="lists no models"),
    ):
        connect(url, None, 2.0).answers(IDS)

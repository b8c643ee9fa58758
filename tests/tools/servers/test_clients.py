"""Requests of the clients, and their reaction to answers that are wrong, late, too large or from another address."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools.servers import clients
from rope_ext_hf.tools.servers.clients import Answer, VLLMClient, connect
from tests.tools.support.model_servers import MODELS

IDS = list(range(10, 20))
Reply = Callable[[BaseHTTPRequestHandler, Any], None]


@contextmanager
def answering(gets: dict[str, Any], reply: Reply | None = None) -> Iterator[tuple[str, list[BaseHTTPRequestHandler]]]:
    """Yield the address of a server with JSON at these paths, and its requests; `reply` answers what is posted."""
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
    """http_server.py of SGLang 0.5.23 has both paths; the second one is deprecated."""
    with answering({path: {"model_path": "x"}}) as (url, _):
        assert connect(url, None, 5.0).program == "SGLang"


@pytest.mark.slow
def test_sglang_leaves_out_the_first_log_probability() -> None:
    """logprob_result_processor.py of SGLang 0.5.23 puts None before the values of the tokens that follow."""

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
    bodies: list[Any] = []

    def reply(handler: BaseHTTPRequestHandler, body: Any) -> None:
        bodies.append(body)
        top = [{"id": 5, "logprob": -0.5}]
        send(handler, json.dumps({"completion_probabilities": [{"top_logprobs": top}]}).encode())

    with answering({"/props": {"build_info": "b1"}}, reply) as (url, _):
        answers = connect(url, None, 5.0).answers(IDS)
    assert [body["prompt"] for body in bodies] == [IDS[:stop] for stop in range(3, 11)]
    assert {(body["n_predict"], body["post_sampling_probs"]) for body in bodies} == {(1, False)}
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


@contextmanager
def sending(reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that answers every request by this function."""

    def serve() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):  # the client has seen enough
            client.recv(65_536)
            reply(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def dripped(first: bytes, repeated: bytes, pause: float = 0.02) -> Callable[[socket.socket], None]:
    """Return a function that sends some bytes, and then others again and again within the socket's time limit."""

    def reply(client: socket.socket) -> None:
        client.sendall(first)
        while True:
            client.sendall(repeated)
            time.sleep(pause)

    return reply


def whole(content: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(content)


OK = b"HTTP/1.1 200 OK\r\n"
LATE, UNREADABLE, LARGE = (
    "not complete after 1 s",
    "does not answer with JSON",
    "more than 10,000,000 bytes or 1,250,000 values",
)
HOSTILE: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "nothing": (lambda client: time.sleep(2), LATE),
    "a dripped status line": (dripped(b"HTTP/1.1 200 O", b"K"), LATE),
    "a dripped header": (dripped(OK + b"X: ", b"a"), LATE),
    "a dripped chunk size": (dripped(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"), LATE),
    "dripped trailers": (dripped(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n"), LATE),
    "a dripped answer": (dripped(OK + b"\r\n", b" "), LATE),
    "a dripped error": (dripped(b"HTTP/1.1 500 Oh\r\n\r\n", b" "), LATE),
    "100 Continue without end": (dripped(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0), LATE),
    "100 Continue now and then": (dripped(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE),
    "an answer without end": (dripped(OK + b"\r\n", b" " * 1_000_000, 0.0), f"{LATE}|{LARGE}"),
    "a header without end": (dripped(OK + b"X: ", b"a" * 100_000, 0.0), "more than 65536 bytes"),
    "objects without values": (whole(OK + b"\r\n[" + b"{}," * 1_300_000 + b"{}]"), LARGE),
    "deep nesting": (whole(OK + b"\r\n" + b"[" * 100_000), UNREADABLE),
    "more bytes than stated": (whole(OK + b"Content-Length: 1\r\n\r\n{}"), UNREADABLE),
    "fewer bytes than stated": (whole(OK + b"Content-Length: 99\r\n\r\n{"), UNREADABLE),
    "no HTTP": (whole(b"SSH-2.0\r\n"), "does not answer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_ends_in_time_with_one_clear_error(name: str) -> None:
    reply, message = HOSTILE[name]
    began = time.monotonic()
    with sending(reply) as url, pytest.raises(ServingError, match=message):
        connect(url, None, 0.3)
    assert time.monotonic() - began < 2.3


@pytest.mark.slow
def test_the_probes_share_the_time_of_one_answer() -> None:
    def slowly(client: socket.socket) -> None:
        time.sleep(0.3)
        client.sendall(b"HTTP/1.1 404 No\r\n\r\n")

    began = time.monotonic()
    with sending(slowly) as url, pytest.raises(ServingError, match=LATE):
        connect(url, None, 0.5)
    assert time.monotonic() - began < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "message"), [(0, "does not answer with JSON"), (1, "more than")])
def test_a_longer_question_may_have_a_longer_answer(extra: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_MOST_BYTES", 2000)
    question = json.dumps(VLLMClient("", "x", 5.0, "").question(IDS))
    content = b" " * (2000 + clients.BYTES_PER_BYTE * len(question) + extra)
    with (
        answering(VLLM, lambda handler, _: send(handler, content)) as (url, _),
        pytest.raises(ServingError, match=message),
    ):
        connect(url, "x", 5.0).answers(IDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda handler, _: send(handler, b"<html>"), "does not answer with JSON"),
        (lambda handler, _: send(handler, b'{"error": "model not found"}', 400), "status 400.*model not found"),
        (sent([]), "no log-probabilities"),
        (sent({"choices": None}), "no log-probabilities"),
        (lambda handler, _: send(handler, b"[" * 950 + b"]" * 950), "no log-probabilities|JSON"),
        (sent({"choices": [{"prompt_logprobs": [None, {"11": {"logprob": 10**400}}]}]}), "no log-probabilities"),
        (
            sent({"choices": [{"prompt_logprobs": [None, *({str(i): {"logprob": float("nan")}} for i in IDS[1:])]}]}),
            "nan",
        ),
    ],
)
def test_an_answer_of_another_form_is_one_clear_error(reply: Reply, message: str) -> None:
    with answering(VLLM, reply) as (url, _), pytest.raises(ServingError, match=message):
        connect(url, "served", 5.0).answers(IDS)


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

"""Clients that ask servers for log-probabilities: vLLM, SGLang, llama.cpp, and OpenAI's completions.

Only the address given is asked: a redirect is an error, and no proxy is used. An API key is taken from the variable
ROPE_EXT_API_KEY.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

from rope_ext_hf.errors import ServingError, duration, one_line, short
from rope_ext_hf.files import json_digest
from rope_ext_hf.tools.engines.llama_cpp import LlamaCpp
from rope_ext_hf.tools.engines.sglang import SGLang
from rope_ext_hf.tools.engines.vllm import VLLM

_COMPARED = 128  # tokens at the end of a prompt whose log-probabilities are asked for
_CUTS, _CUTS_ANEW, _NEXT = 8, 2, 16  # prompts, each a token longer, and likely next tokens of each, of llama.cpp
_WHOLE = [["a", 100]]
"""A token to generate: with a piece of a character llama.cpp gives no log-probabilities. Those given are unbiased."""
_MOST_BYTES, BYTES_PER_BYTE, _BYTES_PER_VALUE = 10_000_000, 200, 8
"""Of an answer; more for each byte of the question, as vLLM gives about 110 per token of a prompt; and what a value
of JSON must have on average: in memory it takes up to 200, in the text as few as two."""
_PROBE_SECONDS, _PART = 30.0, 1 << 20
_LONG = 200  # characters of what is kept whole of what a server states
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, OverflowError)  # an answer of another form


class Answer(NamedTuple):
    """The log-probability, in nats, of a token, given those of the prompt before a position."""

    position: int
    token: int
    logprob: float


@dataclass
class Client(ABC):
    """A server of one kind."""

    program: ClassVar[str]  # its name
    probes: ClassVar[tuple[str, ...]]
    """Paths of which one answers with a JSON object on a server of this kind, and on no kind after it."""
    path: ClassVar[str] = "/v1/completions"
    facts: ClassVar[dict[str, dict[str, str]]] = {"/v1/models": {"length": "data.0.max_model_len"}}
    """What a server states of itself: by path, where in the JSON each name stands."""
    url: str
    served_name: str | None  # of the model there; None: not asked yet
    seconds: float  # that an answer may take
    version: str  # as the server states it; empty: it does not
    anew: bool = False  # compute each prompt anew: from what is cached of another one, sums run in another order

    @property
    def title(self) -> str:
        return f"{self.program} {self.version}".strip()

    def prompts(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """The prompts to ask about in place of one."""
        return [ids]

    @abstractmethod
    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        """The JSON to post."""

    @abstractmethod
    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        """The log-probabilities in an answer; an error of `_UNREADABLE` where it has none."""

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        """Finite log-probabilities of a prompt's last tokens, or of those that may follow it; ServingError: none."""
        given: list[Answer] = []
        for prompt in self.prompts(ids):
            answer = _ask(self.url, self.path, self.question(prompt), self.seconds)
            try:
                given += self.read(answer, prompt)
            except _UNREADABLE as error:
                words = short(json.dumps(answer), 200)
                raise ServingError(
                    f"{self.title} at {self.url} gives no log-probabilities of a prompt: {words}"
                ) from error
        if wrong := [each for each in given if not math.isfinite(each.logprob)]:
            raise ServingError(
                f"{self.title} at {self.url} gives the log-probability {wrong[0].logprob} for token {wrong[0].token} "
                f"at position {wrong[0].position}"
            )
        return given

    def tokens(self, text: str, special: bool) -> list[int]:
        """The server's tokens of a text, if `special` with those that it puts around each; ServingError: none."""
        try:
            answer = _ask(self.url, "/tokenize", self.tokenizing(text, special), self.seconds)
            return [int(token) for token in answer["tokens"]]
        except (ServingError, *_UNREADABLE) as error:
            message = f"{self.title} gives no tokens of a text: give the model it serves, for its tokenizer"
            raise ServingError(message) from error

    def tokenizing(self, text: str, special: bool) -> dict[str, Any]:
        """The JSON that asks for the tokens of a text."""
        return {"prompt": text, "add_special_tokens": special}

    def stated(self) -> dict[str, Any]:
        """What the server states of itself, its version among it; a long text as its digest."""
        known: dict[str, Any] = {"version": self.title}
        for path, places in self.facts.items():
            with contextlib.suppress(ServingError):
                answer = _ask(self.url, path, None, self.seconds)
                for name, place in places.items():
                    with contextlib.suppress(*_UNREADABLE):
                        value = reduce(
                            lambda part, key: part[int(key) if key.isdigit() else key], place.split("."), answer
                        )
                        known[name] = value if len(str(value)) < _LONG else json_digest(value)
        return known

    def model(self) -> str:
        """The name of the model on the server."""
        if self.served_name is None:
            listed = _ask(self.url, "/v1/models", None, self.seconds)
            try:
                self.served_name = str(listed["data"][0]["id"])
            except _UNREADABLE as error:
                raise ServingError(f"{self.url} lists no models at /v1/models; state the name of the model") from error
        return self.served_name


class VLLMClient(Client):
    """vLLM: log-probabilities of every token of the prompt."""

    program, probes = VLLM.title, ("/version",)
    facts: ClassVar = {"/v1/models": {"length": "data.0.max_model_len", "folder": "data.0.root"}}

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        asked = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        return {"model": self.model(), "prompt": list(ids)} | asked

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        listed = answer["choices"][0]["prompt_logprobs"][-len(ids) :]  # tokens before the prompt, if any, come first
        start = max(1, len(ids) - _COMPARED)
        return [Answer(at, ids[at], float(listed[at][str(ids[at])]["logprob"])) for at in range(start, len(ids))]


class _SGLangClient(Client):
    program, probes = SGLang.title, ("/model_info", "/get_model_info")  # the second is deprecated
    path = "/generate"
    facts: ClassVar = {
        "/get_server_info": {
            "length": "context_length", "folder": "model_path", "tokenizer": "tokenizer_path", "dtype": "dtype",
            "dtype of keys and values": "kv_cache_dtype", "quantization": "quantization",
            "settings": "json_model_override_args", "attention": "attention_backend", "template": "chat_template",
        }
    }  # fmt: skip

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        asked = {"return_logprob": True, "logprob_start_len": max(1, len(ids) - _COMPARED) - 1}
        return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0}} | asked

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        start = max(1, len(ids) - _COMPARED)
        listed = [entry for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None]
        listed = listed[-(len(ids) - start) :]
        if [entry[1] for entry in listed] != list(ids[start:]):
            raise ValueError("other tokens")
        return [Answer(start + i, ids[start + i], float(entry[0])) for i, entry in enumerate(listed)]


class _LlamaCppClient(Client):
    """It gives no log-probabilities of a prompt, but those of the likely next tokens after the last few prefixes."""

    program, probes = LlamaCpp.name, ("/props",)
    path = "/completion"
    facts: ClassVar = {
        "/props": {
            "length": "default_generation_settings.n_ctx", "folder": "model_path", "template": "chat_template",
            "first token": "bos_token", "last token": "eos_token",
        },
        "/v1/models": {"vocabulary": "data.0.meta.n_vocab", "bytes of weights": "data.0.meta.size"},
    }  # fmt: skip

    def tokenizing(self, text: str, special: bool) -> dict[str, Any]:
        return {"content": text, "add_special": special}

    def prompts(self, ids: Sequence[int]) -> list[Sequence[int]]:
        cuts = _CUTS_ANEW if self.anew else _CUTS
        return [ids[:stop] for stop in range(max(1, len(ids) - cuts + 1), len(ids) + 1)]

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        asked = {"n_predict": 1, "n_probs": _NEXT, "temperature": 0, "logit_bias": _WHOLE}
        return {"prompt": list(ids), "cache_prompt": not self.anew, "post_sampling_probs": False} | asked

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        first, *others = answer["completion_probabilities"][0]["top_logprobs"]
        return [Answer(len(ids), int(each["id"]), float(each["logprob"])) for each in (first, *others)]


class _OpenAIClient(Client):
    program, probes = "a server with OpenAI's completions", ("/v1/models",)

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        asked = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        return {"model": self.model(), "prompt": list(ids)} | asked

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        listed = answer["choices"][0]["logprobs"]["token_logprobs"]
        if len(listed) < len(ids):
            raise ValueError("fewer tokens")
        return [Answer(at, ids[at], float(listed[at])) for at in range(max(1, len(ids) - _COMPARED), len(ids))]


_KINDS = (VLLMClient, _SGLangClient, _LlamaCppClient, _OpenAIClient)


def connect(url: str, served_name: str | None, seconds: float, *, anew: bool = False) -> Client:
    """A client of the server at an address, of the kind that it is; ServingError: nothing there that answers."""
    url = url.rstrip("/").removesuffix("/v1")
    if not re.match("https?://[^/]", url):
        raise ServingError(f"the address of a server begins with http:// or https://; got {short(url)!r}")
    end, failure = time.monotonic() + min(seconds, _PROBE_SECONDS), None
    for kind, path in [(each, path) for each in _KINDS for path in each.probes]:
        try:
            answer = _ask(url, path, None, end - time.monotonic())
        except ServingError as error:
            failure = error
            if isinstance(error.__cause__, OSError):
                break  # nothing is there, or it hangs
            continue
        if isinstance(answer, dict):
            version = answer.get("version") or answer.get("build_info") or ""
            return kind(url, served_name, seconds, short(str(version), 40), anew)
    raise failure or ServingError(f"{url} is no server of a kind that is known here")


class _Until(socket.SocketIO):
    """A stream of the bytes that a socket receives up to a point in time: its own limit bounds each read alone."""

    def __init__(self, received: socket.socket, end: float) -> None:
        super().__init__(received, "r")
        self._received, self._end = received, end

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._received.settimeout(left)
        return super().readinto(buffer)


def _ask(url: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """The JSON that a server answers with; the time bounds all of the answer, from its first byte to its last."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key := os.environ.get("ROPE_EXT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    most, end, text = _MOST_BYTES + BYTES_PER_BYTE * len(data or b""), time.monotonic() + seconds, bytearray()
    scheme, _, host, rest = f"{url}{path}".split("/", 3)
    kind = http.client.HTTPSConnection if scheme == "https:" else http.client.HTTPConnection
    try:
        with closing(kind(host, timeout=max(0.001, seconds))) as connection:
            connection.request("GET" if data is None else "POST", f"/{rest}", data, headers)
            answer = http.client.HTTPResponse(connection.sock)
            answer.fp = io.BufferedReader(_Until(connection.sock, end))
            answer.begin()
            while len(text) <= most and (part := answer.read1(_PART)):
                text += part
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        late = f"its answer is not complete after {duration(seconds)}"
        why = late if isinstance(error, TimeoutError) else one_line(error)
        raise ServingError(f"{url}{path} does not answer: {why}") from error
    if not 200 <= answer.status < 300:
        words = " ".join(text[:2000].decode("utf-8", errors="replace").split()) or answer.reason
        raise ServingError(f"{url}{path} answers with status {answer.status}: {short(words, 300)}")
    # each value is the first of the text or of a container, or stands behind a comma
    if len(text) > most or sum(map(text.count, (b",", b"[", b"{"))) > most // _BYTES_PER_VALUE:
        raise ServingError(f"{url}{path} answers with more than {most:,} bytes or {most // _BYTES_PER_VALUE:,} values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServingError(f"{url}{path} does not answer with JSON") from error

"""Clients that ask servers for log-probabilities: vLLM, SGLang, llama.cpp, and OpenAI's completions API.

Requests go to the given address and nowhere else: a redirect is an error, and no proxy is used. An API key is taken
from the environment variable ROPE_EXT_API_KEY.
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
from typing import Any, ClassVar, NamedTuple

from rope_ext_hf.errors import ServingError, duration, one_line, short
from rope_ext_hf.files.whole import json_digest
from rope_ext_hf.tools.engines.programs.llama_cpp import LlamaCpp
from rope_ext_hf.tools.engines.programs.sglang import SGLang
from rope_ext_hf.tools.engines.programs.vllm import VLLM

_COMPARED = 128  # tokens at the end of a prompt whose log-probabilities are asked for
_CUTS, _CUTS_ANEW = 8, 2  # prefixes of a prompt, each one token longer, that llama.cpp is asked about
_NEXT = 16  # likely next tokens that llama.cpp returns for each
_BIAS_TO_WHOLE_CHARACTER = [["a", 100]]
"""A bias towards a token that is a whole character.

Where the generated token is a piece of a character, llama.cpp returns no log-probabilities. The returned ones are those
without the bias.
"""
_MOST_BYTES = 10_000_000  # of an answer to an empty question
BYTES_PER_BYTE = 200  # further bytes of an answer for each byte of the question; vLLM needs about 110 per prompt token
_BYTES_PER_VALUE = 8  # least mean size of a JSON value; its text may have 2 bytes where it takes 200 in memory
_PROBE_SECONDS = 30.0  # time limit of finding out which program a server runs
_READ_BYTES = 1 << 20  # at a time
_LONG = 200  # characters of a stated fact; longer ones are kept as a digest
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, OverflowError)  # raised by an answer of another form


class Answer(NamedTuple):
    """One log-probability from a server: that of `token` at `position`, given the prompt's tokens before it."""

    position: int
    token: int
    logprob: float  # in nats


@dataclass
class Client(ABC):
    """Base class of the clients, each of which talks to servers that run one program, such as vLLM.

    Attributes:
        program: the program's name.
        probes: paths, of which at least one returns a JSON object on a server of this program, and on no program whose
            client comes after it in `_CLIENTS`.
        path: the path to which prompts are posted.
        facts: places of the facts that a server states about itself: path -> name of the fact -> place in the JSON.
        url: the server's address.
        served_name: the name of the model on the server; None: not known yet.
        seconds: the time limit of one answer.
        version: the program's version as the server states it; empty if it does not state one.
        anew: whether each prompt is computed without what the server has cached of earlier ones. With a cache, sums run
            in another order.
    """

    program: ClassVar[str]
    probes: ClassVar[tuple[str, ...]]
    path: ClassVar[str] = "/v1/completions"
    facts: ClassVar[dict[str, dict[str, str]]] = {"/v1/models": {"length": "data.0.max_model_len"}}
    url: str
    served_name: str | None
    seconds: float
    version: str
    anew: bool = False

    @property
    def title(self) -> str:
        """The program with its version."""
        return f"{self.program} {self.version}".strip()

    def prompts(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """Return the prompts to send to get the log-probabilities of one prompt: by default that prompt alone."""
        return [ids]

    @abstractmethod
    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the JSON to post, which asks the server for the log-probabilities of a prompt."""

    @abstractmethod
    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        """Return the log-probabilities in the server's JSON; raise an error of `_UNREADABLE` if it has none."""

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        """Ask the server about a prompt, and return the log-probabilities that it answers with.

        They are those of the prompt's last tokens, or of tokens that may follow them.

        Raises:
            ServingError: the server does not answer, or returns no finite log-probabilities.
        """
        answers: list[Answer] = []
        for prompt in self.prompts(ids):
            reply = _ask(self.url, self.path, self.question(prompt), self.seconds)
            try:
                answers += self.read(reply, prompt)
            except _UNREADABLE as error:
                words = short(json.dumps(reply), 200)
                raise ServingError(
                    f"{self.title} at {self.url} returns no log-probabilities of a prompt: {words}"
                ) from error
        for answer in answers:
            if not math.isfinite(answer.logprob):
                raise ServingError(
                    f"{self.title} at {self.url} returns {answer.logprob} as the log-probability of token "
                    f"{answer.token} at position {answer.position}; it must be a finite number"
                )
        return answers

    def tokens(self, text: str, special: bool) -> list[int]:
        """Return the token ids into which the server cuts a text, with its special tokens if `special`.

        Raises:
            ServingError: the server returns no tokens.
        """
        try:
            reply = _ask(self.url, "/tokenize", self.tokenizing(text, special), self.seconds)
            return [int(token) for token in reply["tokens"]]
        except (ServingError, *_UNREADABLE) as error:
            raise ServingError(
                f"{self.title} returns no tokens for a text: give the model that it serves, so that its tokenizer is "
                "used here"
            ) from error

    def tokenizing(self, text: str, special: bool) -> dict[str, Any]:
        """Return the JSON to post, which asks the server for the tokens of a text."""
        return {"prompt": text, "add_special_tokens": special}

    def stated(self) -> dict[str, Any]:
        """Return the facts that the server states about itself, by name, among them its version.

        A long text is replaced by its digest.
        """
        stated: dict[str, Any] = {"version": self.title}
        for path, places in self.facts.items():
            with contextlib.suppress(ServingError):  # a server need not have this path
                reply = _ask(self.url, path, None, self.seconds)
                for name, place in places.items():
                    with contextlib.suppress(*_UNREADABLE):
                        value = _at_place(reply, place)
                        stated[name] = value if len(str(value)) < _LONG else json_digest(value)
        return stated

    def model(self) -> str:
        """Return the name of the model on the server; by default the first one that it lists."""
        if self.served_name is None:
            reply = _ask(self.url, "/v1/models", None, self.seconds)
            try:
                self.served_name = str(reply["data"][0]["id"])
            except _UNREADABLE as error:
                raise ServingError(
                    f"{self.url} lists no models at /v1/models; give the model's name with --served-name"
                ) from error
        return self.served_name


def _at_place(reply: Any, place: str) -> Any:
    """Return the value at a place of a JSON reply, such as "data.0.id"."""
    for key in place.split("."):
        reply = reply[int(key) if key.isdigit() else key]
    return reply


class VLLMClient(Client):
    """A client of vLLM, which returns the log-probability of every token of a prompt."""

    program, probes = VLLM.title, ("/version",)
    facts: ClassVar = {"/v1/models": {"length": "data.0.max_model_len", "folder": "data.0.root"}}

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"model": self.model(), "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        # Tokens that the server puts before the prompt come first.
        logprobs = answer["choices"][0]["prompt_logprobs"][-len(ids) :]
        start = max(1, len(ids) - _COMPARED)
        return [Answer(at, ids[at], float(logprobs[at][str(ids[at])]["logprob"])) for at in range(start, len(ids))]


class _SGLangClient(Client):
    """A client of SGLang, which returns the log-probability of every token of a prompt from a position on."""

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
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": max(1, len(ids) - _COMPARED) - 1,
        }

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        start = max(1, len(ids) - _COMPARED)
        entries = [entry for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None]
        entries = entries[-(len(ids) - start) :]
        if [entry[1] for entry in entries] != list(ids[start:]):
            raise ValueError("other tokens")
        return [Answer(start + index, entry[1], float(entry[0])) for index, entry in enumerate(entries)]


class _LlamaCppClient(Client):
    """A client of llama.cpp, which returns log-probabilities of likely next tokens, and none of a prompt's own tokens.

    To get several log-probabilities from one prompt, it sends the prompt's last few prefixes.
    """

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
        return {
            "prompt": list(ids),
            "cache_prompt": not self.anew,
            "post_sampling_probs": False,
            "n_predict": 1,
            "n_probs": _NEXT,
            "temperature": 0,
            "logit_bias": _BIAS_TO_WHOLE_CHARACTER,
        }

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        first, *others = answer["completion_probabilities"][0]["top_logprobs"]  # raises ValueError where there is none
        return [Answer(len(ids), int(entry["id"]), float(entry["logprob"])) for entry in (first, *others)]


class _OpenAIClient(Client):
    """A client of a program with OpenAI's completions API that can echo the prompt with its log-probabilities."""

    program, probes = "a server with OpenAI's completions", ("/v1/models",)

    def question(self, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self.model(),
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }

    def read(self, answer: Any, ids: Sequence[int]) -> list[Answer]:
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        if len(logprobs) < len(ids):
            raise ValueError("fewer tokens")
        return [Answer(at, ids[at], float(logprobs[at])) for at in range(max(1, len(ids) - _COMPARED), len(ids))]


_CLIENTS = (VLLMClient, _SGLangClient, _LlamaCppClient, _OpenAIClient)


def connect(url: str, served_name: str | None, seconds: float, *, anew: bool = False) -> Client:
    """Return a client for the program that the server at an address runs.

    Args:
        url: the server's address; a trailing /v1 is ignored.
        served_name: the name of the model on the server; None: the first that it lists.
        seconds: the time limit of one answer.
        anew: whether the server computes each prompt without what it has cached of earlier ones.

    Raises:
        ServingError: nothing at the address answers like one of these programs.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not re.match("https?://[^/]", url):
        raise ServingError(f"the address of a server begins with http:// or https://; got {short(url)!r}")
    end, failure = time.monotonic() + min(seconds, _PROBE_SECONDS), None
    probes = [(client, path) for client in _CLIENTS for path in client.probes]
    for client, path in probes:
        try:
            reply = _ask(url, path, None, end - time.monotonic())
        except ServingError as error:
            failure = error
            if isinstance(error.__cause__, OSError):
                break  # no server is there, or it hangs
            continue
        if isinstance(reply, dict):
            version = reply.get("version") or reply.get("build_info") or ""
            return client(url, served_name, seconds, short(str(version), 40), anew)
    raise failure or ServingError(
        f"{url} does not answer like vLLM, SGLang, llama.cpp or a server with OpenAI's completions; check the address"
    )


class _TimedSocket(socket.SocketIO):
    """A stream of the bytes that a socket receives, which ends with an error at a fixed point in time.

    A socket's own timeout starts anew at each read.
    """

    def __init__(self, received: socket.socket, end: float) -> None:
        super().__init__(received, "r")
        self._received, self._end = received, end

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._received.settimeout(left)
        return super().readinto(buffer)


def _ask(url: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """Send a request to a server and return the JSON of its answer.

    Args:
        url: the server's address.
        path: the path on the server.
        body: JSON to post; None: the request is a GET.
        seconds: the time limit of the whole answer, from its first byte to its last.

    Raises:
        ServingError: there is no answer in time, or it is an error, too large or not JSON.
    """
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key := os.environ.get("ROPE_EXT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    most, end = _MOST_BYTES + BYTES_PER_BYTE * len(data or b""), time.monotonic() + seconds
    text = bytearray()
    scheme, _, host, rest = f"{url}{path}".split("/", 3)
    connect_to = http.client.HTTPSConnection if scheme == "https:" else http.client.HTTPConnection
    try:
        with closing(connect_to(host, timeout=max(0.001, seconds))) as connection:
            connection.request("GET" if data is None else "POST", f"/{rest}", data, headers)
            answer = http.client.HTTPResponse(connection.sock)
            answer.fp = io.BufferedReader(_TimedSocket(connection.sock, end))
            answer.begin()
            while len(text) <= most and (part := answer.read1(_READ_BYTES)):
                text += part
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        reason = one_line(error)
        if isinstance(error, TimeoutError):
            reason = f"its answer is not complete after {duration(seconds)}"
        raise ServingError(f"{url}{path} does not answer: {reason}") from error
    if not 200 <= answer.status < 300:
        words = " ".join(text[:2000].decode("utf-8", errors="replace").split()) or answer.reason
        raise ServingError(f"{url}{path} answers with status {answer.status}: {short(words, 300)}")
    # A JSON value is the first of the text or of a container, or stands behind a comma.
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if len(text) > most or values > most // _BYTES_PER_VALUE:
        raise ServingError(f"{url}{path} answers with more than {most:,} bytes or {most // _BYTES_PER_VALUE:,} values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServingError(f"{url}{path} does not answer with JSON") from error

"""What servers are asked for log-probabilities, and how: vLLM, SGLang, llama.cpp, and OpenAI's completions.

Only the address given is asked: a redirect is an error. An API key is taken from the variable ROPE_EXT_API_KEY.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rope_ext_hf.engines.llama_cpp import LlamaCpp
from rope_ext_hf.engines.sglang import SGLang
from rope_ext_hf.engines.vllm import VLLM
from rope_ext_hf.errors import ServingError, one_line, short

__all__ = ["Answer", "connect"]

COMPARED = 128
"""Tokens at the end of a prompt whose log-probabilities are asked for."""
CUTS, NEXT = 8, 16
"""Prompts, each a token longer, and likely next tokens of each, of a server that gives no others."""
WHOLE = [["a", 100]]
"""A token to generate: with a piece of a character llama.cpp gives no log-probabilities. Those given are unbiased."""
MOST_BYTES = 500_000_000  # of an answer; vLLM gives all tokens of a prompt
_KEY = "ROPE_EXT_API_KEY"
_PROBE_SECONDS, _PART = 30.0, 1 << 20
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, OverflowError)
"""What an answer of another form than expected raises."""


class Answer(NamedTuple):
    """The log-probability, in nats, of a token, given those of the prompt before a position."""

    position: int
    token: int
    logprob: float


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Client(ABC):
    """A server of one kind.

    Attributes:
        program: what it is called.
        version: as it states it; empty: it does not.
    """

    program: ClassVar[str]
    probes: ClassVar[tuple[str, ...]]
    """Paths of which one answers with a JSON object on a server of this kind, and on no kind after it."""

    def __init__(self, url: str, served_name: str | None, seconds: float, version: str) -> None:
        self.url, self.seconds, self.version = url, seconds, version
        self._name = served_name

    @property
    def title(self) -> str:
        """The program and its version."""
        return f"{self.program} {self.version}".strip()

    @abstractmethod
    def answers(self, ids: Sequence[int]) -> list[Answer]:
        """Log-probabilities of a prompt's last tokens, or of those that may follow it.

        Raises:
            ServingError: none of them; the message has the server's words.
        """

    def served_name(self) -> str:
        """What the server calls the model."""
        if self._name is None:
            listed = _ask(self.url, "/v1/models", None, self.seconds)
            try:
                self._name = str(listed["data"][0]["id"])
            except _UNREADABLE as error:
                raise ServingError(f"{self.url} lists no models at /v1/models; state the name of the model") from error
        return self._name

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return _ask(self.url, path, body, self.seconds)

    def finite_answers(self, ids: Sequence[int]) -> list[Answer]:
        """`answers`, every log-probability a finite number.

        Raises:
            ServingError: as `answers` does, and one that is not finite.
        """
        given = self.answers(ids)
        if wrong := [answer for answer in given if not math.isfinite(answer.logprob)]:
            raise ServingError(
                f"{self.title} at {self.url} gives the log-probability {wrong[0].logprob} for token {wrong[0].token} "
                f"at position {wrong[0].position}"
            )
        return given

    def none_given(self, answer: Any) -> ServingError:
        return ServingError(
            f"{self.title} at {self.url} gives no log-probabilities of a prompt: {short(json.dumps(answer), 200)}"
        )


class VLLMClient(Client):
    program, probes = VLLM.title, ("/version",)

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        body = {
            "model": self.served_name(),
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        answer = self.ask("/v1/completions", body)
        try:
            listed = answer["choices"][0]["prompt_logprobs"]
            start = max(1, len(ids) - COMPARED)
            return [Answer(at, ids[at], float(listed[at][str(ids[at])]["logprob"])) for at in range(start, len(ids))]
        except _UNREADABLE as error:
            raise self.none_given(answer) from error


class SGLangClient(Client):
    program, probes = SGLang.title, ("/model_info", "/get_model_info")  # the second is deprecated

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        start = max(1, len(ids) - COMPARED)
        answer = self.ask(
            "/generate",
            {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": start - 1,
            },
        )
        try:
            listed = [entry for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None]
            listed = listed[-(len(ids) - start) :]
            if [entry[1] for entry in listed] != list(ids[start:]):
                raise ValueError("other tokens")
            return [Answer(start + i, ids[start + i], float(entry[0])) for i, entry in enumerate(listed)]
        except _UNREADABLE as error:
            raise self.none_given(answer) from error


class LlamaCppClient(Client):
    program, probes = LlamaCpp.name, ("/props",)

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        """Of the likely next tokens after the last few prefixes: it gives no log-probabilities of a prompt."""
        made: list[Answer] = []
        for stop in range(max(1, len(ids) - CUTS + 1), len(ids) + 1):
            body = {"prompt": list(ids[:stop]), "n_predict": 1, "n_probs": NEXT, "temperature": 0, "logit_bias": WHOLE}
            answer = self.ask("/completion", body | {"cache_prompt": True, "post_sampling_probs": False})
            try:
                likely = answer["completion_probabilities"][0]["top_logprobs"]
                made += [Answer(stop, int(entry["id"]), float(entry["logprob"])) for entry in likely]
            except _UNREADABLE as error:
                raise self.none_given(answer) from error
        if not made:
            raise self.none_given({})
        return made


class OpenAIClient(Client):
    program, probes = "a server with OpenAI's completions", ("/v1/models",)

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        body = {"model": self.served_name(), "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        answer = self.ask("/v1/completions", body | {"echo": True, "logprobs": 1})
        try:
            listed = answer["choices"][0]["logprobs"]["token_logprobs"]
            if len(listed) < len(ids):
                raise ValueError("fewer tokens")
            start = max(1, len(ids) - COMPARED)
            return [Answer(at, ids[at], float(listed[at])) for at in range(start, len(ids))]
        except _UNREADABLE as error:
            raise self.none_given(answer) from error


_KINDS = (VLLMClient, SGLangClient, LlamaCppClient, OpenAIClient)


def connect(url: str, served_name: str | None, seconds: float) -> Client:
    """A client of the server at an address, of the kind that it is.

    Raises:
        ServingError: no address of a server, or nothing there that answers.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ServingError(f"the address of a server begins with http:// or https://; got {short(url)!r}")
    failure = None
    for kind, path in [(each, path) for each in _KINDS for path in each.probes]:
        try:
            answer = _ask(url, path, None, min(seconds, _PROBE_SECONDS))
        except ServingError as error:
            failure = error
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, urllib.error.HTTPError):
                break  # nothing is there, or it hangs
            continue
        if isinstance(answer, dict):
            version = answer.get("version") or answer.get("build_info") or ""
            return kind(url, served_name, seconds, short(str(version), 40))
    raise failure or ServingError(f"{url} is no server of a kind that is known here")


def _ask(url: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """The JSON that a server answers with."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get(_KEY):
        headers["Authorization"] = f"Bearer {os.environ[_KEY]}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    end, text = time.monotonic() + seconds, bytearray()
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds) as answer:
            while part := answer.read1(_PART):
                text += part
                if time.monotonic() > end:
                    raise TimeoutError(f"its answer is not complete after {seconds:g} seconds")
                if len(text) > MOST_BYTES:
                    raise ServingError(f"{url}{path} answers with more than {MOST_BYTES:,} bytes")
    except urllib.error.HTTPError as error:
        with error:
            words = " ".join(error.read(2000).decode("utf-8", errors="replace").split()) if error.fp else ""
        raise ServingError(
            f"{url}{path} answers with status {error.code}: {short(words or error.reason, 300)}"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServingError(f"{url}{path} does not answer: {one_line(error)}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServingError(f"{url}{path} does not answer with JSON") from error

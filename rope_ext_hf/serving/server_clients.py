"""What servers are asked for log-probabilities, and how: vLLM, SGLang, llama.cpp, and OpenAI's completions.

Only the address given is asked: a redirect is an error. An API key is taken from the variable ROPE_EXT_API_KEY.
"""

from __future__ import annotations

import json
import os
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

COMPARED = 32
"""Tokens at the end of a prompt whose log-probabilities are asked for."""
CUTS, NEXT = 4, 10
"""Prompts, each a token longer, and likely next tokens of each, of a server that gives no others."""
MOST_BYTES = 500_000_000  # of an answer; vLLM gives all tokens of a prompt
_KEY = "ROPE_EXT_API_KEY"


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
    probe: ClassVar[str]
    """A path that answers with a JSON object on a server of this kind, and on no other."""

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
            except (KeyError, IndexError, TypeError) as error:
                raise ServingError(f"{self.url} lists no models at /v1/models; state the name of the model") from error
        return self._name

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return _ask(self.url, path, body, self.seconds)

    def none_given(self, answer: Any) -> ServingError:
        return ServingError(
            f"{self.title} at {self.url} gives no log-probabilities of a prompt: {short(json.dumps(answer), 200)}"
        )


class VLLMClient(Client):
    program, probe = VLLM.title, "/version"

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
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.none_given(answer) from error


class SGLangClient(Client):
    program, probe = SGLang.title, "/get_model_info"

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
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.none_given(answer) from error


class LlamaCppClient(Client):
    program, probe = LlamaCpp.name, "/props"

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        """Of the likely next tokens after the last few prefixes: it gives no log-probabilities of a prompt."""
        made: list[Answer] = []
        for stop in range(max(1, len(ids) - CUTS + 1), len(ids) + 1):
            body = {"prompt": list(ids[:stop]), "n_predict": 1, "n_probs": NEXT, "temperature": 0, "cache_prompt": True}
            answer = self.ask("/completion", body | {"post_sampling_probs": False})
            try:
                likely = answer["completion_probabilities"][0]["top_logprobs"]
                made += [Answer(stop, int(entry["id"]), float(entry["logprob"])) for entry in likely]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise self.none_given(answer) from error
        if not made:
            raise self.none_given({})
        return made


class OpenAIClient(Client):
    program, probe = "a server with OpenAI's completions", "/v1/models"

    def answers(self, ids: Sequence[int]) -> list[Answer]:
        body = {"model": self.served_name(), "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        answer = self.ask("/v1/completions", body | {"echo": True, "logprobs": 1})
        try:
            listed = answer["choices"][0]["logprobs"]["token_logprobs"]
            if len(listed) < len(ids):
                raise ValueError("fewer tokens")
            start = max(1, len(ids) - COMPARED)
            return [Answer(at, ids[at], float(listed[at])) for at in range(start, len(ids))]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.none_given(answer) from error


def connect(url: str, served_name: str | None, seconds: float) -> Client:
    """A client of the server at an address, of the kind that it is.

    Raises:
        ServingError: no address of a server, or nothing there that answers.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ServingError(f"the address of a server begins with http:// or https://; got {short(url)!r}")
    failure = None
    for kind in (VLLMClient, SGLangClient, LlamaCppClient, OpenAIClient):
        try:
            found = _ask(url, kind.probe, None, min(seconds, 30.0))
        except ServingError as error:
            failure = error
            continue
        if isinstance(found, dict):
            version = found.get("version") or found.get("build_info") or ""
            return kind(url, served_name, seconds, short(str(version), 40))
    assert failure is not None
    raise failure


def _ask(url: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """The JSON that a server answers with."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get(_KEY):
        headers["Authorization"] = f"Bearer {os.environ[_KEY]}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds) as answer:
            text = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            words = " ".join(error.read(2000).decode("utf-8", errors="replace").split()) if error.fp else ""
        raise ServingError(
            f"{url}{path} answers with status {error.code}: {short(words or error.reason, 300)}"
        ) from error
    except (OSError, ValueError) as error:
        raise ServingError(f"{url}{path} does not answer: {one_line(error)}") from error
    if len(text) > MOST_BYTES:
        raise ServingError(f"{url}{path} answers with more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServingError(f"{url}{path} does not answer with JSON") from error

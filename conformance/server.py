"""Check of a server over HTTP that serves one of the tiny models, by the log-probabilities that it returns.

The text is sent as token ids. vLLM, SGLang and programs with OpenAI's completions return log-probabilities of a prompt;
llama.cpp returns those of the next token, so it is asked after each prefix. No other address is contacted.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import kit
import numpy as np

Json = Any
Ask = Callable[[str, Json], Json]


def check(url: str, entry: kit.Json, dtype: str) -> tuple[bool, str]:
    """Return True if a server agrees, and a sentence: the number of prefixes, or the difference and likely mistake.

    Args:
        url: the server's address.
        entry: the content of the served model's file.
        dtype: the dtype of the server's computation.

    Raises:
        SystemExit: no known server answers, or it returns no log-probabilities.
    """
    url = url.rstrip("/").removesuffix("/v1")

    def ask(path: str, body: Json = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    reader = next((reader for probe, reader in READERS.items() if answers(ask, probe)), None)
    if reader is None:
        raise SystemExit(
            f"{url} does not answer like vLLM, SGLang, llama.cpp or a server with OpenAI's completions; check the "
            "address"
        )
    ids, positions = entry["ids"], entry["positions"]
    if reader is llama_cpp and any("alone" in mistake for mistake in entry["mistakes"]):
        raise SystemExit(
            "this model's frequencies depend on the length of the prompt, and llama.cpp can only be asked about "
            "prefixes; serve another model of models/"
        )
    try:
        logprobs = reader(ask, ids, positions)
    except (urllib.error.URLError, KeyError, IndexError, TypeError, ValueError) as error:
        body = f"{error.read().decode()[:200]}" if isinstance(error, urllib.error.HTTPError) else ""
        reason = f"{type(error).__name__}: {error} {body}".strip()
        raise SystemExit(f"{url} returns no log-probabilities of a prompt: {reason}") from error
    if not logprobs:
        raise SystemExit(f"{url} returns no log-probabilities of the tokens after the prefixes")
    errors = [logprob - entry["logprobs"][positions.index(at)] for at, logprob in logprobs.items()]
    difference = float(np.sqrt(np.mean([error**2 for error in errors])))
    if difference <= kit.allowed_difference(entry, dtype):
        return True, f"agrees after {len(logprobs)} prefixes"
    text = f"the log-probabilities after {len(logprobs)} prefixes differ by {difference:.3g} nats"
    return False, text + kit.as_with(kit.likely_mistakes(entry, logprobs, dtype))


def answers(ask: Ask, path: str) -> bool:
    """Return True if a path answers with JSON."""
    try:
        ask(path, None)
    except (OSError, ValueError):
        return False
    return True


def openai_prompt(ask: Ask, ids: list[int], **options: Json) -> Json:
    """Return the first choice for a prompt with one generated token, cut to the server's context length."""
    served = ask("/v1/models", None)["data"][0]
    prompt = ids[: (served.get("max_model_len") or len(ids) + 1) - 1]
    body = {"model": served["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0} | options
    return ask("/v1/completions", body)["choices"][0]


def vllm(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """Return the log-probabilities of the tokens that follow prefixes, by prefix length, from vLLM."""
    logprobs = openai_prompt(ask, ids, prompt_logprobs=0)["prompt_logprobs"]
    return {at: float(logprobs[at][str(ids[at])]["logprob"]) for at in positions if at < len(logprobs)}


def openai(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """Return the log-probabilities of the tokens that follow prefixes, by prefix length, from the echo of a prompt."""
    logprobs = openai_prompt(ask, ids, echo=True, logprobs=1)["logprobs"]["token_logprobs"]
    return {at: float(logprobs[at]) for at in positions if at < len(logprobs)}


def sglang(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """Return the log-probabilities of the tokens that follow prefixes, by prefix length, from SGLang."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    entries = ask("/generate", body)["meta_info"]["input_token_logprobs"]
    values = [entry[0] for entry in entries][-len(ids) :]
    return {at: float(values[at]) for at in positions}


def llama_cpp(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """Return the log-probabilities of the tokens that follow prefixes, by prefix length, from llama.cpp.

    Prefixes that its context does not hold are left out, and tokens that are not among the likely ones that it lists.
    """
    logprobs = {}
    context_length = ask("/props", None).get("default_generation_settings", {}).get("n_ctx", len(ids))
    for at in [position for position in positions if position < context_length]:
        body = {"prompt": ids[:at], "n_predict": 1, "n_probs": 64, "temperature": 0, "post_sampling_probs": False}
        entries = ask("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        by_token = {entry["id"]: float(entry["logprob"]) for entry in entries}
        if ids[at] in by_token:
            logprobs[at] = by_token[ids[at]]
    return logprobs


READERS: dict[str, Callable[[Ask, list[int], list[int]], dict[int, float]]] = {
    "/version": vllm,
    "/model_info": sglang,
    "/get_model_info": sglang,  # of earlier versions
    "/props": llama_cpp,
    "/v1/models": openai,
}
"""The reader of a server, by a path that answers with JSON on this server and on none of those below."""

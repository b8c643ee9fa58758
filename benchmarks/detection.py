"""Accuracy of `detect_pairing` on small models of many kinds, trained here, and on their conversions.

    python benchmarks/detection.py --folder FOLDER [--minutes 9] [--only qwen3,glm] [--device cuda] [--out FILE]

Each model learns bytes of Python's standard library, as the bundled one did, for so many minutes; run it with
OMP_NUM_THREADS=1. A model that is in the folder already is not trained again. Then come random initialisations, none of
which may be said to be in a pairing. The last line is JSON.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from record import benchmark_parser, record
from train_reference import BYTE_OFFSET, END_OF_TEXT, TRAINED_LENGTH, encode, mean_loss, windows
from training_text import stdlib_training
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import rope_ext_hf as rope
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.reference import path

TOKENIZER = ByT5Tokenizer(extra_ids=0)
BATCH = 8
PEAK_LEARNING_RATE = 2e-3
WARMUP = 0.05  # of the time
SIZES: dict[str, Any] = {
    "vocab_size": 256 + BYTE_OFFSET,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED_LENGTH,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": END_OF_TEXT,
    "bos_token_id": None,
}
THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
WIDE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
PARTIAL: dict[str, Any] = {"rope_parameters": THETA["rope_parameters"] | {"partial_rotary_factor": 0.5}}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "first_k_dense_replace": 4,
}
# Name of the config class, and what it needs beyond the common sizes.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 64} | WIDE),  # grouped queries, norms of queries and keys
    "qwen2": ("Qwen2Config", {"num_attention_heads": 6} | WIDE),  # biases, heads of 32
    "glm": ("GlmConfig", {"head_dim": 64, "attention_bias": True} | PARTIAL),  # interleaved, half of a head rotates
    "cohere": ("CohereConfig", {"num_attention_heads": 6, "use_qk_norm": True} | THETA),  # interleaved, norms
    "deepseek_v3": ("DeepseekV3Config", LATENT | THETA),  # latent attention
    "gpt_neox": ("GPTNeoXConfig", PARTIAL),  # fused by groups, biases, half of a head rotates
    "olmo2": ("Olmo2Config", {"num_attention_heads": 6} | THETA),  # norms of all heads together, none at the input
    "phi3": ("Phi3Config", {"original_max_position_embeddings": TRAINED_LENGTH} | THETA),  # fused
}


def build(name: str, seed: int) -> Any:
    """A recipe's model with random weights, in float32."""
    kind, settings = RECIPES[name]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES | settings))


def train(name: str, minutes: float, device: str = "cpu", seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A recipe's model, trained for so long, and how that went."""
    stream = encode(stdlib_training())
    model = build(name, seed).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    sampler = torch.Generator().manual_seed(seed)
    started, step, running = time.perf_counter(), 0, 8.0
    while (progress := (time.perf_counter() - started) / (60 * minutes)) < 1:
        rate = min(progress / WARMUP, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * rate
        starts = torch.randint(0, len(stream) - TRAINED_LENGTH - 1, (BATCH,), generator=sampler)
        loss = mean_loss(model, windows(stream, starts).to(device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, running = step + 1, 0.98 * running + 0.02 * loss.item() / math.log(2)
        if step % 100 == 0:
            print(f"{name}: step {step}, {60 * minutes * progress:.0f} s, {running:.3f} bits per byte", flush=True)
    about = {"parameters": model.num_parameters(), "steps": step, "bits_per_byte": round(running, 3)}
    return model.to("cpu", torch.bfloat16).eval(), about


def row(name: str, weights: str, right: str | None, report: rope.PairingReport) -> dict[str, Any]:
    found = {
        "model": name,
        "weights": weights,
        "found": report.pairing,
        "right": report.pairing == right,
        "score": round(report.score, 4),
        "error": round(report.error, 4),
        "layers": [round(layer.half - layer.interleaved, 3) for layer in report.layers],
        "nats": [round(report.text.half, 3), round(report.text.interleaved, 3)] if report.text else None,
        "text": report.text.pairing if report.text else None,
    }
    print(json.dumps(found), flush=True)
    return found


def both_ways(name: str, folder: Path, text: str) -> list[dict[str, Any]]:
    """A trained model and its conversion, which is made and thrown away."""
    native = rope.detect_pairing(folder, text=text, tokenizer=TOKENIZER)
    assert native.stated is not None
    other = "interleaved" if native.stated == "half" else "half"
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transformers does not run this pairing
        rope.convert_checkpoint(folder, Path(made) / "converted", other)
        converted = rope.detect_pairing(Path(made) / "converted", text=text, tokenizer=TOKENIZER)
    return [row(name, native.stated, native.stated, native), row(name, other, other, converted)]


def by_chance(names: list[str], seeds: int) -> dict[str, Any]:
    """Random initialisations: none of them may be said to be in a pairing."""
    reports = [rope.detect_pairing(build(name, 1000 + seed)) for name in names for seed in range(seeds)]
    sizes = [abs(report.score) / report.error for report in reports]
    return {
        "models": len(reports),
        "said": sum(report.pairing is not None for report in reports),
        "most_standard_errors": round(max(sizes), 2),
        "above_2": sum(size > 2 for size in sizes),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the trained models are kept")
    parser.add_argument("--minutes", type=float, default=9.0, help="of training, for each model that is not there")
    parser.add_argument("--only", help="names of recipes; default: all of them")
    parser.add_argument("--seeds", type=int, default=20, help="random initialisations of each")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(RECIPES)
    text = stdlib_held_out()[0].text
    rows = both_ways("bundled", path(), text)
    for name in names:
        folder = arguments.folder / name
        if not folder.exists():
            model, about = train(name, arguments.minutes, arguments.device)
            model.save_pretrained(folder)
            (folder / "training.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        about = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        rows += [found | about for found in both_ways(name, folder, text)]
    result = {
        "benchmark": "detection",
        "rows": rows,
        "random": by_chance(names, arguments.seeds),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()

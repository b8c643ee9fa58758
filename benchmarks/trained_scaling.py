"""Extend a model that was trained under a scaling: from where it stands, against counting from the original length.

    python benchmarks/trained_scaling.py --folder trained [--scaling yarn] [--device cuda] [--out FILE]

The bundled model, trained at 256 bytes, gets a scaling in its config and is trained further under it on the same text:
Llama 3.1's (llama3, factor 8, a context of 16 times the original length) or YaRN x4. It is saved, loaded as any model,
and extended by --factors over its own scaling and over the original model. Every row of a factor scores the same bytes.
The last line is JSON.
"""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import benchmark_parser, record
from torch import Tensor
from torch.nn import functional
from train_reference import encode
from training import in_bits, take_steps
from training_text import stdlib_training
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.spans.perplexity_runs import difference
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import load as load_corpus
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path

SEED = 20240517
ORIGINAL = 256
METHODS = ("yarn", "ntk", "dynamic-ntk")


class Scaling(NamedTuple):
    """A config's statement of the scaling that its model was trained under."""

    parameters: dict[str, Any]
    context_length: int


SCALINGS = {
    "llama3": Scaling({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
    "yarn": Scaling({"rope_type": "yarn", "factor": 4.0}, 1024),
}


def load_under(scaling: Scaling, device: str) -> Any:
    """The bundled model as transformers builds it from a config with this scaling."""
    config = AutoConfig.from_pretrained(path())
    config.max_position_embeddings = scaling.context_length
    config.rope_parameters |= scaling.parameters | {"original_max_position_embeddings": ORIGINAL}
    return AutoModelForCausalLM.from_pretrained(path(), config=config, dtype=torch.float32).eval().to(device)


def train(model: Any, length: int, steps: int, tokens: int, peak: float) -> None:
    """AdamW, a short warm-up and a cosine to zero; a batch holds `tokens` bytes in rows of `length`."""
    torch.manual_seed(SEED)
    stream = encode(stdlib_training())
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )

    def loss_of_step() -> Tensor:
        starts = torch.randint(0, len(stream) - length - 1, (tokens // length,))
        ids = stream[starts[:, None] + torch.arange(length + 1)].long().to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    model.train()
    take_steps(optimizer, schedule, steps, loss_of_step, every=10, words=in_bits)
    model.eval()


@cache
def held_out() -> list[Tokens]:
    return tokenize(load_corpus("stdlib"), AutoTokenizer.from_pretrained(path()))


def measure(model: Any, spans: int, lengths: list[int]) -> list[Result]:
    return perplexity(model, held_out(), lengths=lengths, targets=128, max_spans=spans, bos=False)


def bits(results: list[Result]) -> list[float]:
    return [round(result.bits_per_byte, 4) for result in results]


def compare(own: Result, original: Result) -> list[float]:
    """Return the increase in loss over the original model and its 95% interval, in bits per byte."""
    return [
        round(gap * original.bits_per_byte / original.loss, 4)
        for gap in difference(original, own)[:3]
        if gap is not None
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--scaling", choices=SCALINGS, default="llama3")
    parser.add_argument("--folder", type=Path, required=True, help="keeps the trained model for a second run")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=8192, help="bytes in a batch")
    parser.add_argument("--peak", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--spans", type=int, default=12, help="spans of 128 scored bytes at each length")
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 4], help="how many times its context length")
    arguments = parser.parse_args()
    started = time.perf_counter()
    scaling = SCALINGS[arguments.scaling]
    trained = arguments.folder / arguments.scaling
    lengths = [ORIGINAL, scaling.context_length, arguments.factors[0] * scaling.context_length]
    not_trained = bits(measure(load_under(scaling, arguments.device), arguments.spans, lengths))
    if not trained.exists():
        model = load_under(scaling, arguments.device)
        train(model, scaling.context_length, arguments.steps, arguments.tokens, arguments.peak)
        model.save_pretrained(trained)
    rows = []
    for factor in arguments.factors:
        lengths = [ORIGINAL, scaling.context_length, factor * scaling.context_length]
        model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval().to(arguments.device)
        row: dict[str, Any] = {"factor": factor, "lengths": lengths, "methods": []}
        row["unpatched"] = bits(measure(model, arguments.spans, lengths))
        rows.append(row)
        for method in METHODS:
            by_base = {}
            for over in ("own", "original"):
                with rope.patched(model, method, target_length=lengths[-1], over=over):
                    by_base[over] = measure(model, arguments.spans, lengths)
                print(factor, method, over, bits(by_base[over]), flush=True)
            row["methods"].append(
                {"method": method}
                | {over: bits(results) for over, results in by_base.items()}
                | {"difference": [compare(*pair) for pair in zip(*by_base.values(), strict=True)]}
            )
            row["scored_bytes"] = by_base["own"][0].tokens  # a token is a byte
            row["documents"] = len(by_base["own"][0].documents)
    result = {
        "benchmark": "trained_scaling",
        "scaling": scaling.parameters | {"original_max_position_embeddings": ORIGINAL},
        "context_length": scaling.context_length,
        "not trained": not_trained,
        "rows": rows,
        "steps": arguments.steps,
        "tokens": arguments.tokens,
        "peak_learning_rate": arguments.peak,
        "spans": arguments.spans,
        "seconds": round(time.perf_counter() - started),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()

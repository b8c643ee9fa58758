#!/bin/sh
# A Qwen3 of torchtitan takes YaRN's frequencies and leaves out YaRN's factor on the scores of attention; its gpt-oss has both.
#
# torchtitan 0.3.0, the attention of Qwen3 8B with the YaRN that Qwen publishes (factor 4 from 32,768 tokens): the slowest
# pair turns at a quarter of its frequency, and the scores are multiplied by 1/sqrt(128) alone. The paper (arXiv 2309.00071)
# multiplies them by (0.1 ln 4 + 1)^2 = 1.296 as well. The attention of gpt-oss 20b does so: 1.813 for its factor of 32.
# Exits 0 as long as that is so, and 1 once Qwen3 has the factor too.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q numpy==2.4.6 tyro==1.0.17 spmd_types==0.2.3
"$folder/venv/bin/pip" install -q --no-deps torchtitan==0.3.0 triton==3.7.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import dataclasses
import importlib
import math
import sys

import torch


def measured(module, size, **changes):
    """Return the slowest pair's frequency over its plain one, YaRN's factor on scores, and the one that attention has."""
    family = importlib.import_module(f"torchtitan.models.{module}")
    attention = family.model_registry(size, attn_backend="flex").model.layers[-1].attention
    attention.rope = dataclasses.replace(attention.rope, max_seq_len=2, **changes)
    rope, width = attention.rope.build(), attention.rope.dim
    queries = torch.zeros(1, 2, 1, width)
    queries[..., : width // 2] = 1
    turned = rope(queries, queries, None)[0][0, 1, 0].double()
    slowest = torch.atan2(turned[-1], turned[width // 2 - 1]) * attention.rope.theta ** (1 - 2 / width)
    with torch.device("meta"):
        built = attention.build()
    scale = built.scaling if hasattr(built, "scaling") else built.softmax_scale
    factor = scale * math.sqrt(width) * (turned.norm() / queries[0, 1, 0].norm()) ** 2
    return float(slowest), (0.1 * math.log(attention.rope.rope_factor) + 1) ** 2, float(factor)


yarn = {"scaling": "yarn", "rope_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_seq_len": 32768}
results = {"Qwen3 8B": measured("qwen3", "8B", **yarn), "gpt-oss 20b": measured("gpt_oss", "20b")}
for name, (slowest, paper, factor) in results.items():
    print(f"{name}: slowest frequency x {slowest:.4f}, scores x {factor:.4f}, in the paper x {paper:.4f}")
slowest, _, lost = results["Qwen3 8B"]
_, paper, factor = results["gpt-oss 20b"]
sys.exit(0 if abs(slowest - 0.25) < 1e-3 and abs(lost - 1) < 1e-3 and abs(factor - paper) < 1e-3 else 1)
PYTHON

#!/bin/sh
# mlx-lm ignores `"truncate": false` in the YaRN of gpt-oss: it rounds the ends of the ramp all the same.
#
# mlx-lm 0.32.2 on the CPU build of mlx 0.32.4, with the published rope settings of gpt-oss 20b: the frequencies are those of
# YaRN with rounded ends (2e-7 off at most). With the ends as they are, which truncate false asks for, 9 of 32 pairs have
# other frequencies, and mlx-lm's are up to 1.76 times too fast. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'mlx-lm[cpu]==0.32.2' mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math
import sys

import mlx.core as mx
import numpy as np
from mlx_lm.models import gpt_oss

mx.set_default_device(mx.cpu)
theta, width, original, factor = 150000.0, 64, 4096, 32.0
yarn = {"rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
yarn |= {"original_max_position_embeddings": original}
arguments = gpt_oss.ModelArgs(
    num_hidden_layers=2, hidden_size=128, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
    head_dim=width, vocab_size=99, num_local_experts=2, num_experts_per_tok=1, rope_theta=theta, rope_scaling=yarn,
    layer_types=["sliding_attention", "full_attention"],
)
rope = gpt_oss.Model(arguments).layers[0].self_attn.rope
queries = np.zeros((1, 1, 2, width), np.float32)
queries[..., : width // 2] = 1  # the first half of each pair
turned = np.array(rope(mx.array(queries)))[0, 0, 1].astype(np.float64)
actual = np.arctan2(turned[width // 2 :], turned[: width // 2])


def frequencies(truncate):
    """Return YaRN's frequencies after arXiv 2309.00071."""
    ends = [width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (32, 1)]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    pairs = np.arange(width // 2)
    ramp = np.clip((pairs - ends[0]) / (ends[1] - ends[0]), 0, 1)
    return theta ** (-2 * pairs / width) * (1 - ramp + ramp / factor)


rounded, asked = (actual / frequencies(truncate) for truncate in (True, False))
others = int((abs(asked - 1) > 1e-3).sum())
print(f"off from rounded ends by at most {abs(rounded - 1).max():.1g}")
print(f"off from the ends as they are in {others} of 32 pairs, by {asked.max():.2f} at most")
sys.exit(0 if abs(rounded - 1).max() < 1e-3 and others and asked.max() > 1.5 else 1)
PYTHON

#!/bin/sh
# The YaRN of LitGPT slows down the fast pairs and leaves the slow ones alone; the paper's does the opposite.
#
# litgpt 0.5.13, rope_adjustments with factor 4, beta_fast 32, beta_slow 1: the fastest pair turns at a quarter of its plain
# frequency, and the slowest at its plain one. In YaRN (arXiv 2309.00071), and in transformers 5.24.0 for the same settings,
# the fastest keeps its frequency and the slowest is divided by 4. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 litgpt==0.5.13 lightning==2.6.6 huggingface-hub==1.3.7
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from litgpt import GPT, Config

sizes = {"n_layer": 1, "n_embd": 256, "n_head": 2, "n_query_groups": 1, "head_size": 128, "intermediate_size": 64}
yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 32768}
config = Config.from_name("Qwen3-8B", block_size=2, padded_vocab_size=64, rope_adjustments=yarn, **sizes)
model = GPT(config)
turned = torch.atan2(model.sin[1, :64], model.cos[1, :64]).double()
ratios = turned * config.rope_base ** (torch.arange(64) / 64)
print("frequencies over plain ones, pairs 0, 16, 32, 48, 63:", [round(float(ratios[i]), 3) for i in (0, 16, 32, 48, 63)])
inverted = abs(ratios[0] - 0.25) < 1e-3 and abs(ratios[63] - 1) < 1e-3
sys.exit(0 if inverted else 1)
PYTHON

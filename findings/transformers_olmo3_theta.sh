#!/bin/sh
# An OLMo 3 config that states rope_theta at its top level, as transformers 4 wrote it, loses that theta in the sliding layers.
#
# transformers 5.24.0: with rope_theta 10,000 at the top level, the full-attention layers get 10,000 and the sliding layers
# 500,000, the default of the class. transformers 4.57.6 makes both from 10,000. No warning. OLMo 3 itself has 500,000, so
# that only models with another theta change. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cd "$folder"
cat >theta.py <<'PYTHON'
import sys

import transformers

sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}
config = transformers.Olmo3Config(**sizes, rope_theta=10000.0)
buffers = dict(transformers.Olmo3ForCausalLM(config).named_buffers())
thetas = {}
for kind in ("sliding_attention", "full_attention"):
    frequencies = next(value for name, value in buffers.items() if kind in name and name.endswith("inv_freq"))
    thetas[kind] = round(float(frequencies[1].double() ** -16), -1)  # the second of 16 pairs has theta^(-1/16)
print("transformers", transformers.__version__, thetas)
expected = {"sliding_attention": float(sys.argv[1]), "full_attention": 10000.0}
sys.exit(0 if thetas == expected else 1)
PYTHON
"$folder/venv/bin/pip" install -q transformers==4.57.6
"$folder/venv/bin/python" theta.py 10000
"$folder/venv/bin/pip" install -q transformers==5.24.0
"$folder/venv/bin/python" theta.py 500000

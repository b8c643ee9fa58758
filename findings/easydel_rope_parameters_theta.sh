#!/bin/sh
# EasyDeL reads theta at the top level of a config.json alone, and transformers 5 no longer writes it there.
#
# easydel 0.3.0 with transformers 5.5.4, the version that it needs: a LlamaConfig with theta 500,000, saved by transformers and
# read by EasyDeL, has a rope_theta of 10,000, by which its tables of angles are made. No warning. Exits 0 as long as that
# is so, and 1 once EasyDeL reads 500,000.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q easydel==0.3.0 transformers==5.5.4 jax==0.9.2 jaxlib==0.9.2 flax==0.12.3 pillow==13.0.0
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import numpy as np
from easydel import AutoEasyDeLConfig
from easydel.infra.factory import TaskType
from transformers import LlamaConfig

saved = LlamaConfig(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
saved.save_pretrained("model")
written = json.load(open("model/config.json"))
loaded = AutoEasyDeLConfig.from_pretrained("model", model_task=TaskType.CAUSAL_LM)
frequencies = np.asarray(loaded.get_basic_inv_frequencies()[...], np.float64)
theta = float(frequencies[1] ** -64)  # the second of 64 pairs has theta^(-1/64)
print("written by transformers:", written["rope_parameters"], "rope_theta" in written)
print(f"EasyDeL's rope_theta: {loaded.rope_theta:,.0f}, theta by its frequencies: {theta:,.0f}")
sys.exit(0 if loaded.rope_theta == 10000 and abs(theta / 10000 - 1) < 0.01 else 1)
PYTHON

#!/bin/sh
# keras-hub loses the llama3 scaling of a Llama 3.1 that transformers 5 has saved, and keeps it in the spelling of transformers 4.
#
# keras-hub 0.32.0 with transformers 5.24.0, the rope settings of Llama 3.1 8B: out of the config.json that transformers 5
# writes, with `rope_parameters`, keras-hub takes theta and leaves the scaling, so that the slowest pair turns 8 times too
# fast. The same settings as `rope_scaling` and `rope_theta`, as transformers 4 wrote them, are converted right. No warning.
# Exits 0 as long as that is so, and 1 once both have the scaling.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0 keras==3.15.0 kagglehub==1.0.3 sentencepiece==0.2.3
"$folder/venv/bin/pip" install -q --no-deps keras-hub==0.32.0
cd "$folder"
KERAS_BACKEND=torch "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import keras_hub
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3 |= {"original_max_position_embeddings": 8192}
config = LlamaConfig(
    vocab_size=99, hidden_size=256, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=131072, rope_parameters=llama3 | {"rope_theta": 500000.0},
)
model = LlamaForCausalLM(config)
model.save_pretrained("transformers 5")
written = json.load(open("transformers 5/config.json"))
del written["rope_parameters"]
model.save_pretrained("transformers 4")
json.dump(written | {"rope_scaling": llama3, "rope_theta": 500000.0}, open("transformers 4/config.json", "w"))
inv_freq = model.model.rotary_emb.inv_freq.numpy()
ratios = {}
for folder in ("transformers 5", "transformers 4"):
    backbone = keras_hub.models.Backbone.from_preset(folder, load_weights=False)
    inner = (part for layer in backbone.layers for part in layer._flatten_layers(include_self=False))
    rotary = next(part for part in inner if "RotaryEmbedding" in type(part).__name__)
    # A unit vector at position 1 shows the angle of the slowest pair.
    unit = np.zeros((1, 2, 1, 128), np.float32)
    unit[..., 63] = 1
    turned = rotary(unit)[0, 1, 0].cpu().numpy().astype(np.float64)
    ratios[folder] = float(np.arctan2(turned[127], turned[63]) / inv_freq[63])
    print(f"spelling of {folder}: slowest frequency over that of transformers: {ratios[folder]:.3f}")
expected = {"transformers 5": 8, "transformers 4": 1}
sys.exit(0 if all(abs(ratios[folder] / ratio - 1) < 0.01 for folder, ratio in expected.items()) else 1)
PYTHON

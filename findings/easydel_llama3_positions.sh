#!/bin/sh
# In EasyDeL, a Llama with rope_type llama3 rotates all tokens beyond its original length by the same angles.
#
# easydel 0.3.0 with jax 0.9.2 and transformers 5.5.4, the settings of Llama 3.1 8B (131,072 positions, original length 8,192):
# the table of angles has 8,192 rows, and positions 8,191, 8,192, 50,000 and 131,071 get the last one. Attention no longer
# sees how far such tokens are apart, and nothing warns. Under a linear scaling of factor 16 there are more than 131,072
# rows, and these positions differ. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q easydel==0.3.0 transformers==5.5.4 jax==0.9.2 jaxlib==0.9.2 flax==0.12.3 pillow==13.0.0
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import json
import os
import sys

import jax.numpy as jnp
import numpy as np
from easydel import AutoEasyDeLConfig
from easydel.infra.factory import TaskType

llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3 |= {"original_max_position_embeddings": 8192}
linear = {"rope_type": "linear", "factor": 16.0}
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 256}
config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 96}
config |= {"num_hidden_layers": 1, "max_position_embeddings": 131072, "rope_theta": 500000.0}
positions = [8190, 8191, 8192, 50000, 131071]
os.mkdir("model")
alike = {}
for name, scaling in (("llama3", llama3), ("linear", linear)):
    with open("model/config.json", "w") as file:
        json.dump(config | {"rope_scaling": scaling}, file)
    loaded = AutoEasyDeLConfig.from_pretrained("model", model_task=TaskType.CAUSAL_LM)
    rows = loaded.get_basic_frequencies()[...].shape[0]
    rotate = loaded.get_basic_rope(dtype=jnp.float32, head_size=128)
    queries = jnp.ones((1, len(positions), 1, 128))
    turned = np.asarray(rotate(positions=jnp.array([positions]), query=queries, key=queries)[0])[0, :, 0]
    last = turned[positions.index(131071)]
    alike[name] = [position for position, vector in zip(positions, turned, strict=True) if np.allclose(vector, last)]
    print(f"{name}: {rows:,} rows, positions that are rotated as 131,071 is: {alike[name]}")
sys.exit(0 if alike == {"llama3": [8191, 8192, 50000, 131071], "linear": [131071]} else 1)
PYTHON

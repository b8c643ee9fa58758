#!/bin/sh
# curated-transformers gives every Llama theta 10,000; Llama 3 was trained with 500,000.
#
# curated-transformers 2.0.1: `LlamaCausalLM.from_hf_config` takes a config of Llama 3 (rope_theta 500000), says nothing, and
# its slowest pair turns 47.0 times too fast, which is 50^(63/64). Exits 0 as long as that is so, and 1 once the frequencies
# are those of 500,000.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q curated-transformers==2.0.1 huggingface-hub==2.4.0 requests==2.34.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
from curated_transformers.models import LlamaCausalLM

# Llama 3 8B but for its widths, its layers and its vocabulary; a head has 128 dimensions as there.
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, "rope_scaling": None}
config |= {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
config |= {"num_hidden_layers": 1, "vocab_size": 99, "rms_norm_eps": 1e-05, "hidden_act": "silu"}
config |= {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rotary = LlamaCausalLM.from_hf_config(hf_config=config).decoder.layers[0].mha.rotary_embeds
queries = torch.zeros(1, 1, 2, 128)
queries[..., :64] = 1  # the first half of each pair
turned = rotary(query=queries, key=queries)[0][0, 0, 1].double()
ratio = float(torch.atan2(turned[-1], turned[63]) / 500000.0 ** (-63 / 64))
print(f"warnings: {len(caught)}, slowest pair over that of theta 500,000: {ratio:.1f}")
sys.exit(0 if not caught and abs(ratio / 50 ** (63 / 64) - 1) < 0.01 else 1)
PYTHON

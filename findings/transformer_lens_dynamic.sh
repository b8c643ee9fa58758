#!/bin/sh
# The dynamic scaling of a native transformer-lens model is not dynamic: it changes the shortest input too.
#
# transformer-lens 4.3.0 with transformers 5.24.0, rope_type dynamic with factor 4 and a context of 64: for 2 tokens the
# slowest pair of transformer-lens's own model turns at a quarter of its plain frequency. A Llama of transformers has plain
# frequencies for inputs of up to 64 tokens, and slower ones beyond. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformer-lens==4.3.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native.model import NativeRotary
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

width, dynamic = 32, {"rope_type": "dynamic", "factor": 4.0}
plain = 10000.0 ** (2 / width - 1)  # of the slowest pair
config = TransformerBridgeConfig(
    n_layers=1, n_heads=1, d_model=width, d_head=width, rotary_dim=width, d_vocab=8, n_ctx=64, act_fn="silu",
    positional_embedding_type="rotary", rotary_base=10000.0,
)
config.rope_scaling = dynamic
model = TransformerBridge.boot_native(config)
rotary = next(module for module in model.modules() if isinstance(module, NativeRotary))
queries = torch.zeros(1, 1, 2, width)
queries[..., -1] = 1  # half of the slowest pair
turned = rotary.apply_rope(queries, queries)[0][0, 0, 1].double()
angle = float(turned[:-1].norm().atan2(turned[-1]))
ratios = {"transformer-lens, 2 tokens": angle / plain}
sizes = {"hidden_size": width, "num_attention_heads": 1, "max_position_embeddings": 64}
llama = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dynamic | {"rope_theta": 10000.0}))
for length in (2, 64, 128):
    _, sin = llama(torch.zeros(1), torch.arange(length)[None])
    ratios[f"transformers, {length} tokens"] = float(sin[0, 1, width // 2 - 1].double().asin()) / plain
for name, ratio in ratios.items():
    print(f"{name}: slowest frequency x {ratio:.3f}")
lens, two, whole, beyond = ratios.values()
sys.exit(0 if abs(lens - 0.25) < 1e-3 and abs(two - 1) < 1e-3 and abs(whole - 1) < 1e-3 and beyond < 0.5 else 1)
PYTHON

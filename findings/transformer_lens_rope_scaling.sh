#!/bin/sh
# `boot_native` of transformer-lens drops rope_scaling from a dict, and keeps it in a config object.
#
# transformer-lens 4.3.0, a linear scaling of factor 4: set on a TransformerBridgeConfig it divides the frequencies of the
# model by 4. The same settings in a dict, which `boot_native` takes too, make a model of plain frequencies, without a
# warning. Exits 0 as long as that is so, and 1 once both are alike or the dict is refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformer-lens==4.3.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native.model import NativeRotary

settings = {"n_layers": 1, "n_heads": 1, "d_model": 32, "d_head": 32, "rotary_dim": 32, "d_vocab": 8, "n_ctx": 64}
settings |= {"act_fn": "silu", "positional_embedding_type": "rotary", "rotary_base": 10000.0}
scaling = {"rope_type": "linear", "factor": 4.0}
as_object = TransformerBridgeConfig(**settings)
as_object.rope_scaling = scaling
ratios = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for kind, config in (("config object", as_object), ("dict", settings | {"rope_scaling": scaling})):
        model = TransformerBridge.boot_native(config)
        rotary = next(module for module in model.modules() if isinstance(module, NativeRotary))
        queries = torch.zeros(1, 1, 2, 32)
        queries[..., 0] = 1
        turned = rotary.apply_rope(queries, queries)[0][0, 0, 1]  # its first pair turns by 1 without a scaling
        ratios[kind] = float(turned[1:].norm().atan2(turned[0]))
        print(f"{kind}: the first pair turns by {ratios[kind]:.4f} per position")
said = [str(warning.message) for warning in caught if "rope_scaling" in str(warning.message)]
print("warnings about rope_scaling:", said)
lost = abs(ratios["config object"] - 0.25) < 1e-4 and abs(ratios["dict"] - 1) < 1e-4
sys.exit(0 if lost and not said else 1)
PYTHON

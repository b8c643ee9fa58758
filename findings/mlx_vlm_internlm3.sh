#!/bin/sh
# In mlx-vlm, an InternLM3 rotates twice as far per position as it was trained to, unless its scaling is linear.
#
# mlx-vlm 0.7.10 on the CPU build of mlx 0.32.4, with the published settings of InternLM3 8B (theta 50 million, dynamic
# scaling with factor 6, which starts beyond 32,768 tokens): in a prompt of 2 tokens all 64 pairs turn by 2.0 times
# theta^(-2i/128), and so they do without a scaling. With a linear scaling of factor 1 all turn by 1.0 times that. Exits 0
# as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 numpy==2.4.6 pillow==13.0.0 \
	requests==2.34.2 tqdm==4.70.1
"$folder/venv/bin/pip" install -q --no-deps mlx-vlm==0.7.10
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import get_model_and_args

mx.set_default_device(mx.cpu)
theta, pairs = 50_000_000, 64
config = {"model_type": "internlm3", "vocab_size": 99, "hidden_size": 2 * pairs, "intermediate_size": 64}
config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2 * pairs}
config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": theta}
plain = theta ** (-np.arange(pairs) / pairs)
ratios = {}
for kind, scaling in (
    ("dynamic", {"rope_type": "dynamic", "factor": 6.0}),
    ("none", None),
    ("linear, factor 1", {"rope_type": "linear", "factor": 1.0}),
):
    module, _ = get_model_and_args(config)
    model = module.Model(module.ModelConfig.from_dict(config | {"rope_scaling": scaling}))
    queries = np.zeros((1, 1, 2, 2 * pairs), np.float32)
    queries[..., :pairs] = 1  # the first half of each pair
    turned = np.array(model.layers[0].self_attn.rope(mx.array(queries)))[0, 0, 1].astype(np.float64)
    ratios[kind] = np.arctan2(turned[pairs:], turned[:pairs]) / plain
    print(f"scaling {kind}: turns over theta^(-2i/128): {ratios[kind].min():.4f} to {ratios[kind].max():.4f}")
expected = {"dynamic": 2, "none": 2, "linear, factor 1": 1}
sys.exit(0 if all(np.allclose(ratios[kind], ratio, rtol=1e-3) for kind, ratio in expected.items()) else 1)
PYTHON

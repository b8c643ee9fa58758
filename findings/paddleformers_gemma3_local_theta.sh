#!/bin/sh
# paddleformers does not read rope_local_base_freq: the sliding layers of its Gemma 3 get the theta of the others.
#
# paddleformers 1.2.0 with paddlepaddle 3.3.0: a Gemma 3 with rope_theta 1,000,000 and rope_local_base_freq 10,000, as the
# published 1B has them, hands every layer the same angles, of theta 1,000,000. The config keeps rope_local_base_freq, and
# nothing warns. Exits 0 as long as that is so, and 1 once the sliding layers have theta 10,000.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q paddlepaddle==3.3.0 transformers==5.3.0 colorlog==6.12.0 aistudio-sdk==0.3.9 \
	ml_dtypes==0.6.0 omegaconf==2.4.0 requests==2.34.2
"$folder/venv/bin/pip" install -q --no-deps paddleformers==1.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import paddle
from paddleformers.transformers import Gemma3TextConfig
from paddleformers.transformers.gemma3_text.modeling import Gemma3TextModel

width, kinds = 32, ["sliding_attention"] * 5 + ["full_attention"]
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 1, "head_dim": width, "sliding_window": 512, "layer_types": kinds}
config = Gemma3TextConfig(**sizes, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0)
model = Gemma3TextModel(config)
model.eval()
thetas = []


def record(layer, arguments, named):
    cos, sin = (table[0, 1, 1].item() for table in named["position_embeddings"])
    thetas.append(paddle.atan2(paddle.to_tensor(sin), paddle.to_tensor(cos)).item() ** (-width / 2))


for layer in model.layers:
    layer.register_forward_pre_hook(record, with_kwargs=True)
model(input_ids=paddle.arange(10)[None])
print("rope_local_base_freq of the config:", config.rope_local_base_freq)
for kind, theta in zip(kinds, thetas, strict=True):
    print(f"{kind}: theta {theta:,.0f}")
sys.exit(0 if all(abs(theta / 1_000_000 - 1) < 0.01 for theta in thetas) else 1)
PYTHON

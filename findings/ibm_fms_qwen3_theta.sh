#!/bin/sh
# ibm-fms ignores the rope_theta of a Qwen3 that transformers saved: the model runs with theta 1,000,000.
#
# ibm-fms 1.13.1 with transformers 5.24.0, a Qwen3 of random weights with theta 5,000,000, 500 tokens: the logits of
# `get_model("hf_pretrained", ...)` are those of the same weights with theta 1,000,000 (4e-7 standard deviations off), and
# more than 0.01 from those with 5,000,000. It says nothing. Its builder of arguments names the setting rope_base, and the
# class reads rope_theta. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q ibm-fms==1.13.1 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from fms.models import get_model
from transformers import Qwen3Config, Qwen3ForCausalLM

sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False}


def qwen3(theta):
    return Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": theta})).eval()


torch.manual_seed(0)
model = qwen3(5_000_000.0)
model.save_pretrained("model")
loaded = get_model("hf_pretrained", model_path="model", data_type=torch.float32).eval()
ids = torch.arange(500)[None] * 7 % 299 + 1
differences = {}
with torch.no_grad():
    actual = loaded(ids)
    for theta in (5_000_000.0, 1_000_000.0):
        other = qwen3(theta)
        other.load_state_dict(model.state_dict())
        logits = other(ids).logits
        differences[theta] = float((actual - logits).pow(2).mean().sqrt() / logits.std())
        print(f"off from transformers with theta {theta:,.0f}: {differences[theta]:.2g} standard deviations")
sys.exit(0 if differences[1_000_000.0] < 1e-4 and differences[5_000_000.0] > 0.01 else 1)
PYTHON

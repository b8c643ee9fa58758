#!/bin/sh
# The rope_theta of an ESM is for new models alone: a loaded one takes its frequencies from the file of weights.
#
# transformers 5.24.0: inv_freq of an ESM is a saved buffer, and loading puts it in the place of what the config says. A folder
# of theta 10,000, loaded with rope_theta 1,000,000, has a config of 1,000,000 and the frequencies of 10,000. No warning. A
# comment in its source keeps the saved values on purpose, for their rounding. A Llama, whose inv_freq is not saved, follows
# its config. Exits 0 as long as that is so, and 1 once ESM does the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from transformers import EsmConfig, EsmModel, LlamaConfig, LlamaModel

sizes = {"vocab_size": 33, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
sizes |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def theta(model):
    inv_freq = next(value for name, value in model.named_buffers() if name.endswith("inv_freq"))
    return round(float(inv_freq[1].double() ** -16), -2)  # the second of 16 pairs has theta^(-1/16)


EsmModel(EsmConfig(**sizes, position_embedding_type="rotary")).save_pretrained("esm")
LlamaModel(LlamaConfig(**sizes)).save_pretrained("llama")
esm = EsmModel.from_pretrained("esm", rope_theta=1_000_000.0)
new = {"rope_type": "default", "rope_theta": 1_000_000.0}
llama = LlamaModel.from_pretrained("llama", rope_parameters=new)
thetas = {"esm": theta(esm), "llama": theta(llama)}
print(f"ESM:   config {esm.config.rope_theta:,.0f}, frequencies of {thetas['esm']:,.0f}")
print(f"Llama: config {llama.config.rope_parameters['rope_theta']:,.0f}, frequencies of {thetas['llama']:,.0f}")
sys.exit(0 if esm.config.rope_theta == 1_000_000 and thetas == {"esm": 10_000, "llama": 1_000_000} else 1)
PYTHON

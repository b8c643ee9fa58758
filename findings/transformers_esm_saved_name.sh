#!/bin/sh
# transformers 5 saves the frequencies of an ESM under a name that holds a star, which transformers 4 does not know.
#
# transformers 5.24.0, save_pretrained of an EsmModel with two layers: the file of weights has one tensor
# `encoder.layer.*.attention.self.rotary_embeddings.inv_freq`, where transformers 4 has one for each layer, with its number.
# transformers 4.57.6 reports the tensor as unused, and those of both layers as missing. Exits 0 as long as that is so, and
# 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from transformers import EsmConfig, EsmModel

sizes = {"vocab_size": 33, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
EsmModel(EsmConfig(**sizes, pad_token_id=1, position_embedding_type="rotary")).save_pretrained("esm")
PYTHON
"$folder/venv/bin/pip" install -q transformers==4.57.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from safetensors import safe_open
from transformers import EsmModel

with safe_open("esm/model.safetensors", "pt") as file:
    saved = [name for name in file.keys() if name.endswith("inv_freq")]
_, report = EsmModel.from_pretrained("esm", output_loading_info=True)
print("saved by transformers 5.24.0:     ", saved)
print("unused by transformers 4.57.6:    ", sorted(report["unexpected_keys"]))
print("missing for transformers 4.57.6:  ", sorted(report["missing_keys"]))
name = "encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
missing = [name.format(layer) for layer in range(2)]
same = saved == [name.format("*")] == list(report["unexpected_keys"]) and sorted(report["missing_keys"]) == missing
sys.exit(0 if same else 1)
PYTHON

#!/bin/sh
# The model builder of onnxruntime-genai writes a Llama with rope_type yarn as if it had no scaling, and says nothing.
#
# onnxruntime-genai 0.18.0 with transformers 5.5.4: the table cos_cache of the ONNX file is that of plain RoPE up to 4e-6, and
# differs from transformers' own yarn by more than 2. Exits 0 as long as that is so, and 1 once the table is that of yarn.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.5.4 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 \
	onnx==1.23.2 onnx-ir==1.1.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
config = LlamaConfig(
    vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, rope_parameters=yarn,
)
model = LlamaForCausalLM(config)
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({str(number): number for number in range(300)}, unk_token="0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2").save_pretrained("model")
cos, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(256)[None])
torch.save(cos[0, :, :8], "yarn.pt")
PYTHON
"$folder/venv/bin/python" -m onnxruntime_genai.models.builder -m model -o built -p fp32 -e cpu -c cache >log 2>&1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import onnx
import torch
from onnx import numpy_helper

tables = {entry.name: entry for entry in onnx.load("built/model.onnx").graph.initializer}
table = torch.from_numpy(numpy_helper.to_array(tables["cos_cache"]).copy())
yarn = torch.load("yarn.pt")
plain = (torch.arange(256)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)).cos()
far, near = float((table - yarn).abs().max()), float((table - plain).abs().max())
print("cos_cache", tuple(table.shape), f"off from yarn by {far:.2g}, from plain RoPE by {near:.2g}")
sys.exit(0 if near < 1e-4 and far > 1 else 1)
PYTHON

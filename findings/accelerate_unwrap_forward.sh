#!/bin/sh
# accelerate's unwrap_model(keep_fp32_wrapper=False) takes more off a transformers model than `prepare` put around it.
#
# accelerate 1.15.0 with transformers 5.24.0: after `prepare` under mixed precision, unwrapping goes on past the autocast
# wrapper into the decorators of the class's own forward. A Llama then no longer returns a tuple for return_dict=False,
# which worked before: an AttributeError comes out of its forward. Exits 0 as long as that is so, and 1 once the unwrapped
# model answers as the one that was prepared.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids = torch.arange(5, 15)[None]
before = type(model(ids, return_dict=False)).__name__
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
try:
    after = type(model(ids, return_dict=False)).__name__
except AttributeError as error:
    after = f"AttributeError: {error}"
print("return_dict=False before prepare:  ", before)
print("return_dict=False after unwrapping:", after)
sys.exit(0 if before == "tuple" and after.startswith("AttributeError") else 1)
PYTHON

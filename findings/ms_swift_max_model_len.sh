#!/bin/sh
# In ms-swift, --max_model_len takes the scaling away from a model whose config.json has a linear one.
#
# ms-swift 4.6.0 with transformers 5.19.0, a small Llama with the rope settings of DeepSeek Coder (16,384 tokens, theta
# 100,000, a linear scaling of factor 4): loaded with max_model_len 16384, the length that its config states, its factor is
# 1.0 and its frequencies are those of plain RoPE. Loaded without that argument it keeps factor 4. Exits 0 as long as that is
# so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from swift.arguments import BaseArguments
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sizes = {"vocab_size": 99, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
linear = {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0}
config = LlamaConfig(**sizes, max_position_embeddings=16384, rope_parameters=linear)
LlamaForCausalLM(config).save_pretrained("model")
words = Tokenizer(models.WordLevel({str(number): number for number in range(99)}, unk_token="0"))
special = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "0"}
PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained("model")
results = {}
for title, changes in (("without max_model_len", {}), ("max_model_len 16384", {"max_model_len": 16384})):
    arguments = BaseArguments(model="model", model_type="llama", template="dummy", **changes)
    model = arguments.get_model_processor()[0]
    first = float(model.model.rotary_emb.inv_freq[0])  # 1 without a scaling
    results[title] = (model.config.rope_parameters["factor"], first)
for title, (factor, first) in results.items():
    print(f"{title}: factor {factor}, first frequency {first}")
sys.exit(0 if list(results.values()) == [(4.0, 0.25), (1.0, 1.0)] else 1)
PYTHON

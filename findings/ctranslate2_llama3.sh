#!/bin/sh
# The converter of CTranslate2 takes a Llama with rope_type llama3, and the converted model computes as without a scaling.
#
# ctranslate2 4.8.5 with transformers 5.24.0, a Llama of random weights, 500 tokens: the logits of the converted model are those
# of the same weights without a scaling (differences below 1e-4 standard deviations), and more than 0.05 from those with it.
# The converter says nothing. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 ctranslate2==4.8.5 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

plain = {"rope_type": "default", "rope_theta": 500000.0}
llama3 = plain | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3 |= {"original_max_position_embeddings": 8192}
sizes = {"vocab_size": 300, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 128}
sizes |= {"num_key_value_heads": 1, "intermediate_size": 96, "max_position_embeddings": 131072, "bos_token_id": 1}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=2, rope_parameters=llama3)).eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:  # scores large enough that positions matter
            weight.mul_(6)
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({str(number): number for number in range(300)}, unk_token="0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2").save_pretrained("model")
TransformersConverter("model").convert("converted")
generator = ctranslate2.Generator("converted", device="cpu", compute_type="float32")
vocabulary = json.load(open("converted/vocabulary.json"))
ids = [3 + 7 * i % 290 for i in range(500)]
given = np.array(generator.forward_batch([[vocabulary[i] for i in ids]], return_log_probs=False))[0]
differences = {}
for title, settings in (("with llama3", llama3), ("without a scaling", plain)):
    other = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=2, rope_parameters=settings)).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = other(torch.tensor([ids])).logits[0].numpy()
    differences[title] = float(np.sqrt(((given - logits) ** 2).mean()) / logits.std())
    print(f"off from transformers {title}: {differences[title]:.2g} standard deviations")
sys.exit(0 if differences["without a scaling"] < 1e-4 and differences["with llama3"] > 0.05 else 1)
PYTHON

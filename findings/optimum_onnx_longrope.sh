#!/bin/sh
# A Phi-3 that optimum-onnx has exported uses the short list of longrope for long inputs too.
#
# optimum-onnx 0.1.0 with transformers 4.57.6 and onnxruntime 1.32.0, a Phi-3 of random weights whose original length is 64:
# at 50 tokens the logits are those of transformers. At 300 tokens transformers takes the long list; the exported model is 1.1
# standard deviations off, and 1e-6 from the same weights with the short list in the place of the long one. The trace keeps
# the branch of its short example. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q optimum-onnx==0.1.0 optimum==2.1.0 transformers==4.57.6 onnx==1.23.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForCausalLM
from tokenizers import Tokenizer, models
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast

sizes = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
short, long = [1.0 + 0.05 * pair for pair in range(16)], [1.0 + 2.0 * pair for pair in range(16)]


def phi3(long_list):
    longrope = {"type": "longrope", "short_factor": short, "long_factor": long_list}
    lengths = {"max_position_embeddings": 1024, "original_max_position_embeddings": 64}
    return Phi3ForCausalLM(Phi3Config(**sizes, **lengths, rope_scaling=longrope)).eval()


torch.manual_seed(0)
model = phi3(long)
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "qkv_proj" in name:  # scores large enough that positions matter
            weight.mul_(6)
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({str(number): number for number in range(300)}, unk_token="0"))
special = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "0"}
PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained("model")
main_export("model", "exported", task="text-generation")
exported = ORTModelForCausalLM.from_pretrained("exported", use_cache=False)
only_short = phi3(short)
only_short.load_state_dict(model.state_dict())
differences = {}
for length in (50, 300):
    ids = torch.arange(length)[None] * 7 % 297 + 3
    actual = exported(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    for name, other in (("transformers", model), ("the short list alone", only_short)):
        with torch.no_grad():
            logits = other(ids, use_cache=False).logits
        differences[length, name] = float((actual - logits).pow(2).mean().sqrt() / logits.std())
        print(f"{length} tokens, off from {name}: {differences[length, name]:.2g} standard deviations")
right = differences[50, "transformers"] < 1e-3 and differences[300, "the short list alone"] < 1e-3
sys.exit(0 if right and differences[300, "transformers"] > 0.05 else 1)
PYTHON

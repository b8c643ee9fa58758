"""Patch a model, generate text beyond its trained length, and remove the patch.

python examples/patch_and_generate.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.reference import path

model_name = sys.argv[1] if len(sys.argv) > 1 else path()  # the bundled model was trained at 256 tokens
model = AutoModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)

prompt = "def add(first, second):\n    return first + second\n\n\n" * 8
ids = tokenizer(prompt, return_tensors="pt").input_ids
if ids[0, -1] == tokenizer.eos_token_id:  # the bundled model's tokenizer ends every text with EOS
    ids = ids[:, :-1]
print(f"The prompt has {ids.shape[1]} tokens; the model was trained at {rope.describe(model).context_length}.")

for method in ("default", "yarn", "self-extend"):
    with rope.patched(model, method, **({} if method == "default" else {"target_length": 2048})):
        output = model.generate(ids, max_new_tokens=40, do_sample=False)
    print(f"--- {method}\n{tokenizer.decode(output[0, ids.shape[1] :])}")

print(rope.describe(model))  # unpatched again, since a `with` block removes its patch

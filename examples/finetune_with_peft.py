"""LoRA on a patched model: train, save the adapter, load it again, merge.

python examples/finetune_with_peft.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reference import path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
length, steps = 1024, 3  # the bundled model is trained at 256; a real run takes some hundred steps

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(path())
text = "".join(document.text for document in load("stdlib"))[: (steps + 1) * length]
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

base = rope.patch(AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32), "yarn", target_length=length)
settings = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
model = get_peft_model(base, settings)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for step in range(steps):
    batch = ids[:, step * length : (step + 1) * length]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

# The adapter alone. Its folder records the method, which goes into the base model again before the adapter does.
model.save_pretrained(folder / "adapter")
again = rope.from_pretrained(folder / "adapter", dtype=torch.float32)

# Or merge it and save the whole model, which carries the method.
with torch.no_grad():
    expected = model.eval()(ids[:, :length]).logits
model.merge_and_unload().save_pretrained(folder / "merged")
loaded = rope.from_pretrained(folder / "merged")

with torch.no_grad():
    by_adapter, by_merging = (m.eval()(ids[:, :length]).logits for m in (again, loaded))
print(f"logits differ by {(by_adapter - expected).abs().max():.1e} and {(by_merging - expected).abs().max():.1e}")
assert torch.allclose(by_adapter, expected, atol=1e-3)
assert torch.allclose(by_merging, expected, atol=1e-3)

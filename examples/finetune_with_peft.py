"""Train LoRA on a patched model, save the adapter, load it again, and merge it.

python examples/finetune_with_peft.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reference import path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
length, steps = 1024, 3  # the bundled model was trained at 256 tokens; a real run takes some hundred steps

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

# Save the adapter alone. Its folder records the method, and loading patches the base model before it adds the adapter.
model.save_pretrained(folder / "adapter")
again = rope.from_pretrained(folder / "adapter", dtype=torch.float32)

# Or merge it, and save the whole model, whose config records the method.
with torch.no_grad():
    expected = model.eval()(ids[:, :length]).logits
model.merge_and_unload().save_pretrained(folder / "merged")
loaded = rope.from_pretrained(folder / "merged")

with torch.no_grad():
    with_adapter = again.eval()(ids[:, :length]).logits
    merged = loaded.eval()(ids[:, :length]).logits
print(f"logits differ by {(with_adapter - expected).abs().max():.1e} and {(merged - expected).abs().max():.1e}")
assert torch.allclose(with_adapter, expected, atol=1e-3)
assert torch.allclose(merged, expected, atol=1e-3)

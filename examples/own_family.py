"""Use a model family that the package does not know: it is patched and converted without a table of its own.

python examples/own_family.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope


class OwnConfig(LlamaConfig):
    model_type = "own_family"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


AutoConfig.register("own_family", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = OwnForCausalLM(OwnConfig(vocab_size=100, num_key_value_heads=2, max_position_embeddings=128, **sizes)).eval()

# Patching and saving go by the structure of the model; the pairing is found by running a small model of its class.
rope.patch(model, "yarn", factor=4)
print(rope.describe(model))
folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder / "patched")
again = rope.from_pretrained(folder / "patched")
ids = torch.arange(3, 67)[None]
with torch.no_grad():
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)

# So are the rows of its weights that rotate. Its class does not run the other pairing, which is said in a warning.
rope.unpatch(model).save_pretrained(folder / "half")
print(rope.convert_checkpoint(folder / "half", folder / "interleaved", to="interleaved", verify=True))
rope.convert_checkpoint(folder / "interleaved", folder / "back", to="half")
before, after = ((folder / name / "model.safetensors").read_bytes() for name in ("half", "back"))
assert before == after

# A class that the probe does not understand needs a table in rope_ext_hf/models/families.toml, whose top explains it.

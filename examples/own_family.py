"""Use a model family that the package does not know: patching needs nothing, converting needs a table.

python examples/own_family.py
"""

import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.patches.families import parse_families


class OwnConfig(LlamaConfig):
    model_type = "own_family"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


AutoConfig.register("own_family", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = OwnForCausalLM(OwnConfig(vocab_size=100, num_key_value_heads=2, max_position_embeddings=128, **sizes)).eval()

# Patching, describing and saving go by the structure of the model and need no table.
rope.patch(model, "yarn", factor=4)
print(rope.describe(model))  # the pairing is unknown
folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder / "patched")
again = rope.from_pretrained(folder / "patched")
ids = torch.arange(3, 67)[None]
with torch.no_grad():
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)

# Converting its weights is refused until a table states which rows rotate.
rope.unpatch(model).save_pretrained(folder / "half")
try:
    rope.convert_checkpoint(folder / "half", folder / "interleaved", to="interleaved")
except rope.RopeExtError as error:
    print("refused:", error)

# Such a table goes into patches/families.toml; here it is only read and checked.
TABLE = """
[own_family]
like = "llama"
"""
known = files("rope_ext_hf.patches").joinpath("families.toml").read_text(encoding="utf-8")
print("the table is read as:", parse_families(known + TABLE)["own_family"].rotated)

"""Convert a checkpoint from Meta's format (params.json, consolidated.*.pth) to the format of transformers.

python examples/convert_meta_checkpoint.py [META_FOLDER NEW_FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.reference import path

if len(sys.argv) > 2:
    meta, new = Path(sys.argv[1]), Path(sys.argv[2])
else:  # make a checkpoint in Meta's format from the bundled model
    folder = Path(tempfile.mkdtemp())
    meta, new = folder / "meta", folder / "hugging-face"
    rope.convert_checkpoint(path(), meta, to="meta")
    print("Meta's format:", sorted(file.name for file in meta.iterdir()))

report = rope.convert_checkpoint(meta, new, to="half", verify=True)  # the rows of Meta's weights are interleaved
print(report)

model = AutoModelForCausalLM.from_pretrained(new)
ids = torch.arange(3, 67)[None]
with torch.no_grad():
    print("largest logit:", model(ids).logits.max().item())
    if len(sys.argv) <= 2:
        original = AutoModelForCausalLM.from_pretrained(path())
        assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-4)

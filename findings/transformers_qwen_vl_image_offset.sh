#!/bin/sh
# After a forward with an image, Qwen2.5-VL decodes a later text without images at positions shifted by that image.
#
# transformers 5.24.0: the model keeps the difference between tokens and positions of the last image that it read
# (rope_deltas). A text that is read onto a new cache is read at its own positions, but each token after it, decoded
# onto that cache in a loop of one's own, is read at positions shifted by that difference: its logits are off by several
# standard deviations. Before the image, steps equal one forward to rounding. No warning; generate is right. Setting
# model.model.rope_deltas to None helps. Exits 0 as long as that is so, and 1 once it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
cat >offset.py <<'PYTHON'
import sys

import torch
import transformers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

IMAGE, BEGIN, END = 190, 191, 192
torch.manual_seed(0)
sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
patches = {"patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2, "window_size": 8}
model = Qwen2_5_VLForConditionalGeneration(
    Qwen2_5_VLConfig(
        text_config={**sizes, **heads, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**vision, **patches, "fullatt_block_indexes": [0], "in_channels": 3},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
).eval()
text = torch.arange(3, 43)[None]


@torch.no_grad()
def off() -> float:
    """How far steps onto a cache are from one forward, in standard deviations of the logits."""
    whole = model(input_ids=text, use_cache=False).logits[:, 30:]
    cache = model(input_ids=text[:, :30], use_cache=True)["past_key_values"]
    steps = [model(input_ids=text[:, at : at + 1], past_key_values=cache).logits for at in range(30, 40)]
    return float((torch.cat(steps, dim=1) - whole).abs().max() / whole.std())


before, generated = off(), model.generate(text, max_new_tokens=8, do_sample=False)
row = torch.tensor([[5, 6, BEGIN, *[IMAGE] * 16, END, 7, 8]])  # an image of 8 x 8 patches, merged by 4
with torch.no_grad():
    model(
        input_ids=row,
        pixel_values=torch.randn(64, 12),
        image_grid_thw=torch.tensor([[1, 8, 8]]),
        mm_token_type_ids=(row == IMAGE).int(),
    )
after, shift = off(), model.model.rope_deltas.item()
again = model.generate(text, max_new_tokens=8, do_sample=False)
model.model.rope_deltas = None
reset = off()
print(f"transformers {transformers.__version__}: off by {before:.1g} before the image, {after:.1f} after it (by {shift} positions)")
print(f"{reset:.1g} once rope_deltas is None; generate gives the same tokens: {torch.equal(generated, again)}")
sys.exit(0 if before < 1e-3 and after > 1 and reset < 1e-3 and torch.equal(generated, again) else 1)
PYTHON
"$folder/venv/bin/python" offset.py

"""Write a method of your own: a class that is registered under a name, and used like every other method.

python examples/own_method.py
"""

import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reference import path


@rope.register_method("half-linear")
@dataclass(frozen=True, kw_only=True)
class HalfLinear(rope.RopeMethod):
    """Interpolation of the slower half of the pairs; the faster half keeps its frequencies."""

    factor: float

    def compute(self, rotary: rope.Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)  # (dim // 2,) float64, the model's own frequencies
        slow = torch.arange(rotary.dim // 2, device=length.device) >= rotary.dim // 4
        return torch.where(slow, inv_freq / self.factor, inv_freq), 1.0  # frequencies, and the attention factor


model = AutoModelForCausalLM.from_pretrained(path())
for name in ("linear", "half-linear"):
    with rope.patched(model, name, factor=4):
        (result,) = perplexity(model, "stdlib", lengths=[1024], max_spans=2)
    print(f"{name:12} {result.bits_per_byte:.3f} bits per byte at 1,024 tokens")

folder = tempfile.mkdtemp()
rope.patch(model, "half-linear", factor=4).save_pretrained(folder)
plain = AutoModelForCausalLM.from_pretrained(folder)  # stock transformers loads a model with a static method
ids = torch.arange(3, 67)[None]
with torch.no_grad():
    assert torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-4)

"""A method of your own: one class, registered under a name, used like every other.

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
    """The slower half of the pairs interpolated, the faster half as trained."""

    factor: float

    def compute(self, rotary: rope.Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)  # (dim // 2,) float64: what the method changes
        slow = torch.arange(rotary.dim // 2, device=length.device) >= rotary.dim // 4
        return torch.where(slow, inv_freq / self.factor, inv_freq), 1.0  # and the attention factor


model = AutoModelForCausalLM.from_pretrained(path())
for name in ("linear", "half-linear"):
    with rope.patched(model, name, factor=4):
        (result,) = perplexity(model, "stdlib", lengths=[1024], max_spans=2)
    print(f"{name:12} {result.bits_per_byte:.3f} bits per byte at 1,024 tokens")

folder = tempfile.mkdtemp()
rope.patch(model, "half-linear", factor=4).save_pretrained(folder)
plain = AutoModelForCausalLM.from_pretrained(folder)  # a static method has a form that transformers loads
ids = torch.arange(3, 67)[None]
with torch.no_grad():
    assert torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-4)

"""Rotary modules that only a patched model needs: for remapping methods, and for a learned factor of the frequencies.

Most methods need nothing but `RotaryEmbedding`; `PatchedRotaryEmbedding` chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.methods.base import Frequencies
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.phase import fixed_point


class RemappedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of a remapping method: it rotates queries and keys to the position at which keys are stored.

    The attention function then rotates them on, from there to the relative positions of the method. Under ReRoPE, for
    example, `stored_position` is 0 for every token: this module rotates nothing, and keys enter the cache unrotated.
    Attention then rotates near pairs to their true positions, and the queries of far pairs by the window alone.
    """

    beside_attention = True
    method: RemappingMethod

    @property
    def length_dependent(self) -> bool:
        """False: a rule that depends on the row length is chosen in attention, and the frequencies stay the same."""
        return False

    def _frequencies_at(self, length: int | None) -> Frequencies:
        # A stored position p / divisor is rotated as position p with frequencies that are smaller by that factor.
        inv_freq, attention_factor = super()._frequencies_at(length)
        divisor = self.method.stored_position(torch.zeros((), dtype=torch.int64)).divisor
        return Frequencies(inv_freq / divisor, attention_factor)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        positions = self.method.stored_position(position_ids).positions
        assert positions is not None
        return super().forward(x, positions)


class MultipliedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of a model that multiplies each frequency by the exponential of a learned number.

    The numbers are the buffer or parameter `buffer` of `source`, (dim // 2,): the module that was in the slot, which
    stays the one that loads and saves them.
    """

    beside_attention = True  # while a model is probed for a remapping method, this module stands in its slot

    def __init__(self, *args: Any, source: nn.Module, buffer: str, **kwargs: Any) -> None:
        # Not as an attribute of a module, which would make `source` a submodule here: the slot holds it already.
        self.__dict__["_learned"] = (source, buffer)
        super().__init__(*args, **kwargs)

    def _multiply(self, inv_freq: Tensor) -> Tensor:
        source, buffer = self.__dict__["_learned"]
        learned: Tensor = getattr(source, buffer)
        return inv_freq * learned.to(inv_freq.device, torch.float64).exp()

    @property
    def _reads_weights(self) -> bool:
        return True

    def _frequency_of_call(self, position_ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor | float]:
        # Read anew at every call, because the learned numbers may be loaded or trained after the patch.
        if self.length_dependent:
            return super()._frequency_of_call(position_ids, device)
        inv_freq, attention_factor = self._frequencies_at(self.fixed_length)
        return fixed_point(self._multiply(inv_freq)).to(device), attention_factor

"""The temperature alone: a method for models whose full-attention layers do not rotate their queries and keys.

    >>> import torch
    >>> method = Temperature(max_distance=8, temperature="log-n")
    >>> method.query_scale(torch.tensor([3, 7, 63]))
    tensor([1., 1., 2.])

Such layers (NoPE, "no positional encoding") have no rotation that a longer input could take beyond what it was trained
at. What grows with the input is the number of keys that share the attention of a query, and a larger query makes the
softmax sharper again. SWAN-GPT reads 4 to 8 times its trained length in this way (Puvvada et al. 2025,
arXiv 2504.08719).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import UNBOUNDED, Rotary
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappingMethod


@register_method("temperature")
@dataclass(frozen=True, kw_only=True)
class Temperature(RemappingMethod):
    """Full-attention layers get larger queries beyond the context length, and nothing else changes.

    No position changes and no frequency. Queries at positions beyond `max_distance` are multiplied by the factor that
    `temperature` names, and then the attention function of the model runs, whichever it is, so that inputs of up to
    `max_distance` tokens give the same output bit for bit. Sliding-window layers are left alone.
    """

    local_zone_exact = False  # keys stay where they are stored, which is where they stand
    moves_keys = False
    scales_queries_only: ClassVar[bool] = True
    default_temperature = "log-n"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("frequency", "beyond_only"):
            if getattr(self, name):
                raise MethodError(
                    f"{self.name} takes no {name}: it changes no frequencies, and nothing in inputs of up to "
                    "max_distance tokens"
                )

    def bind(self, rotary: Rotary, target_length: int | None, *, own_temperature: bool = False) -> Self:
        if own_temperature and self.temperature is None:
            raise MethodError(
                f"{self.name} has nothing to change: the attention of this model has a factor of its own, which grows "
                "with the position of the query. Name a temperature to multiply it by another factor (log-n, llama4)"
            )
        return super().bind(rotary, target_length, own_temperature=own_temperature)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        return self

    @property
    def keeps_bits(self) -> bool:
        return True

    @property
    def exact_length(self) -> int:
        return UNBOUNDED

    @property
    def note(self) -> str:
        return (
            f"Queries at positions from {self.max_distance:,} on are multiplied by a factor that grows with their "
            f"position ({self.temperature}), in full-attention layers; rotations are unchanged."
        )

"""NoPE, no positional encoding: queries and keys are not rotated any more.

>>> from rope_ext_hf.methods.base import Rotary
>>> Nope().frequencies(Rotary(dim=8, theta=10000.0, trained_length=4096)).inv_freq
tensor([0., 0., 0., 0.], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from rope_ext_hf.errors import MethodError, capital
from rope_ext_hf.methods.base import RopeMethod, Rotary, TrainingDefaults
from rope_ext_hf.methods.registry import register_method


@register_method("nope", aliases=["drope"])
@dataclass(frozen=True, kw_only=True)
class Nope(RopeMethod):
    """DroPE (Gelberg et al. 2025, arXiv 2512.12167): all frequencies are 0, so that cos is 1 and sin is 0.

    Without a rotation, a model tells positions apart by its causal mask alone. A pretrained model must be trained for
    that, at its context length ("recalibrated", `rope-ext finetune --method nope`), and predicts nonsense before. No
    input is too long for the frequencies afterwards. Where the model has a scaling of its own, its attention factor
    stays.

    `layers` of `rope_ext_hf.patch` chooses layers one by one, also those that share a rotary embedding with others.

    `recalibrated`: the number of tokens that the model was trained on without a rotation; 0: it was not.
    """

    training: ClassVar[TrainingDefaults] = TrainingDefaults(
        learning_rate=3e-4,
        train_all=True,
        guard=0.0,
        extended_rows=False,
        published="the authors of DroPE train Llama 2 7B on 10.5 billion tokens, 0.5% of its pretraining",
    )

    changes_frequencies = False
    drops_rotation = True

    recalibrated: int = field(default=0, metadata={"in_label": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(0, "recalibrated")

    def check(self, rotary: Rotary) -> None:
        if rotary.length_dependent:
            raise MethodError(
                "nope drops the rotation at every length, and this model's own scaling has other frequencies for short "
                "inputs; replace it in all layers with over='original'"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device) * 0.0, 1.0

    @property
    def warning(self) -> str | None:
        if self.recalibrated:
            return None
        return (
            "nope drops the rotation that this model was trained with: until it is trained without it, it predicts "
            "worse, and nonsense if no layer rotates (rope-ext finetune MODEL --method nope)"
        )

    @property
    def note(self) -> str:
        if self.warning is not None:
            return f"{capital(self.warning)}."
        return f"The model was trained on {self.recalibrated:,} tokens after its rotation was dropped."

    def after_training(self, tokens: int, before: RopeMethod | None) -> Self:
        earlier = self.recalibrated or (before.recalibrated if isinstance(before, Nope) else 0)
        return replace(self, recalibrated=earlier + tokens)

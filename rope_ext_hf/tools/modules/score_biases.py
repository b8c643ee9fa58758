"""Score biases beside RoPE: a number that is added to the score of a query and a key, by their distance and the head.

    >>> ALiBi(start=4096).bias(torch.tensor([0.0, 2.0]), heads=8)[0]
    tensor([[-0., -1.]])

Rotations are unchanged; the bias takes weight from far keys. A model that was trained without the bias keeps its
quality up to `start`, where the bias begins. Biases with learned numbers are modules, because a model must be trained
with them: see `rope_ext_hf.tools.modules.hybrids`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappingMethod, ScoreBias


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head: 2^(-8 h / heads) for h = 1 ... heads.

    As in Press et al. 2022 (arXiv 2108.12409, sec. 3). Where `heads` is not a power of two, the slopes are those of the
    next smaller power of two, followed by every other slope of the next larger one, as in the authors' code.
    """
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    between = [2 ** (-4 * h / below) for h in range(1, 2 * below + 1, 2)]
    return slopes + between[: heads - below]


@dataclass(frozen=True, kw_only=True)
class _ScoreBias(RemappingMethod):
    """Base class for methods that keep positions and add a bias to the attention scores of far keys.

    Args:
        start: the distance in tokens at which the bias begins. 0: it applies to all distances, as in a model that was
            trained with it. Default: `max_distance`, so that inputs up to that length are unchanged.
    """

    default_temperature = "none"  # a bias already keeps the number of keys that matter from growing
    local_zone_exact = False  # keys stay where they are stored, which is where they stand
    moves_keys = False

    start: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None and self.start < 0:
            raise MethodError(f"{self.name}: start must be at least 0 tokens, got {self.start}")

    @abstractmethod
    def bias(self, distance: Tensor, heads: int) -> Tensor:
        """Return the bias to add to attention scores; at distance 0 it is 0.

        Args:
            distance: (rows or 1, 1, queries, keys) float32, the tokens beyond `start`, at least 0.
            heads: query heads.

        Returns:
            (rows or 1, heads, queries, keys) float32, or a shape that broadcasts to it.

        Raises:
            MethodError: the method has parameters for another number of heads.
        """

    def score_bias(self, heads: int, length: int) -> ScoreBias | None:
        start = self.start
        assert start is not None
        if length <= start + 1:
            return None

        def bias(m: Tensor, n: Tensor) -> Tensor:
            beyond = (m[:, None, :, None] - n[:, None, None, :] - start).clamp(min=0)
            return self.bias(beyond.to(torch.float32), heads)

        return bias

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        return self if self.start is not None else replace(self, start=limit)

    @property
    def note(self) -> str:
        return f"Scores of keys more than {self.start:,} tokens back get a bias; rotations are unchanged."

    @property
    def exact_length(self) -> int:
        assert self.start is not None
        return self.start + 1


@register_method("alibi")
@dataclass(frozen=True, kw_only=True)
class ALiBi(_ScoreBias):
    """ALiBi beside RoPE (Press et al. 2022, arXiv 2108.12409): scores fall linearly beyond `start`, a slope per head.

    Args:
        start: the distance in tokens at which the bias begins; default: `max_distance`.
        strength: the factor of the paper's slopes.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_above_zero("strength")

    def bias(self, distance: Tensor, heads: int) -> Tensor:
        slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=distance.device)
        return -self.strength * slopes[:, None, None] * distance


@register_method("kerple")
@dataclass(frozen=True, kw_only=True)
class Kerple(_ScoreBias):
    """KERPLE beside RoPE (Chi et al. 2022, arXiv 2205.09921): scores fall with the log or a power of the distance.

    With d tokens beyond `start`, the bias is -r1 ln(1 + r2 d) for `kernel="log"`, and -r1 d^r2 for `kernel="power"`.

    Args:
        start: the distance in tokens at which the bias begins; default: `max_distance`.
        kernel: "log" or "power".
        r1: a positive number for all heads, or one for each.
        r2: the same, at most 2 for the power kernel.
    """

    kernel: Literal["log", "power"] = "log"
    r1: tuple[float, ...] = (1.0,)
    r2: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("r1", "r2"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                object.__setattr__(self, name, (float(value),))
        super().__post_init__()
        for name in ("r1", "r2"):
            values = getattr(self, name)
            most = 2 if (self.kernel, name) == ("power", "r2") else math.inf
            if not values or not all(0 < value <= most for value in values):
                allowed = "above 0" + (" and at most 2" if most == 2 else "")
                raise MethodError(f"{self.name}: {name} must be {allowed}, got {list(values)}")

    def bias(self, distance: Tensor, heads: int) -> Tensor:
        r1, r2 = (self._per_head(name, heads, distance.device) for name in ("r1", "r2"))
        return -r1 * (torch.log1p(r2 * distance) if self.kernel == "log" else distance**r2)

    def _per_head(self, name: str, heads: int, device: torch.device) -> Tensor:
        values = getattr(self, name)
        if len(values) not in (1, heads):
            raise MethodError(
                f"{self.name}: {name} has {len(values)} numbers; give one, or one for each of {heads} heads"
            )
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

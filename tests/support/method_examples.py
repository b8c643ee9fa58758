"""Instances of every registered method, for tests that hold for all of them.

>>> [method.name for _, method in example_methods(Rotary(dim=64, theta=1e4, trained_length=512))][:2]
['default', 'linear']
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, replace
from typing import Any, get_type_hints

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.clipping import Cope
from rope_ext_hf.methods.dropping import Nope
from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn, LongRoPE
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.static import ByParts, Factors, MrRoPE, RampedMethod, Yarn
from tests.support.oracles import rising_divisors


def example_method(cls: type[RopeMethod], rotary: Rotary, **given_: Any) -> RopeMethod:
    """An instance whose required parameters are filled in by their type, so that a new method needs no entry here."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):
        if item.default is not MISSING:
            continue
        if item.name == "theta":
            values[item.name] = 10 * rotary.theta
        elif hints[item.name] is float:
            values[item.name] = 4.0
        elif hints[item.name] == tuple[float, ...]:
            values[item.name] = tuple(rising_divisors(rotary, 4.0 + len(values)))  # two lists of one method differ
        else:
            raise AssertionError(f"no example value for {cls.name}.{item.name}: {hints[item.name]}")
    try:
        example = cls(**values | given_)
    except MethodError:  # one of several optional ones is needed
        example = cls(**values | {"factor": 4.0} | given_)
    if isinstance(example, Nope):
        example = replace(example, recalibrated=1)  # `patch` warns of a model that was not trained
    return within(example, rotary)


def within(method: RopeMethod, rotary: Rotary) -> RopeMethod:
    """The method, with betas between the cycles of the first and the last two pairs where its own fit no pair.

    Where every pair turns around, `cope` clips the last two.
    """
    try:
        method.check(rotary)
    except MethodError:
        cycles = (rotary.context_length * rotary.inv_freq()[: rotary.rotated_pairs] / (2 * math.pi)).tolist()
        if isinstance(method, Cope):
            return replace(method, clip=min(2, len(cycles)), hard=len(cycles) < 2)
        if not isinstance(method, (RampedMethod, MrRoPE)) or len(cycles) < 2:
            return method
        fast, slow = (math.sqrt(one * other) for one, other in (cycles[:2], cycles[-2:]))
        return replace(method, beta_fast=fast, beta_slow=slow)
    return method


def variants(rotary: Rotary) -> list[RopeMethod]:
    ones = (1.0,) * (rotary.dim // 2)
    return [
        *(DynamicNTK(growth=growth) for growth in ("paper", "even", "pow2")),
        DynamicNTK(growth="hf", factor=4),
        DynamicNTK(growth="even", initial=2, sticky=True),
        ByParts(factor=3, ramp="cycles"),
        ByParts(factor=3, truncate=False, beta_fast=20, beta_slow=2),
        Yarn(factor=6, ramp="cycles"),
        Yarn(factor=6, ramp="cycles", attention_factor=1.2),
        Yarn(factor=40, mscale=0.707, mscale_all_dim=1.0),
        Yarn(factor=40, mscale=0.707),
        Yarn(factor=6, attention_factor=1.2),
        Yarn(factor=6, truncate=False),
        MrRoPE(factor=6, radix="uniform", beta_fast=8, attention_factor=1.2),
        DynamicYarn(ramp="cycles"),
        DynamicYarn(truncate=False),
        LongRoPE(short_factor=ones, long_factor=ones, factor=1),
        LongRoPE(short_factor=ones, long_factor=ones, attention_factor=1.1),
        Factors(factors=ones, attention_factor=0.9),
    ]


def example_methods(rotary: Rotary) -> list[tuple[str, RopeMethod]]:
    generic = [example_method(cls, rotary) for cls in list_methods().values()]
    return [(method.name, method) for method in (*generic, *variants(rotary))]

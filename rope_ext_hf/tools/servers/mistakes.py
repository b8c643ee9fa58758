"""The configurations that a server is likely to run: the model as measured, and with each mistake that people make.

And slight errors, whose effect says how large an error has to be to show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.reordering import reordered
from rope_ext_hf.checkpoints.row_layouts import RotaryTensors
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default, Factors
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import checkpoint_geometry
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.spans import prefix_tokens
from rope_ext_hf.rotary.pairing import other_pairing

AS_MEASURED = "as measured"
_USUAL_THETA = 10_000.0  # the theta of programs where a config states none that they read
_OTHER_FACTORS = (0.5, 2.0)
_USUAL_FACTORS = (2.0, 4.0, 8.0)
_CONTENT = "content"


def configurations(model: Any, as_loaded: Rotary) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Contexts by name in which a loaded model is as measured, and in which it has one mistake that changes something.

    `as_loaded` is the model's rotary embedding without a patch.
    """
    made: dict[str, Callable[[], AbstractContextManager[Any]]] = {AS_MEASURED: nullcontext}
    specs = present_specs(model)
    if specs:
        made["without the patch"] = partial(patched, model, Default())
        method, rotary, length = specs[-1].method, specs[-1].rotary, specs[-1].target_length
    elif as_loaded.own is not None:
        method, rotary, length = as_loaded.own.method, as_loaded.own.rotary, as_loaded.own.context_length
    else:
        method, rotary, length = Default(), as_loaded, None
    if not isinstance(method, RemappingMethod):
        length = length or method.extended_length(rotary) or rotary.context_length
        for name, (inv_freq, factor) in different_frequencies(method, rotary, length):
            if specs and as_loaded.own is None and name == "no scaling at all":
                continue  # it is the model without the patch
            plain = rotary.theta_inv_freq()
            divisors = torch.where(plain > 0, plain / inv_freq, 1.0)  # some families leave pairs unrotated
            changed = Factors(factors=tuple(divisors.tolist()), attention_factor=factor)
            made[f"with {name}"] = partial(patched, model, changed, over="original")
    runs = class_pairing(model.config)
    if runs is not None:
        other, tensors = other_pairing(runs), RotaryTensors(model.config, checkpoint_geometry(model).dim)
        made[f"with {other} weights rotated as {runs}"] = partial(reordered, model, tensors, other)
        made[f"with {runs} weights rotated as {other}"] = partial(reordered, model, tensors, runs)
    return made


def rarer_configurations(
    model: Any, as_loaded: Rotary, tokenizer: Any
) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """More such contexts: under a patch where there is none; and, as lists, tokens that stand before each prompt."""
    made: dict[str, Callable[[], AbstractContextManager[Any]]] = {AS_MEASURED: nullcontext}
    for factor in () if present_specs(model) else _USUAL_FACTORS:
        for method in _static_methods(as_loaded, factor):
            made[f"with {method.label()} put in"] = partial(patched, model, method)
    bos, before = tokenizer.bos_token_id, dict[str, list[int]]()
    for first in (prefix_tokens(tokenizer, None), () if bos is None else (bos,)):
        name = "".join(map(str, tokenizer.convert_ids_to_tokens(first)))
        before |= {name: [*first], f"{name} twice": [*first, *first]} if first else {}
    template = getattr(tokenizer, "chat_template", None)
    with contextlib.suppress(Exception):  # a template may refuse anything
        message = [{"role": "user", "content": _CONTENT}]
        text = tokenizer.apply_chat_template(message, tokenize=False) if template is not None else ""
        before["the chat template"] = tokenizer(text.partition(_CONTENT)[0], add_special_tokens=False)["input_ids"]
    return made | {f"with {name} before the prompt": partial(nullcontext, ids) for name, ids in before.items() if ids}


@contextlib.contextmanager
def slightly_wrong(model: Any, scale: float = 0.0, noise: float = 0.0) -> Iterator[bool]:
    """Let a model multiply what enters its softmax by 1 + `scale`, and add noise to the attention output of one layer.

    `noise` is a share of that output's root mean square. Yields whether the attention modules hold their scale as
    transformers' usually do; if not, nothing is changed.
    """
    before = [(part, part.scaling) for part in model.modules() if isinstance(getattr(part, "scaling", None), float)]
    draws = torch.Generator().manual_seed(0)

    def add(module: Any, given: Any, result: Any) -> Any:
        drawn = torch.randn(result[0].shape, generator=draws).to(result[0])
        return (result[0] + noise * result[0].square().mean().sqrt() * drawn, *result[1:])

    hooks = [part.register_forward_hook(add) for part, _ in before[len(before) // 2 :][:1] if noise]
    try:
        for part, scaling in before:
            part.scaling = (1 + scale) * scaling
        yield bool(before)
    finally:
        for part, scaling in before:
            part.scaling = scaling
        for hook in hooks:
            hook.remove()


def different_frequencies(method: RopeMethod, rotary: Rotary, length: int) -> Iterator[tuple[str, Frequencies]]:
    """The mistakes whose frequencies or attention factor are not those of the method, nor of an earlier mistake."""
    earlier = [] if method.depends_on_length(rotary) else [method.frequencies(rotary, length)]
    for name, (inv_freq, factor) in _mistakes(method, rotary, length):
        if torch.equal(inv_freq > 0, rotary.theta_inv_freq() > 0) and not any(
            torch.allclose(inv_freq, other, rtol=1e-6, atol=0) and abs(factor - magnitude) < 1e-6
            for other, magnitude in earlier
        ):
            earlier.append(Frequencies(inv_freq, factor))
            yield name, earlier[-1]


def _mistakes(method: RopeMethod, rotary: Rotary, length: int) -> Iterator[tuple[str, tuple[Tensor, float]]]:
    inv_freq, factor = method.frequencies(rotary, length)
    plain = rotary.theta_inv_freq()
    yield "no scaling at all", (plain, 1.0)
    yield "no attention factor", (inv_freq, 1.0)
    yield "the attention factor applied twice", (inv_freq, factor * factor)
    yield "the scaling applied twice", (inv_freq * inv_freq / plain, factor)
    yield "the frequencies of long inputs for all", (inv_freq, factor)
    yield "the frequencies of short inputs for all", method.frequencies(rotary, 1)
    yield "frequencies rounded to bfloat16", (inv_freq.to(torch.bfloat16).double(), factor)
    for name, wrong in (
        ("theta 10,000", _with_theta(rotary, _USUAL_THETA)),
        ("the extended length as the original one", replace(rotary.plain, trained_length=length)),
    ):
        with contextlib.suppress(RopeExtError):  # no such combination
            yield name, method.frequencies(wrong, length)
    for other in _other_methods(method, rotary, length / rotary.context_length):
        with contextlib.suppress(RopeExtError):
            yield f"{other.label()} in place of {method.label()}", other.frequencies(rotary, length)


def _other_methods(method: RopeMethod, rotary: Rotary, factor: float) -> Iterator[RopeMethod]:
    """The method with another factor, and every other static one with this factor."""
    given: Any = getattr(method, "factor", None)
    for ratio in _OTHER_FACTORS if given is not None and factor > 1 else ():
        with contextlib.suppress(RopeExtError):  # a factor below 1
            yield replace(method, factor=given * ratio)  # type: ignore[call-arg]
    if factor > 1:
        yield from _static_methods(rotary, factor)


def _static_methods(rotary: Rotary, factor: float) -> Iterator[RopeMethod]:
    for name, kind in list_methods().items():
        if kind.takes_factor({}) and not issubclass(kind, RemappingMethod):
            with contextlib.suppress(RopeExtError):  # parameters that have no defaults
                other = resolve_method(name, rotary, factor=factor)
                if not other.length_dependent:  # which engines do not run
                    yield other


def _with_theta(rotary: Rotary, theta: float) -> Rotary:
    own = rotary.own
    return replace(
        rotary, theta=theta, own=None if own is None else replace(own, rotary=_with_theta(own.rotary, theta))
    )

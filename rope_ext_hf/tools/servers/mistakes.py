"""Configurations in which a server may run a model: as it was measured, and with each of the common mistakes.

The module also gives a model slight errors, whose effect shows how large an error must be to be detected.
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

from rope_ext_hf.bounds import NO_ROTATION
from rope_ext_hf.checkpoints.rows.loaded_rows import reordered
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.text.tokenizing import prefix_tokens

AS_MEASURED = "as measured"
Configuration = Callable[[], AbstractContextManager[Any]]
"""A maker of contexts in which a model is configured; one may yield a list of tokens to read before each prompt."""
_USUAL_THETA = 10_000.0  # programs take this theta where a config states none that they read
_OTHER_FACTORS = (0.5, 2.0)
_USUAL_FACTORS = (2.0, 4.0, 8.0)
_CONTENT = "content"  # of a message that stands for the prompt in a chat template


def configurations(model: Any, unpatched: Rotary) -> dict[str, Configuration]:
    """Return, by name, the model as measured and a variant for each common serving mistake that changes its output.

    Args:
        model: the loaded model, patched or not.
        unpatched: the model's rotary embedding without a patch.
    """
    by_name: dict[str, Configuration] = {AS_MEASURED: nullcontext}
    patches = active_patches(model)
    if patches:
        by_name["without the patch"] = partial(patched, model, "default")
        method, rotary, length = patches[-1].method, patches[-1].rotary, patches[-1].target_length
    elif unpatched.own is not None:
        method, rotary, length = unpatched.own.method, unpatched.own.rotary, unpatched.own.context_length
    else:
        method, rotary, length = resolve_method("default", unpatched), unpatched, None
    if not isinstance(method, RemappingMethod):
        length = length or method.extended_length(rotary) or rotary.context_length
        for name, (inv_freq, factor) in different_frequencies(method, rotary, length):
            if patches and unpatched.own is None and name == "no scaling at all":
                continue  # the same as the model without the patch
            plain = rotary.theta_inv_freq()
            divisors = (plain / inv_freq).clamp(max=NO_ROTATION)
            divisors = torch.where(plain > 0, divisors, 1.0)  # some families leave pairs unrotated
            changed: dict[str, Any] = {"factors": tuple(divisors.tolist()), "attention_factor": factor}
            by_name[f"with {name}"] = partial(patched, model, "factors", over="original", **changed)
    pairing = describe(model).pairing
    if pairing is not None:
        other = "interleaved" if pairing == "half" else "half"
        by_name[f"with {other} weights rotated as {pairing}"] = partial(reordered, model, other)
        by_name[f"with {pairing} weights rotated as {other}"] = partial(reordered, model, pairing)
    return by_name


def rarer_configurations(model: Any, unpatched: Rotary, tokenizer: Any) -> dict[str, Configuration]:
    """Return, by name, the model as measured and a variant for each of the rarer serving mistakes.

    These are a method in a model that was measured without one, and extra tokens before each prompt.
    """
    by_name: dict[str, Configuration] = {AS_MEASURED: nullcontext}
    if not active_patches(model):
        for factor in _USUAL_FACTORS:
            for method in _static_methods(unpatched, factor):
                by_name[f"with {method.label()} put in"] = partial(patched, model, method)
    for name, ids in _prefixes(tokenizer).items():
        by_name[f"with {name} before the prompt"] = partial(nullcontext, ids)
    return by_name


def _prefixes(tokenizer: Any) -> dict[str, list[int]]:
    """Return, by name, the token ids that a server may add before a prompt.

    They are the tokenizer's first tokens, once or twice, or the beginning of its chat template.
    """
    prefixes: dict[str, list[int]] = {}
    bos = tokenizer.bos_token_id
    for first in (prefix_tokens(tokenizer, None), () if bos is None else (bos,)):
        if first:
            name = "".join(map(str, tokenizer.convert_ids_to_tokens(first)))
            prefixes |= {name: [*first], f"{name} twice": [*first, *first]}
    if getattr(tokenizer, "chat_template", None) is not None:
        with contextlib.suppress(Exception):  # a template is code that may raise anything
            message = [{"role": "user", "content": _CONTENT}]
            text = tokenizer.apply_chat_template(message, tokenize=False)
            ids = tokenizer(text.partition(_CONTENT)[0], add_special_tokens=False)["input_ids"]
            if ids:
                prefixes["the chat template"] = ids
    return prefixes


@contextlib.contextmanager
def slightly_wrong(model: Any, scale: float = 0.0, noise: float = 0.0) -> Iterator[bool]:
    """Give a model a slightly wrong softmax scale, or noise in the attention output of its middle layer.

    Args:
        model: a model whose attention modules have an attribute `scaling`, as most of transformers' have.
        scale: relative error of the softmax scale.
        noise: the noise's root mean square as a share of that of the attention output.

    Yields:
        True if the model was changed; False if no module has such an attribute, and nothing was changed.
    """
    scalings = [(part, part.scaling) for part in model.modules() if isinstance(getattr(part, "scaling", None), float)]
    generator = torch.Generator().manual_seed(0)

    def add_noise(module: Any, inputs: Any, result: Any) -> Any:
        drawn = torch.randn(result[0].shape, generator=generator).to(result[0])
        return (result[0] + noise * result[0].square().mean().sqrt() * drawn, *result[1:])

    hooks = []
    if noise and scalings:
        middle, _ = scalings[len(scalings) // 2]
        hooks.append(middle.register_forward_hook(add_noise))
    try:
        for part, scaling in scalings:
            part.scaling = (1 + scale) * scaling
        yield bool(scalings)
    finally:
        for part, scaling in scalings:
            part.scaling = scaling
        for hook in hooks:
            hook.remove()


def different_frequencies(method: RopeMethod, rotary: Rotary, length: int) -> Iterator[tuple[str, Frequencies]]:
    """Yield each mistake, by name, whose frequencies differ from those of the method and of all earlier mistakes.

    `length` is the length in tokens at which a length-dependent method is computed.
    """
    earlier = [] if method.depends_on_length(rotary) else [method.frequencies(rotary, length)]
    for name, (inv_freq, factor) in _mistakes(method, rotary, length):
        known = any(
            torch.allclose(inv_freq, other, rtol=1e-6, atol=0) and abs(factor - other_factor) < 1e-6
            for other, other_factor in earlier
        )
        if not known:
            earlier.append(Frequencies(inv_freq, factor))
            yield name, earlier[-1]


def _mistakes(method: RopeMethod, rotary: Rotary, length: int) -> Iterator[tuple[str, tuple[Tensor, float]]]:
    """Yield each common serving mistake: its name, and the inverse frequencies and attention factor it leads to."""
    inv_freq, factor = method.frequencies(rotary, length)
    plain = rotary.theta_inv_freq()
    yield "no scaling at all", (plain, 1.0)
    yield "no attention factor", (inv_freq, 1.0)
    yield "the attention factor applied twice", (inv_freq, factor * factor)
    twice = torch.where(plain > 0, inv_freq * inv_freq / plain, 0.0)  # some families leave pairs unrotated
    yield "the scaling applied twice", (twice, factor)
    yield "the frequencies of long inputs for all", (inv_freq, factor)
    yield "the frequencies of short inputs for all", method.frequencies(rotary, 1)
    yield "frequencies rounded to bfloat16", (inv_freq.to(torch.bfloat16).double(), factor)
    for name, wrong in (
        ("theta 10,000", _with_theta(rotary, _USUAL_THETA)),
        ("the extended length as the original one", replace(rotary.plain, trained_length=length)),
    ):
        with contextlib.suppress(RopeExtError):  # the method cannot be combined with that rotary embedding
            yield name, method.frequencies(wrong, length)
    for other in _other_methods(method, rotary, length / rotary.context_length):
        with contextlib.suppress(RopeExtError):
            yield f"{other.label()} in place of {method.label()}", other.frequencies(rotary, length)


def _other_methods(method: RopeMethod, rotary: Rotary, factor: float) -> Iterator[RopeMethod]:
    """Yield the methods that a server may run by mistake: the same one with other factors, and others with `factor`.

    Nothing is yielded for factors up to 1. The others are all methods with fixed frequencies.
    """
    if factor <= 1:
        return
    own_factor: Any = getattr(method, "factor", None)
    if own_factor is not None:
        for ratio in _OTHER_FACTORS:
            with contextlib.suppress(RopeExtError):  # a factor below 1
                yield replace(method, factor=own_factor * ratio)  # type: ignore[call-arg]
    yield from _static_methods(rotary, factor)


def _static_methods(rotary: Rotary, factor: float) -> Iterator[RopeMethod]:
    """Yield every method with fixed frequencies that needs no parameter but a factor.

    Engines do not run methods whose frequencies depend on the input's length.
    """
    for name, kind in list_methods().items():
        if not kind.takes_factor({}) or issubclass(kind, RemappingMethod):
            continue
        with contextlib.suppress(RopeExtError):  # a parameter without a default is missing
            method = resolve_method(name, rotary, factor=factor)
            if not method.length_dependent:
                yield method


def _with_theta(rotary: Rotary, theta: float) -> Rotary:
    """Return the rotary embedding with another theta; a scaling that the model has of its own is computed anew."""
    own = rotary.own
    if own is not None:
        own = replace(own, rotary=_with_theta(own.rotary, theta))
    return replace(rotary, theta=theta, own=own)

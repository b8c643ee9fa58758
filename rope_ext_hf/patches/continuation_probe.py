"""Try once whether a decoder, under a patch, goes on from its cache as it reads the same tokens in one forward.

Hooks around a decoder rely on what transformers calls and hands over inside of it, which changes from release to
release. Under a remapping or length-dependent method a change that they miss gives other numbers without an error. So
the first patch of such a kind on a class of decoders reads a few tokens both ways and compares. What is tried is the
method of the patch, bound to a trained length of a few tokens, so that the tokens lie beyond it; weights are those of
the model, and the outcome depends on the code of its class, so that later patches of the same kind do not try again.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable
from rope_ext_hf.errors import MethodError, RopeExtError, UnsupportedModelError, one_line
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.attention_interface import Layer, evaluating
from rope_ext_hf.patches.attention_probe import is_partitioned
from rope_ext_hf.patches.decoder_arguments import cache_of_output, cache_parameter
from rope_ext_hf.patches.key_layout_probe import CacheCannotFollowError
from rope_ext_hf.patches.slots import patched_slots, tables_of

TOKENS = 24
"""Tokens that are read, the last of them also onto the cache of those before."""
_TRAINED = 8
"""The trained length that the method is bound to while it is tried, in tokens."""
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
"""What rounding may make of hidden states, root mean square in their standard deviations; other dtypes: 0.1."""
_TIMES_SHORTER = 3.0
"""How many times the effect of one token less a difference may be, under a method that follows the length.

The cache was then filled at a length that was shorter by one token, and what later layers store depends on it; experts
may even be chosen otherwise. That effect is measured, and has the rounding of the model's dtype in it.
"""
# tests/patches/test_continuation_probe.py has what is measured where the cache is found, and where it is missed.

_tried: set[tuple[Any, ...]] = set()
"""Kinds of patches on classes of decoders that were tried and are right."""


class NotTriedError(Exception):
    """The weights are not there, or the decoder does not run on token ids alone."""


def kind_of_patch(decoder: nn.Module, hooks: type, method: RopeMethod) -> tuple[Any, ...]:
    """What the outcome of a trial depends on."""
    by_length = isinstance(method, RemappingMethod) and method.by_length
    return type(decoder), hooks, by_length, getattr(decoder.config, "_attn_implementation", None)


def was_tried(kind: tuple[Any, ...]) -> bool:
    """Whether such a patch was tried in this process and is right."""
    return kind in _tried


def small_patch(method: RopeMethod, rotary: Rotary) -> tuple[RopeMethod, Rotary]:
    """Return the method and its rotary embedding for a trained length of a few tokens.

    A method that moves positions gets the default parameters for that length; one that changes frequencies is the same.

    Raises:
        NotTriedError: it has no default parameters, or takes no length as short as that.
    """
    small = replace(rotary.plain, trained_length=_TRAINED)
    try:
        if not isinstance(method, RemappingMethod):
            method.frequencies(small, TOKENS)
            return method, small
        made = resolve_method(method.name, small, target_length=TOKENS)
        assert isinstance(made, RemappingMethod)
        return made.bind(small, TOKENS), small
    except MethodError as error:
        raise NotTriedError(f"{method.name} is not for {_TRAINED} tokens: {one_line(error)}") from error


def small_layers(
    attention: tuple[tuple[nn.Module, Layer], ...], method: RopeMethod, small: Any, rotary: Rotary
) -> tuple[tuple[nn.Module, Layer], ...]:
    """Return how each attention module attends, with the small method in place of the method of the patch."""
    table = RotationTable(Default().frequencies(rotary).inv_freq)

    def with_small(layer: Layer) -> Layer:
        rule: Any = layer.rule
        if rule is method:
            rule = small
        elif isinstance(rule, LocalAttention):
            rule = replace(
                rule,
                method=small if rule.method is method else rule.method,
                temperature=small if rule.temperature is method else rule.temperature,
            )
        rotation = None if layer.rotation is None else Rotation(table, layer.rotation.layout)
        return replace(layer, rule=rule, rotation=rotation)

    return tuple((module, with_small(layer)) for module, layer in attention)


def check_weights(model: nn.Module, decoder: nn.Module) -> None:
    """Raise NotTriedError where running a few tokens would need weights that are elsewhere, or other processes."""
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise NotTriedError("the weights of the model are not in memory")
    if is_partitioned(model):
        raise NotTriedError("the weights of the model are sharded over devices")
    sharding = sys.modules.get("torch.distributed.tensor")  # without it there are no sharded weights
    if sharding is not None and any(isinstance(each, sharding.DTensor) for each in decoder.parameters()):
        raise NotTriedError("the weights of the model are sharded over devices")


def try_continuation(
    model: nn.Module, decoder: nn.Module, kind: tuple[Any, ...], method: RopeMethod
) -> tuple[float, float]:
    """Compare a forward of a few tokens with one that goes on from the cache of the first of them.

    Args:
        model: patched with what `small_patch` gives.
        kind: what `kind_of_patch` says, noted where both agree.
        method: of the patch.

    Returns:
        How far hidden states are apart, in standard deviations, and how far they may be.

    Raises:
        NotTriedError: the decoder does not run on token ids alone, or keeps no cache.
        UnsupportedModelError: it refuses to go on from its cache.
    """
    follows = not isinstance(method, RemappingMethod)
    with evaluating(model), torch.no_grad():
        try:
            whole, then = _both_ways(decoder, 1 if follows else 2)
            if follows:
                allowed = _ROUNDING[torch.float32] + _TIMES_SHORTER * _apart(_read_as_shorter(model, decoder), whole)
            else:
                allowed = _ROUNDING.get(_dtype(decoder), 0.1)
        except CacheCannotFollowError as error:  # which every use of such a cache says, and `fixed_length` avoids
            raise NotTriedError(one_line(error)) from error
        except RopeExtError as error:
            raise _refusal(decoder, method.name, one_line(error)) from error
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            raise NotTriedError(
                f"{type(decoder).__name__} does not run on token ids alone: {one_line(error)}"
            ) from error
    if not whole.isfinite().all():  # a model with NaN, whose readers say so
        return 0.0, 0.0
    off = _apart(then, whole)
    if off <= allowed:
        _tried.add(kind)
    return off, allowed


def check_difference(model: nn.Module, decoder: nn.Module, name: str, off: float, allowed: float) -> None:
    """Raise what follows from a difference under the method `name`, now that the model is unpatched.

    Raises:
        NotTriedError: the unpatched model differs as much. Attention that is not causal does, such as PaliGemma's.
        UnsupportedModelError: it goes on from its cache as it reads the same tokens in one forward.
    """
    if off <= allowed:
        return
    with evaluating(model), torch.no_grad():
        whole, then = _both_ways(decoder, 1)
    if off <= allowed + _TIMES_SHORTER * _apart(then, whole):
        raise NotTriedError(
            f"unpatched, too, {type(decoder).__name__} does not go on from its cache as it reads the same tokens in "
            "one forward"
        )
    raise _refusal(decoder, name, f"hidden states are off by {off:.2g} standard deviations")


def _apart(some: Tensor, others: Tensor) -> float:
    """The root mean square difference of hidden states, in standard deviations of the second ones."""
    return float((some - others).square().mean().sqrt() / others.std().clamp(min=1e-6))


def _dtype(decoder: nn.Module) -> torch.dtype:
    """The dtype that a decoder computes in, which is not that of quantised weights."""
    return next((each.dtype for each in decoder.parameters() if each.is_floating_point()), torch.float16)


def _token_ids(decoder: nn.Module) -> Tensor:
    """Ids, (1, TOKENS), spread over the vocabulary: the first and the last ids are special tokens in most models."""
    embeddings: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embeddings.weight
    return torch.linspace(weight.shape[0] // 8, 7 * weight.shape[0] // 8, TOKENS, device=weight.device).long()[None]


def _read_as_shorter(model: nn.Module, decoder: nn.Module) -> Tensor:
    """The hidden state of the last token, (1, hidden), where all tokens are read as those of a shorter text."""
    with ExitStack() as stack:
        for table in tables_of(patched_slots(model)):
            if table.method.depends_on_length(table.rotary):
                stack.enter_context(table.at_length(TOKENS - 1))
        hidden: Tensor = decoder(input_ids=_token_ids(decoder), use_cache=False)[0]
    return hidden[0, -1:].float()


def _both_ways(decoder: nn.Module, continued: int) -> tuple[Tensor, Tensor]:
    """Hidden states of the last tokens, (continued, hidden) float32: in one forward, and onto a cache of the others."""
    ids = _token_ids(decoder)
    whole = decoder(input_ids=ids, use_cache=False)
    first = decoder(input_ids=ids[:, :-continued], use_cache=True)
    cache = cache_of_output(first)
    if cache is None:
        raise NotTriedError(f"{type(decoder).__name__} keeps no cache")
    then = decoder(input_ids=ids[:, -continued:], use_cache=True, **{cache_parameter(decoder): cache})
    return whole[0][0, -continued:].float(), then[0][0].float()


def _refusal(decoder: nn.Module, name: str, why: str) -> UnsupportedModelError:
    from transformers import __version__

    return UnsupportedModelError(
        f"{type(decoder).__name__} of transformers {__version__} does not go on from its cache under {name} as it "
        f"reads the same tokens in one forward ({why}), so that generated text would be wrong. The model is as it was. "
        "Use a static method (yarn, ntk, linear, ...), or another release of transformers, and please report this"
    )

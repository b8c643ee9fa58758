"""Test once whether a patched decoder computes the same with a cache as in one forward over the same tokens.

What a patch puts around a decoder's forward relies on the calls and arguments inside it, which change from release to
release. Under a remapping or length-dependent method a change that it misses gives other numbers without an error.
So the first patch of such a kind on a class of decoders reads a few tokens both ways, and compares the hidden states.

The trial runs the method of the patch, bound to a trained length of a few tokens so that the tokens lie beyond it, with
the weights of the model. Its outcome depends on the code of the class, so later patches of the same kind need no trial.
"""

from __future__ import annotations

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
from rope_ext_hf.models.decoder_arguments import cache_of_output, cache_parameter, is_of_transformers
from rope_ext_hf.models.temporary import trying
from rope_ext_hf.patches.forward.attention_interface import Layer
from rope_ext_hf.patches.forward.key_layout_probe import CacheCannotFollowError
from rope_ext_hf.patches.slots.patched_slot import patched_slots, tables_of

TOKENS = 24
"""The number of tokens that are read in one forward, and again with the last of them onto a cache of the others."""
_TRAINED_LENGTH = 8
"""The trained length that the method is bound to during the trial, in tokens."""
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The difference that rounding may make: root mean square, in standard deviations of the hidden states."""
_ROUNDING_OF_HALF = 0.1
"""The same in every other dtype."""
_TIMES_SHORTER = 3.0
"""How large a difference may be under a length-dependent method, in multiples of the effect of one token less.

The first layer's keys are rotated again, but what later layers store was computed while the text was shorter by one
token; experts may even be chosen otherwise. That effect is measured, with the rounding of the model's dtype in it.
"""
# tests/patches/trials/test_continuation_probe.py has the differences that were measured, with the cache and without.

_tried: set[tuple[Any, ...]] = set()
"""The kinds of patches, by class of decoders, that a trial of this process found right."""


class NotTriedError(Exception):
    """The reason why no trial was made: weights are missing, for example."""


def kind_of_patch(decoder: nn.Module, forward: type, method: RopeMethod) -> tuple[Any, ...]:
    """Return the key under which the result of a trial is remembered; patches with equal keys behave alike.

    It holds the classes of the decoder and of the forward that the patch puts on it, whether positions follow the
    length, and the name of the model's attention function.
    """
    by_length = isinstance(method, RemappingMethod) and method.depends_on_total_length
    return type(decoder), forward, by_length, getattr(decoder.config, "_attn_implementation", None)


def was_tried(kind: tuple[Any, ...]) -> bool:
    """Return whether a patch of this kind, see `kind_of_patch`, was tried in this process and found right."""
    return kind in _tried


def small_patch(method: RopeMethod, rotary: Rotary) -> tuple[RopeMethod, Rotary]:
    """Return a method and its rotary embedding for a trained length of a few tokens, which a short trial can exceed.

    A remapping method gets its default parameters for that length; a method that changes frequencies stays as it is.

    Raises:
        NotTriedError: the method has no default parameters, or is not for so short a length.
    """
    small = replace(rotary.plain, trained_length=_TRAINED_LENGTH)
    try:
        if not isinstance(method, RemappingMethod):
            method.frequencies(small, TOKENS)
            return method, small
        default = resolve_method(method.name, small, target_length=TOKENS)
        assert isinstance(default, RemappingMethod)
        return default.bind(small, TOKENS), small
    except MethodError as error:
        raise NotTriedError(f"{method.name} is not for {_TRAINED_LENGTH} tokens: {one_line(error)}") from error


def small_layers(
    attention: tuple[tuple[nn.Module, Layer], ...], method: RopeMethod, small: Any, rotary: Rotary
) -> tuple[tuple[nn.Module, Layer], ...]:
    """Return attention modules and how they attend, with the method `small` in place of the method of the patch.

    `rotary`: the rotary embedding that `small` extends.
    """
    table = RotationTable(Default().frequencies(rotary).inv_freq)

    def with_small(layer: Layer) -> Layer:
        """Return the layer with the small method wherever its rule names the method of the patch."""
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


def try_continuation(
    model: nn.Module, decoder: nn.Module, kind: tuple[Any, ...], method: RopeMethod
) -> tuple[float, float]:
    """Compare one forward over a few tokens with reading the same tokens in two steps, the second from a cache.

    Args:
        model: patched with the method that `small_patch` gives.
        decoder: its decoder.
        kind: the kind of the patch (`kind_of_patch`), which is remembered where both forwards agree.
        method: the method of the patch itself.

    Returns:
        The difference of the hidden states, and the largest difference that is right: both root mean square, in
        standard deviations of the hidden states. (0, 0) for a model that computes NaN.

    Raises:
        NotTriedError: the decoder does not run on token ids alone, or keeps no cache.
        UnsupportedModelError: the decoder refuses to go on from its cache.
    """
    by_length = not isinstance(method, RemappingMethod)
    with trying(model), torch.no_grad():
        try:
            whole, continued = _both_ways(decoder, 1 if by_length else 2)
            if by_length:
                effect = _difference(_read_as_shorter(model, decoder), whole)
                allowed = _ROUNDING[torch.float32] + _TIMES_SHORTER * effect
            else:
                allowed = _ROUNDING.get(_dtype(decoder), _ROUNDING_OF_HALF)
        except CacheCannotFollowError as error:  # every use of such a cache says so, and `fixed_length` avoids it
            raise NotTriedError(one_line(error)) from error
        except RopeExtError as error:
            raise _refusal(decoder, method.name, one_line(error)) from error
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            raise NotTriedError(
                f"{type(decoder).__name__} does not run on token ids alone: {one_line(error)}"
            ) from error
    if not whole.isfinite().all():  # damaged weights, which measurements report
        return 0.0, 0.0
    difference = _difference(continued, whole)
    if difference <= allowed:
        _tried.add(kind)
    return difference, allowed


def check_difference(model: nn.Module, decoder: nn.Module, name: str, difference: float, allowed: float) -> None:
    """Check the outcome of a trial, and find out whether the patch or the model itself is the reason for a difference.

    Args:
        model: the model, whose patch has been taken off.
        decoder: its decoder.
        name: the name of the method that was tried.
        difference, allowed: as `try_continuation` returns them.

    Raises:
        NotTriedError: the unpatched model differs as much; attention that is not causal does, such as PaliGemma's.
        UnsupportedModelError: the unpatched model does not differ so, and the patch is the reason.
    """
    if difference <= allowed:
        return
    with trying(model), torch.no_grad():
        whole, continued = _both_ways(decoder, 1)
    if difference <= allowed + _TIMES_SHORTER * _difference(continued, whole):
        raise NotTriedError(
            f"{type(decoder).__name__} computes something else with a cache than in one forward even when it is not "
            "patched"
        )
    raise _refusal(decoder, name, f"hidden states are off by {difference:.2g} standard deviations")


def _difference(hidden: Tensor, reference: Tensor) -> float:
    """Return the root mean square difference of hidden states, in standard deviations of the reference."""
    return float((hidden - reference).square().mean().sqrt() / reference.std().clamp(min=1e-6))


def _dtype(decoder: nn.Module) -> torch.dtype:
    """Return the dtype that a decoder computes in; quantised weights, which are integers, do not count."""
    return next((weight.dtype for weight in decoder.parameters() if weight.is_floating_point()), torch.float16)


def _token_ids(decoder: nn.Module) -> Tensor:
    """Return token ids, (1, TOKENS), from the inner three quarters of the vocabulary.

    The first and the last ids are special tokens in most models.
    """
    embeddings: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embeddings.weight
    vocabulary = weight.shape[0]
    return torch.linspace(vocabulary // 8, 7 * vocabulary // 8, TOKENS, device=weight.device).long()[None]


def _read_as_shorter(model: nn.Module, decoder: nn.Module) -> Tensor:
    """Return the last token's hidden state, (1, hidden), under the frequencies of a text that is one token shorter."""
    with ExitStack() as stack:
        for table in tables_of(patched_slots(model)):
            if table.method.depends_on_length(table.rotary):
                stack.enter_context(table.at_length(TOKENS - 1))
        hidden: Tensor = decoder(input_ids=_token_ids(decoder), use_cache=False)[0]
    return hidden[0, -1:].float()


def _both_ways(decoder: nn.Module, last: int) -> tuple[Tensor, Tensor]:
    """Return hidden states of the last tokens, twice: read in one forward, and read onto a cache of the others.

    Both are (last, hidden) float32.
    """
    ids = _token_ids(decoder)
    whole = decoder(input_ids=ids, use_cache=False)
    first = decoder(input_ids=ids[:, :-last], use_cache=True)
    cache = cache_of_output(first)
    if cache is None:
        raise NotTriedError(f"{type(decoder).__name__} keeps no cache")
    continued = decoder(input_ids=ids[:, -last:], use_cache=True, **{cache_parameter(decoder): cache})
    return whole[0][0, -last:].float(), continued[0][0].float()


def _refusal(decoder: nn.Module, name: str, reason: str) -> UnsupportedModelError:
    """Return the error for a decoder that computes something else with a cache under the method `name`."""
    from transformers import __version__

    release, change = f" of transformers {__version__}", "another release of transformers, and please report this"
    if not is_of_transformers(decoder):
        release, change = "", "correct how its forward uses the cache"
    return UnsupportedModelError(
        f"under {name}, {type(decoder).__name__}{release} does not compute the same with a cache "
        f"as in one forward over the same tokens ({reason}), so that generated text would be wrong. The model is as "
        f"it was. Use a static method (yarn, ntk, linear, ...), or {change}"
    )

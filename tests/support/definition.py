"""Whole models whose attention is the definition of a remapping method, pair by pair, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import rope_ext_hf as rope
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.slots.slot_finding import find_slots
from tests.support.models import FAMILIES, build, rope_parameters, tokens
from tests.support.oracles import distances, plain_distance, rotate_to, temperature_scale

_INTERLEAVED = ("glm", "cohere", "llama4", "deepseek_v2")


class _Still(nn.Module):
    """A rotary module that turns nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any) -> Any:
        out = self.module(x, position_ids, *args)
        return torch.ones_like(out) if isinstance(out, Tensor) else (torch.ones_like(out[0]), torch.zeros_like(out[1]))


@contextmanager
def defined(model: Any, name: str, method: RemappingMethod) -> Iterator[Any]:
    """A model whose rotary modules turn nothing and whose attention has every distance in it as the paper says."""
    family = FAMILIES[name]
    own_theta = rope_parameters(name)["sliding_attention"]["rope_theta"] if family.nested else None

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        tokens, head_dim = query.shape[2:]
        groups = query.shape[1] // key.shape[1]
        query, key, value = query.double(), key.double(), value.double()
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        start = head_dim - family.rotated if name.startswith("deepseek") else 0
        parts = [x[..., start : start + family.rotated] for x in (query, key)]
        if name in _INTERLEAVED:
            parts = [torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) for x in parts]
        window = kwargs.get("sliding_window")
        far = method if window is None else None
        distance = distances(far, tokens) if far else plain_distance
        places = torch.tensor(
            [[distance(m, n) for n in range(m + 1)] + [0.0] * (tokens - m - 1) for m in range(tokens)],
            dtype=torch.float64,
        ) * getattr(module, "use_rope", 1)
        theta = own_theta if window is not None and own_theta else 10_000.0
        at = rotate_to(parts[0][..., :, None, :].expand(*parts[0].shape[:3], tokens, -1), places, family.rotated, theta)
        scores = torch.einsum("bhmnd,bhnd->bhmn", at, parts[1])
        others = [torch.cat([x[..., :start], x[..., start + family.rotated :]], dim=-1) for x in (query, key)]
        scores = (scores + others[0] @ others[1].transpose(-1, -2)) * kwargs["scaling"]
        if far is not None:
            scales = torch.tensor([temperature_scale(far, m, tokens) for m in range(tokens)], dtype=torch.float64)
            scores = scores * scales[:, None]
        if (cap := kwargs.get("softcap")) is not None:
            scores = torch.tanh(scores / cap) * cap
        m, n = torch.arange(tokens)[:, None], torch.arange(tokens)
        hidden = (n > m) | (n <= m - window if window is not None else n > m)
        scores = scores.masked_fill(hidden, -torch.inf)
        if (sinks := kwargs.get("s_aux")) is not None:
            scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, -1, tokens, 1)], dim=-1)
        return (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2).float().contiguous(), None

    with attending_by(model, attention):
        yield model


@contextmanager
def attending_by(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """A model with this attention function, which no mask reaches, and with rotary modules that turn nothing."""
    AttentionInterface.register("tests_definition", attention)
    AttentionMaskInterface.register("tests_definition", lambda *args, **kwargs: None)
    (slot,) = find_slots(model)
    setattr(slot.parent, slot.attribute, _Still(slot.module))
    before = model.config._attn_implementation
    model.set_attn_implementation("tests_definition")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        setattr(slot.parent, slot.attribute, slot.module)


def assert_gradients_are_defined(method: str, length: int) -> None:
    """The gradients of a patched Llama are those of the definition."""
    model, ids = build("llama").train(), tokens(length)
    with rope.patched(model, method):
        fitted = patched_method(model)
        model(ids, labels=ids).loss.backward()
        actual = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with defined(model, "llama", fitted):
        model(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(actual[key], parameter.grad, atol=1e-5, rtol=1e-3)


def patched_method(model: Any) -> RemappingMethod:
    from rope_ext_hf.patches.patching import patched_method as actual

    method = actual(model)
    assert isinstance(method, RemappingMethod)
    return method

"""Remapping methods against the code of their authors, which differs from the papers, by parameters that give the same.

The attention of the released files is written out here as whole matrices, from the positions that they rotate queries
and keys to, for a prompt that is read in one forward:

- ChunkLlama, `chunkllama_attn_replace.py` of HKUNLP/ChunkLlama (2add4d7)
- Self-Extend, `self_extend_patch/Llama.py` of datamllab/LongLM (cdbbb06)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rope_ext_hf as rope
from tests.support.definition import attending_by
from tests.support.models import TRAINED, build, logits, tokens
from tests.support.oracles import rotate_to

pytestmark = pytest.mark.slow

LENGTH = 3 * TRAINED - 5
THETA = 10_000.0

Part = tuple[float, Tensor, Tensor]
"""Where a query is rotated to, the keys that it then sees, and where those are rotated to."""


@contextmanager
def reading(model: Any, parts: Callable[[int], list[Part]], scale: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Return a model whose attention is one softmax over the parts of each query; a key may be in two of them.

    Args:
        parts: those of the query at a position.
        scale: the factor of the scores of queries at these positions.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups, dim = query.shape[1] // key.shape[1], query.shape[-1]
        key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
        out = torch.empty_like(query, dtype=torch.float64)
        for m in range(query.shape[2]):
            scores, seen = [], []
            for at, keys, places in parts(m):
                turned = rotate_to(query[:, :, m : m + 1].double(), torch.tensor([float(at)]), dim, THETA)
                scores.append((turned * rotate_to(key[:, :, keys], places, dim, THETA)).sum(-1))
                seen.append(keys)
            weights = (torch.cat(scores, -1) * kwargs["scaling"] * scale(torch.tensor(m))).softmax(-1)
            out[:, :, m] = (weights[..., None] * value[:, :, torch.cat(seen)]).sum(-2)
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    with attending_by(model, attention):
        yield


def chunkllama(m: int) -> list[Part]:
    """Tables of chunk_len rows for keys, queries of the chunk and queries of later chunks; the last row serves all
    chunks but the one before."""
    ceiling = TRAINED * 3 // 4
    size = ceiling - TRAINED // 8
    later = [min(row + size, ceiling) for row in range(size)]
    begin = m // size * size

    def keys(first: int, last: int) -> tuple[Tensor, Tensor]:
        return torch.arange(first, last), torch.arange(first, last) % size

    parts = [(float(m % size), *keys(begin, m + 1))]
    if begin:
        parts.append((float(later[m % size]), *keys(begin - size, begin)))
    if begin > size:
        parts.append((float(later[size - 1]), *keys(0, begin - size)))
    return parts


def longlm(window: int, group: int) -> Callable[[int], list[Part]]:
    def parts(m: int) -> list[Part]:
        first = max(0, m - window + 1)
        near, far = torch.arange(first, m + 1), torch.arange(first)
        return [(float(m), near, near), (m // group + window - window / group, far, far // group)]

    return parts


def alike(positions: Tensor) -> Tensor:
    return torch.ones(positions.shape, dtype=torch.float64)


def test_chunkllama_is_a_window_one_larger_over_chunks_of_five_eighths() -> None:
    model, ids = build("llama"), tokens(LENGTH)
    mscale = 0.05 * math.log(LENGTH / TRAINED) + 1
    with reading(model, chunkllama, lambda m: mscale**2 * alike(m)):
        released = logits(model, ids)
    sizes: dict[str, Any] = {"chunk": TRAINED * 5 // 8, "window": TRAINED // 8 + 1, "temperature": "none"}
    warm: dict[str, Any] = {"frequency": "yarn", "factor": 1, "attention_factor": mscale}
    with rope.patched(model, "dca", **sizes, **warm):
        torch.testing.assert_close(logits(model, ids), released, atol=1e-5, rtol=0)
    for other in (sizes, sizes | warm | {"window": TRAINED // 8}):
        with rope.patched(model, "dca", **other):
            assert (logits(model, ids) - released).abs().max() > 1e-4


@pytest.mark.parametrize("scaled", [False, True], ids=["scale_base=-1", "scale_base=64"])
def test_longlm_for_llama_is_self_extend_without_the_floor(scaled: bool) -> None:
    model, ids = build("llama"), tokens(LENGTH)
    by_position = (lambda m: ((m + 1).double().log() / math.log(TRAINED)).clamp(min=1)) if scaled else alike
    with reading(model, longlm(30, 7), by_position):
        released = logits(model, ids)
    parameters: dict[str, Any] = {"window": 30, "group": 7, "temperature": "log-n" if scaled else "none"}
    with rope.patched(model, "self-extend", **parameters, floor_window=False):
        torch.testing.assert_close(logits(model, ids), released, atol=1e-5, rtol=0)
    with rope.patched(model, "self-extend", **parameters):
        assert (logits(model, ids) - released).abs().max() > 1e-4

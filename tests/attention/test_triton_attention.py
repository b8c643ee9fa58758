"""The Triton kernel of attention over all zones, against attention by whole scores: on a CUDA device, or in Triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.attention import blockwise, triton_attention
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable, ScoreModifiers, TokenPositions
from rope_ext_hf.attention.triton_attention import can_attend
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import AttentionRule
from rope_ext_hf.methods.tiles import ZoneEdges
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.models import build, tokens
from tests.support.simulated_cuda import SimulatedCuda, why_unavailable

HALF = KeyLayout("half", 0, 32)
TRAINED = 64


class Case(NamedTuple):
    """The sizes and the modifiers of one call of attention."""

    tokens: int
    past: int = 0
    padding: tuple[int, ...] = (0,)
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    width: int = 32
    layout: KeyLayout | None = HALF
    dtype: torch.dtype = torch.float32
    evicted: int = 0
    parts: int = 1
    sinks: bool = False
    softcap: float | None = None
    ends: int = 0  # padded tokens behind those of the first row; their position is that of its last token


EVERY_RULE = [
    Case(200),
    Case(70, past=130, padding=(0, 37)),
    Case(200, padding=(0, 150)),  # some blocks of queries see no key
    Case(100, padding=(0, 0), ends=40),
    Case(1, past=299, parts=4),
    Case(2, past=299, padding=(5, 0), parts=3, sinks=True),
    Case(1, past=299, padding=(290, 0), parts=3),  # parts without a key
    Case(130, dtype=torch.float16),
]
LAYOUTS = [
    Case(130, layout=KeyLayout("interleaved", 8, 16)),
    Case(130, layout=KeyLayout("half", 0, 32, negative_angle=True)),
    Case(130, dim=24, width=40, heads=(6, 2), layout=KeyLayout("half", 0, 24)),
    Case(70, past=60, heads=(3, 1), sinks=True, softcap=5.0),
    Case(1, past=129, softcap=5.0, parts=2, sinks=True),
    *(Case(40, past=40, dim=dim, width=dim, layout=KeyLayout("half", 0, dim)) for dim in (64, 96, 128, 192, 256)),
]
WINDOWS = [
    Case(130, sinks=True, layout=None),
    Case(30, past=130, evicted=100, padding=(0, 11), layout=None),
    Case(1, past=129, evicted=100, parts=2, layout=None),
]


def rules_of(rotary: Rotary, length: int) -> list[AttentionRule]:
    """Every form of zones: two, chunks, bands, far keys that follow the length of the row, and a temperature."""
    named: list[tuple[str, dict[str, Any]]] = [
        ("rerope", {}),
        ("leaky-rerope", {"temperature": "log-n"}),
        ("self-extend", {}),
        ("dca", {}),
        ("dca", {"chunk": 40, "window": 9, "beyond_only": True}),
        ("stairs", {}),
        ("stairs", {"window": 20, "start": 9, "chunk": 17, "temperature": "none"}),
        ("dynamic-self-extend", {}),
        ("jet-long", {}),
    ]
    rules = []
    for name, params in named:
        bound: Any = resolve_method(name, rotary, **params).bind(rotary, 4 * length)  # type: ignore[attr-defined]
        rules.append(bound.at_length(length))
    return rules


def attention_of(case: Case, rule: AttentionRule, rotary: Rotary, device: str) -> tuple[Tensor, Tensor]:
    """Return the attention by the kernel, and by whole scores in float32 on the CPU, without queries at padding."""
    generator = torch.Generator().manual_seed(case.tokens + case.past)
    rows, length = len(case.padding), case.past + case.tokens
    query = torch.randn(rows, case.tokens, case.heads[0], case.dim, generator=generator).transpose(1, 2)
    key = torch.randn(rows, case.heads[1], length - case.evicted, case.dim, generator=generator)
    value = torch.randn(rows, case.heads[1], length - case.evicted, case.width, generator=generator)
    query, key, value = (x.to(case.dtype) for x in (query, key, value))
    sinks = torch.randn(case.heads[0], generator=generator) if case.sinks else None
    rotation = None if case.layout is None else Rotation(RotationTable(rotary.inv_freq()), case.layout)
    at = torch.arange(length)[None] - torch.tensor(case.padding)[:, None]
    clamped = at.clamp(min=0)
    clamped[0] = clamped[0].clamp(max=length - case.ends - 1)

    def attention(place: str, dtype: torch.dtype) -> Tensor:
        mask = (at >= 0).to(place) if any(case.padding) else None
        positions = TokenPositions(clamped[:, case.past :].to(place), clamped.to(place), case.padding, mask)
        q, k, v = (x.to(place, dtype) for x in (query, key, value))
        modifiers = ScoreModifiers(case.softcap, None if sinks is None else sinks.to(place))
        with torch.no_grad():
            return attend(rule, rotation, positions, q, k, v, case.dim**-0.5, modifiers)

    expected, launches, launch = attention("cpu", torch.float32), Counter[str](), triton_attention._launch

    def counted(*arguments: Any) -> Tensor:
        out = launch(*arguments)
        launches["attention"] += 1
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "_launch", counted)
        patch.setattr(blockwise, "can_attend", lambda *_: True)
        patch.setattr(blockwise, "parts_of_keys", lambda *_: case.parts)
        patch.setattr(blockwise, "_LAUNCH_BOUND", float("inf"))
        kernel = attention(device, case.dtype).cpu().float()
    assert launches["attention"] == 1
    real = (at[:, case.past :] >= 0)[:, None, :, None].expand(rows, -1, -1, -1).clone()
    if case.ends:
        real[0, :, -case.ends :] = False
        kernel = kernel * real
    assert not (kernel * ~real).any()
    return kernel, expected * real


def compare(device: str) -> None:
    """Compare the kernel with whole scores.

    Triton's interpreter multiplies matrices of bfloat16 incorrectly; on a device bfloat16 is compared, too.
    """
    for case in [*EVERY_RULE, *LAYOUTS, *WINDOWS]:
        rotary = Rotary(dim=case.layout.dim if case.layout else 32, theta=1e4, trained_length=TRAINED)
        rules = rules_of(rotary, case.past + case.tokens)
        if case in LAYOUTS:
            rules = rules[:1] + rules[3:4]
        if case in WINDOWS:
            rules = [LocalAttention(window_size=20)]
        dtypes = [case.dtype] if device == "cpu" else [torch.float16, torch.bfloat16]
        for rule in rules:
            for dtype in dtypes:
                kernel, expected = attention_of(case._replace(dtype=dtype), rule, rotary, device)
                error = (kernel - expected).norm() / expected.norm()
                limit = {torch.float32: 2e-6, torch.float16: 1e-3}.get(dtype, 1e-2)
                assert error <= limit, (case, rule, dtype, float(error))


def example(rule: AttentionRule, rotary: Rotary, tokens: int, count: int, heads: tuple[int, int], dim: int) -> Any:
    """One layer's attention of the last `tokens` of `count`, its queries and its keys, without values."""
    at, layout = torch.arange(count)[None], KeyLayout("half", 0, dim)
    positions = TokenPositions(at[:, count - tokens :], at, (0,), None)
    rotation = Rotation(RotationTable(rotary.inv_freq()), layout)
    attention = blockwise._Attention(rule, rotation, positions, dim**-0.5, ScoreModifiers(), torch.device("meta"))
    sizes = (heads[0], tokens), (heads[1], count)
    return attention, *(torch.empty(1, *size, dim, dtype=torch.bfloat16, device="meta") for size in sizes)


@pytest.mark.parametrize(
    ("tokens", "count", "heads", "dim", "bound"),
    [
        (1, 131_072, (32, 8), 128, True),  # a step
        (4_096, 65_536, (9, 3), 64, True),  # SmolLM2-135M
        (8_192, 8_192, (32, 8), 64, True),  # the shape of Llama 3.2 1B
        (131_072, 131_072, (32, 8), 128, False),  # the shape of Llama 3.1 8B
    ],
)
@pytest.mark.parametrize("name", ["rerope", "self-extend", "dca"])
def test_small_models_and_steps_are_bound_by_launches(
    name: str, tokens: int, count: int, heads: tuple[int, int], dim: int, bound: bool
) -> None:
    rotary = Rotary(dim=dim, theta=5e5, trained_length=8192)
    rule: Any = resolve_method(name, rotary).bind(rotary, 4 * count)  # type: ignore[attr-defined]
    attention, query, key = example(rule, rotary, tokens, count, heads, dim)
    assert attention._is_launch_bound(False, query, key) == bound


def test_edges_are_where_the_zones_of_a_rule_are() -> None:
    length = 300
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    for rule in [*rules_of(Rotary(dim=32, theta=1e4, trained_length=TRAINED), length), LocalAttention()]:
        edges = rule.zone_edges(length)
        assert edges is not None
        anchor = m // edges.step * edges.step
        lower = [edges.first - zone * edges.band for zone in range(edges.zones - 1)]
        below = torch.stack([n < anchor + edge for edge in lower]).sum(0) if lower else torch.zeros_like(m - n)
        assert torch.equal(torch.where(n <= m, below, 0), torch.where(n <= m, rule.zone(m, n), 0)), rule


def test_zones_that_no_edges_describe() -> None:
    assert ZoneEdges.from_distances(((0, 10), (5, 20))) is None  # they overlap
    assert ZoneEdges.from_distances(((0, 10), (10, 20), (20, 35), (35, 99))) is None  # in several sizes
    assert ZoneEdges.from_distances(((0, 10), (10, 20), (20, 30), (30, 99))) == ZoneEdges(4, -9, 10, -98)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_which_tensors_the_kernel_takes() -> None:
    def takes(dtype: torch.dtype = torch.bfloat16, dim: int = 64, **options: Any) -> bool:
        with SimulatedCuda(**options):
            x = torch.zeros(1, 2, 3, dim, dtype=dtype, device="cuda")
            return can_attend(x, x, x)

    assert takes()
    assert takes(torch.float16, capability=(8, 0))
    assert not takes(torch.float32)
    assert not takes(torch.float16, capability=(7, 5))
    assert not takes(dim=264)
    x = torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)
    assert not can_attend(x, x, x)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_where_triton_fails_tiles_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("llama"), tokens(150)
    expected = rope.patch(model, "self-extend")(ids).logits

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_attention, "_launch", fail)
    monkeypatch.setattr(triton_attention, "_UNUSABLE", set())
    with SimulatedCuda() as device, torch.no_grad():
        monkeypatch.setattr(blockwise, "attend_fused", triton_attention.attend_fused)
        model = model.to("cuda", torch.bfloat16)
        with pytest.warns(UserWarning, match="several launches do the same: no compiler"):
            logits = model(ids.cuda()).logits.float().cpu()
        assert device.operators["_flash_attention_forward"]
    assert (logits - expected).norm() < 0.06 * expected.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test runs the kernel itself")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernel_in_the_interpreter() -> None:
    code = "from tests.attention.test_triton_attention import compare; compare('cpu')"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_attends_as_whole_scores_do_on_a_gpu() -> None:
    compare("cuda")

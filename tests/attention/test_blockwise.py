"""Attention over zones against the definitions in the papers, written out pair by pair in oracles.py, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rope_ext_hf.attention import blockwise as attending
from rope_ext_hf.attention import kernels, tile_batches
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable, TokenPositions
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import UNBOUNDED, Rotary
from rope_ext_hf.methods.dual_chunk import DualChunk
from rope_ext_hf.methods.grouped import JetLong, SelfExtend
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import LeakyReRoPE, RemappingMethod, ReRoPE
from rope_ext_hf.methods.stairs import Stairs
from rope_ext_hf.methods.tiles import Mask, Tile
from rope_ext_hf.rotary import key_rotation
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.contracts import THETA, assert_close, attend_and_definition
from tests.support.dispatch import MemoryAndWork
from tests.support.oracles import distances


@st.composite
def methods(draw: Any) -> RemappingMethod:
    window = draw(st.integers(1, 70))
    common: dict[str, Any] = {
        "temperature": draw(st.sampled_from(["none", "log-n", "llama4"])),
        "max_distance": 64,
        "beyond_only": draw(st.booleans()),
    }
    match draw(st.sampled_from(["rerope", "leaky", "self-extend", "jet-long", "stairs", "dca"])):
        case "rerope":
            return ReRoPE(window=window, **common)
        case "leaky":
            return LeakyReRoPE(window=window, k=draw(st.floats(1, 20)), **common)
        case "self-extend":
            floored = draw(st.booleans())
            return SelfExtend(window=window, group=draw(st.integers(1, 20)), floor_window=floored, **common)
        case "jet-long":
            return JetLong(window=window, group=draw(st.integers(1, 20)), **common)
        case "stairs":
            start, chunk = draw(st.integers(1, window)), draw(st.integers(1, 70))
            return Stairs(window=window, start=start, chunk=chunk, **common)
    return DualChunk(chunk=draw(st.integers(1, 70)), window=window, **common)


@pytest.mark.slow
@given(methods(), st.data())
@settings(max_examples=150, deadline=None)
def test_is_the_definition_whatever_the_shapes_windows_and_lengths(method: RemappingMethod, data: Any) -> None:
    tokens = data.draw(st.one_of(st.integers(1, 3), st.integers(1, 150)), "tokens")
    count = tokens + data.draw(st.integers(0, 150), "past")
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]), "heads")
    dim = data.draw(st.sampled_from([4, 8, 16]), "rotated")
    pads = tuple(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3), "pads"))
    value_dim = data.draw(st.sampled_from([16, 8]), "value dim")
    with pytest.MonkeyPatch.context() as patch:
        block = data.draw(st.sampled_from([9, 64, 2048]), "queries at a time")
        patch.setattr(attending, "_MAX_QUERY_BLOCK", block)
        if data.draw(st.booleans(), "windows"):
            patch.setattr(attending, "_MAX_WINDOW_BLOCK", block)
            patch.setitem(kernels.KERNELS, "cpu", kernels.KERNELS["cpu"]._replace(run=masked_softmax, windows=True))
        actual, expected = attend_and_definition(
            method, tokens, count, heads=kv_heads * groups, kv_heads=kv_heads, dim=dim, pads=pads, value_dim=value_dim
        )
    assert_close(actual, expected)


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in the dtypes of a fused kernel; windows end at the last query and key."""
    groups, (queries, keys) = query.shape[1] // key.shape[1], (query.shape[-2], key.shape[-2])
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    if mask != "full":
        assert queries == keys or isinstance(mask, int)  # kernels disagree on which corner the triangle has otherwise
        before = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)  # 0: the newest key of a query
        visible = (before >= 0) & (before < (mask if isinstance(mask, int) else keys))
        assert visible.any(-1).all()  # a kernel's log-sum-exp of no key is not -inf
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores.softmax(-1) @ value).to(query.dtype), lse if query.dtype == torch.float64 else lse.float()


EACH = [
    ReRoPE(window=40),
    LeakyReRoPE(window=40, k=8.0),
    SelfExtend(window=40, group=4),
    JetLong(window=39, group=4, beyond_only=True),
    DualChunk(chunk=48, window=16),
    DualChunk(chunk=48, window=16, beyond_only=True),
    Stairs(window=32, start=16, chunk=40),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "more",
    [{"cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sliding": 33}, {"sliding": 33, "gone": 60}],
    ids=["soft cap", "sinks", "sliding window", "sliding cache"],
)
@pytest.mark.parametrize("pads", [(0,), (0, 7, 90)], ids=["one row", "padded rows"])
def test_what_families_do_to_scores(method: RemappingMethod, more: dict[str, Any], pads: tuple[int, ...]) -> None:
    assert_close(*attend_and_definition(method, 40, 150, pads=pads, **more))
    assert_close(*attend_and_definition(method, 1, 150, pads=pads, **more))


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH, ids=lambda m: m.name)
def test_both_ways_give_the_same(method: RemappingMethod) -> None:
    by_kernel, expected = attend_and_definition(method, 100, 200)
    by_scores, _ = attend_and_definition(method, 100, 200, ordered=False)
    assert_close(by_kernel, expected)
    assert_close(by_scores, expected)
    assert not torch.equal(by_kernel, by_scores)


@pytest.mark.parametrize("more", [{"ordered": False}, {"cap": 2.0}], ids=str)
def test_a_sliding_window_where_every_score_is_computed(more: dict[str, Any]) -> None:
    for window in (1, 2, 33):
        assert_close(*attend_and_definition(ReRoPE(window=40), 40, 150, sliding=window, **more))


# --- CUDA, as far as it can be tested without -----------------------------------------------------------------------


def gradients_of_softmax(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `out` and `lse` are those of a softmax over more keys."""
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    weights = (query.double() @ wide_key.transpose(-1, -2) * scale - lse[..., None]).exp()
    weights = weights.tril() if causal else weights
    by_weight = grad.double() @ wide_value.transpose(-1, -2) - (grad.double() * out).sum(-1, keepdim=True)
    by_score = weights * by_weight * scale
    to_key, to_value = by_score.transpose(-1, -2) @ query.double(), weights.transpose(-1, -2) @ grad.double()
    to_key, to_value = (x.reshape(*key.shape[:2], groups, *x.shape[2:]).sum(2) for x in (to_key, to_value))
    return (by_score @ wide_key).to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


@pytest.fixture(params=["flash attention", "memory-efficient attention"])
def cuda_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Run the code for CUDA on the CPU, with plain arithmetic under the names of its operators, and their demands.

    Both demand heads of a multiple of 8 dims, each dim next to the last in memory (pytorch, aten/native/transformers).
    """
    seen: set[str] = set()

    def demand(*tensors: Tensor) -> None:
        assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 for x in tensors)
        assert len({x.dtype for x in tensors}) == 1

    def flash(query: Any, key: Any, value: Any, dropout: float = 0, causal: bool = False, *, scale: float) -> Any:
        demand(query, key, value)
        assert query.dtype in (torch.float16, torch.bfloat16)
        seen.add("flash attention")
        out, lse = masked_softmax(query, key, value, scale, "causal" if causal else "full")
        none = torch.empty(0, dtype=torch.int64)
        return out, lse, none, none, query.shape[-2], key.shape[-2], none, none, torch.empty(0)

    def flash_by_windows(
        query: Any, key: Any, value: Any, _: None, __: None, queries: int, keys: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        demand(query, key, value)
        assert (queries, keys, window_size_right) == (query.shape[1], key.shape[1], 0)
        seen.add("flash attention")
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = masked_softmax(query, key, value, scale, window_size_left + 1)
        none = torch.empty(0, dtype=torch.int64)
        return out.transpose(1, 2), lse, none, none, torch.empty(0)

    def efficient(
        query: Any, key: Any, value: Any, bias: None, logs: bool, p: float = 0, causal: bool = False, *, scale: float
    ) -> Any:
        demand(query, key, value)
        assert logs
        assert query.shape[1] == key.shape[1]
        seen.add("memory-efficient attention")
        out, lse = masked_softmax(query, key, value, scale, "causal" if causal else "full")
        room = -lse.shape[-1] % 32  # the real one gives a multiple of 32
        none = torch.empty(0, dtype=torch.int64)
        return out, torch.nn.functional.pad(lse, (0, room), value=math.inf), none, none

    def flash_backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, _: None, __: None, tokens: int, keys: int,
        dropout: float, causal: bool, *___: Any, scale: float,
    ) -> Any:  # fmt: skip
        demand(grad, query, key, value, out)
        assert lse.is_contiguous()
        assert (tokens, keys) == (query.shape[-2], key.shape[-2])
        seen.add("flash attention backward")
        return gradients_of_softmax(grad, query, key, value, out, lse, causal, scale)

    def efficient_backward(
        grad: Any, query: Any, key: Any, value: Any, bias: None, out: Any, lse: Any, _: Any, __: Any, dropout: float,
        output_mask: list[bool], causal: bool = False, *, scale: float,
    ) -> Any:  # fmt: skip
        demand(grad, query, key, value, out)
        assert grad.shape[1] == query.shape[1] == key.shape[1]
        assert lse.shape[-1] == query.shape[-2] + -query.shape[-2] % 32
        seen.add("memory-efficient attention backward")
        return *gradients_of_softmax(
            grad, query, key, value, out, lse[..., : query.shape[-2]], causal, scale
        ), torch.empty(0)

    # aten's operators have no kernel for CPUs: while the library lives, they have these.
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_flash_attention_forward", flash_by_windows, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    generation = 9 if request.param == "flash attention" else 7
    as_if_cuda(monkeypatch, "cpu", generation)
    yield seen
    library._destroy()
    assert {name.removesuffix(" backward") for name in seen} == {request.param}


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, id=m.name, marks=pytest.mark.slow if m.name == "dca" else pytest.mark.thorough) for m in EACH],
)
def test_the_code_for_cuda(method: RemappingMethod, cuda_kernels: set[str]) -> None:
    for tokens, pads in ((120, (0,)), (120, (0, 7, 90)), (1, (0, 0)), (70, (0,))):
        assert_close(*attend_and_definition(method, tokens, 150, pads=pads, dtype=torch.float16), atol=0.02)
        assert_close(
            *attend_and_definition(method, tokens, 150, pads=pads, head_dim=20, value_dim=12, dtype=torch.float16),
            atol=0.02,
        )


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(8, 8), (20, 12)], ids=str)
@pytest.mark.parametrize("method", EACH, ids=lambda m: m.name)
def test_gradients_by_the_code_for_cuda(
    method: RemappingMethod, widths: tuple[int, int], cuda_kernels: set[str]
) -> None:
    """Compare with the backward of the kernel for CPUs, which test_blockwise_gradients.py compares with definitions."""
    width, value_width = widths
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 120, width), (1, 2, 120, width), (1, 2, 120, value_width)
    created = [torch.randn(shape, generator=generator) for shape in shapes]
    method = dataclasses.replace(method, max_distance=64, temperature="llama4")
    at = torch.arange(120)[None]
    rotation = Rotation(RotationTable(THETA ** (-torch.arange(0, 8, 2).double() / 8)), KeyLayout("half", 0, 8))

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.to(dtype).requires_grad_() for x in created)
        out = attend(method, rotation, TokenPositions(at, at, (0,), None), query, key, value, width**-0.5)
        return list(torch.autograd.grad(out.float().square().sum(), (query, key, value)))

    actual = gradients(torch.float16)
    assert any(name.endswith("backward") for name in cuda_kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.KERNELS, "cpu", kernels.KERNELS["cpu"]._replace(
            run=kernels._on_cpu, backward=kernels._cpu_backward, head_dim_multiple=1
        ))  # fmt: skip
        expected = gradients(torch.float32)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()


HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "seen"), [*product((torch.float32, *HALF), ("full", "causal", "anticausal")), *product(HALF, (30,))]
)
def test_the_operators_of_cuda_are_called_as_torch_has_them(
    dtype: torch.dtype, seen: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_cuda(monkeypatch)
    query = torch.empty(2, 8, 100, 20, dtype=dtype, device="meta")
    key, value = (torch.empty(2, 2, 100, width, dtype=dtype, device="meta") for width in (20, 12))
    out, lse = kernels.run_kernel(query, key, value, 0.1, seen)
    assert (out.shape, out.dtype) == ((2, 8, 100, 12), dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, 100), torch.float32)
    if isinstance(seen, int):
        return  # without gradients
    gradients = kernels.run_backward((torch.empty_like(out), out, lse[..., None]), (query, key, value), 0.1, seen)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, dtype) for x in (query, key, value)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, 30, 300, 5000])
def test_windows_on_a_gpu(window: int) -> None:
    """Flash attention's window is defined as the simulated device and the tests above take it."""
    generator = torch.Generator().manual_seed(window)
    query = torch.randn(2, 8, 500, 64, generator=generator).half()
    key, value = (torch.randn(2, 2, 700, 64, generator=generator).half() for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # on Hopper torch would choose cuDNN's, which takes no windows
        if not kernels.usable_kernel(query.cuda(), value.cuda())[1]:
            pytest.skip("torch has no flash attention for this device")
        out, lse = kernels.run_kernel(query.cuda(), key.cuda(), value.cuda(), 0.1, window)
    expected, expected_lse = masked_softmax(query, key, value, 0.1, window)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


def as_if_cuda(
    monkeypatch: pytest.MonkeyPatch, device: str = "meta", generation: int = 9, windows: bool = True
) -> None:
    """Make tensors of another device take the same path as those of CUDA."""

    def choice(query: Tensor, key: Tensor, *_: Any, enable_gqa: bool, **__: Any) -> int:
        half = query.dtype in (torch.float16, torch.bfloat16)
        if query.shape[-1] > 256:
            return SDPBackend.MATH.value
        if half and generation >= 8:
            return SDPBackend.FLASH_ATTENTION.value
        taken = query.dtype in (torch.float16, torch.float32) and not enable_gqa
        return SDPBackend.EFFICIENT_ATTENTION.value if taken else SDPBackend.MATH.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setitem(kernels.KERNELS, device, kernels.KERNELS["cuda"]._replace(windows=windows))
    monkeypatch.setattr(key_rotation, "_FUSED_UPCAST_DEVICES", {device})


@pytest.mark.parametrize(
    ("generation", "dtype", "dim", "kernel"),
    [
        (9, torch.bfloat16, 128, True),
        (8, torch.float16, 256, True),
        (8, torch.float32, 128, True),
        (7, torch.float16, 128, True),
        (7, torch.bfloat16, 128, False),  # "cutlassF: no kernel found to launch!"
        (9, torch.float64, 128, False),
        (9, torch.bfloat16, 512, False),
    ],
)
def test_what_the_kernels_of_cuda_take(
    generation: int, dtype: torch.dtype, dim: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_cuda(monkeypatch, "meta", generation)
    query = torch.empty(1, 1, 1, dim, dtype=dtype, device="meta")
    assert kernels.usable_kernel(query, query)[0] == kernel


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (28, 4)])
@pytest.mark.parametrize("name", ["rerope", "leaky-rerope", "self-extend", "stairs", "dca"])
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.thorough
@pytest.mark.sampled(7)
def test_what_a_prefill_of_16k_takes_on_a_gpu(
    name: str, heads: int, kv_heads: int, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill takes at most 1.5 times the memory of flash attention, the same products, and few launches."""
    as_if_cuda(monkeypatch, windows=windows)
    tokens, dim = 2**14, 128
    rotary = Rotary(dim=dim, theta=THETA, trained_length=4096)
    method: Any = resolve_method(name, rotary)
    method = method.bind(rotary, tokens)
    query, key, value = (
        torch.empty(1, n, tokens, dim, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads, kv_heads)
    )
    positions = torch.arange(tokens)[None]
    call = TokenPositions(positions, positions, (0,), None)
    with torch.inference_mode():
        with MemoryAndWork(query, key, value) as plain:
            torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=0.1)
        with MemoryAndWork(query, key, value) as ours:
            rotation = Rotation(RotationTable(rotary.inv_freq()), KeyLayout("half", 0, dim))
            attend(method, rotation, call, query, key, value, 0.1)
    assert ours.most <= 1.5 * plain.most
    assert ours.products == pytest.approx(plain.products, rel=0.01)
    few, many = LAUNCHES_AT_16K[windows]
    assert ours.launches <= (many if name == "stairs" else few)  # stairs have nine zones here, others two or three


LAUNCHES_AT_16K = {True: (310, 520), False: (335, 640)}
AT_131K = {  # windows, Triton: launches of a step, of a chunk, of all chunks; gigabytes; launches and gigabytes at once
    (True, True): (7, 14, 377, 45, 579, 96),
    (True, False): (16, 42, 1095, 118, 1790, 103),
    (False, True): (7, 54, 1535, 99, 1294, 96),
    (False, False): (16, 95, 2679, 134, 2075, 114),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "triton"), [*list(AT_131K)[:-1], pytest.param(False, False, marks=pytest.mark.thorough)]
)
def test_what_stairs_take_of_a_gpu_at_131k(windows: bool, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of an 8B model trained at 8k: 31 bands of far keys, whose tiles share calls."""
    as_if_cuda(monkeypatch, windows=windows)
    works: list[MemoryAndWork] = []

    def rotated(x: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Tensor:
        out = torch.empty_like(x)
        works[-1].launch(x, cos, sin, out)
        return out

    if triton:  # each element is read and written once
        for module in (attending, key_rotation, tile_batches):
            monkeypatch.setattr(module, "can_fuse", lambda x: True)
        monkeypatch.setattr(key_rotation, "rotate_fused", rotated)
        monkeypatch.setattr(
            tile_batches, "merge_fused", lambda out, lse, *parts: works[-1].launch(out, out, lse, *parts)
        )
    length, dim = 2**17, 128
    rotary = Rotary(dim=dim, theta=5e5, trained_length=8192)
    method: Any = resolve_method("stairs", rotary).bind(rotary, length)  # type: ignore[attr-defined]
    rotation = Rotation(RotationTable(rotary.inv_freq()), KeyLayout("half", 0, dim))

    def counted(tokens: int, count: int) -> MemoryAndWork:
        query, key, value = (
            torch.empty(1, n, size, dim, dtype=torch.bfloat16, device="meta")
            for n, size in ((32, tokens), (8, count), (8, count))
        )
        at = torch.arange(count)[None]
        call = TokenPositions(at[:, count - tokens :], at, (0,), None)
        works.append(MemoryAndWork())
        with torch.inference_mode():
            if tokens < count:  # what the first layer works out for the others
                attend(method, rotation, call, query, key, value, 0.1)
            works.append(MemoryAndWork(query, key, value))
            with works[-1]:
                attend(method, rotation, call, query, key, value, 0.1)
        return works[-1]

    step, chunk, all_chunks, gigabytes, whole, whole_gigabytes = AT_131K[windows, triton]
    assert counted(1, length).launches <= step
    chunks = [counted(4096, count) for count in range(4096, length + 1, 4096)]
    assert max(each.launches for each in chunks) <= chunk
    assert sum(each.launches for each in chunks) <= all_chunks
    assert sum(each.traffic for each in chunks) <= gigabytes * 1e9
    prompt = counted(length, length)
    assert prompt.launches <= whole
    assert prompt.traffic <= whole_gigabytes * 1e9


def test_nothing_to_attend() -> None:
    for rows, tokens in ((0, 5), (1, 0)):
        query, key = torch.empty(rows, 4, tokens, 16), torch.empty(rows, 2, 7, 16)
        positions = torch.arange(7)[None]
        call = TokenPositions(positions[:, 7 - tokens :], positions, (0,) * rows, None)
        assert attend(LocalAttention(), None, call, query, key, key, 1.0).shape == (rows, 4, tokens, 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH, ids=lambda m: m.name)
def test_half_precision(method: RemappingMethod) -> None:
    assert_close(*attend_and_definition(method, 100, 200, dtype=torch.bfloat16), atol=0.05)
    assert_close(*attend_and_definition(method, 1, 200, pads=(0, 5), dtype=torch.bfloat16), atol=0.05)


@pytest.mark.slow
@given(
    queries=st.tuples(st.integers(0, 12), st.integers(1, 8)),
    keys=st.tuples(st.integers(0, 16), st.integers(1, 12)),
    diagonal=st.integers(-5, 10),
    width=st.one_of(st.just(UNBOUNDED), st.integers(1, 12)),
    low=st.integers(0, 20),
    windows=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_the_rectangles_of_a_tile_hold_each_visible_pair_once(
    queries: tuple[int, int], keys: tuple[int, int], diagonal: int, width: int, low: int, windows: bool
) -> None:
    (q0, q1), (k0, k1) = ((first, first + count) for first, count in (queries, keys))
    actual = []
    for (first, last), (begin, end), mask in Tile(0, (q0, q1), (k0, k1), diagonal, width).rectangles(low, windows):
        assert mask == "full" or windows or last - first == end - begin
        for q, k in product(range(first, last), range(begin, end)):
            row, column, before = q - first, k - begin, (end - k) - (last - q)  # before: the newest key that q sees
            seen = {"full": True, "causal": column <= row, "anticausal": column >= row}
            if seen[mask] if isinstance(mask, str) else 0 <= before < mask:
                actual.append((q, k))
    expected = [
        (q, k) for q in range(q0, q1) for k in range(max(k0, low), k1) if q - diagonal - width < k <= q - diagonal
    ]
    assert sorted(actual) == expected


def farthest(method: RemappingMethod, length: int) -> float:
    """Return the largest distance at which the last of `length` queries sees a key, from all pairs."""
    return max(distances(method)(length - 1, n) for n in range(length))


@given(limit=st.integers(8, 40), window=st.integers(1, 30), length=st.integers(8, 300), floored=st.booleans())
@settings(max_examples=40, deadline=None)
def test_self_extend_takes_the_smallest_group_that_reaches(limit: int, window: int, length: int, floored: bool) -> None:
    assume(window < limit)
    method = SelfExtend(window=window, max_distance=limit, temperature="none", floor_window=floored)
    groups = (dataclasses.replace(method, group=size) for size in range(1, length + 1))
    smallest = next((candidate for candidate in groups if farthest(candidate, length) <= limit - 1), None)
    if smallest is None:
        with pytest.raises(MethodError, match="the relative position of the first key"):
            method.with_defaults(limit, length)
    else:
        assert method.with_defaults(limit, length) == smallest
        reach = smallest.extended_length(Rotary(16, THETA, limit))
        assert reach is not None
        assert reach >= length
        assert farthest(smallest, reach) <= limit - 1 < farthest(smallest, reach + 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_the_callers_own(dtype: torch.dtype) -> None:
    """The mask is added to the scores, or is False for hidden keys; later keys are hidden by it, too."""
    generator = torch.Generator().manual_seed(0)
    seen = (torch.rand(90, 150, generator=generator) < 0.7).tril(60) | torch.eye(90, 150, dtype=torch.bool)
    added = torch.randn(90, 150, generator=generator).masked_fill(~seen, -1e30)
    mask = seen if dtype == torch.bool else added
    assert_close(*attend_and_definition(ReRoPE(window=40), 90, 150, mask=mask))


@pytest.mark.parametrize(("tokens", "needs_grad"), [(200, True), (200, False), (5, True)])
def test_scores_in_blocks_are_made_again_for_the_backward(
    tokens: int, needs_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are computed again if there are several blocks and a backward; otherwise that would be of no use."""
    created = []

    def checkpoint(function: Callable[..., Tensor], *args: Any, **_: Any) -> Tensor:
        created.append(args)
        return function(*args)

    monkeypatch.setitem(attending.SCORE_BYTES, "cpu", 50 * 200 * 4 * 4)
    monkeypatch.setattr(attending, "checkpoint", checkpoint)
    attend_and_definition(ReRoPE(window=40), tokens, 200, ordered=False, needs_grad=needs_grad)
    assert bool(created) is (needs_grad and tokens > 50)


@pytest.mark.slow
@given(methods())
@settings(max_examples=20, deadline=None)
def test_a_method_says_at_which_distances_keys_are_seen(method: RemappingMethod) -> None:
    places = torch.arange(0, 260, 3)
    actual = method.distance(places[:, None], places).tril()
    expected = [[distances(method)(int(m), int(n)) if n <= m else 0.0 for n in places] for m in places]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))

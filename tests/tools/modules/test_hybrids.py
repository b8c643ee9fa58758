"""RoPE with score biases and xPos, against their definitions pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

import rope_ext_hf as rope
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, ScoreModifiers, TokenPositions
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.tools.modules.hybrids import HybridAttention, KerpleBias, T5Bias, XPos
from rope_ext_hf.tools.modules.score_biases import ALiBi, Kerple, alibi_slopes
from tests.support.models import TRAINED, build, logits, tokens
from tests.support.oracles import rotate_to

Bias = Callable[[int, int, int], float]
"""A function of head, query and key that returns the addition to the score."""

SLOPES = [2**-2, 2**-4, 2**-6, 2**-8]
"""The slopes of four heads, from the paper: a geometric sequence that begins at 2^(-8/4) and has that ratio."""

METHODS: list[tuple[str, dict[str, Any], Bias]] = [
    ("alibi", {}, lambda h, m, n: -SLOPES[h] * max(0, m - n - TRAINED)),
    ("alibi", {"start": 0, "strength": 0.5}, lambda h, m, n: -0.5 * SLOPES[h] * (m - n)),
    ("kerple", {"start": 20}, lambda h, m, n: -math.log(1 + max(0, m - n - 20))),
    (
        "kerple",
        {"start": 0, "kernel": "power", "r1": (0.1, 0.2, 0.3, 0.4), "r2": 0.5},
        lambda h, m, n: -(h + 1) / 10 * math.sqrt(m - n),
    ),
]
each_method = pytest.mark.parametrize(
    ("name", "params", "bias"), METHODS, ids=["alibi", "alibi-strength", "kerple", "kerple-power"]
)


@contextmanager
def added(model: Any, bias: Bias) -> Iterator[Any]:
    """Return a model whose attention is written out, with a bias added to every score."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        heads, length = query.shape[1:3]
        key, value = (x.repeat_interleave(heads // x.shape[1], 1).double() for x in (key, value))
        scores = query.double() @ key.transpose(-1, -2) * kwargs["scaling"]
        if kwargs.get("softcap"):
            scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
        numbers = [[[bias(h, m, n) if n <= m else -math.inf for n in range(length)] for m in range(length)]
                   for h in range(heads)]  # fmt: skip
        out = (scores + torch.tensor(numbers, dtype=torch.float64)).softmax(-1) @ value
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    AttentionInterface.register("tests_bias", attention)
    AttentionMaskInterface.register("tests_bias", lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation("tests_bias")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


# --- methods: ALiBi and KERPLE with given numbers ------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm"])
def test_logits_are_those_of_the_definition(family: str, name: str, params: dict[str, Any], bias: Bias) -> None:
    model, ids = build(family), tokens(2 * TRAINED)
    plain = logits(model, ids)
    with rope.patched(model, name, **params):
        actual = logits(model, ids)
    with added(model, bias):
        expected = logits(model, ids)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert (plain - expected).abs().max() > 1e-3


def test_sliding_layers_stay_and_softcaps_come_first() -> None:
    model, ids = build("gemma2", layer_types=["full_attention"] * 2), tokens(2 * TRAINED)
    with rope.patched(model, "alibi", start=0):
        actual = logits(model, ids)
    with added(model, METHODS[1][2]):
        half = logits(model, ids)
    with added(model, lambda h, m, n: -SLOPES[h] * (m - n)):
        torch.testing.assert_close(actual, logits(model, ids), atol=1e-4, rtol=0)
    assert not torch.allclose(actual, half, atol=1e-3)
    sliding = build("gemma2", layer_types=["sliding_attention"] * 2)
    with pytest.raises(UnsupportedModelError, match="would change nothing"):
        rope.patch(sliding, "alibi")


@each_method
def test_chunks_padding_and_packing_are_one_shot(name: str, params: dict[str, Any], bias: Bias) -> None:
    model, ids = rope.patch(build("llama"), name, **params), tokens(2 * TRAINED, batch=2)
    whole, cache, parts = logits(model, ids), DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in torch.split(ids, [50, 1, 1, 70, 6], dim=1):
            parts.append(model(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=0)
    short = logits(model, ids[1:, :100])
    for left in (True, False):
        where = slice(28, 128) if left else slice(100)
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[1], mask[1] = 0, 0
        padded[1, where], mask[1, where] = ids[1, :100], 1
        out = logits(model, padded, attention_mask=mask)
        torch.testing.assert_close(out[0], whole[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(out[1, where], short[0], atol=1e-4, rtol=0)
    positions = torch.cat([torch.arange(128), torch.arange(100)])[None]
    packed = logits(model, torch.cat([ids[:1], ids[1:, :100]], dim=1), position_ids=positions)
    torch.testing.assert_close(packed, torch.cat([whole[:1], short], dim=1), atol=1e-4, rtol=0)


@each_method
def test_gradients_are_those_of_the_definition(name: str, params: dict[str, Any], bias: Bias) -> None:
    model, ids = build("llama").train(), tokens(2 * TRAINED)
    with rope.patched(model, name, **params):
        model(ids, labels=ids).loss.backward()
        actual = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    with added(model, bias):
        model(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(actual[key], parameter.grad, atol=1e-5, rtol=1e-3)


def test_up_to_the_start_nothing_changes_and_unpatch_is_exact() -> None:
    model = build("llama")
    long, short = tokens(2 * TRAINED), tokens(TRAINED)
    before = logits(model, long), logits(model, short)
    rope.patch(model, "alibi")
    torch.testing.assert_close(logits(model, short), before[1], atol=1e-5, rtol=0)
    assert "keys more than 64 tokens back" in str(rope.describe(model))
    assert torch.equal(logits(rope.unpatch(model), long), before[0])


def test_over_a_frequency_method_the_bias_begins_at_the_extended_length() -> None:
    model, ids = build("llama"), tokens(4 * TRAINED)
    with rope.patched(model, "yarn", factor=2.0):
        expected = logits(model, ids[:, : 2 * TRAINED])
    rope.patch(model, "alibi", frequency="yarn", factor=2.0)
    assert rope.describe(model).params["start"] == 2 * TRAINED
    torch.testing.assert_close(logits(model, ids[:, : 2 * TRAINED]), expected, atol=1e-4, rtol=0)
    actual = logits(model, ids)[:, -1]
    with rope.patched(model, "yarn", factor=2.0):
        assert not torch.allclose(actual, logits(model, ids)[:, -1], atol=1e-3)


def test_saved_and_restored(tmp_path: Path) -> None:
    params: dict[str, Any] = {"start": 8, "kernel": "power", "r1": (0.1, 0.2, 0.3, 0.4), "r2": (0.5,)}
    model, ids = rope.patch(build("llama"), "kerple", **params), tokens(100)
    model.save_pretrained(tmp_path / "saved")
    back = rope.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert rope.describe(back).params == rope.describe(model).params


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),  # the list in the paper
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),  # as the authors' code gives for BLOOM-like head counts
    ],
)
def test_slopes(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == slopes


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("alibi", {"start": -1}, "start must be at least 0"),
        ("alibi", {"strength": 0.0}, "strength must be above 0"),
        ("kerple", {"kernel": "linear"}, "kernel must be"),
        ("kerple", {"r1": (-1.0,)}, "r1 must be above 0"),
        ("kerple", {"kernel": "power", "r2": (3.0,)}, "at most 2"),
        ("kerple", {"r1": (1.0, 2.0)}, "r1 has 2 numbers; give one, or one for each of 4 heads"),
    ],
)
def test_what_cannot_be_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    model, ids = build("llama"), tokens(20)
    before = logits(model, ids)
    with pytest.raises(MethodError, match=message):
        rope.patch(model, name, **params)
    assert torch.equal(logits(model, ids), before)


# --- modules: learned biases, xPos ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_t5(bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300 if bidirectional else 0, 300)
    module = T5Bias(2, buckets=32, max_distance=128, bidirectional=bidirectional)
    expected = T5Attention._relative_position_bucket(-distance, bidirectional, 32, 128)
    assert torch.equal(module.bucket(distance), expected)
    assert len(set(module.bucket(distance).tolist())) == 32 - bidirectional  # "0 after" is no distance


def filled(bias: nn.Module) -> nn.Module:
    """Return a learned bias with random parameters."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in bias.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return bias


def naive(q: Tensor, k: Tensor, v: Tensor, bias: Callable[[int, int, int], Tensor], z: Tensor | None) -> Tensor:
    """Compute attention of one row with grouped heads, pair by pair, in float64; q, k, v are (heads, tokens, dim)."""
    groups, past = q.shape[0] // k.shape[0], k.shape[1] - q.shape[1]
    rows = []
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            scores = []
            for n in range(past + i + 1):
                product = q[h, i] * k[h // groups, n]
                if z is not None:
                    product = product * torch.cat([z, z]) ** (past + i - n)
                scores.append(product.sum() / math.sqrt(q.shape[-1]) + bias(h, past + i, n))
            rows.append(torch.stack(scores).softmax(-1) @ v[h // groups, : past + i + 1])
    return torch.stack(rows).reshape(q.shape[0], q.shape[1], -1)


def definition(bias: Any) -> Callable[[int, int, int], Tensor]:
    """Return the learned biases from their formulas, with a module's parameters."""
    if isinstance(bias, KerpleBias):
        r1 = torch.log1p(bias.raw_r1.exp()).double()
        if bias.kernel == "log":
            r2 = torch.log1p(bias.raw_r2.exp()).double()
            return lambda h, m, n: -r1[h] * torch.log(1 + r2[h] * (m - n))
        r2 = 2 / (1 + torch.exp(-bias.raw_r2.double()))
        return lambda h, m, n: -r1[h] * float(m - n) ** r2[h] if m > n else torch.zeros(())
    if isinstance(bias, T5Bias):
        from transformers.models.t5.modeling_t5 import T5Attention

        def number(h: int, m: int, n: int) -> Tensor:
            bucket = T5Attention._relative_position_bucket(torch.tensor(n - m), False, 8, 20)
            return bias.bias.double()[bucket, h]

        return number
    return lambda h, m, n: torch.zeros(())


BIASES: list[Callable[[], Any]] = [
    lambda: T5Bias(4, buckets=8, max_distance=20),
    lambda: KerpleBias(4),
    lambda: KerpleBias(4, kernel="power"),
    lambda: None,
]


@pytest.mark.slow
@pytest.mark.parametrize("make", BIASES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("past", [0, 9])
def test_values_and_gradients_are_the_definition(make: Callable[[], Any], scaled: bool, past: int) -> None:
    bias = make() and filled(make())
    scales = XPos(16, scale_base=7) if scaled else None
    z = (torch.arange(0, 16, 2, dtype=torch.float64) / 16 + 0.4) / 1.4
    generator = torch.Generator().manual_seed(past)
    shapes = [(4, 12, 16), (2, 12 + past, 16), (2, 12 + past, 16)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights = torch.randn(4, 12, 16, generator=generator, dtype=torch.float64)
    learned = list(bias.parameters()) if bias is not None else []
    q, k, v = inputs
    expected = naive(q, k, v, definition(bias), z ** (1 / 7) if scaled else None)
    wanted_grad = torch.autograd.grad((expected * weights).sum(), inputs + learned)
    hybrid = HybridAttention(bias=bias, scales=scales)
    mask = torch.ones(12, 12 + past, dtype=torch.bool).tril(past)[None, None] if past else None
    out, _ = hybrid(nn.Module(), *(x.float()[None] for x in inputs), mask)
    actual = out.transpose(1, 2)[0]
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
    found_grad = torch.autograd.grad((actual * weights).sum(), inputs + learned)
    for one, other in zip(found_grad, wanted_grad, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_and_scale_together_are_the_formula_of_xpos(pairing: Any) -> None:
    """Re[q conj(k) z^((m-n)/B) e^(i (m-n) theta)] for each pair, at positions where a scale from 0 would overflow."""
    dim, first = 8, 10**6
    m, n = torch.tensor([[first + 40, first + 41]]), torch.arange(first - 2000, first + 42, 10)[None]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, x.shape[1], dim, generator=generator, dtype=torch.float64) for x in (m, n))
    v = torch.eye(n.shape[1])[None, None].double()  # the output is the weights
    turned_q, turned_k = (rotate_to(x, at - first, dim, 100.0, pairing) for x, at in ((q, m), (k, n)))
    mask = (n[0] <= m[0][:, None])[None, None]
    actual = attend(
        LocalAttention(), None, TokenPositions(m, n, None, None), turned_q, turned_k, v, 1.0,
        ScoreModifiers(mask=mask, product=XPos(dim, scale_base=50, pairing=pairing).product),
    )  # fmt: skip
    pairs = [(x[..., 0::2], x[..., 1::2]) if pairing == "interleaved" else x.chunk(2, -1) for x in (q, k)]
    (qc, kc) = (torch.complex(a, b)[0, 0] for a, b in pairs)
    distance = (m[0][:, None] - n[0]).double()[..., None]
    theta = 100.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    z = (torch.arange(0, dim, 2, dtype=torch.float64) / dim + 0.4) / 1.4
    terms = qc[:, None] * kc.conj() * z ** (distance / 50) * torch.exp(1j * distance * theta)
    expected = terms.real.sum(-1).masked_fill(~mask[0, 0], -math.inf).softmax(-1)
    torch.testing.assert_close(actual[0, 0].double(), expected, atol=1e-5, rtol=0)


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=40)
@given(
    kind=st.sampled_from(["t5", "kerple", "xpos", "none"]),
    heads=st.sampled_from([2, 4, 6]),
    pairs=st.integers(2, 12),
    length=st.integers(1, 30),
    shift=st.integers(0, 2000),
    method=st.sampled_from(["default", "linear", "ntk", "yarn"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_scores_of_a_hybrid_depend_on_differences_of_positions_alone(
    kind: str, heads: int, pairs: int, length: int, shift: int, method: str, dtype: torch.dtype, seed: int
) -> None:
    """The output does not depend on the position at which the input begins."""
    factor: dict[str, Any] = {} if method == "default" else {"factor": 4.0}
    rotary = rope.RotaryEmbedding(method, rope.Rotary(2 * pairs, 1e4, 64), **factor)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, heads, 2 * pairs, generator=generator) for _ in range(3))
    bias = None
    if kind in ("t5", "kerple"):
        bias = filled(T5Bias(heads, buckets=8, max_distance=20) if kind == "t5" else KerpleBias(heads))
    hybrid = HybridAttention(bias=bias, scales=XPos(2 * pairs, scale_base=9) if kind == "xpos" else None)

    def run(first: int) -> Tensor:
        cos, sin = rotary(q, torch.arange(first, first + length)[None])
        turned = [rope.apply_rotary_pos_emb(x, cos, sin).transpose(1, 2).to(dtype) for x in (q, k)]
        with torch.no_grad():
            out: Tensor = hybrid(nn.Module(), *turned, v.transpose(1, 2).to(dtype))[0]
        return out.double()

    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(run(shift), run(0), atol=tolerance, rtol=0)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    name=st.sampled_from(["alibi", "kerple", "kerple power"]),
    heads=st.integers(1, 12),
    start=st.integers(0, 50),
    m=st.integers(0, 10**6),
    distance=st.integers(0, 10**4),
    shift=st.integers(0, 10**6),
)
def test_biases_of_methods_depend_on_the_distance_and_never_rise_with_it(
    name: str, heads: int, start: int, m: int, distance: int, shift: int
) -> None:
    kernel: dict[str, Any] = {"kernel": "power", "r2": 0.5} if name.endswith("power") else {}
    method: Any = ALiBi(start=start) if name == "alibi" else Kerple(start=start, **kernel)
    bias = method.score_bias(heads, 10**7)

    def of(query: int, key: int) -> Tensor:
        number: Tensor = bias(torch.tensor([[query]]), torch.tensor([[key]])).expand(1, heads, 1, 1)
        return number

    assert torch.equal(of(m + distance, m), of(m + distance + shift, m + shift))
    assert (of(m + distance + 1, m) <= of(m + distance, m)).all()
    assert torch.equal(of(m + min(distance, start), m), torch.zeros(1, heads, 1, 1))


@contextmanager
def running(model: Any, hybrid: HybridAttention) -> Iterator[Any]:
    AttentionInterface.register("tests_hybrid", hybrid)
    AttentionMaskInterface.register("tests_hybrid", sdpa_mask)
    model.set_attn_implementation("tests_hybrid")
    yield model


@pytest.mark.parametrize("make", [*BIASES[:2], lambda: "xpos"])
def test_in_a_model_caches_and_padding_change_nothing(make: Callable[[], Any]) -> None:
    hybrid = HybridAttention(scales=XPos(16)) if make() == "xpos" else HybridAttention(bias=filled(make()))
    ids = tokens(40, batch=2)
    with running(build("llama"), hybrid) as model:
        whole, parts = logits(model, ids), []
        cache: Any = DynamicCache(config=model.config)
        with torch.no_grad():
            for piece in torch.split(ids, [20, 1, 1, 18], dim=1):
                parts.append(model(piece, past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=0)
        mask = torch.ones(2, 40, dtype=torch.int64)
        mask[1, :15] = 0
        moved = ids.clone()
        moved[1, 15:] = ids[1, :25]
        out = logits(model, moved, attention_mask=mask)
        torch.testing.assert_close(out[1, 15:], whole[1, :25], atol=1e-4, rtol=0)
        static = {"cache_implementation": "static", "disable_compile": True}
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **settings, **static), model.generate(ids, **settings))


def test_t5_numbers_begin_at_nothing_and_are_trained_with_the_model() -> None:
    model, ids = build("llama"), tokens(60)
    before = logits(model, ids)
    bias = T5Bias(4)
    hybrid = HybridAttention(bias=bias)
    with running(model, hybrid):
        model.hybrid = hybrid
        torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert "hybrid.bias.bias" in model.state_dict()
    assert bias.bias.abs().max() > 0


def test_attention_to_both_sides() -> None:
    """An encoder sees later keys: a bidirectional bias has buckets for them, xPos is refused."""
    encoder: Any = nn.Module()
    encoder.is_causal = False
    bias = filled(T5Bias(2, buckets=8, max_distance=20, bidirectional=True))
    q, k, v = (torch.randn(1, 2, 10, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    actual, _ = HybridAttention(bias=bias)(encoder, q, k, v)
    place = torch.arange(10)[None]
    expected = ((q @ k.mT) / math.sqrt(8) + bias(place, place)).softmax(-1) @ v
    torch.testing.assert_close(actual.transpose(1, 2), expected, atol=1e-5, rtol=0)
    with pytest.raises(UnsupportedModelError, match="keys after the query"):
        HybridAttention(scales=XPos(8))(encoder, q, k, v)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T5Bias(4, buckets=2), "at least 4"),
        (lambda: T5Bias(4, buckets=6, bidirectional=True), "multiple of 4"),
        (lambda: T5Bias(4, max_distance=16), "above 16 tokens"),
        (lambda: KerpleBias(4, kernel="cubic"), "kernel"),
        (lambda: XPos(7), "even"),
        (lambda: XPos(8, gamma=0), "gamma"),
        (lambda: XPos(8, pairing="thirds"), "pairing"),
    ],
)
def test_modules_refuse_what_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        make()


def test_biases_of_methods_by_hand() -> None:
    distance = torch.tensor([0.0, 3.0]).reshape(1, 1, 1, 2)
    assert ALiBi().bias(distance, 2)[0, :, 0].tolist() == [[0, -3 / 16], [0, -3 / 256]]
    log = Kerple(r1=(2.0,), r2=(0.5,)).bias(distance, 2)
    assert log[0, 0, 0].tolist() == pytest.approx([0, -2 * math.log(2.5)])

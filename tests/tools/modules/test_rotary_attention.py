"""`RotaryAttention`: equal to transformers' attention with the same weights, however an input is cut into pieces."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf.rotary.pairing import rotate, to_pairing
from rope_ext_hf.tools.modules import KeyValueCache, RotaryAttention

ROTARY = rope.Rotary(dim=8, theta=1e4, trained_length=16)
HIDDEN, HEADS, KV_HEADS, DIM = 24, 4, 2, 8
# method -> its parameters, and the rope_parameters of transformers that mean the same
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"rope_type": "default"}),
    "linear": ({"factor": 4}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {"factor": 4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama3": (
        {"factor": 4},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}
LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic-ntk": {"growth": "even"},
    "dynamic-yarn": {},
    "longrope": {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 4},
}
EVERY = {name: ours for name, (ours, _) in METHODS.items()} | LENGTH_DEPENDENT | {"ntk": {"factor": 4}}


def ours(method: str = "default", *, rotary: rope.Rotary = ROTARY, **options: Any) -> RotaryAttention:
    torch.manual_seed(0)
    table = rope.RotaryEmbedding(method, rotary, **EVERY[method])
    return RotaryAttention(HIDDEN, HEADS, table, **({"num_kv_heads": KV_HEADS, "head_dim": DIM} | options)).eval()


@functools.cache
def theirs(family: str, method: str, bias: bool, heads: int, kv_heads: int) -> tuple[Any, Any]:
    """Return the attention and the rotary module of a transformers family, with random weights and norms."""
    from transformers.models.llama import modeling_llama
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    kind, module, prefix = {
        "llama": (LlamaConfig, modeling_llama, "Llama"),
        "qwen3": (Qwen3Config, modeling_qwen3, "Qwen3"),
    }[family]
    config = kind(
        hidden_size=HIDDEN,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=DIM,
        num_hidden_layers=1,
        max_position_embeddings=16 if method == "default" else 64,
        rope_parameters={"rope_theta": 1e4} | METHODS[method][1],
        attention_bias=bias,
        attn_implementation="eager",
    )
    torch.manual_seed(1)
    attention = getattr(module, f"{prefix}Attention")(config, layer_idx=0).eval()
    for weight in attention.parameters():
        nn.init.normal_(weight, std=0.15)
    return attention, getattr(module, f"{prefix}RotaryEmbedding")(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@given(
    method=st.sampled_from(sorted(METHODS)),
    bias=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    begin=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_equal_to_transformers(
    family: str, method: str, bias: bool, heads: tuple[int, int], batch: int, length: int, begin: int, seed: int
) -> None:
    """Outputs and gradients are equal to transformers', whose state_dict is loaded."""
    attention, table = theirs(family, method, bias, *heads)
    mine = RotaryAttention(
        HIDDEN,
        heads[0],
        rope.RotaryEmbedding(method, ROTARY, **METHODS[method][0]),
        num_kv_heads=heads[1],
        head_dim=DIM,
        qk_norm=family == "qwen3",
        bias=bias,
    ).eval()
    mine.load_state_dict(attention.state_dict())
    x = torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    positions = torch.arange(begin, begin + length)[None].expand(batch, -1)
    hidden = torch.full((length, length), -torch.inf).triu(1)
    expected, _ = attention(x, table(x, positions), hidden)
    out = mine(x, positions)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for gradient, reference in zip(
        torch.autograd.grad(out.square().mean(), [x, mine.k_proj.weight]),
        torch.autograd.grad(expected.square().mean(), [x, attention.k_proj.weight]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


# --- pieces and padding ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY)
@given(data=st.data(), length=st.integers(1, 40), qk_norm=st.booleans())
@settings(max_examples=12)
def test_the_last_tokens_of_every_piece_are_those_of_one_pass(
    method: str, data: st.DataObject, length: int, qk_norm: bool
) -> None:
    """Under a length-dependent method every token sees all keys with the frequencies of the length so far."""
    attention = ours(method, qk_norm=qk_norm).double()
    x = torch.randn(2, length, HIDDEN, dtype=torch.float64)
    cache, begin = KeyValueCache(), 0
    while begin < length:
        end = data.draw(st.integers(begin + 1, length))
        out = attention(x[:, begin:end], cache=cache)
        torch.testing.assert_close(out, attention(x[:, :end])[:, begin:], rtol=1e-9, atol=1e-9)
        assert cache.length == end
        begin = end


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY)
@given(length=st.integers(2, 30), cut=st.integers(1, 29), causal=st.booleans(), seed=st.integers(0, 2**31))
@settings(max_examples=12)
def test_padding_is_as_if_it_were_not_there(method: str, length: int, cut: int, causal: bool, seed: int) -> None:
    """Padding may stand anywhere, in another amount in every row; the input is read in one pass and in two pieces."""
    attention = ours(method, causal=causal).double()
    mask = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, -1] = True
    x = torch.randn(3, length, HIDDEN, dtype=torch.float64)
    out = attention(x, padding_mask=mask)
    assert bool(out.isfinite().all())
    for row in range(3):
        alone = attention(x[row : row + 1, mask[row]])
        torch.testing.assert_close(out[row, mask[row]], alone[0], rtol=1e-9, atol=1e-9)
    if causal:
        cache, cut = KeyValueCache(), min(cut, length - 1)
        attention(x[:, :cut], padding_mask=mask[:, :cut], cache=cache)
        last = attention(x[:, cut:], padding_mask=mask[:, cut:], cache=cache)
        torch.testing.assert_close(last[:, -1], out[:, -1], rtol=1e-9, atol=1e-9)


@given(length=st.integers(1, 30), shift=st.integers(0, 10_000), causal=st.booleans())
@settings(max_examples=20)
def test_positions_matter_by_their_differences_alone(length: int, shift: int, causal: bool) -> None:
    attention = ours("yarn", causal=causal)
    x = torch.randn(1, length, HIDDEN)
    positions = torch.arange(length)[None]
    torch.testing.assert_close(attention(x, positions + shift), attention(x, positions), rtol=1e-5, atol=1e-5)


def test_full_attention_with_equal_positions_has_no_order() -> None:
    attention, x = ours(causal=False), torch.randn(1, 9, HIDDEN)
    order, still = torch.randperm(9), torch.zeros(1, 9, dtype=torch.int64)
    torch.testing.assert_close(attention(x, still)[:, order], attention(x[:, order], still))
    assert not torch.allclose(attention(x)[:, order], attention(x[:, order]), atol=1e-3)


# --- pairings -------------------------------------------------------------------------------------------------------


def interleaved_attention(attention: RotaryAttention, x: Tensor, positions: Tensor) -> Tensor:
    """Compute the layer as code of the interleaved pairing does, with weights in that order."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    query, key = (
        (x @ to_pairing(getattr(attention, name).weight, "interleaved", heads=count).T).view(*x.shape[:2], count, DIM)
        for name, count in heads.items()
    )
    value = attention.v_proj(x).view(*x.shape[:2], KV_HEADS, DIM)
    inv_freq, attention_factor = attention.rotary.frequencies()
    angles = (positions[..., None] * inv_freq)[:, :, None]
    query, key = (attention_factor * rotate(each, angles, "interleaved") for each in (query, key))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(HEADS // KV_HEADS, 2)) * DIM**-0.5
    weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, value.repeat_interleave(HEADS // KV_HEADS, 2))
    out: Tensor = attention.o_proj(mixed.flatten(2))
    return out


@pytest.mark.parametrize("method", METHODS)
def test_both_pairings_are_one_attention(method: str) -> None:
    """Weights whose rows are reordered make interleaved code compute what half-paired code does."""
    attention, x = ours(method).double(), torch.randn(2, 20, HIDDEN, dtype=torch.float64)
    positions = torch.arange(20)[None].expand(2, -1)
    expected = interleaved_attention(attention, x, positions)
    torch.testing.assert_close(attention(x, positions), expected, rtol=1e-5, atol=1e-6)


# --- the module -----------------------------------------------------------------------------------------------------


def test_layers_share_a_rotary_module_and_save_none_of_it() -> None:
    table = rope.RotaryEmbedding("yarn", ROTARY, factor=4)
    layers = nn.ModuleList(RotaryAttention(HIDDEN, HEADS, table, head_dim=DIM, qk_norm=True) for _ in range(2))
    assert layers[0].rotary is layers[1].rotary
    names = {name.split(".")[1] for name in layers.state_dict()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


def test_half_precision() -> None:
    attention, x = ours("yarn", qk_norm=True), torch.randn(1, 12, HIDDEN)
    expected = attention(x)
    out = attention.to(torch.bfloat16)(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.05)


def test_partial_rotation_leaves_the_other_dims() -> None:
    attention = ours(rotary=rope.Rotary(dim=4, theta=1e4, trained_length=16))
    with torch.no_grad():
        for layer, heads in ((attention.q_proj, HEADS), (attention.k_proj, KV_HEADS)):
            layer.weight.view(heads, DIM, HIDDEN)[:, :4] = 0  # nothing in the dims that rotate
    x = torch.randn(1, 9, HIDDEN)
    torch.testing.assert_close(attention(x, torch.zeros(1, 9, dtype=torch.int64)), attention(x))


def test_sticky_growth_keeps_the_longest_length() -> None:
    table = rope.RotaryEmbedding("dynamic-ntk", ROTARY, growth="even", sticky=True)
    attention = RotaryAttention(HIDDEN, HEADS, table, head_dim=DIM)
    attention(torch.randn(1, 60, HIDDEN))
    assert int(table.longest_seen) == 60


def test_a_length_dependent_method_holds_a_length() -> None:
    attention, x = ours("dynamic-yarn"), torch.randn(1, 40, HIDDEN)
    with attention.rotary.at_length(40):
        held = attention(x[:, :10])
    torch.testing.assert_close(held, attention(x)[:, :10], rtol=1e-5, atol=1e-6)


TABLE = rope.RotaryEmbedding("default", ROTARY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must be a divisor of num_heads = 4, got 3"),
        ({"num_kv_heads": 0}, "got 0"),
        ({"hidden_size": 30}, "hidden_size = 30 is not a multiple of num_heads = 4"),
        ({"head_dim": 6}, "rotary is for 8 dims, but a head has only 6"),
        ({"rotary": rope.RotaryEmbedding("default", ROTARY, layout="interleaved")}, "must have layout='half'"),
    ],
)
def test_modules_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "rotary": TABLE} | options
    with pytest.raises(ValueError, match=message):
        RotaryAttention(**arguments)


def test_inputs_that_do_not_fit_are_refused() -> None:
    attention, x, ones = ours(), torch.ones(2, 5, HIDDEN), torch.ones
    with pytest.raises(ValueError, match=r"must be \(batch, length, 24\), got \(5, 24\)"):
        attention(x[0])
    with pytest.raises(ValueError, match=r"position_ids must be \(2, 5\) or \(1, 5\), got \(1, 4\)"):
        attention(x, torch.arange(4)[None])
    with pytest.raises(ValueError, match=r"padding_mask must be bool \(2, 5\).*torch.float32 \(2, 5\)"):
        attention(x, padding_mask=ones(2, 5))
    with pytest.raises(ValueError, match=r"torch.bool \(2, 4\)"):
        attention(x, padding_mask=ones(2, 4, dtype=torch.bool))
    cache = KeyValueCache()
    attention(x, cache=cache)
    with pytest.raises(ValueError, match="the cache holds 2 rows, but hidden_states has 1"):
        attention(x[:1], cache=cache)
    with pytest.raises(ValueError, match="a cache holds only earlier tokens"):
        ours(causal=False)(x, cache=cache)
